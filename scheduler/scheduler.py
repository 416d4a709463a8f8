"""Which tokens run in the next step: continuous batching under a token budget.

`schedule` fills a step in this order: one row for every running request that decodes, then their drafts, then chunks
of running prefills in order of arrival, then waiting requests, first come first served, while a slot and pages are
there. While something decodes, a step takes at most `mixed_prefill_tokens` of prefill, and no prompt more than half of
what is left while another waits. Where a chunk ends and which states it leaves is asked of the policy. When pages run
out the youngest running request is preempted and goes to the front of the queue; it resumes by an ordinary lookup.
`commit` makes a step's result true: only then is anything published, so requests admitted together never hit what
their own step has yet to write; tokens that were rejected, or follow a stop, leave nothing.
"""

from collections import deque
from itertools import islice

from scheduler.block_manager import BlockManager, junctions_of
from scheduler.checkpoint_policy import Chunk, Prefill, Reuse
from scheduler.fitting import fitted_chunk, states_of
from scheduler.plan import ScheduledChunk, StepPlan, StepResult
from scheduler.request import Advance, Request

NO_CAP = 0


class RequestRefused(ValueError):
    """The request can never run; the message holds the numbers."""


class Scheduler:
    """Requests over one BlockManager. `context_limit` is in tokens, output included; `draft_tokens` is the most that a
    step verifies per request; for `scratch_tokens` beyond a sampling chunk's end the draft layer needs pages."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batched_tokens: int,
        context_limit: int,
        max_running_requests: int,
        mixed_prefill_tokens: int = 1024,
        draft_tokens: int = 0,
        scratch_tokens: int = 0,
        debug: bool = False,
    ) -> None:
        self.blocks, self.max_batched_tokens, self.context_limit = blocks, max_batched_tokens, context_limit
        self.max_running_requests, self.mixed_prefill_tokens = max_running_requests, mixed_prefill_tokens
        self.draft_tokens, self.scratch_tokens, self.debug = draft_tokens, scratch_tokens, debug
        self._last_row_needs_next = blocks.policy.drafting and blocks.policy.filing != "token"
        self._no_pages: list[list[int]] = [[] for _ in blocks.groups]
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._released: list[int] = []
        self._chunks: dict[int, ScheduledChunk] = {}  # of the step being planned
        self._in_flight: dict[int, Request] = {}  # in the step that is planned and not committed
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
        """The next step. If the last one was never committed its forward failed, and may have left anything in running
        slots: its requests begin again by lookup."""
        for request in reversed([*self._in_flight.values()]):
            self.preempt(request)
        self._chunks, self._waits = {}, {}
        preemptions = self.num_preemptions
        decoding: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            (decoding if request.decodes else prefills).append(request)
        spare = max(self.max_batched_tokens - len(decoding), 0)
        for request in decoding[: self.max_batched_tokens]:
            if request.status == "running":
                spare -= self._place_decode(request, spare)
        rows = sum([len(chunk.token_ids) for chunk in self._chunks.values()])
        left = largest = self._prefill_tokens(rows)
        for request in prefills:
            if left and request.status == "running":
                left -= self._place(request, self._offer(left, largest, rows))
        while left and self.waiting and self.num_preemptions == preemptions:
            used = self._admit(self.waiting[0], self._offer(left, largest, rows))
            if not used:
                break
            left -= used
        self._explain_the_rest()
        chunks = tuple(self._chunks.values())
        self._in_flight = {r.request_id: r for r in self.running if r.request_id in self._chunks}
        released, self._released = tuple(self._released), []
        unused = self.max_batched_tokens - sum([len(chunk.token_ids) for chunk in chunks])
        return StepPlan(chunks, released, self._waits, unused)

    def _prefill_tokens(self, decode_rows: int) -> int:
        """Tokens of prefill that a step beside `decode_rows` rows of decodes may take."""
        left = self.max_batched_tokens - decode_rows
        capped = decode_rows and self.mixed_prefill_tokens != NO_CAP
        return min(left, self.mixed_prefill_tokens) if capped else left

    def _offer(self, left: int, largest: int, decode_rows: int) -> tuple[int, int]:
        """(tokens offered to the next prefill now, the most that any step would offer it)."""
        # Whoever decodes has a row by now, so all that have no chunk are prefills.
        others = len(self.running) + len(self.waiting) - len(self._chunks) > 1
        if decode_rows and self.mixed_prefill_tokens != NO_CAP and others:
            return max(left // 2, 1), max(largest // 2, 1)
        return left, largest

    def _explain_the_rest(self) -> None:
        """A reason for everybody who does not run and has none yet."""
        for request in [*self.running, *islice(self.waiting, 1)]:
            if request.request_id not in self._chunks:
                self._waits.setdefault(request.request_id, "waits: no tokens left in this step")
        for request in islice(self.waiting, 1, None):
            self._waits.setdefault(request.request_id, f"waits behind request {self.waiting[0].request_id}")

    def _place_decode(self, request: Request, spare: int) -> int:
        """Plan a request's decode row, and of its drafts what fits into `spare` tokens; the number of drafts."""
        start, size = request.num_computed_tokens, self.blocks.block_size
        rows = 1 + min(len(request.drafts), spare)
        end, held = start + rows, len(request.tables[0]) * size
        if start // size == end // size and request.cache_end(end, self.scratch_tokens) <= held:
            self._plan(request, Chunk(end, reason="decode"), self._no_pages)  # nor is a slot needed
            return rows - 1
        return max(self._place(request, (rows, rows)) - 1, 0)

    def _place(self, request: Request, offer: tuple[int, int]) -> int:
        """Plan a running request's chunk and take what it needs; its tokens, 0 if it has to wait."""
        start, held = request.num_computed_tokens, len(request.tables[0])
        while True:
            states, pages = self.blocks.spare(request)
            chunk = self._fitted(request, start, request.junctions, offer, states)
            if chunk.end == start:
                return self._wait(request, chunk.reason)
            if self.blocks.blocks_for(request.cache_end(chunk.end, self.scratch_tokens)) - held <= pages:
                self._plan(request, chunk, self._take(request, chunk))
                return chunk.end - start
            if request.decodes and offer[0] > 1:
                offer = (1, 1)  # drafts go before anybody has to leave
            elif not self._preempt_youngest(request):
                return self._wait(request, "waits for pages")

    def _admit(self, request: Request, offer: tuple[int, int]) -> int:
        """Admit the first waiting request with its first chunk, or leave everything as it was; its tokens."""
        most = self.max_running_requests
        if len(self.running) >= most:
            return self._wait(request, f"waits: {len(self.running)} of {most} are running")
        # A scored prompt needs the logits of all its rows.
        reuse = Reuse(0, 0) if request.score_prompt else self.blocks.lookup(request)
        states, pages = self.blocks.spare(request, reuse)
        rolling = [r for r in reversed(self.running) if r.rolling][: max(-states, 0)]
        if states + len(rolling) < 0:
            size = self.blocks.slots.size
            return self._wait(request, f"waits for a slot: {size} of {size} in use")
        start = max(reuse.state_at, request.num_external_tokens)
        chunk = self._fitted(request, start, junctions_of(reuse), offer, max(states, 0))
        if chunk.end == start:
            return self._wait(request, chunk.reason)
        shared = self.blocks.blocks_for(reuse.attention_to)
        if self.blocks.blocks_for(request.cache_end(chunk.end, self.scratch_tokens)) - shared > pages:
            return self._wait(request, "waits for pages")
        for holder in rolling:  # a slot to run in comes before private checkpoints, the youngest's first
            self.blocks.drop_rolling(holder)
        self.blocks.admit(request, reuse)
        self._take(request, chunk)
        self._plan(request, chunk, request.tables, admitted=True)
        self.running.append(self.waiting.popleft())
        request.status = "running"
        if not request.num_preemptions:
            request.num_cached_tokens = reuse.state_at
        return chunk.end - start

    def _wait(self, request: Request, reason: str) -> int:
        self._waits[request.request_id] = reason
        return 0

    def _take(self, request: Request, chunk: Chunk) -> list[list[int]]:
        """Take the slots and pages that were counted; the new pages by group."""
        for position in states_of(chunk):
            self.blocks.reserve_checkpoint(request, position)
        added = self.blocks.grow(request, request.cache_end(chunk.end, self.scratch_tokens))
        assert added is not None, "pages that were counted are gone"
        return added

    def _plan(self, request: Request, chunk: Chunk, pages: list[list[int]], admitted: bool = False) -> None:
        """Make the chunk part of the step."""
        start, end, known = request.num_computed_tokens, chunk.end, request.num_known_tokens
        drafts, reason = request.drafts, chunk.reason
        if known + len(drafts) > end and drafts:
            drafts = drafts[: end - known]
            reason += f", {len(drafts)} of {len(request.drafts)} drafts: no room"
        self._chunks[request.request_id] = ScheduledChunk(
            request_id=request.request_id,
            token_ids=(*request.tokens(start, end), *drafts),
            start=start,
            write_from=request.write_from,
            admitted=admitted,
            new_blocks=tuple(map(tuple, pages)),
            recurrent_slot=request.recurrent_slot or 0,
            restore_from=request.restored,
            exports=tuple(request.reserved),
            publishes=chunk.publishes,
            rolling=chunk.rolling,
            samples=end >= known and request.max_tokens > 0,
            decodes=request.decodes,
            reason=reason,
            limit=request.max_known_tokens,
            targets=request.tokens(start + 1, end + 1) if request.score_prompt else (),
            num_drafts=len(drafts),
            draft_start=request.num_drafted_tokens,
            next_token=request.token(end) if self._last_row_needs_next and end < known else None,
            companion_slot=request.companion_slot,
        )

    def _fitted(
        self, request: Request, start: int, junctions: tuple[int, ...], offer: tuple[int, int], states: int
    ) -> Chunk:
        (room, largest), known, size = offer, request.num_known_tokens, self.blocks.slots.size
        room = min(room, known + len(request.drafts) - start)
        prefill = Prefill(len(request.prompt), known, junctions)
        return fitted_chunk(self.blocks.policy, prefill, start, room, largest, states, size)

    def _preempt_youngest(self, beneficiary: Request) -> bool:
        """Free the youngest running request's places; False if that is the beneficiary itself, which then waits."""
        victim = self.running[-1]
        self.preempt(victim)
        self._waits[victim.request_id] = f"preempted: request {beneficiary.request_id} needs its pages"
        return victim is not beneficiary

    def preempt(self, request: Request) -> None:
        """Send a running request back to the front of the queue. It keeps its tokens and resumes by lookup."""
        self._let_go(request)
        self.running.remove(request)
        self._chunks.pop(request.request_id, None)
        request.status = "waiting"
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _let_go(self, request: Request) -> None:
        in_flight = self._in_flight.pop(request.request_id, None) is not None
        self.blocks.leave(request, in_flight=in_flight)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Advance]:
        """Record what a step computed and sampled. Requests that left since then are passed over."""
        advances = []
        for chunk in plan.chunks:
            request = self._in_flight.get(chunk.request_id)
            if request is None:
                continue
            if (message := result.errors.get(request.request_id)) is not None:
                # Its forward publishes nothing.
                advances.append(Advance(request, finish_reason="error", message=message))
                self.finish(request)
                continue
            del self._in_flight[chunk.request_id]
            completes = not chunk.decodes and chunk.end >= request.prefill_end
            advance = request.advance(chunk, result, self.draft_tokens)
            if completes and chunk.rolling is None:
                self.blocks.end_prefill(request)
            self.blocks.commit(request, chunk.publishes, chunk.rolling)
            if advance.finish_reason is not None:
                self.finish(request)
            advances.append(advance)
        if self.debug:
            self.blocks.check(self.running)
        return advances

    def finish(self, request: Request) -> None:
        """End a request at any moment and free what it holds; ending it again changes nothing."""
        if request.status == "finished":
            return
        (self.waiting if request.status == "waiting" else self.running).remove(request)
        self._let_go(request)
        request.status = "finished"
        self._released.append(request.request_id)
