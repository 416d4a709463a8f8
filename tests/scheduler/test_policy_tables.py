"""The worked examples of the policy are literal: chunks, exports, published boundaries and hits, preset by preset."""

import pytest

from scheduler.checkpoint_policy import Capability
from tests.scheduler.policy_driver import PRESETS, Trace, build, decode, prefill

Cell = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]

SEVEN = (4096,) * 7
SEVEN_ENDS = (4096, 8192, 12288, 16384, 20480, 24576, 28672)

# prompt: preset: chunks, exported, published when prefill ends, resend hit, extend hit
MAIN: dict[int, dict[str, Cell]] = {
    32320: {
        "generic": ((*SEVEN, 3072, 576), (), (*SEVEN_ENDS, 31744), 31744, 31744),
        "seed": ((*SEVEN, 3648), (32256,), (*SEVEN_ENDS, 32256), 28672, 28672),
        "vllm-0.33": ((*SEVEN, 3648), (32256,), (32256,), 32256, 32256),
        "ours": ((*SEVEN, 3648), (32256,), (32256, 32320), 32256, 32320),
    },
    32770: {
        "generic": ((*SEVEN, 3584, 514), (), (*SEVEN_ENDS, 32256), 32256, 32256),
        "seed": ((*SEVEN, 4096, 2), (), (*SEVEN_ENDS, 32768), 28672, 28672),
        "vllm-0.33": ((*SEVEN, 4096, 2), (), (32768,), 32768, 32768),
        "ours": ((*SEVEN, 4096, 2), (), (32768,), 32768, 32768),
    },
    3000: {
        "generic": ((2048, 952), (), (2048,), 2048, 2048),
        "seed": ((3000,), (2560,), (2560,), 0, 0),
        "vllm-0.33": ((3000,), (2560,), (2560,), 2560, 2560),
        "ours": ((3000,), (2944,), (2944,), 2944, 2944),
    },
    300: {
        "generic": ((300,), (), (), 0, 0),
        "seed": ((300,), (), (), 0, 0),
        "vllm-0.33": ((300,), (), (), 0, 0),
        "ours": ((300,), (256,), (256,), 256, 256),
    },
    512: {
        "generic": ((512,), (), (512,), 0, 0),
        "seed": ((512,), (), (512,), 0, 0),
        "vllm-0.33": ((512,), (), (), 0, 0),
        "ours": ((512,), (448,), (448, 512), 448, 512),
    },
    513: {
        "generic": ((513,), (), (), 0, 0),
        "seed": ((513,), (512,), (512,), 0, 0),
        "vllm-0.33": ((513,), (512,), (512,), 512, 512),
        "ours": ((513,), (512,), (512,), 512, 512),
    },
    700: {
        "generic": ((700,), (), (), 0, 0),
        "seed": ((700,), (512,), (512,), 0, 0),
        "vllm-0.33": ((700,), (512,), (512,), 512, 512),
        "ours": ((700,), (640,), (640,), 640, 640),
    },
    1024: {
        "generic": ((512, 512), (), (512, 1024), 0, 512),
        "seed": ((1024,), (), (1024,), 0, 0),
        "vllm-0.33": ((1024,), (512,), (512,), 512, 512),
        "ours": ((1024,), (960,), (960, 1024), 960, 1024),
    },
    1025: {
        "generic": ((512, 513), (), (512,), 512, 512),
        "seed": ((1025,), (1024,), (1024,), 0, 0),
        "vllm-0.33": ((1025,), (1024,), (1024,), 1024, 1024),
        "ours": ((1025,), (1024,), (1024,), 1024, 1024),
    },
    4096: {
        "generic": ((3584, 512), (), (3584, 4096), 0, 3584),
        "seed": ((4096,), (), (4096,), 0, 0),
        "vllm-0.33": ((4096,), (3584,), (3584,), 3584, 3584),
        "ours": ((4096,), (4032,), (4032, 4096), 4032, 4096),
    },
    4097: {
        "generic": ((3584, 513), (), (3584,), 3584, 3584),
        "seed": ((4096, 1), (), (4096,), 0, 0),
        "vllm-0.33": ((4096, 1), (), (4096,), 4096, 4096),
        "ours": ((4096, 1), (), (4096,), 4096, 4096),
    },
    32768: {
        "generic": ((*SEVEN, 3584, 512), (), (*SEVEN_ENDS, 32256, 32768), 28672, 32256),
        "seed": ((*SEVEN, 4096), (), (*SEVEN_ENDS, 32768), 28672, 28672),
        "vllm-0.33": ((*SEVEN, 4096), (32256,), (32256,), 32256, 32256),
        "ours": ((*SEVEN, 4096), (32704,), (32704, 32768), 32704, 32768),
    },
    32769: {
        "generic": ((*SEVEN, 3584, 513), (), (*SEVEN_ENDS, 32256), 32256, 32256),
        "seed": ((*SEVEN, 4096, 1), (), (*SEVEN_ENDS, 32768), 28672, 28672),
        "vllm-0.33": ((*SEVEN, 4096, 1), (), (32768,), 32768, 32768),
        "ours": ((*SEVEN, 4096, 1), (), (32768,), 32768, 32768),
    },
}


def cells(trace: Trace) -> Cell:
    return (
        trace.chunks,
        tuple(m for m in trace.exports if m in trace.published),
        trace.published,
        trace.resend,
        trace.extend,
    )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("prompt", MAIN)
def test_a_cold_prompt(prompt: int, preset: str) -> None:
    trace = prefill(build(preset), prompt)
    assert cells(trace) == MAIN[prompt][preset]
    assert trace.rolling is None, "progress is gone when prefill completes"


@pytest.mark.parametrize(
    ("prompt", "preset", "forwards", "recomputed"),
    [
        (32320, "generic", 9, 576),
        (32320, "seed", 8, 3648),
        (32320, "vllm-0.33", 8, 64),
        (32320, "ours", 8, 64),
        (32770, "generic", 9, 514),
        (32770, "seed", 9, 4098),
        (32770, "vllm-0.33", 9, 2),
        (32770, "ours", 9, 2),
        (3000, "generic", 2, 952),
        (3000, "seed", 1, 3000),
        (3000, "vllm-0.33", 1, 440),
        (3000, "ours", 1, 56),
    ],
)
def test_forwards_and_tokens_that_a_resend_recomputes(
    prompt: int, preset: str, forwards: int, recomputed: int
) -> None:
    trace = prefill(build(preset), prompt)
    assert (trace.forwards, prompt - trace.resend) == (forwards, recomputed)


def test_progress_follows_the_chunk_ends() -> None:
    rolling = [prefill(build("ours"), 32320, forwards=n).rolling for n in range(1, 8)]
    assert rolling == list(SEVEN_ENDS)


@pytest.mark.parametrize(
    ("preset", "draft", "block", "expected"),
    [
        ("generic", False, 1152, ((1152, 7), (), (1152,), 1152, 1152)),
        ("seed", False, 1152, ((1159,), (1152,), (1152,), 1152, 1152)),
        ("generic", True, 1152, ((1159,), (), (), 0, 0)),
        ("seed", True, 1152, ((1159,), (1152,), (1152,), 0, 0)),
        ("vllm-0.33", True, 1152, ((1159,), (1152,), (1152,), 1152, 1152)),
        ("ours", True, 64, ((1159,), (1152,), (1152,), 1152, 1152)),
    ],
)
def test_seven_tokens_past_a_block(preset: str, draft: bool, block: int, expected: Cell) -> None:
    policy = build(preset, block=block) if draft else build(preset, block=block, draft=None)
    assert cells(prefill(policy, 1159)) == expected


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("generic", ((*SEVEN, 3584, 64), (), (*SEVEN_ENDS, 32256), 32256, 32256)),
        ("seed", ((*SEVEN, 3648), (32256,), (*SEVEN_ENDS, 32256), 32256, 32256)),
        ("vllm-0.33", ((*SEVEN, 3648), (32256,), (32256,), 32256, 32256)),
        ("ours", ((*SEVEN, 3648), (32256,), (32256, 32320), 32256, 32320)),
    ],
)
def test_without_speculation_nothing_is_dropped(preset: str, expected: Cell) -> None:
    assert cells(prefill(build(preset, draft=None), 32320)) == expected


# case: preset: chunks, exported, newly published
STARTS: dict[
    str, tuple[dict[str, int], dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]]
] = {
    "hit 31,744": (
        {"prompt": 32320, "start": 31744},
        {
            "generic": ((576,), (), ()),
            "seed": ((576,), (32256,), (32256,)),
            "vllm-0.33": ((576,), (32256,), (32256,)),
            "ours": ((576,), (32256,), (32256, 32320)),
        },
    ),
    "hit 28,672": (
        {"prompt": 32320, "start": 28672},
        {
            "generic": ((3072, 576), (), (31744,)),
            "seed": ((3648,), (32256,), (32256,)),
            "vllm-0.33": ((3648,), (32256,), (32256,)),
            "ours": ((3648,), (32256,), (32256, 32320)),
        },
    ),
    "hit 32,256": (
        {"prompt": 33000, "start": 32256},
        {
            "generic": ((744,), (), ()),
            "seed": ((744,), (32768,), (32768,)),
            "vllm-0.33": ((744,), (32768,), (32768,)),
            "ours": ((744,), (32960,), (32960,)),
        },
    ),
    "external cache 28,700": (
        {"prompt": 32320, "start": 28700},
        {
            "generic": ((484, 2560, 576), (), (29184, 31744)),
            "seed": ((484, 3136), (32256,), (29184, 32256)),
            "vllm-0.33": ((484, 3136), (32256,), (32256,)),
            "ours": ((3556, 64), (), (32256, 32320)),
        },
    ),
    "resumed with 80 generated": (
        {"prompt": 32320, "known": 32400, "start": 28672},
        {
            "generic": ((3072, 656), (), (31744,)),
            "seed": ((3728,), (32256,), (32256,)),
            "vllm-0.33": ((3728,), (32256,), (32256,)),
            "ours": ((3728,), (32256, 32320, 32384), (32256, 32320)),
        },
    ),
    "resumed with 8,000 generated": (
        {"prompt": 1000, "known": 9000},
        {
            "generic": ((4096, 4096, 808), (), (4096, 8192)),
            "seed": ((4096, 4096, 808), (8704,), (4096, 8192, 8704)),
            "vllm-0.33": ((4096, 4096, 808), (8704,), ()),
            "ours": ((4096, 4096, 808), (960, 8960), (960,)),
        },
    ),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", STARTS)
def test_starts_other_than_zero_and_resumed_requests(case: str, preset: str) -> None:
    arguments, expected = STARTS[case]
    trace = prefill(build(preset), **arguments)
    assert (trace.chunks, trace.exports, trace.published) == expected[preset]


@pytest.mark.parametrize(
    ("prompt", "known", "start", "rolling"), [(32320, 32400, 28672, 32384), (1000, 9000, 0, 8960)]
)
def test_a_replay_ends_with_a_decode_checkpoint(prompt: int, known: int, start: int, rolling: int) -> None:
    assert prefill(build("ours"), prompt, known=known, start=start).rolling == rolling


@pytest.mark.parametrize(
    ("preset", "chunks", "exports", "published"),
    [
        ("generic", (*SEVEN, 3072, 576), (), (*SEVEN_ENDS, 31744)),
        ("seed", (*SEVEN, 3648), (32256,), (*SEVEN_ENDS, 32256)),
        ("vllm-0.33", (4096, 4096, 4096, 1536, 4096, 4096, 4096, 4096, 2112), (32256,), (13824, 32256)),
        ("ours", (*SEVEN, 3648), (13824, 32256), (13824, 32256, 32320)),
    ],
)
def test_a_junction_at_13824(
    preset: str, chunks: tuple[int, ...], exports: tuple[int, ...], published: tuple[int, ...]
) -> None:
    trace = prefill(build(preset), 32320, junctions=(13824,))
    assert (trace.chunks, trace.exports, trace.published) == (chunks, exports, published)


WIDE = (1024, 1024, 256, 1024, 1024, 256, 392)
FLOORED = (3584,) * 8


@pytest.mark.parametrize(
    ("prompt", "budget", "preset", "chunks"),
    [
        (32320, 4000, "generic", (*FLOORED, 3072, 576)),
        (32320, 4000, "seed", (*FLOORED, 3648)),
        (32320, 4000, "vllm-0.33", (*FLOORED, 3648)),
        (32320, 4000, "ours", (*(4000,) * 8, 320)),
        (32770, 4000, "generic", (*(3584,) * 9, 514)),
        (32770, 4000, "seed", (*(3584,) * 9, 514)),
        (32770, 4000, "vllm-0.33", (*(3584,) * 9, 514)),
        (32770, 4000, "ours", (*(4000,) * 8, 770)),
        # One neighbour with three drafts takes 4 tokens of 4,096.
        (32320, 4092, "generic", (*FLOORED, 3072, 576)),
        (32320, 4092, "seed", (*FLOORED, 3648)),
        (32320, 4092, "vllm-0.33", (*FLOORED, 3648)),
        (32320, 4092, "ours", (*(4080,) * 7, 3760)),
    ],
)
def test_a_budget_off_the_block_grid(prompt: int, budget: int, preset: str, chunks: tuple[int, ...]) -> None:
    assert prefill(build(preset), prompt, budget=budget).chunks == chunks


@pytest.mark.parametrize("preset", ["seed", "vllm-0.33"])
def test_the_last_floored_chunk_exports_32768(preset: str) -> None:
    assert prefill(build(preset), 32770, budget=4000).exports == (32768,)


def test_progress_is_exported_in_every_second_chunk_of_4000() -> None:
    trace = prefill(build("ours"), 32320, budget=4000, forwards=8)
    assert trace.exports == (3968, 11968, 19968, 27968)


@pytest.mark.parametrize(
    ("preset", "chunks", "exports", "published"),
    [
        ("generic", WIDE, (), (2304, 4608)),
        ("seed", WIDE, (), (2304, 4608)),
        ("vllm-0.33", WIDE, (), (4608,)),
        ("ours", (1024, 1024, 1024, 1024, 904), (4608,), (4608,)),
    ],
)
def test_a_block_wider_than_the_budget_does_not_hang(
    preset: str, chunks: tuple[int, ...], exports: tuple[int, ...], published: tuple[int, ...]
) -> None:
    trace = prefill(build(preset, block=2304), 5000, budget=1024)
    assert (trace.chunks, tuple(m for m in trace.exports if m in published), trace.published) == (
        chunks,
        exports,
        published,
    )


@pytest.mark.parametrize(
    ("preset", "resumes_at", "forwards_left"),
    [("generic", 118784, 21), ("seed", 118784, 20), ("vllm-0.33", 0, 49), ("ours", 122880, 19)],
)
def test_a_long_prefill_that_leaves_after_30_forwards(
    preset: str, resumes_at: int, forwards_left: int
) -> None:
    trace = prefill(build(preset), 200_000, forwards=30)
    assert trace.computed == 122_880
    reuse = trace.hit(200_000, more=() if trace.rolling is None else (trace.rolling,))
    assert reuse.state_at == resumes_at
    junctions = (reuse.attention_to,) if reuse.attention_to > reuse.state_at else ()
    rest = prefill(trace.policy, 200_000, start=reuse.state_at, junctions=junctions)
    assert rest.forwards == forwards_left


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize(
    ("preset", "checkpoints", "next_turn"),
    [("generic", 136, 97280), ("seed", 136, 97280), ("vllm-0.33", 1, 32256), ("ours", 3, 97792)],
)
def test_after_65536_generated_tokens(preset: str, checkpoints: int, next_turn: int, step: int) -> None:
    trace = prefill(build(preset), 32_320)
    published, rolling, verified = decode(trace, 65_536, step)
    states = {*trace.published, *published} | ({rolling} if rolling is not None else set())
    assert len(states) == checkpoints
    matched = trace.policy.publishable(verified, verified + 1)
    assert trace.policy.reuse(verified + 1 + 512, matched, sorted(states, reverse=True)).state_at == next_turn


@pytest.mark.parametrize(
    ("prompt", "chunks", "published", "resend"),
    [
        (32320, (*SEVEN, 3648), (31744,), 31744),
        (3000, (3000,), (2048,), 2048),
        (700, (700,), (), 0),
    ],
)
def test_release_033_with_a_connector_drops_again(
    prompt: int, chunks: tuple[int, ...], published: tuple[int, ...], resend: int
) -> None:
    trace = prefill(build("vllm-0.33", filing="drop"), prompt)
    assert (trace.chunks, trace.published, trace.resend) == (chunks, published, resend)


def test_release_033_exports_only_in_the_chunk_that_finishes() -> None:
    trace = prefill(build("vllm-0.33", filing="drop"), 4700, budget=4608)
    assert (trace.chunks, trace.exports, trace.published) == ((4096, 604), (), (4096,))


def test_release_033_never_exports_a_junction() -> None:
    trace = prefill(build("vllm-0.33"), 3000, junctions=(1024,))
    assert (trace.chunks, trace.exports, trace.published) == ((1024, 1976), (2560,), (1024, 2560))


def test_release_033_without_export_keeps_the_ninth_forward() -> None:
    trace = prefill(build("vllm-0.33", capability=Capability(exports=0)), 32320)
    assert (trace.chunks, trace.published) == ((*SEVEN, 3584, 64), (32256,))


@pytest.mark.parametrize(
    ("prompt", "block", "resend"), [(8901, 2304, 4608), (11910, 1600, 9600)], ids=["8901", "11910"]
)
def test_field_figures_of_generic(prompt: int, block: int, resend: int) -> None:
    assert prefill(build("generic", block=block), prompt).resend == resend
