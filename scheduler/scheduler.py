"""Which tokens run in the next step: continuous batching under a token budget.

`schedule` fills a step in this order: one row for every running request that decodes, then chunks of running
prefills in order of arrival, then waiting requests, first come first served, while a slot and pages are there. While
something decodes, a step takes at most `mixed_prefill_tokens` of prefill, and no prompt more than half of what is
left while another waits. Where a chunk ends and which states it leaves is asked of the policy. When pages run out
the youngest running request is preempted and goes to the front of the queue; it resumes by an ordinary lookup.
`commit` makes a step's result true: only then is anything published, so requests admitted together never hit
what their own step has yet to write.
"""

from collections import deque
from dataclasses import dataclass

from scheduler.block_manager import BlockManager
from scheduler.checkpoint_policy import Chunk, Prefill, Reuse
from scheduler.plan import ScheduledChunk, StepPlan, StepResult
from scheduler.request import FinishReason, Request

NO_CAP = 0


class RequestRefused(ValueError):
    """The request can never run; the message holds the numbers."""


@dataclass(frozen=True)
class Advance:
    """What a commit did to one request: the delivered token (never a stop id), and how it ended."""

    request: Request
    token: int | None = None
    finish_reason: FinishReason | None = None
    message: str | None = None


class Scheduler:
    """Requests over one BlockManager. `context_limit` is in tokens, output included."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batched_tokens: int,
        context_limit: int,
        max_running_requests: int,
        mixed_prefill_tokens: int = 1024,
        debug: bool = False,
    ) -> None:
        self.blocks, self.max_batched_tokens, self.context_limit = blocks, max_batched_tokens, context_limit
        self.max_running_requests, self.mixed_prefill_tokens = max_running_requests, mixed_prefill_tokens
        self.debug = debug
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._released: list[int] = []
        self._chunks: dict[int, ScheduledChunk] = {}  # of the step being planned
        self._waits: dict[int, str] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request; its `max_tokens` is cut to the context. RequestRefused if it can never fit."""
        room = self.context_limit - len(request.prompt)
        if not request.prompt:
            raise RequestRefused("the prompt is empty; expected at least one token")
        if room < (not request.score_prompt):
            raise RequestRefused(
                f"the prompt has {len(request.prompt)} tokens, the context holds {self.context_limit} with at least"
                " one new token; shorten the prompt"
            )
        request.max_tokens = min(request.max_tokens, room)
        needed = self.blocks.blocks_for(request.max_known_tokens)
        if needed > self.blocks.num_blocks:
            raise RequestRefused(
                f"{request.max_known_tokens} tokens need {needed} blocks of {self.blocks.block_size}, the cache has"
                f" {self.blocks.num_blocks}; ask for fewer new tokens or a larger cache"
            )
        self.waiting.append(request)

    def schedule(self) -> StepPlan:
        """The next step."""
        self._chunks, self._waits = {}, {}
        preemptions = self.num_preemptions
        for request in [r for r in self.running if decodes(r)]:
            if request.status == "running" and len(self._chunks) < self.max_batched_tokens:
                self._place(request, 1, 1)
        rows = len(self._chunks)
        left = self._prefill_tokens(rows)
        largest = left
        for request in [r for r in self.running if not decodes(r)]:
            if left and request.status == "running":
                left -= self._place(request, *self._shares(left, largest, rows, request))
        while left and self.waiting and self.num_preemptions == preemptions:
            used = self._admit(self.waiting[0], *self._shares(left, largest, rows, self.waiting[0]))
            if not used:
                break
            left -= used
        released, self._released = tuple(self._released), []
        chunks = tuple(self._chunks.values())
        unused = self.max_batched_tokens - sum(len(chunk.token_ids) for chunk in chunks)
        return StepPlan(chunks, released, self._waits, unused)

    def _prefill_tokens(self, decode_rows: int) -> int:
        """Tokens of prefill that a step beside `decode_rows` decodes may take."""
        left = self.max_batched_tokens - decode_rows
        capped = decode_rows and self.mixed_prefill_tokens != NO_CAP
        return min(left, self.mixed_prefill_tokens) if capped else left

    def _shares(self, left: int, largest: int, decode_rows: int, request: Request) -> tuple[int, int]:
        """(tokens offered to the request now, the most that any step would offer it)."""
        others = any(
            r is not request and not decodes(r) and r.request_id not in self._chunks for r in self.running
        )
        others = others or any(r is not request for r in self.waiting)
        if decode_rows and self.mixed_prefill_tokens != NO_CAP and others:
            return max(left // 2, 1), max(largest // 2, 1)
        return left, largest

    def _place(self, request: Request, room: int, largest: int, admitted: bool = False) -> int:
        """Plan the request's chunk and take what it needs; its tokens, 0 if it has to wait."""
        prefill = Prefill(len(request.prompt), request.num_known_tokens, request.junctions)
        chunk = self._with_slots(request, prefill, room, largest)
        start = request.num_computed_tokens
        if chunk.end == start:
            self._waits[request.request_id] = chunk.reason
            return 0
        added = self.blocks.grow(request, chunk.end)
        while added is None:
            if admitted or not self._preempt_youngest(request):
                self._waits[request.request_id] = "waits for pages"
                return 0
            added = self.blocks.grow(request, chunk.end)
        tables = request.tables if admitted else added
        self._chunks[request.request_id] = ScheduledChunk(
            request_id=request.request_id,
            token_ids=request.tokens(start, chunk.end),
            start=start,
            write_from=request.write_from,
            admitted=admitted,
            new_blocks=tuple(tuple(pages) for pages in tables),
            recurrent_slot=request.recurrent_slot or 0,
            restore_from=request.restored.slot if admitted and request.restored else None,
            exports=tuple((reserved.position, reserved.slot) for reserved in request.reserved),
            publishes=chunk.publishes,
            rolling=chunk.rolling,
            samples=chunk.end == request.num_known_tokens and request.max_tokens > 0,
            decodes=decodes(request),
            reason=chunk.reason,
            targets=request.tokens(start + 1, chunk.end + 1) if request.score_prompt else (),
        )
        return chunk.end - start

    def _with_slots(self, request: Request, prefill: Prefill, room: int, largest: int) -> Chunk:
        """The policy's chunk, with a slot reserved for every state it leaves. A boundary for which there is none is
        struck, and the end derived again without it."""
        denied: set[int] = set()
        while True:
            chunk = self._ask(request, prefill, room, largest, denied)
            wanted = sorted(
                {*chunk.exports, *chunk.publishes} | ({chunk.rolling} if chunk.rolling else set())
            )
            failed = [m for m in wanted if not self.blocks.reserve_checkpoint(request, m)]
            if not failed:
                break
            self.blocks.cancel_reserved(request)
            denied.update(failed)
        if not denied:
            return chunk
        in_use = self.blocks.slots.size - self.blocks.slots.num_available
        struck = ", ".join(f"{m:,}" for m in sorted(denied))
        reason = f"{chunk.reason}; no slot for {struck}: {in_use} of {self.blocks.slots.size} in use"
        return Chunk(chunk.end, chunk.exports, chunk.publishes, chunk.rolling, reason)

    def _ask(self, request: Request, prefill: Prefill, room: int, largest: int, denied: set[int]) -> Chunk:
        policy, start = self.blocks.policy, request.num_computed_tokens
        chunk = policy.chunk(start, room, prefill, largest, denied)
        if start < prefill.finish:
            return chunk
        boundary, at_once = policy.decode_boundary(start, chunk.end)
        if boundary is None or boundary in denied:
            return chunk
        return Chunk(
            chunk.end, (), (boundary,) if at_once else (), None if at_once else boundary, chunk.reason
        )

    def _admit(self, request: Request, room: int, largest: int) -> int:
        """Admit the first waiting request with its first chunk, or leave everything as it was; its tokens."""
        if len(self.running) >= self.max_running_requests:
            self._waits[request.request_id] = (
                f"waits: {len(self.running)} of {self.max_running_requests} are running"
            )
            return 0
        # A scored prompt needs the logits of all its rows.
        reuse = Reuse(0, 0) if request.score_prompt else self.blocks.lookup(request)
        if not self.blocks.admit(request, reuse):
            size = self.blocks.slots.size
            self._waits[request.request_id] = f"waits for a slot: {size} of {size} in use"
            return 0
        used = self._place(request, room, largest, admitted=True)
        if not used:
            self.blocks.leave(request)
            return 0
        self.waiting.popleft()
        request.status = "running"
        if not request.output:
            request.num_cached_tokens = reuse.state_at
        self.running.append(request)
        return used

    def _preempt_youngest(self, beneficiary: Request) -> bool:
        """Free the youngest running request's places; False if that is the beneficiary itself, which then waits."""
        victim = self.running[-1]
        self.preempt(victim)
        return victim is not beneficiary

    def preempt(self, request: Request) -> None:
        """Send a running request back to the front of the queue. It keeps its tokens and resumes by lookup."""
        self.blocks.leave(request)
        self.running.remove(request)
        self._chunks.pop(request.request_id, None)
        request.status = "waiting"
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def commit(self, plan: StepPlan, result: StepResult) -> list[Advance]:
        """Record what a step computed and sampled. Requests that left since then are passed over."""
        by_id = {request.request_id: request for request in self.running}
        advances = []
        for chunk in plan.chunks:
            request = by_id.get(chunk.request_id)
            if request is None or request.num_computed_tokens != chunk.start:
                continue
            if (message := result.errors.get(request.request_id)) is not None:
                # Its forward publishes nothing.
                advances.append(Advance(request, finish_reason="error", message=message))
                self.finish(request, "error")
                continue
            completes = (
                not chunk.decodes
                and chunk.end >= Prefill(len(request.prompt), request.num_known_tokens).finish
            )
            request.num_computed_tokens = chunk.end
            advance = self._advance(request, result)
            if completes and chunk.rolling is None:
                self.blocks.end_prefill(request)
            self.blocks.commit(request, chunk.publishes, chunk.rolling)
            if advance.finish_reason is not None:
                self.finish(request, advance.finish_reason)
            advances.append(advance)
        if self.debug:
            self.blocks.check(self.running)
        return advances

    def _advance(self, request: Request, result: StepResult) -> Advance:
        token = result.tokens.get(request.request_id)
        if token is None:
            done = request.max_tokens == 0 and request.num_computed_tokens == len(request.prompt)
            return Advance(request, finish_reason="length" if done else None)
        if token in request.stop_ids:
            return Advance(request, finish_reason="stop")
        request.output.append(token)
        return Advance(request, token, "length" if len(request.output) == request.max_tokens else None)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request at any moment and free what it holds; ending it again changes nothing."""
        if request.status == "finished":
            return
        (self.waiting if request.status == "waiting" else self.running).remove(request)
        self.blocks.leave(request)
        request.status = "finished"
        self._released.append(request.request_id)


def decodes(request: Request) -> bool:
    """Whether every known token but the last is computed, so that the next row samples."""
    return request.num_computed_tokens >= max(len(request.prompt), request.num_known_tokens - 1)
