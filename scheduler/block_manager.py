"""Which request owns which cache page and recurrent slot, what is published under which key, and what is reused.

One block size serves keys, pages and boundaries, but every kind of place has ids, bytes and ages of its own: target
pages, draft pages, recurrent slots (one slot = all KDA layers of one state), companions (what drafting needs beside a
state). Nothing pads one kind to another, and states may be evicted without their pages and the reverse.

A slot's life: free -> held (running, or reserved for an export) -> published -> idle -> free. A held slot has no key,
so nobody can find it; a keyed slot is never written. A hit references the checkpoint until its copy is made. Reserving
is all or nothing. What to keep, and how far a hit reaches, is the policy's decision, never this file's.
"""

from collections.abc import Iterable, Iterator

from scheduler.checkpoint_policy import Policy, Reuse
from scheduler.keys import KeyChain
from scheduler.pool import Pool
from scheduler.request import Checkpoint, Request


class BlockManager:
    """Pools for `num_blocks` pages per group and `num_slots` recurrent slots (as many companions, if drafting)."""

    def __init__(self, policy: Policy, num_blocks: int, num_slots: int) -> None:
        self.policy, self.block_size, self.num_blocks = policy, policy.block_size, num_blocks
        self.groups = [Pool(num_blocks) for _ in range(1 + policy.drafting)]
        self.slots = Pool(num_slots)
        self.companions = Pool(num_slots) if policy.drafting else None
        self._tags: dict[int, int] = {}  # filing `tag`: draft page -> the token after its block

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def lookup(self, request: Request) -> Reuse:
        """What the request may skip, by what is published now. Takes no reference."""
        if not self.policy.retain:
            return Reuse(0, 0)
        keys, matched = self._keys(request), 0
        finders = [group.find for group in self.groups]
        for key in keys:
            if any(find(key) is None for find in finders) or not self._tag_matches(request, key, matched):
                break
            matched += self.block_size
        return self.policy.reuse(request.num_known_tokens, matched, self._states(keys, matched))

    def checkpoints(self, request: Request) -> list[int]:
        """Boundaries of the request's known tokens that hold a complete published checkpoint, ascending."""
        keys = self._keys(request)
        return sorted(self._states(keys, len(keys) * self.block_size))

    def _tag_matches(self, request: Request, key: bytes, start: int) -> bool:
        """Filing `tag`: whether the draft page's last row was made with this request's next token."""
        if self.policy.filing != "tag" or not self.policy.drafting:
            return True
        page = self.groups[-1].find(key)
        return page is not None and self._tags.get(page) == _token(request, start + self.block_size)

    def _states(self, keys: KeyChain, matched: int) -> Iterator[int]:
        """Boundaries up to `matched` with a complete checkpoint, deepest first."""
        for position in range(matched, 0, -self.block_size):
            key = keys.at(position)
            complete = self.companions is None or self.companions.find(key) is not None
            if complete and self.slots.find(key) is not None:
                yield position

    def admit(self, request: Request, reuse: Reuse) -> bool:
        """Give a request its running slot and references to what it reuses, or nothing at all."""
        checkpoint, key = None, None
        if reuse.state_at:
            key = self._keys(request).at(reuse.state_at)
            slot = self.slots.find(key)
            assert slot is not None
            checkpoint = Checkpoint(
                reuse.state_at, slot, self.companions.find(key) if self.companions else None
            )
            self._acquire(checkpoint)  # first, so that the running slot does not evict it
        running = self._reserve(request.num_computed_tokens)
        if running is None:
            self._release(checkpoint)
            return False
        request.restored, request.recurrent_slot, request.companion_slot = (
            checkpoint,
            running.slot,
            running.companion,
        )
        shared = [
            self._keys(request).at(p) for p in range(self.block_size, reuse.attention_to + 1, self.block_size)
        ]
        request.tables = [[self._share(group, key) for key in shared] for group in self.groups]
        request.num_computed_tokens = max(reuse.state_at, request.num_external_tokens)
        request.write_from = reuse.attention_to
        request.num_published_blocks = len(shared)
        request.junctions = (reuse.attention_to,) if reuse.attention_to > reuse.state_at else ()
        return True

    def grow(self, request: Request, end: int) -> list[list[int]] | None:
        """Pages for tokens up to `end`: the new ones by group, or None (and nothing taken) if there are too few."""
        missing = self.blocks_for(end) - len(request.tables[0])
        if any(group.num_available < missing for group in self.groups):
            return None
        added = [[_taken(group.allocate()) for _ in range(missing)] for group in self.groups]
        for table, pages in zip(request.tables, added, strict=True):
            table.extend(pages)
        return added

    def reserve_checkpoint(self, request: Request, position: int) -> bool:
        """A slot (and companion) for the state at `position`, to be written by the next forward."""
        checkpoint = self._reserve(position)
        if checkpoint is not None:
            request.reserved.append(checkpoint)
        return checkpoint is not None

    def cancel_reserved(self, request: Request) -> None:
        """Give back what `reserve_checkpoint` took for a forward that will not run."""
        for reserved in request.reserved:
            self._release(reserved)
        request.reserved = []

    def commit(self, request: Request, publishes: Iterable[int], rolling: int | None) -> None:
        """After the forward: publish full pages and the states at `publishes`; keep the one at `rolling` privately."""
        self._release(request.restored)
        request.restored = None
        self._publish_pages(request)
        for checkpoint in request.reserved:
            if checkpoint.position == rolling:
                self._release(request.rolling)
                request.rolling = checkpoint
            else:
                self._publish(request, checkpoint, checkpoint.position in publishes)
        request.reserved = []

    def end_prefill(self, request: Request) -> None:
        """Prefill is complete: the prompt's reuse points are at or above a rolling checkpoint inside it."""
        rolling = request.rolling
        if rolling and not self.policy.outlasts_prefill(rolling.position, len(request.prompt)):
            self._release(rolling)
            request.rolling = None

    def leave(self, request: Request) -> None:
        """The request finishes, is preempted or cancelled: publish its rolling checkpoint and verified full pages,
        drop everything else. Legal between any two steps, and twice."""
        if request.recurrent_slot is None:
            return
        self.cancel_reserved(request)  # a forward that was never committed publishes nothing
        self._release(request.restored)
        self._publish_pages(request)
        if request.rolling is not None:
            self._publish(request, request.rolling, True)
        self._release(Checkpoint(0, request.recurrent_slot, request.companion_slot))
        for group, table in zip(self.groups, request.tables, strict=True):
            for page in reversed(table):  # suffixes age before prefixes
                group.release(page)
        request.tables, request.restored, request.rolling = [], None, None
        request.recurrent_slot = request.companion_slot = None
        request.num_computed_tokens = request.num_published_blocks = request.write_from = 0

    def reset_cache(self, running: Iterable[Request]) -> None:
        """Forget everything published and every rolling checkpoint. Running requests keep what they compute with."""
        for request in running:
            self._release(request.rolling)
            request.rolling = None
        for pool in self._pools():
            pool.evict_all()

    def check(self, running: Iterable[Request]) -> None:
        """Assert that every page, slot and reference is accounted for."""
        requests = list(running)
        for index, group in enumerate(self.groups):
            group.check(page for request in requests for page in request.tables[index])
        held = [c for r in requests for c in (*r.reserved, r.rolling, r.restored) if c is not None]
        held += [Checkpoint(0, _taken(r.recurrent_slot), r.companion_slot) for r in requests]
        self.slots.check(checkpoint.slot for checkpoint in held)
        if self.companions is not None:
            self.companions.check(_taken(checkpoint.companion) for checkpoint in held)
        for request in requests:
            assert request.recurrent_slot is not None and not self.slots.is_keyed(request.recurrent_slot)
            if self.policy.retain:
                keys, written = self._keys(request), request.write_from // self.block_size
                covered = zip(self.groups, request.tables, strict=True)
                assert all(len(table) <= group.size for group, table in covered) and written <= len(keys)

    def _publish_pages(self, request: Request) -> None:
        if not self.policy.retain:
            return
        known = (
            self.policy.publishable(request.num_computed_tokens, request.num_known_tokens) // self.block_size
        )
        if known <= request.num_published_blocks:
            return
        keys = self._keys(request)
        for block in range(request.num_published_blocks, known):
            key = keys.at((block + 1) * self.block_size)
            for group, table in zip(self.groups, request.tables, strict=True):
                group.publish(table[block], key)
            if (
                self.policy.filing == "tag"
                and self.policy.drafting
                and self.groups[-1].find(key) == request.tables[-1][block]
            ):
                self._tags[request.tables[-1][block]] = _token(request, (block + 1) * self.block_size)
        request.num_published_blocks = known

    def _publish(self, request: Request, checkpoint: Checkpoint, findable: bool) -> None:
        """Give up a held checkpoint, findable from now on or not."""
        if findable:
            key = self._keys(request).at(checkpoint.position)
            self.slots.publish(checkpoint.slot, key)
            if self.companions is not None:
                self.companions.publish(_taken(checkpoint.companion), key)
        self._release(checkpoint)

    def _reserve(self, position: int) -> Checkpoint | None:
        pools = [pool for pool in (self.slots, self.companions) if pool is not None]
        if any(not pool.num_available for pool in pools):
            return None
        places = [_taken(pool.allocate()) for pool in pools]
        return Checkpoint(position, places[0], places[1] if len(places) > 1 else None)

    def _acquire(self, checkpoint: Checkpoint) -> None:
        self.slots.acquire(checkpoint.slot)
        if self.companions is not None:
            self.companions.acquire(_taken(checkpoint.companion))

    def _release(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            self.slots.release(checkpoint.slot)
            if self.companions is not None:
                self.companions.release(_taken(checkpoint.companion))

    def _share(self, group: Pool, key: bytes) -> int:
        page = _taken(group.find(key))
        group.acquire(page)
        return page

    def _keys(self, request: Request) -> KeyChain:
        if request.keys is None:
            request.keys = KeyChain(self.block_size, self.policy.ahead, request.salt)
        request.keys.extend(request.prompt, request.output)
        return request.keys

    def _pools(self) -> list[Pool]:
        return [pool for pool in (*self.groups, self.slots, self.companions) if pool is not None]


def _token(request: Request, position: int) -> int:
    split = len(request.prompt)
    return request.prompt[position] if position < split else request.output[position - split]


def _taken(place: int | None) -> int:
    assert place is not None, "a place that was counted as available is gone"
    return place
