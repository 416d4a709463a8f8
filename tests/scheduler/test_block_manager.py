"""Every page, slot and companion has one role; what is published is found, complete, and never taken by halves."""

import pytest

from scheduler.block_manager import BlockManager
from scheduler.checkpoint_policy import MANY, Capability, Reuse, make_policy
from scheduler.request import Request
from tests.scheduler.simulation import DRAFTER

B = 16
Points = tuple[int, ...]
PROMPT = list(range(1000, 1100))


def manager(
    pages: int = 16,
    slots: int = 8,
    filing: str = "token",
    drafter: str | None = DRAFTER,
    preset: str = "ours",
) -> BlockManager:
    policy = make_policy(preset, Capability(MANY), draft_architecture=drafter, block_size=B, filing=filing)
    return BlockManager(policy, pages, slots)


def ran(
    blocks: BlockManager,
    end: int,
    publishes: Points = (),
    rolling: int | None = None,
    *,
    length: int = 100,
    output: tuple[int, ...] = (),
    salt: bytes = b"",
) -> Request:
    """A request whose first forward, to `end`, is committed with these checkpoints."""
    request = Request(0, PROMPT[:length], 8, salt=salt, output=[*output])
    assert blocks.admit(request, blocks.lookup(request))
    return run(blocks, request, end, publishes, rolling)


def run(
    blocks: BlockManager, request: Request, end: int, publishes: Points = (), rolling: int | None = None
) -> Request:
    assert blocks.grow(request, end) is not None
    for position in sorted({*publishes, *([rolling] if rolling else [])}):
        assert blocks.reserve_checkpoint(request, position)
    request.num_computed_tokens = request.num_drafted_tokens = end
    blocks.commit(request, publishes, rolling)
    return request


def lookup(blocks: BlockManager, length: int = 100, **fields: object) -> Reuse:
    return blocks.lookup(Request(9, PROMPT[:length], 8, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_begun_block_counts_whole(num_tokens: int, num_blocks: int) -> None:
    assert manager().blocks_for(num_tokens) == num_blocks


def test_a_hit_ends_at_the_deepest_checkpoint_within_the_attention_match() -> None:
    blocks = manager()
    ran(blocks, 70, (16, 48))
    assert lookup(blocks) == Reuse(48, 64)
    assert lookup(blocks, 64) == Reuse(48, 48)
    assert (lookup(blocks, 48), lookup(blocks, 16)) == (Reuse(16, 32), Reuse(0, 0))
    assert blocks.checkpoints(Request(9, PROMPT, 8)) == [16, 48]


def test_nothing_is_found_before_its_commit() -> None:
    blocks, request = manager(), Request(0, PROMPT, 8)
    assert blocks.admit(request, Reuse(0, 0)) and blocks.grow(request, 70) is not None
    assert blocks.reserve_checkpoint(request, 64)
    assert lookup(blocks) == Reuse(0, 0)
    blocks.leave(request)
    assert lookup(blocks) == Reuse(0, 0)
    assert blocks.slots.num_available == 8
    blocks.check([])


def test_a_page_that_is_not_full_is_not_published() -> None:
    blocks = manager()
    request = ran(blocks, 31, (16,))
    assert lookup(blocks) == Reuse(16, 16)
    run(blocks, request, 32)
    assert lookup(blocks) == Reuse(16, 32)


def test_without_a_drafter_there_is_one_group_and_no_companion() -> None:
    blocks = manager(drafter=None)
    request = ran(blocks, 70, (64,))
    assert len(blocks.groups) == len(request.tables) == 1
    assert (blocks.companions, request.companion_slot) == (None, None)
    assert lookup(blocks) == Reuse(64, 64)


def test_other_salts_find_nothing() -> None:
    blocks = manager()
    ran(blocks, 70, (64,), salt=b"tenant")
    assert lookup(blocks, salt=b"other tenant") == lookup(blocks) == Reuse(0, 0)
    assert lookup(blocks, salt=b"tenant") == Reuse(64, 64)


def test_without_retention_nothing_is_kept() -> None:
    blocks = manager(preset="none")
    blocks.leave(ran(blocks, 70))
    assert lookup(blocks) == Reuse(0, 0)
    assert not any(pool.num_available < pool.size for pool in (*blocks.groups, blocks.slots))


class TestAdmission:
    """All of a request's places, or none of them."""

    def test_a_hit_shares_pages_and_continues_from_the_checkpoint(self) -> None:
        blocks = manager()
        first = ran(blocks, 70, (48,))
        second = Request(1, PROMPT, 8)
        assert blocks.admit(second, blocks.lookup(second))
        assert second.tables == [table[:4] for table in first.tables]
        assert (second.num_computed_tokens, second.write_from, second.num_published_blocks) == (
            48,
            64,
            [4, 4],
        )
        assert second.junctions == (64,)
        assert second.restored is not None and second.restored.position == 48
        assert second.restored.slot == blocks.slots.find(second.keys.at(48))  # type: ignore[union-attr]
        assert second.recurrent_slot not in (second.restored.slot, first.recurrent_slot)
        blocks.check([first, second])

    def test_a_hit_that_needs_two_slots_is_not_admitted_to_one(self) -> None:
        blocks = manager(slots=2)
        first = ran(blocks, 70, (64,))
        second = Request(1, PROMPT, 8)
        reuse = blocks.lookup(second)
        assert reuse == Reuse(64, 64)
        assert not blocks.admit(second, reuse)
        assert (second.tables, second.recurrent_slot, second.restored) == ([], None, None)
        assert blocks.lookup(second) == reuse
        blocks.check([first])

    def test_the_checkpoint_is_kept_until_its_copy_is_made(self) -> None:
        blocks = manager(slots=3)
        blocks.leave(ran(blocks, 70, (64,)))
        second = Request(1, PROMPT, 8)
        assert blocks.admit(second, blocks.lookup(second))
        assert blocks.reserve_checkpoint(second, 96)
        assert not blocks.reserve_checkpoint(second, 80)  # the third slot is being read
        run(blocks, second, 97)
        assert second.restored is None
        assert blocks.slots.num_available == 2

    def test_pages_for_every_group_or_for_none(self) -> None:
        blocks = manager(pages=4)
        request, other = Request(0, PROMPT, 8), Request(1, PROMPT, 8, salt=b"x")
        assert blocks.admit(request, Reuse(0, 0)) and blocks.admit(other, Reuse(0, 0))
        assert blocks.grow(request, 33) == [request.tables[0], request.tables[1]]
        assert [len(table) for table in request.tables] == [3, 3]
        blocks.groups[1].allocate()  # somebody else's draft page
        assert blocks.grow(other, 16) is None and other.tables == [[], []]
        assert blocks.groups[0].num_available == 1 and blocks.grow(request, 48) == [[], []]

    def test_a_state_without_its_companion_is_not_reserved(self) -> None:
        blocks = manager(slots=2)
        request = Request(0, PROMPT, 8)
        assert blocks.admit(request, Reuse(0, 0)) and blocks.companions is not None
        blocks.companions.allocate()
        assert not blocks.reserve_checkpoint(request, 16)
        assert request.reserved == [] and blocks.slots.num_available == 1


class TestPublication:
    """Explicit, once, and never changed."""

    def test_an_export_that_nobody_wants_is_freed(self) -> None:
        blocks = manager()
        request = Request(0, PROMPT, 8)
        assert blocks.admit(request, Reuse(0, 0)) and blocks.grow(request, 70) is not None
        assert blocks.reserve_checkpoint(request, 32) and blocks.reserve_checkpoint(request, 64)
        request.num_computed_tokens = request.num_drafted_tokens = 70
        blocks.commit(request, (64,), None)
        assert request.reserved == [] and blocks.slots.num_available == 7
        assert lookup(blocks, 64) == Reuse(0, 48)

    def test_the_first_of_two_equals_is_kept_and_no_table_rewritten(self) -> None:
        blocks = manager()
        requests = [Request(i, PROMPT, 8) for i in range(2)]
        for request in requests:
            assert blocks.admit(request, Reuse(0, 0))
        run_all = [blocks.grow(request, 70) for request in requests]
        for request in requests:
            assert blocks.reserve_checkpoint(request, 64)
            request.num_computed_tokens = request.num_drafted_tokens = 70
            blocks.commit(request, (64,), None)
        assert [request.tables for request in requests] == run_all
        assert [pool.num_duplicate_publications for pool in blocks.groups] == [4, 4]
        assert blocks.slots.num_duplicate_publications == 1
        third = Request(2, PROMPT, 8)
        assert blocks.admit(third, blocks.lookup(third)) and third.junctions == ()  # a complete hit
        assert third.tables == [table[:4] for table in requests[0].tables]
        blocks.check([*requests, third])

    def test_a_rolling_checkpoint_is_private_replaced_and_published_on_leaving(self) -> None:
        blocks = manager()
        request = ran(blocks, 20, rolling=16)
        first = request.rolling
        run(blocks, request, 40, rolling=32)
        assert first is not None and request.rolling is not None and request.rolling.position == 32
        assert blocks.slots.num_available == 6 and lookup(blocks) == Reuse(0, 32)
        run(blocks, request, 44)
        assert request.rolling.position == 32
        blocks.leave(request)
        assert lookup(blocks) == Reuse(32, 32)
        assert blocks.slots.num_available == 8

    @pytest.mark.parametrize(("length", "kept"), [(50, None), (49, None), (48, None), (47, 48), (10, 48)])
    def test_the_end_of_prefill_drops_a_rolling_checkpoint_inside_the_prompt(
        self, length: int, kept: int | None
    ) -> None:
        blocks = manager()
        request = ran(blocks, 50, rolling=48, length=length, output=tuple(PROMPT[length:60]))
        blocks.end_prefill(request)
        assert (request.rolling.position if request.rolling else None) == kept
        blocks.check([request])

    def test_tags_let_a_page_match_only_before_the_token_it_was_made_with(self) -> None:
        blocks = manager(filing="tag")
        ran(blocks, 70, (16, 32, 48, 64))
        assert lookup(blocks) == Reuse(64, 64)
        other = Request(1, [*PROMPT[:48], 1, *PROMPT[49:]], 8)
        assert blocks.lookup(other) == Reuse(32, 32)

    def test_a_page_waits_for_the_token_that_its_key_or_tag_needs(self) -> None:
        for filing, expected in (("token", 4), ("drop", 4), ("off", 4), ("key", 3), ("tag", 3)):
            assert ran(manager(filing=filing), 64, length=64).num_published_blocks == [expected] * 2


class TestLeaving:
    """At any moment and twice; what was verified stays findable, the rest is free."""

    def test_twice_is_once(self) -> None:
        blocks = manager()
        request, other = ran(blocks, 40, (32,)), ran(blocks, 40, salt=b"x")
        for _ in range(2):
            blocks.leave(request)
            blocks.check([other])
        assert lookup(blocks) == Reuse(32, 32)
        assert (request.num_computed_tokens, request.num_published_blocks, request.write_from) == (0, [], 0)
        assert (request.tables, request.recurrent_slot, request.companion_slot) == ([], None, None)

    def test_long_prefixes_lose_their_tail_first(self) -> None:
        blocks = manager(pages=6)
        blocks.leave(ran(blocks, 96, (32, 96)))
        stranger = Request(1, [5] * 32, 1)
        assert blocks.admit(stranger, Reuse(0, 0)) and blocks.grow(stranger, 32) is not None
        assert lookup(blocks) == Reuse(32, 64)

    def test_states_go_without_their_pages_and_the_oldest_first(self) -> None:
        blocks = manager(slots=3)
        blocks.leave(ran(blocks, 70, (32, 64)))
        stranger = Request(1, [5] * 32, 1)
        assert blocks.admit(stranger, Reuse(0, 0))
        assert lookup(blocks) == Reuse(64, 64) and blocks.reserve_checkpoint(stranger, 16)
        assert lookup(blocks, 64) == Reuse(0, 48) and lookup(blocks) == Reuse(64, 64)
        assert blocks.reserve_checkpoint(stranger, 32)
        assert lookup(blocks) == Reuse(0, 64)

    def test_a_reset_forgets_pages_states_and_rolling_checkpoints(self) -> None:
        blocks = manager()
        gone, request = ran(blocks, 70, (64,)), ran(blocks, 40, rolling=32, salt=b"x")
        blocks.leave(gone)
        blocks.reset_cache([request])
        assert lookup(blocks) == lookup(blocks, salt=b"x") == Reuse(0, 0)
        assert request.rolling is None and [len(table) for table in request.tables] == [3, 3]
        blocks.check([request])
        blocks.leave(request)  # its pages are right, and published again
        assert lookup(blocks, salt=b"x") == Reuse(0, 32)


class TestCheck:
    """The debug check sees what no operation should do."""

    def test_a_page_with_an_owner_too_many(self) -> None:
        blocks = manager()
        owner, thief = ran(blocks, 32), ran(blocks, 32, salt=b"x")
        thief.tables[1][0] = owner.tables[1][0]
        with pytest.raises(AssertionError, match="references"):
            blocks.check([owner, thief])

    @pytest.mark.parametrize("part", ["rolling", "recurrent_slot", "companion_slot"])
    def test_a_lost_slot(self, part: str) -> None:
        blocks = manager()
        request = ran(blocks, 40, rolling=32)
        setattr(request, part, None)
        with pytest.raises(AssertionError):
            blocks.check([request])

    def test_a_running_slot_with_a_key(self) -> None:
        blocks = manager()
        request = ran(blocks, 40)
        blocks.slots.publish(request.recurrent_slot or 0, b"k" * 16)
        with pytest.raises(AssertionError):
            blocks.check([request])
