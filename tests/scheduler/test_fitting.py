"""A chunk leaves as many states as there are slots, the shallowest first, and its reason counts the rest."""

import pytest

from scheduler.checkpoint_policy import Chunk, Prefill
from scheduler.fitting import fitted_chunk
from tests.scheduler.policy_driver import build


@pytest.mark.parametrize(
    ("num_states", "exports", "struck"),
    [
        (3, (64, 128), ""),
        (2, (64, 128), "; no slot for 192: 6 of 8 in use"),
        (1, (64,), "; no slot for 128, 192: 7 of 8 in use"),
        (0, (), "; no slot for 64, 128, 192: 8 of 8 in use"),
    ],
)
def test_the_deepest_boundaries_are_struck(num_states: int, exports: tuple[int, ...], struck: str) -> None:
    policy = build("ours", retain=["all"])
    chunk = fitted_chunk(policy, Prefill(192, 192), 0, 192, 192, num_states, 8)
    reason = "tail joined" if exports else "end of prompt"
    assert (chunk.end, chunk.exports, chunk.reason) == (192, exports, reason + struck)


@pytest.mark.parametrize(
    ("preset", "start", "expected"),
    [
        ("ours", 126, Chunk(127, reason="decode")),
        ("ours", 127, Chunk(128, rolling=128, reason="decode")),
        ("ours", 128, Chunk(129, reason="decode")),
        ("generic", 127, Chunk(128, publishes=(128,), reason="decode")),
        ("vllm-0.33", 127, Chunk(128, reason="decode")),
    ],
)
def test_a_decode_step_leaves_the_boundary_that_it_reaches(preset: str, start: int, expected: Chunk) -> None:
    policy, prefill = build(preset, block=64), Prefill(100, start + 1)
    assert fitted_chunk(policy, prefill, start, 1, 1, 5, 8) == expected
    struck = fitted_chunk(policy, prefill, start, 1, 1, 0, 8)
    assert (struck.end, struck.publishes, struck.rolling) == (start + 1, (), None)
    kept = expected.publishes or expected.rolling
    assert struck.reason == ("decode; no slot for 128: 8 of 8 in use" if kept else "decode")
