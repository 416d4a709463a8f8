"""Each page and slot is free or owned by one request; an allocation is all or nothing."""

import pytest

from scheduler.block_manager import BlockManager
from scheduler.request import Request


def request(num_tokens: int) -> Request:
    """A request whose longest course is `num_tokens` tokens."""
    return Request(num_tokens, [1], max_tokens=num_tokens - 1)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_begun_block_counts_whole(num_tokens: int, num_blocks: int) -> None:
    assert BlockManager(8, 16, 1).blocks_for(num_tokens) == num_blocks


def test_what_does_not_fit_takes_neither_pages_nor_a_slot() -> None:
    blocks, first, second = BlockManager(4, 16, 2), request(48), request(17)
    assert blocks.allocate(first)
    assert not blocks.allocate(second)
    assert (second.block_table, second.recurrent_slot) == ([], None)
    assert (blocks.num_free_blocks, blocks.num_free_slots) == (1, 1)
    blocks.check([first])


def test_without_a_free_slot_no_page_is_taken() -> None:
    blocks = BlockManager(4, 16, 1)
    assert blocks.allocate(request(16)) and not blocks.allocate(request(16))
    assert (blocks.num_free_blocks, blocks.num_free_slots) == (3, 0)


def test_released_twice_counts_once() -> None:
    blocks, owner, other = BlockManager(4, 16, 2), request(32), request(16)
    assert blocks.allocate(owner) and blocks.allocate(other)
    blocks.release(owner)
    blocks.release(owner)
    assert (blocks.num_free_blocks, blocks.num_free_slots) == (3, 1)
    blocks.check([other])


def test_check_sees_a_page_with_two_owners_and_a_lost_slot() -> None:
    blocks, owner, thief = BlockManager(4, 16, 2), request(32), request(32)
    assert blocks.allocate(owner)
    thief.block_table = owner.block_table[:1]
    with pytest.raises(AssertionError, match="page"):
        blocks.check([owner, thief])
    owner.recurrent_slot, thief.block_table = None, []
    with pytest.raises(AssertionError, match="slot"):
        blocks.check([owner])
