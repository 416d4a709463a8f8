"""Which tokens run in the next step: first in, first out, chunked prefill under a token budget.

`schedule` fills a step with at most `max_batched_tokens` tokens: running requests in order of arrival, one row
for a decode, as much of the prompt as fits for a prefill, then waiting requests while a slot and pages are
free. Decode rows and prefill chunks share the step. A request reserves the pages of its longest possible course
when admitted, so it never runs out of them. `commit` makes a step's result true.
"""

from collections import deque
from dataclasses import dataclass

from scheduler.block_manager import BlockManager
from scheduler.plan import ScheduledChunk, StepPlan, StepResult
from scheduler.request import FinishReason, Request


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
    """Requests in order of arrival over one BlockManager. `context_limit` is in tokens, output included."""

    def __init__(self, blocks: BlockManager, max_batched_tokens: int, context_limit: int) -> None:
        self.blocks, self.max_batched_tokens, self.context_limit = blocks, max_batched_tokens, context_limit
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._released: list[int] = []

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
        """The next step. Empty only if no request is left."""
        room, chunks = self.max_batched_tokens, []
        for request in self.running:
            if room:
                chunks.append(self._chunk(request, room, ()))
                room -= len(chunks[-1].token_ids)
        while self.waiting and room and self.blocks.allocate(self.waiting[0]):
            request = self.waiting.popleft()
            request.status = "running"
            self.running.append(request)
            chunks.append(self._chunk(request, room, tuple(request.block_table)))
            room -= len(chunks[-1].token_ids)
        released, self._released = tuple(self._released), []
        return StepPlan(tuple(chunks), released)

    def _chunk(self, request: Request, room: int, new_blocks: tuple[int, ...]) -> ScheduledChunk:
        assert request.recurrent_slot is not None
        start = request.num_computed_tokens
        end = min(request.num_known_tokens, start + room)
        return ScheduledChunk(
            request_id=request.request_id,
            token_ids=request.tokens(start, end),
            start=start,
            new_blocks=new_blocks,
            recurrent_slot=request.recurrent_slot,
            samples=end == request.num_known_tokens and request.max_tokens > 0,
            targets=request.tokens(start + 1, end + 1) if request.score_prompt else (),
        )

    def commit(self, plan: StepPlan, result: StepResult) -> list[Advance]:
        """Record what a step computed and sampled. Requests cancelled since then are passed over."""
        by_id = {request.request_id: request for request in self.running}
        advances = []
        for chunk in plan.chunks:
            if (request := by_id.get(chunk.request_id)) is not None:
                request.num_computed_tokens = chunk.end
                advance = self._advance(request, result)
                if advance.finish_reason is not None:
                    self.finish(request, advance.finish_reason)
                advances.append(advance)
        return advances

    def _advance(self, request: Request, result: StepResult) -> Advance:
        if (message := result.errors.get(request.request_id)) is not None:
            return Advance(request, finish_reason="error", message=message)
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
        request.status, request.finish_reason = "finished", reason
        self._released.append(request.request_id)
        self.blocks.release(request)
