"""A model of what every page and slot holds, so that any stale, mislabelled or overwritten content fails a test.

The state after m tokens is a hash chain over them, a target row is the state after its token, and a draft row the
state that its token completes. What is free, was just taken, or was never written holds NONE; rows of rejected drafts
and what drafting writes provisionally hold WRONG, and so does a state that a rejected draft kept from being reached.
"""

from collections.abc import Iterable, Sequence

from scheduler.block_manager import BlockManager
from scheduler.plan import Checkpoint, ScheduledChunk
from scheduler.pool import Pool
from scheduler.request import Request

NONE = None  # what no forward has written
WRONG = -1  # what no key may ever promise


def prefix_states(tokens: Sequence[int], salt: bytes = b"", states: list[int] | None = None) -> list[int]:
    """states[m]: the state after m tokens; extends `states` in place if given."""
    states = [int.from_bytes(salt[:7])] if states is None else states
    for token in tokens[len(states) - 1 :]:
        states.append(hash((states[-1], token)))
    return states


class Contents:
    """Pages and slots of a block manager, and the requests that fill them. `content` False: nothing is tracked."""

    def __init__(self, blocks: BlockManager, *, content: bool) -> None:
        self.blocks, self.policy, self.content = blocks, blocks.policy, content
        self.scratch = 0  # slots beyond a sampling chunk's end that drafting writes
        size = self.policy.block_size if content else 0
        self.pages: list[list[list[int | None]]] = [
            [[NONE] * size for _ in range(p.size)] for p in blocks.groups
        ]
        self.slots: list[int | None] = [NONE] * blocks.slots.size
        self.companions: list[int | None] = [NONE] * blocks.slots.size
        self.requests: dict[int, Request] = {}
        self.states: dict[int, list[int]] = {}
        self.tables: dict[int, list[list[int]]] = {}  # as a runner builds them from plans
        self.labels: dict[bytes, list[int]] = {}  # key -> the target rows it promises; the last is the state
        self.label_positions: dict[bytes, int] = {}
        self.labelled: dict[int, int] = {}  # blocks of a request whose keys are labelled
        self.wiped: list[set[int]] = [set() for _ in blocks.groups]
        self.positions: dict[int, int] = {}  # slot -> position of what was last written to it
        self.wrong_draft_rows: list[tuple[int, int]] = []  # (request, slot position) read and not its own

    def taken(self, request: Request, chunk: ScheduledChunk) -> None:
        """Places that this step took hold nothing yet."""
        shared = chunk.write_from // self.policy.block_size if chunk.admitted else 0
        for group, added in zip(self.pages, chunk.new_blocks, strict=True):
            for page in added[shared:]:
                group[page] = [NONE] * self.policy.block_size
        for reserved in request.reserved:
            self.fill(reserved, NONE)
        if chunk.admitted:
            self.fill(running_place(request), NONE)

    def fill(self, place: Checkpoint, state: int | None) -> None:
        self.slots[place.slot] = state
        if place.companion is not None:
            self.companions[place.companion] = state

    def forward(
        self, request: Request, chunk: ScheduledChunk, num_accepted_drafts: int = 0, lags: bool = False
    ) -> int:
        """Run the target, then the draft layer over its new rows, unless it `lags`; the draft rows that it has now."""
        states, table = self.states[chunk.request_id], self.tables[chunk.request_id]
        running = self.restore(request, chunk)
        self.read(request, chunk.start, chunk.draft_start)
        verified = chunk.end - chunk.num_drafts + num_accepted_drafts
        for p in range(max(chunk.start, chunk.write_from), chunk.end):
            self.write(0, table[0], p, states[p + 1] if p < verified else WRONG)
        drafted = chunk.draft_start if lags else self.num_drafted(chunk, verified, len(states) - 1)
        if self.policy.drafting:
            for p in range(max(chunk.draft_start, chunk.write_from), drafted):
                self.write(1, table[1], p, self.draft_row(states, p))
            for p in range(max(drafted, chunk.write_from), self.scratch_end(chunk)):
                self.write(1, table[1], p, WRONG)
        for export in chunk.exports:
            assert export in request.reserved and chunk.start < export.position <= chunk.end
            private(self.blocks.slots, export.slot)
            self.fill(export, states[export.position] if export.position <= verified else WRONG)
            if export.companion is not None and drafted < export.position:
                self.companions[export.companion] = WRONG  # it holds draft rows
            self.positions[export.slot] = export.position
        private(self.blocks.slots, running.slot)
        self.fill(running, states[verified])
        if running.companion is not None and drafted < verified:
            self.companions[running.companion] = WRONG
        self.positions[running.slot] = verified
        return drafted

    def restore(self, request: Request, chunk: ScheduledChunk) -> Checkpoint:
        """The running place, which holds the state at the chunk's start."""
        states, running = self.states[chunk.request_id], running_place(request)
        assert (running.slot, running.companion) == (chunk.recurrent_slot, chunk.companion_slot)
        if chunk.admitted:
            source = request.restored
            assert source == chunk.restore_from
            self.fill(running, states[0] if source is None else self.slots[source.slot])
            if source is not None and source.companion is not None:
                assert self.companions[source.companion] == states[chunk.start], "stale companion"
        assert self.slots[running.slot] == states[chunk.start], f"{chunk}: the state is not its own"
        if running.companion is not None:
            assert self.companions[running.companion] == states[chunk.start], "the companion is not its own"
        return running

    def num_drafted(self, chunk: ScheduledChunk, verified: int, known: int) -> int:
        """Draft rows after the step, the one of a sampled token included."""
        if self.shift() == 2:
            return min(verified, known - 1)
        return min(verified + 1, known, self.scratch_end(chunk)) if chunk.samples else verified

    def scratch_end(self, chunk: ScheduledChunk) -> int:
        """How far drafting may write provisional rows."""
        return min(chunk.end + self.scratch, chunk.limit) if chunk.samples else 0

    def shift(self) -> int:
        """Tokens that a draft row's slot must be followed by, plus one, for the row to be made."""
        return 1 if self.policy.filing == "token" else 2

    def draft_row(self, states: Sequence[int], p: int) -> int | None:
        """What draft slot p holds: the state that the row's token completes; slot 0 is empty under `token`."""
        return NONE if self.shift() == 1 and p == 0 else states[p + self.shift()]

    def write(self, group: int, table: list[int], p: int, row: int | None) -> None:
        page = table[p // self.policy.block_size]
        private(self.blocks.groups[group], page)
        self.pages[group][page][p % self.policy.block_size] = row

    def read(self, request: Request, end: int, draft_end: int) -> None:
        """Every cached row below `end` is the request's own; a draft row may be wrong under `drop` and `off` only."""
        states, tables = self.states[request.request_id], self.tables[request.request_id]
        rows = [row for page in tables[0] for row in self.pages[0][page]][:end]
        assert rows == states[1 : end + 1], f"request {request.request_id} reads stale target rows"
        if not (self.policy.drafting and draft_end):
            return
        found = [row for page in tables[1] for row in self.pages[1][page]][:draft_end]
        own = [self.draft_row(states, 0), *states[1 + self.shift() : draft_end + self.shift()]][:draft_end]
        if found != own:
            assert self.policy.filing in ("drop", "off"), (
                f"request {request.request_id} reads stale draft rows"
            )
            self.wrong_draft_rows += [(request.request_id, p) for p in range(draft_end) if found[p] != own[p]]

    # After every operation.

    def account(self, running: Iterable[Request]) -> None:
        """References, labels of everything findable, rolling checkpoints; what is free is wiped."""
        requests = list(running)
        self.blocks.check(requests)
        for request in requests:
            if self.content and request.rolling is not None:
                assert (
                    self.slots[request.rolling.slot]
                    == self.states[request.request_id][request.rolling.position]
                )
        if not self.content:
            return
        self.label()
        for pool, place_content in (
            (self.blocks.slots, self.slots),
            (self.blocks.companions, self.companions),
        ):
            if pool is not None:
                for key, place in pool._place_of.items():
                    assert place_content[place] == self.labels[key][-1], "a state under a wrong key"
                for place in pool._free:
                    place_content[place] = NONE
        for key, slot in self.blocks.slots._place_of.items():
            assert self.positions[slot] == self.label_positions[key], "a state of another position"
        for group, pool in enumerate(self.blocks.groups):
            self.account_pages(group, pool)

    def account_pages(self, group: int, pool: Pool) -> None:
        for key, page in pool._place_of.items():
            rows = self.pages[group][page]
            if group == 0:
                assert rows == self.labels[key], "a target page under a wrong key"
            elif self.policy.filing == "token":
                first = [NONE] if self.label_positions[key] == len(rows) else self.labels[key][:1]
                assert rows == first + self.labels[key][1:], "a draft page under a wrong key"
            elif self.policy.filing in ("key", "tag"):
                assert rows[:-1] == self.labels[key][1:], "a draft page under a wrong key"
        for page in set(pool._free) - self.wiped[group]:
            self.pages[group][page] = [NONE] * self.policy.block_size
        self.wiped[group] = set(pool._free)

    def label(self) -> None:
        """What each key known so far promises; two prefixes never share one."""
        size = self.policy.block_size
        for request in self.requests.values():
            states, done = self.states[request.request_id], self.labelled.get(request.request_id, 0)
            for block, key in enumerate(request.keys or ()):
                if block >= done:
                    rows = states[block * size + 1 : (block + 1) * size + 1]
                    assert self.labels.setdefault(key, rows) == rows, "a key promises two contents"
                    self.label_positions[key] = (block + 1) * size
            self.labelled[request.request_id] = len(request.keys or ())


def private(pool: Pool, place: int) -> None:
    """Written only by a single owner, while nobody can find it."""
    assert not pool.is_keyed(place) and pool._references[place] == 1, f"place {place} is not private"


def running_place(request: Request) -> Checkpoint:
    assert request.recurrent_slot is not None
    return Checkpoint(request.num_computed_tokens, request.recurrent_slot, request.companion_slot)
