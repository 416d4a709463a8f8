"""Corners of the policy that sweeps pass by: equal ends, the smallest block, the values of the public presets."""

import pytest

from scheduler import checkpoint_policy
from scheduler.checkpoint_policy import Capability, Policy, Prefill
from tests.scheduler.policy_driver import PRESETS, build


def test_an_end_on_the_next_boundary_was_not_re_aligned() -> None:
    chunk = build("generic", draft=None).chunk(28_700, 4096, Prefill(29_184, 29_184), 4096)
    assert (chunk.end, chunk.reason) == (29_184, "end of prompt")


def test_all_publishes_the_end_too() -> None:
    chunk = build("ours", retain=["all"]).chunk(0, 256, Prefill(1000, 1000), 256)
    assert chunk.publishes == (64, 128, 192, 256)


def test_a_kernel_that_exports_anywhere_allows_blocks_of_one_token() -> None:
    policy = build("ours", capability=Capability(export_grid=1), block=1)
    assert policy.chunk(0, 3, Prefill(3, 3), 3).publishes == (2, 3)
    assert [policy.floor(position) for position in (-1, 0, 1)] == [0, 0, 1]


@pytest.mark.parametrize("preset", [*PRESETS, "none"])
@pytest.mark.parametrize("draft", ["EagleModel", None])
def test_a_policy_keeps_the_name_it_was_asked_for(preset: str, draft: str | None) -> None:
    """`seed` too, where it plans as `generic` does."""
    assert build(preset, draft=draft, filing="drop").name == preset


def test_public_presets_floor_chunk_ends_and_stop_for_the_known_tokens() -> None:
    policy = checkpoint_policy._public("x", 1, "key", "resend", "junction")
    assert policy == Policy(
        name="x",
        block_size=512,
        retain=frozenset({"resend", "junction"}),
        capability=Capability(exports=1, export_grid=16, free_chunk_ends=False),
        filing="key",
        drafting=True,
        export_at_finish_only=False,
        stop_from_known=True,
    )
