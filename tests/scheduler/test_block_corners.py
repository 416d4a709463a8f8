"""Corners of the block manager: blocks of one token, and who hands over a running slot when it leaves."""

import pytest

from scheduler.block_manager import BlockManager
from scheduler.checkpoint_policy import Capability, Reuse, make_policy
from scheduler.request import Request

PROMPT = [*range(1000, 1100)]


def manager(block: int = 16, retain: tuple[str, ...] | None = None) -> BlockManager:
    capability = Capability(export_grid=min(block, 16))
    policy = make_policy("ours", capability, draft_architecture=None, block_size=block, retain=retain)
    return BlockManager(policy, 16, 8)


def ran(blocks: BlockManager, prompt: list[int], end: int, publishes: tuple[int, ...] = ()) -> Request:
    """A request whose first forward, to `end`, is committed."""
    request = Request(0, prompt, 8)
    assert blocks.admit(request, Reuse(0, 0)) and blocks.grow(request, end) is not None
    assert all(blocks.reserve_checkpoint(request, position) for position in publishes)
    request.num_computed_tokens = end
    blocks.commit(request, publishes, None)
    return request


def test_the_first_boundary_is_found_in_blocks_of_one_token() -> None:
    blocks, later = manager(block=1), Request(9, PROMPT, 8)
    first = ran(blocks, PROMPT[:3], 3, (1,))
    assert blocks.lookup(later) == Reuse(1, 3)
    assert blocks.admit(later, Reuse(1, 3)) and later.tables == first.tables


def test_without_retention_nothing_gets_a_key() -> None:
    blocks = manager(retain=())
    blocks.leave(ran(blocks, PROMPT, 70))
    assert blocks.groups[0].num_keyed == blocks.slots.num_keyed == 0


@pytest.mark.parametrize(
    ("retain", "length", "found"),
    [
        (("progress",), 40, [32]),
        (("decode",), 40, []),
        (("progress",), 32, []),
        (("decode",), 32, [32]),
        (("resend",), 40, []),
    ],
)
def test_leaving_on_a_boundary_hands_over_what_retention_promises(
    retain: tuple[str, ...], length: int, found: list[int]
) -> None:
    """32 tokens are run, and with a prompt of 32 they are all of it."""
    blocks = manager(retain=retain)
    blocks.leave(ran(blocks, PROMPT[:length], 32))
    assert blocks.checkpoints(Request(9, PROMPT, 8)) == found


def test_a_boundary_that_is_published_already_is_not_published_twice() -> None:
    blocks = manager()
    request = ran(blocks, PROMPT[:32], 32, (32,))
    slot = blocks.slots.find(blocks._keys(request).at(32))
    blocks.leave(request)
    assert blocks.slots.find(blocks._keys(request).at(32)) == slot
    assert blocks.slots.num_duplicate_publications == 0
