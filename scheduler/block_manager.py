"""Which request owns which cache page and recurrent slot, what is published under which key, and what is reused.

One block size serves keys, pages and boundaries, but every kind of place has ids, bytes and ages of its own: target
pages, draft pages, recurrent slots (one slot = all KDA layers of one state), companions (what drafting needs beside a
state). Nothing pads one kind to another, and states may be evicted without their pages and the reverse.

A slot's life: free -> held (running, or reserved for an export) -> published -> idle -> free. A held slot has no key,
so nobody can find it; a keyed slot is never written. A hit references the checkpoint until its copy is made. A running
slot is published only by a request that leaves on a boundary, which then never writes it again. Places are counted
before any is taken: taking is all or nothing, and what fails evicts nobody and leaves every age as it was.
What to keep, and how far a hit reaches, is the policy's decision, never this file's.
"""

from collections.abc import Iterable, Iterator
from itertools import compress

from scheduler.checkpoint_policy import Policy, Prefill, Reuse
from scheduler.keys import KeyChain
from scheduler.plan import Checkpoint
from scheduler.pool import Pool
from scheduler.request import Request


class BlockManager:
    """Pools for `num_blocks` pages per group and `num_slots` recurrent slots (as many companions, if drafting)."""

    def __init__(self, policy: Policy, num_blocks: int, num_slots: int) -> None:
        self.policy, self.block_size, self.num_blocks = policy, policy.block_size, num_blocks
        self.groups = [Pool(num_blocks) for _ in range(1 + policy.drafting)]
        self.slots = Pool(num_slots)
        self.companions = Pool(num_slots) if policy.drafting else None
        self._state_pools = [self.slots] if self.companions is None else [self.slots, self.companions]
        self._tagged = policy.filing == "tag" and policy.drafting
        self._tags: dict[int | None, int] = {}  # filing `tag`: draft page -> the token after its block

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def lookup(self, request: Request) -> Reuse:
        """What the request may skip, by what is published now. Takes no reference."""
        if not self.policy.retain:
            return Reuse(0, 0)
        keys = self._keys(request)
        matched = min(group.num_found(keys) for group in self.groups)
        if self._tagged:
            matched = self._num_tags_matched(request, keys, matched)
        matched *= self.block_size
        return self.policy.reuse(request.num_known_tokens, matched, self._states(keys, matched))

    def checkpoints(self, request: Request) -> list[int]:
        """Boundaries of the request's known tokens that hold a complete published checkpoint, ascending."""
        keys = self._keys(request)
        return sorted(self._states(keys, len(keys) * self.block_size))

    def _num_tags_matched(self, request: Request, keys: KeyChain, matched: int) -> int:
        """Filing `tag`: the blocks before the first whose last draft row was made with another token than ours."""
        pages = map(self.groups[-1].find, keys.between(0, matched * self.block_size))
        for block, page in enumerate(pages):
            if self._tags.get(page) != request.token((block + 1) * self.block_size):
                return block
        return matched

    def _states(self, keys: KeyChain, matched: int) -> Iterator[int]:
        """Boundaries up to `matched` with a complete checkpoint, deepest first."""
        boundaries = range(matched, 0, -self.block_size)
        held = compress(boundaries, self.slots.which(reversed(keys.between(0, matched))))
        return (m for m in held if self._complete(keys.at(m)))

    def _complete(self, key: bytes) -> bool:
        return all(pool.find(key) is not None for pool in self._state_pools)

    def spare(self, request: Request, reuse: Reuse | None = None) -> tuple[int, int]:
        """(checkpoints, pages of every group) that the request could take; with `reuse`, after being admitted with
        it. Fewer than 0 checkpoints: it can't be admitted."""
        if reuse is None:
            return self._spare_states(None), min([group.num_available for group in self.groups])
        shared = zip(self.groups, self._shared(request, reuse), strict=True)
        pages = min(group.num_available - group.num_idle(table) for group, table in shared)
        return self._spare_states(self._reused(request, reuse)) - 1, pages

    def _spare_states(self, reused: Checkpoint | None) -> int:
        """Checkpoints that could be taken while `reused` is being read."""
        if reused is None:
            return min([pool.num_available for pool in self._state_pools])
        places = zip(self._state_pools, _places(reused), strict=True)
        return min(pool.num_available - pool.num_idle([place]) for pool, place in places)

    def _reused(self, request: Request, reuse: Reuse) -> Checkpoint | None:
        if not reuse.state_at:
            return None
        key = self._keys(request).at(reuse.state_at)
        return Checkpoint(reuse.state_at, *(_taken(pool.find(key)) for pool in self._state_pools))

    def _shared(self, request: Request, reuse: Reuse) -> list[list[int]]:
        """Published pages of the tokens below `attention_to`, by group."""
        keys = self._keys(request).between(0, reuse.attention_to) if reuse.attention_to else []
        return [[_taken(group.find(key)) for key in keys] for group in self.groups]

    def admit(self, request: Request, reuse: Reuse) -> bool:
        """Give a request its running slot and references to what it reuses, or nothing at all."""
        reused = self._reused(request, reuse)
        if self._spare_states(reused) < 1:
            return False
        if reused is not None:
            for pool, place in zip(self._state_pools, _places(reused), strict=True):
                pool.acquire(place)  # first, so that the running slot does not evict it
        running = self._reserve(reuse.state_at)
        request.restored = reused
        request.recurrent_slot, request.companion_slot = running.slot, running.companion
        request.tables = self._shared(request, reuse)
        for group, table in zip(self.groups, request.tables, strict=True):
            for page in table:
                group.acquire(page)
        request.num_computed_tokens = max(reuse.state_at, request.num_external_tokens)
        request.num_drafted_tokens = request.num_computed_tokens
        request.write_from = reuse.attention_to
        request.num_published_blocks = [reuse.attention_to // self.block_size for _ in self.groups]
        request.junctions = junctions_of(reuse)
        return True

    def grow(self, request: Request, end: int) -> list[list[int]] | None:
        """Pages for tokens up to `end`: the new ones by group, or None (and nothing taken) if there are too few."""
        missing = self.blocks_for(end) - len(request.tables[0])
        if missing <= 0:
            return [[] for _ in self.groups]
        if any(group.num_available < missing for group in self.groups):
            return None
        added = [[_taken(group.allocate()) for _ in range(missing)] for group in self.groups]
        for table, pages in zip(request.tables, added, strict=True):
            table.extend(pages)
        return added

    def reserve_checkpoint(self, request: Request, position: int) -> bool:
        """A slot (and companion) for the state at `position`, to be written by the next forward."""
        if self._spare_states(None) < 1:
            return False
        request.reserved.append(self._reserve(position))
        return True

    def commit(self, request: Request, publishes: Iterable[int], rolling: int | None) -> None:
        """After the forward: publish full pages and the states at `publishes`; keep the one at `rolling` privately. A
        state beyond a rejected draft or a stop is freed, and the rolling one of before stays."""
        self._release(request.restored)
        request.restored = None
        self._publish_pages(request)
        if not request.reserved:
            return
        for checkpoint in request.reserved:
            position = checkpoint.position
            places = self._findable(request, checkpoint) if position <= request.num_computed_tokens else []
            if position == rolling and len(places) == len(self._state_pools):
                self._release(request.rolling)
                request.rolling = checkpoint
            else:
                self._give_up(request, checkpoint, bool(places) and position in (*publishes, rolling))
        request.reserved = []

    def end_prefill(self, request: Request) -> None:
        """Prefill is complete: the prompt's reuse points are at or above a rolling checkpoint inside it."""
        rolling = request.rolling
        if rolling and not self.policy.outlasts_prefill(rolling.position, len(request.prompt)):
            self.drop_rolling(request)

    def drop_rolling(self, request: Request) -> None:
        """Give a private checkpoint up, if there is one."""
        self._release(request.rolling)
        request.rolling = None

    def leave(self, request: Request, *, in_flight: bool = False) -> None:
        """The request finishes, is preempted or cancelled: publish its newest private checkpoint and verified full
        pages, drop everything else. Legal at any moment, and twice. `in_flight`: a forward was launched and not
        committed; it publishes nothing, and what it left in the running slot is nobody's."""
        if request.recurrent_slot is None:
            return
        for checkpoint in (*request.reserved, request.restored):
            self._release(checkpoint)
        self._publish_pages(request)
        running = Checkpoint(request.num_computed_tokens, request.recurrent_slot, request.companion_slot)
        if request.rolling is not None:
            self._give_up(request, request.rolling, True)
        self._give_up(request, running, not in_flight and self._hands_over(request))
        for group, table in zip(self.groups, request.tables, strict=True):
            for page in reversed(table):  # suffixes age before prefixes
                group.release(page)
        request.tables, request.reserved, request.restored, request.rolling = [], [], None, None
        request.recurrent_slot = request.companion_slot = None
        request.num_computed_tokens = request.num_drafted_tokens = request.write_from = 0
        request.num_published_blocks, request.drafts = [], ()

    def reset_cache(self, running: Iterable[Request]) -> None:
        """Forget everything published and every rolling checkpoint. Running requests keep what they compute with, and
        publish their pages again."""
        for request in running:
            self.drop_rolling(request)
            request.num_published_blocks = [0 for _ in self.groups]
        for pool in (*self.groups, *self._state_pools):
            pool.evict_all()

    def check(self, running: Iterable[Request]) -> None:
        """Assert that every page, slot and reference is accounted for."""
        requests = list(running)
        for index, group in enumerate(self.groups):
            group.check(page for request in requests for page in request.tables[index])
        held = [c for r in requests for c in (*r.reserved, r.rolling, r.restored) if c is not None]
        held += [Checkpoint(0, _taken(r.recurrent_slot), r.companion_slot) for r in requests]
        places = [_places(checkpoint) for checkpoint in held]
        assert all(len(kinds) == len(self._state_pools) for kinds in places), "a state without its companion"
        for index, pool in enumerate(self._state_pools):
            pool.check(kinds[index] for kinds in places)
        for request in requests:
            assert request.recurrent_slot is not None and not self.slots.is_keyed(request.recurrent_slot)
            rows = max(request.write_from, request.num_drafted_tokens)
            assert rows <= self.block_size * min(map(len, request.tables))

    def _publish_pages(self, request: Request) -> None:
        """Publish full pages of verified tokens; those of the draft group, the last, as far as their rows were made."""
        verified, size, published = request.num_computed_tokens, self.block_size, request.num_published_blocks
        if verified // size <= published[-1] or not self.policy.retain:
            return
        chain = self._keys(request)
        for index, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
            written = min(verified, request.num_drafted_tokens) if index else verified
            end, first = self.policy.publishable(written, request.num_known_tokens), published[index]
            for block, key in enumerate(chain.between(first * size, end), start=first):
                kept = group.publish(table[block], key)
                if kept and self._tagged and index:
                    self._tags[table[block]] = request.token((block + 1) * size)
            published[index] = max(first, end // size)

    def _hands_over(self, request: Request) -> bool:
        """Whether the running state itself becomes a checkpoint when the request leaves."""
        computed = request.num_computed_tokens
        prefill = Prefill(len(request.prompt), request.num_known_tokens)
        copyable = self.slots.size > 1  # a hit reads one slot and writes another
        wanted = copyable and self.policy.hands_over(computed, prefill)
        return wanted and not self._complete(self._keys(request).at(computed))

    def _give_up(self, request: Request, checkpoint: Checkpoint, findable: bool) -> None:
        """Release a held checkpoint, findable from now on or not."""
        places = self._findable(request, checkpoint) if findable else []
        for pool, place in zip(self._state_pools, places, strict=False):
            pool.publish(place, self._keys(request).at(checkpoint.position))
        self._release(checkpoint)

    def _findable(self, request: Request, checkpoint: Checkpoint) -> list[int]:
        """The slot, and the companion, if the known tokens determine their keys. A companion holds draft rows, and is
        left out where they lag."""
        position = checkpoint.position
        if self.policy.publishable(position, request.num_known_tokens) != position:
            return []
        return _places(checkpoint)[: 1 + (position <= request.num_drafted_tokens)]

    def _reserve(self, position: int) -> Checkpoint:
        return Checkpoint(position, *(_taken(pool.allocate()) for pool in self._state_pools))

    def _release(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            for pool, place in zip(self._state_pools, _places(checkpoint), strict=True):
                pool.release(place)

    def _keys(self, request: Request) -> KeyChain:
        if request.keys is None:
            request.keys = KeyChain(self.block_size, self.policy.ahead, request.salt)
        request.keys.extend(request.prompt, request.output)
        return request.keys


def junctions_of(reuse: Reuse) -> tuple[int, ...]:
    """Where a lookup found pages and no state: somebody shared the prompt that far."""
    return (reuse.attention_to,) if reuse.attention_to > reuse.state_at else ()


def _places(checkpoint: Checkpoint) -> list[int]:
    """Slot, and companion if there is one: in the order of the pools of states."""
    return [place for place in checkpoint[1:] if place is not None]


def _taken(place: int | None) -> int:
    assert place is not None, "a place that was counted as available is gone"
    return place
