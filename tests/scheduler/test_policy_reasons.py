"""A chunk says why it ends where it does; a wish is masked by the kernel, and refused where it cannot be met."""

import pytest

from scheduler.checkpoint_policy import PRESETS, Capability, Prefill
from tests.scheduler.policy_driver import build, prefill


def test_a_wait_is_explained() -> None:
    chunk = build("generic").chunk(4096, 100, Prefill(32_320, 32_320), 4096)
    assert (chunk.end, chunk.reason) == (4096, "waits: 100 tokens are less than one step of 512")


def test_an_end_is_re_aligned_only_if_the_budget_reaches_further() -> None:
    reasons = [build("seed").chunk(28_700, n, Prefill(32_320, 32_320), 4096).reason for n in (484, 485)]
    assert reasons == ["budget", "aligned to 512"]
    assert (
        build("seed").chunk(28_700, 4096, Prefill(32_320, 32_320), 4096).reason == "re-aligned to the block"
    )


def test_a_stop_is_explained() -> None:
    chunk = build("generic").chunk(28_672, 4096, Prefill(32_320, 32_320), 4096)
    assert chunk.reason == "stopped at 31,744: retained, kernel exports 0"


def test_a_chunk_that_happens_to_end_on_a_retained_boundary_was_not_stopped() -> None:
    assert prefill(build("generic"), 512).reasons == ("end of prompt",)


def test_a_stop_off_the_export_grid_is_explained() -> None:
    chunk = build("ours").chunk(28_700, 4096, Prefill(32_320, 32_320), 4096)
    assert chunk.reason == "stopped at 32,256: retained, no multiple of 16 from the chunk's start"


@pytest.mark.parametrize(
    ("prompt", "obstacle"),
    [(4700, "exports no junction"), (9000, "exports only in the chunk that finishes")],
)
def test_a_stop_that_release_033_could_export_is_explained(prompt: int, obstacle: str) -> None:
    chunk = build("vllm-0.33").chunk(2048, 4096, Prefill(prompt, prompt, (3072,)), 4096)
    assert chunk.reason == f"stopped at 3,072: retained, {obstacle}"


def test_the_second_boundary_is_one_export_too_many() -> None:
    policy = build("ours", capability=Capability(exports=1))
    chunk = policy.chunk(28_672, 4096, Prefill(32_320, 32_320, (30_016,)), 4096)
    assert chunk.reason == "stopped at 32,256: retained, kernel exports 1"


def test_retention_none_stands_alone() -> None:
    assert build("generic", retain=["none"]).retain == frozenset()
    with pytest.raises(ValueError, match="retention is 'none', expected one of resend"):
        build("ours", retain=["resend", "none"])


def test_a_tail_that_joins_is_explained() -> None:
    assert prefill(build("seed"), 32_320).reasons[-2:] == ("budget", "tail joined")
    assert prefill(build("generic"), 32_320).reasons[-1] == "end of prompt"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "vllm"}, "policy is 'vllm', expected one of generic, seed, vllm-0.33, ours, none"),
        (
            {"preset": "ours", "retain": ["resend", "resent"]},
            "retention is 'resent', expected one of resend",
        ),
        ({"preset": "ours", "filing": "tokens"}, "draft filing is 'tokens', expected one of token, drop"),
        ({"preset": "ours", "draft": "EagleModel"}, "EagleModel does not declare that: use drop, key or tag"),
        ({"preset": "generic", "draft": "EagleModel", "filing": "token"}, "use drop, key or tag"),
        ({"preset": "ours", "block": 24}, "block size is 24, expected a multiple of 16"),
        ({"preset": "ours", "block": 0}, "block size is 0, expected a multiple of 16"),
    ],
)
def test_refusals_name_what_was_found_and_what_is_expected(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        build(**arguments)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_token_filing_needs_no_declaration_without_a_drafter() -> None:
    assert build("ours", draft=None).dropped == 0


def test_no_prefix_cache_needs_no_declaration() -> None:
    assert build("none", draft="EagleModel").retain == frozenset()


def test_a_preset_as_it_stands_assumes_a_drafter() -> None:
    assert PRESETS["generic"].dropped == 512


def test_overrides_mask_and_never_raise() -> None:
    assert build("generic").capability == Capability(exports=0, free_chunk_ends=False)
    assert build("seed", capability=Capability(exports=7)).capability.exports == 1
    assert build("ours", capability=Capability(export_grid=32)).capability.export_grid == 32
    assert build("ours", capability=Capability(exports=2, free_chunk_ends=False)).capability == Capability(
        exports=2, free_chunk_ends=False
    )
