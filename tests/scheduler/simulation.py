"""A scheduler under a model that samples from its state, so that whatever goes wrong changes the output.

Its drafter knows what the model will sample, and proposes as many right drafts before a wrong one as a test asks for.
"""

from collections.abc import Callable, Sequence

from scheduler.block_manager import BlockManager
from scheduler.checkpoint_policy import MANY, Capability, make_policy
from scheduler.plan import ScheduledChunk, StepPlan, StepResult
from scheduler.request import Request
from scheduler.scheduler import Advance, Scheduler
from tests.scheduler.contents import Contents, prefix_states

DRAFTER = "Glm5NextMTPModel"
PRESETS = ("generic", "seed", "vllm-0.33", "ours", "none")
VOCAB = 1_000_003


def engine(
    preset: str = "ours",
    block: int | None = None,
    budget: int = 4096,
    *,
    pages: int = 1024,
    slots: int = 16,
    running: int = 16,
    mixed: int = 0,
    context: int = 1 << 21,
    drafter: str | None = DRAFTER,
    filing: str | None = None,
    retain: Sequence[str] | None = None,
    exports: int = MANY,
    free_chunk_ends: bool = True,
    drafts: int = 0,
    scratch: int = 0,
) -> Scheduler:
    """A scheduler over fresh pools, whose kinds of places are handed out in opposite orders, so that ids differ."""
    capability = Capability(exports, 16, free_chunk_ends)
    policy = make_policy(
        preset, capability, draft_architecture=drafter, block_size=block, filing=filing, retain=retain
    )
    blocks = BlockManager(policy, pages, slots)
    for pool in (*blocks.groups[1:], blocks.companions):
        if pool is not None:
            pool._free.reverse()
    return Scheduler(
        blocks,
        max_batched_tokens=budget,
        context_limit=context,
        max_running_requests=running,
        mixed_prefill_tokens=mixed,
        draft_tokens=drafts,
        scratch_tokens=scratch,
    )


def sampled(state: int) -> int:
    return state % VOCAB


def reference(prompt: Sequence[int], max_tokens: int, salt: bytes = b"") -> list[int]:
    """The output of one uninterrupted run without cache or chunks."""
    tokens = list(prompt)
    states = prefix_states(tokens, salt)
    for _ in range(max_tokens):
        tokens.append(sampled(states[-1]))
        prefix_states(tokens, salt, states)
    return tokens[len(prompt) :]


class Simulation(Contents):
    """A scheduler, and every request it was given. `content` False: arithmetic only, for long prompts."""

    def __init__(self, scheduler: Scheduler, *, content: bool = True) -> None:
        super().__init__(scheduler.blocks, content=content)
        self.scheduler = scheduler
        self.scratch = scheduler.scratch_tokens
        self.errors: dict[int, str] = {}  # requests whose next forward fails
        self.num_right: Callable[[Request], int] = lambda _: scheduler.draft_tokens
        self.lagging = False  # the draft layer does not run in a request's last step

    # What a test does.

    def add(self, prompt: Sequence[int], max_tokens: int = 1, **fields: object) -> Request:
        request = Request(len(self.requests), list(prompt), max_tokens, **fields)  # type: ignore[arg-type]
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.states[request.request_id] = prefix_states(request.prompt, request.salt)
        return request

    def run(self, prompt: Sequence[int], max_tokens: int = 1, **fields: object) -> Request:
        """One request from arrival to end, together with whatever else is there."""
        request = self.add(prompt, max_tokens, **fields)
        self.drain()
        return request

    def step(self) -> StepPlan:
        plan = self.schedule()
        self.commit(plan)
        return plan

    def drain(self, limit: int = 100_000) -> list[StepPlan]:
        """Step until nothing is left; every step has to run something."""
        plans: list[StepPlan] = []
        while self.scheduler.has_work:
            plans.append(self.step())
            assert plans[-1].chunks, f"an empty step: {dict(plans[-1].waits)}"
            assert len(plans) < limit
        return plans

    def finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.account(self.scheduler.running)

    def preempt(self, request: Request) -> None:
        self.scheduler.preempt(request)
        self.account(self.scheduler.running)

    # The runner's side.

    def schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan.num_tokens + plan.unused_tokens == self.scheduler.max_batched_tokens
        assert plan.unused_tokens >= 0
        for chunk in plan.chunks:
            self.enter(chunk)
        return plan

    def enter(self, chunk: ScheduledChunk) -> None:
        """Check a chunk against its request's own account, and extend the runner's tables."""
        request = self.requests[chunk.request_id]
        assert request.status == "running" and chunk.start == request.num_computed_tokens < chunk.end
        known, num_known = request.tokens(chunk.start, chunk.end), request.num_known_tokens
        assert chunk.token_ids == (*known, *request.drafts[: chunk.num_drafts])
        assert chunk.samples == (chunk.end >= num_known and request.max_tokens > 0)
        assert chunk.num_drafts == max(chunk.end - num_known, 0) and chunk.end <= chunk.limit
        assert chunk.num_drafts == 0 or chunk.end < chunk.limit
        needs_next = self.policy.drafting and self.shift() == 2 and chunk.end < num_known
        assert chunk.next_token == (request.token(chunk.end) if needs_next else None)
        assert chunk.draft_start == request.num_drafted_tokens
        if chunk.admitted:
            self.tables[chunk.request_id] = [[] for _ in self.blocks.groups]
        for table, added, own in zip(
            self.tables[chunk.request_id], chunk.new_blocks, request.tables, strict=True
        ):
            table.extend(added)
            assert table == own
            assert len(table) * self.policy.block_size >= max(
                chunk.end, chunk.write_from, self.scratch_end(chunk)
            )
        inside = [position for position, *_ in chunk.exports if position < chunk.end]
        assert len(inside) <= (self.policy.capability.exports if not chunk.decodes else 1)
        grid = self.policy.capability.export_grid
        assert chunk.decodes or all((position - chunk.start) % grid == 0 for position in inside)
        if chunk.admitted:
            assert chunk.start % self.policy.block_size == 0 and chunk.start <= chunk.write_from
            assert chunk.write_from <= self.policy.floor(
                request.num_known_tokens - 1
            ) - self.policy.dropped or not (chunk.write_from)
        if self.content:
            self.taken(request, chunk)

    def commit(self, plan: StepPlan) -> list[Advance]:
        """Run the forward for what is still there, sample, propose, commit, check."""
        tokens: dict[int, tuple[int, ...]] = {}
        drafts: dict[int, tuple[int, ...]] = {}
        drafted: dict[int, int] = {}
        for chunk in plan.chunks:
            request, new = self.requests[chunk.request_id], ()
            if request not in self.scheduler.running:
                continue
            if chunk.samples and chunk.request_id not in self.errors:
                tokens[chunk.request_id] = new = self.verify(chunk)
                drafts[chunk.request_id] = self.propose(request)
            lags = self.lagging and ends(request, new)
            drafted[chunk.request_id] = chunk.end
            if self.content:
                drafted[chunk.request_id] = self.forward(request, chunk, max(len(new) - 1, 0), lags)
        errors, self.errors = self.errors, {}
        result = StepResult(tokens, errors, drafts=drafts, num_drafted=drafted)
        advances = self.scheduler.commit(plan, result)
        self.account(self.scheduler.running)
        return advances

    def verify(self, chunk: ScheduledChunk) -> tuple[int, ...]:
        """The drafts that the model samples itself, and the token after them."""
        states, tokens = self.states[chunk.request_id], []
        for draft in (*chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :], None):
            tokens.append(sampled(states[-1]))
            states.append(hash((states[-1], tokens[-1])))
            if tokens[-1] != draft:
                break
        return tuple(tokens)

    def propose(self, request: Request) -> tuple[int, ...]:
        """As many right drafts as asked for, then wrong ones."""
        state, drafts, right = self.states[request.request_id][-1], [], self.num_right(request)
        for rank in range(self.scheduler.draft_tokens):
            token = sampled(state)
            drafts.append(token if rank < right else token + 1)
            state = hash((state, token))
        return tuple(drafts)


def ends(request: Request, new: Sequence[int]) -> bool:
    """Whether these tokens are the request's last."""
    return bool({*new} & request.stop_ids) or len(request.output) + len(new) >= request.max_tokens


def sizes(plan: StepPlan) -> dict[int, int]:
    """Tokens of the step by request."""
    return {chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks}


def published(simulation: Simulation, request: Request) -> list[int]:
    """Boundaries of a request whose state others can find, ascending."""
    size, find = simulation.policy.block_size, simulation.blocks.slots.find
    return [(i + 1) * size for i, key in enumerate(request.keys or ()) if find(key) is not None]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Prompts of different seeds share no token."""
    return list(range(seed * 1_000_000, seed * 1_000_000 + length))


def assert_right(simulation: Simulation) -> None:
    """Every output is that of an uninterrupted run, and nothing is held any more."""
    for request in simulation.requests.values():
        if request.status == "finished":
            full = reference(request.prompt, request.max_tokens, request.salt)
            assert request.output == full[: len(request.output)]
    assert not simulation.scheduler.has_work
    simulation.blocks.check([])
