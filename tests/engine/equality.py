"""Players of the equality tests: requests on one scheduler and one cache, where every free place is NaN.

A player is a scheduler and a runner. With answers in place of a model it only plans, which tells in advance whether
two cells do the same work: a plan is all that a runner sees.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from engine.cache import CacheShape, allocate_draft, allocate_trunk
from engine.llm import EMBEDDED_MODEL
from engine.runner import Runner
from engine.sampling import SamplingParams
from engine.speculation import Drafter
from model.glm5_next import Glm5Next, TrunkCache
from model.kda import EXPORT_GRID_TOKENS
from model.mla import MlaCache
from model.mtp import Mtp
from model.parameters import parameter_specs
from scheduler.block_manager import BlockManager
from scheduler.checkpoint_policy import Capability, Policy, make_policy
from scheduler.plan import StepPlan, StepResult
from scheduler.pool import Pool
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests import driver, tiny
from tests.engine.drafts import UNSAID, Drafts, Oracle, filed

BLOCK_TOKENS = {
    "ours": 16,
    "none": 16,
}  # public presets: 32, so that short prompts hold several boundaries, too
WHOLE = 4096
FORK = 40  # inside a block of either size; 32 is a boundary of both
NEW_TOKENS = (10, 3, 6)  # per prompt: the second finishes early


class Subject:
    """A model, three prompts past its `index_topk` or shorter, and what it says alone, whole and uncached."""

    def __init__(self, model: Glm5Next, mtp: Mtp, lengths: Sequence[int]) -> None:
        self.model, self.mtp = model, mtp
        self.prompts = [tiny.token_ids(n, seed=n, vocab_size=model.config.vocab_size) for n in lengths]
        self._known: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """The greedy continuation, max(NEW_TOKENS) tokens."""
        if tuple(prompt) not in self._known:
            self._known[tuple(prompt)] = driver.greedy(self.model, prompt, max(NEW_TOKENS))
        return list(self._known[tuple(prompt)])


@lru_cache
def subject(name: str, dtype: torch.dtype = torch.float32) -> Subject:
    """`tiny`: five random layers, selection from row 12 on; `embedded`: the model in the repository, from row 260."""
    if name == "embedded":
        return Subject(*driver.load_model(EMBEDDED_MODEL, dtype), (269, 83, 45))
    config = replace(tiny.TINY, num_hidden_layers=5, layer_types=("kda", "mla", "kda", "kda", "mla"),
                     mlp_layer_types=("dense", *["sparse"] * 4))  # fmt: skip
    # A slow decay: the state of a boundary matters to the end of the prompt.
    decay = {
        spec.name: tiny.normal(*spec.shape, seed=i) - 3
        for i, spec in enumerate(parameter_specs(config))
        if spec.name.endswith("dt_bias")
    }
    weights = tiny.tree(decay, config)
    model = Glm5Next(weights, config, dtype, driver.CPU)
    return Subject(model, Mtp(weights, config, model), (81, 49, 37))


class Ask(NamedTuple):
    """A prompt, how many tokens to generate, and whether every policy with a cache owes it a hit."""

    prompt: list[int]
    new_tokens: int
    hit: bool = False


def rounds(scenario: str, of: Subject) -> list[list[Ask]]:
    """The asks of a scenario; those of a round arrive together."""
    a, b, c = (Ask(prompt, n) for prompt, n in zip(of.prompts, NEW_TOKENS, strict=True))
    if scenario in ("resumed", "mates"):
        again = [ask._replace(hit=True) for ask in (a, b, c)]
        return [[a, b, c]] if scenario == "resumed" else [[a, b, c], again]
    branch = Ask([*a.prompt[:FORK], *b.prompt], b.new_tokens)
    turn = [*a.prompt, *of.answer(a.prompt)[: a.new_tokens], *c.prompt]
    later = {
        "cold": [b, c],
        "resend": [a._replace(hit=True)],
        "extend": [Ask(turn, 4, hit=True), Ask([*a.prompt, *b.prompt], 4, hit=True)],
        "branch": [branch, branch._replace(hit=True), Ask([*a.prompt[:32], *c.prompt], 4)],
    }
    return [[ask] for ask in (a, *later[scenario])]


def policy_of(name: str, filing: str, drafter: str | None = None) -> Policy:
    """A preset with small blocks."""
    return make_policy(name, Capability(export_grid=EXPORT_GRID_TOKENS), draft_architecture=drafter,
                       block_size=BLOCK_TOKENS.get(name, 32), filing=filing)  # fmt: skip


class Player:
    """Requests on one scheduler, by `model` or (an Oracle) by known answers. `requests` and `plans` are in order;
    `verified`: (drafts, accepted drafts) of every verification."""

    def __init__(
        self,
        policy: Policy,
        budget: int,
        executor: Glm5Next | Oracle,
        *,
        num_blocks: int = 128,
        num_slots: int = 40,
        max_running: int = 4,
        state_dtype: torch.dtype = torch.float32,
        drafts: Drafts = Drafts(),  # noqa: B008  a NamedTuple
    ) -> None:
        blocks, depth = BlockManager(policy, num_blocks, num_slots), drafts.depth
        self.scheduler = Scheduler(
            blocks, max_batched_tokens=budget, context_limit=1024, max_running_requests=max_running, debug=True,
            draft_tokens=depth, scratch_tokens=min(depth, 1) if drafts.index_share else depth,
        )  # fmt: skip
        self.requests: list[Request] = []
        self.plans: list[StepPlan] = []
        self.verified: list[tuple[int, int]] = []
        self.drafts, first_slot = drafts, int(policy.filing == "token")
        self.runner: Runner | Oracle
        if isinstance(executor, Oracle):
            self.runner, executor.first_slot = executor, first_slot if depth else None
            return
        shape = CacheShape(
            num_blocks, policy.block_size, num_slots, max_running, depth, not drafts.index_share
        )
        where = executor.dtype, executor.device
        cache, drafter = allocate_trunk(executor.config, shape, *where, state_dtype), None
        clear_freed(blocks.slots, slot_tensors(cache), self.before_slot_reuse)
        clear_freed(blocks.groups[0], page_tensors(cache.mla.values()), self.before_page_reuse)
        if depth:
            assert drafts.mtp is not None and blocks.companions is not None
            draft_cache = allocate_draft(executor.config, shape, *where, executor.embedding.dtype)
            drafter = Drafter(filed(drafts.mtp, first_slot), draft_cache, depth, drafts.index_share)
            clear_freed(blocks.groups[1], page_tensors([draft_cache.mla]))
            clear_freed(blocks.companions, [draft_cache.hidden, draft_cache.mla.index.ring])
        self.runner = Runner(executor, cache, drafter)

    def add(self, prompt: Sequence[int], new_tokens: int) -> Request:
        """Queue a greedy request."""
        request = Request(len(self.requests), prompt, new_tokens, frozenset({UNSAID}))
        self.requests.append(request)
        self.scheduler.add(request)
        if isinstance(self.runner, Runner):
            self.runner.add(request.request_id, SamplingParams(), seed=0)
        else:
            self.runner.prompts[request.request_id] = prompt
        return request

    def before_slot_reuse(self, slot: int) -> None:
        """Called when a recurrent slot is handed out, before its content goes."""

    def before_page_reuse(self, page: int) -> None:
        """The same for a page."""

    def step(self) -> None:
        """One forward."""
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        if isinstance(self.runner, Runner):  # what a verification leaves to replay is its own step's
            for left in (self.runner.cache.recurrent.replay, self.runner.cache.recurrent.conv_tail):
                left.fill_(torch.nan)
        result = self.scripted(self.execute(plan))
        counts = {chunk.request_id: chunk.num_drafts for chunk in plan.chunks if chunk.num_drafts}
        self.verified += [(count, len(result.tokens[i]) - 1) for i, count in counts.items()]
        self.scheduler.commit(plan, result)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan."""
        return self.runner.execute(plan)

    def scripted(self, result: StepResult) -> StepResult:
        """The result with the script's drafts, if there is one."""
        script = self.drafts.script
        if script is None:
            return result
        known = {i: len(self.requests[i].output) + len(tokens) for i, tokens in result.tokens.items()}
        return replace(result, drafts={i: script(self.requests[i], n) for i, n in known.items()})

    def play(self, rounds: Sequence[Sequence[Ask]], interrupted: bool = False) -> None:
        """Run rounds one after the other; `interrupted`: preempt each request twice, in prefill and in decode."""
        for asks in rounds:
            done = dict.fromkeys((self.add(ask.prompt, ask.new_tokens).request_id for ask in asks), 0)
            while self.scheduler.has_work:
                self.step()
                for request in list(self.scheduler.running) if interrupted else ():
                    stage = (request.num_computed_tokens > FORK) + (len(request.output) > 1)
                    if stage > done[request.request_id]:
                        done[request.request_id] = stage
                        self.scheduler.preempt(request)


def slot_tensors(cache: TrunkCache) -> list[Tensor]:
    """Everything that a recurrent slot numbers, [num_slots, ...] each."""
    states = [part for state in cache.kda.values() for part in (state.matrix, state.conv)]
    return states + [layer.index.ring for layer in cache.mla.values()]


def page_tensors(layers: Iterable[MlaCache]) -> list[Tensor]:
    """Everything that a page numbers, [num_blocks, ...] each."""
    return [part for layer in layers for part in (layer.latent, layer.index.pooled)]


def clear_freed(pool: Pool, tensors: Sequence[Tensor], before_reuse: Callable[[int], object] = int) -> None:
    """Fill a pool's places with NaN: all of them now, then each that is freed, and each evicted one when it is
    handed out again."""
    allocate, release = pool.allocate, pool.release

    def clear(place: int | slice) -> None:
        for tensor in tensors:
            tensor[place] = torch.nan

    def clearing_allocate() -> int | None:
        place = allocate()
        if place is not None:
            before_reuse(place)
            clear(place)
        return place

    def clearing_release(place: int) -> None:
        available = pool.num_available
        release(place)
        if pool.num_available > available and not pool.is_keyed(place):
            clear(place)

    clear(slice(None))
    pool.allocate, pool.release = clearing_allocate, clearing_release  # type: ignore[method-assign]
