"""For every prompt the policy keeps its promises: forward counts, means, hits, no public bug of its area."""

from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.checkpoint_policy import Capability, Prefill, Reuse
from tests.scheduler.policy_driver import PRESETS, build, decode, prefill

BUDGET, BLOCK = 4096, 512


@pytest.mark.parametrize("drafting", [True, False])
def test_generic_needs_one_more_forward_exactly_when_the_tail_is_long(drafting: bool) -> None:
    policy = build("generic") if drafting else build("generic", draft=None)
    for prompt in range(1, 20_001):
        forwards, tail = -(-prompt // BUDGET), (prompt - 1) % BUDGET + 1
        one_more = tail >= 2 * BLOCK if drafting else tail >= BLOCK and prompt % BLOCK != 0
        assert prefill(policy, prompt).forwards == forwards + one_more, prompt


def test_three_of_four_prompts_need_the_extra_forward() -> None:
    policy, start = build("generic"), 6 * BUDGET
    extra = sum(prefill(policy, n, start=start).forwards == 3 for n in range(28_673, 32_769))
    assert extra == 3_073


# preset, block: forwards, tokens a resend recomputes, its forwards, tokens the next turn recomputes, checkpoints
MEANS: list[tuple[str, int, float, float, float, float, float]] = [
    ("none", 64, 8.00, 30720.5, 8.00, 31832.5, 0),
    ("generic", 512, 8.75, 772.0, 1.00, 1704.5, 7.75),
    ("seed", 512, 8.00, 2560.5, 1.12, 1280.5, 7.88),
    ("vllm-0.33", 512, 8.00, 256.5, 1.00, 1368.5, 1.00),
    ("ours", 512, 8.00, 256.5, 1.00, 768.5, 1.00),
    ("ours", 128, 8.00, 64.5, 1.00, 576.5, 1.01),
    ("ours", 64, 8.00, 32.5, 1.00, 544.5, 1.02),
    ("ours", 16, 8.00, 8.5, 1.00, 520.5, 1.06),
]
SHARED = 6  # whole budgets that every prompt of this range begins with, under every preset


@pytest.mark.parametrize(("preset", "block", "cold", "resend", "again", "turn", "held"), MEANS)
def test_means_over_one_budget_of_prompt_lengths(
    preset: str, block: int, cold: float, resend: float, again: float, turn: float, held: float
) -> None:
    policy = build(preset, block=block)
    head = prefill(policy, 28_673, forwards=SHARED)
    assert head.chunks == (BUDGET,) * SHARED
    rows = []
    for prompt in range(28_673, 32_769):
        trace = prefill(policy, prompt, start=head.computed)
        states = (*head.published, *trace.published) if policy.retain else ()
        matched = policy.publishable(prompt, prompt) if policy.retain else 0
        hit = policy.reuse(prompt, matched, sorted(states, reverse=True)).state_at
        resent = prefill(policy, prompt, start=hit).forwards
        # A step of 64 tokens crosses at most one of the boundaries that a lookup could need, and saves time.
        generated, rolling, verified = decode(trace, 600, 64)
        after = (*states, *generated, *(() if rolling is None else (rolling,)))
        matched = policy.publishable(verified, verified + 1) if policy.retain else 0
        next_turn = prompt + 600 + 512
        recomputed = next_turn - policy.reuse(next_turn, matched, sorted(after, reverse=True)).state_at
        rows.append((SHARED + trace.forwards, prompt - hit, resent, recomputed, len(states)))
    got = [fmean(column) for column in zip(*rows, strict=True)]
    # The literal figures are rounded to the digits shown.
    assert got == [
        pytest.approx(cold, abs=0.005),
        pytest.approx(resend, abs=0.05),
        pytest.approx(again, abs=0.006),
        pytest.approx(turn, abs=0.05),
        pytest.approx(held, abs=0.006),
    ]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(["token", "drop", "key", "tag", "off"]), st.sampled_from([16, 64, 2304]))
def test_a_hit_is_never_above_the_attention_match_and_never_below_the_deepest_state(
    data: st.DataObject, filing: str, block: int
) -> None:
    """Raising the recurrent group above the candidate, or dropping for it a second time."""
    policy = build("ours", filing=filing, block=block)
    num_tokens = data.draw(st.integers(1, 20 * block))
    matched = data.draw(st.integers(0, 25)) * block
    states = data.draw(st.sets(st.integers(1, 25).map(lambda n: n * block)))
    reuse = policy.reuse(num_tokens, matched, sorted(states, reverse=True))
    cap = (num_tokens - 1) // block * block - (block if filing == "drop" else 0)
    assert reuse.attention_to == max(min(cap, matched - (block if filing == "drop" else 0)), 0)
    assert reuse.state_at % block == 0 and reuse.state_at in {0, *states}
    assert reuse.state_at <= reuse.attention_to < num_tokens
    assert not [m for m in states if reuse.state_at < m <= reuse.attention_to]


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 6000), st.sampled_from([16, 64, 512]), st.sampled_from([700, 1024, 4096]))
def test_token_filing_reaches_the_last_boundary_below_the_prompt_end(
    prompt: int, block: int, budget: int
) -> None:
    trace = prefill(build("ours", block=block), prompt, budget=budget)
    assert (trace.resend, trace.extend) == (trace.policy.floor(prompt - 1), trace.policy.floor(prompt))


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 6000), st.sampled_from([16, 512]), st.sampled_from(["drop", "key", "tag", "off"]))
def test_every_filing_keeps_what_its_own_lookups_reach(prompt: int, block: int, filing: str) -> None:
    trace = prefill(build("ours", block=block, filing=filing), prompt)
    dropped = block if filing == "drop" else 0
    reach = trace.policy.floor(prompt - (1 if filing in ("key", "tag") else 0))
    assert trace.resend == max(trace.policy.floor(prompt - 1) - dropped, 0)
    assert trace.extend == max(reach - dropped, 0)
    assert set(trace.published) == {trace.resend, trace.extend} - {0}


@pytest.mark.parametrize(
    ("filing", "expected"), [("drop", Reuse(48, 48)), ("token", Reuse(64, 64)), ("key", Reuse(64, 64))]
)
def test_the_recurrent_lookup_stays_within_the_attention_match(filing: str, expected: Reuse) -> None:
    assert build("ours", block=16, filing=filing).reuse(65, 64, [64, 48]) == expected


@pytest.mark.parametrize(
    ("prompt", "block", "filing", "reached"),
    [
        (8901, 2304, "drop", 4608),
        (11910, 1600, "drop", 9600),
        (8901, 2304, "token", 6912),
        (11910, 1600, "token", 11200),
    ],
)
def test_retention_keeps_the_boundary_that_the_lookup_reaches(
    prompt: int, block: int, filing: str, reached: int
) -> None:
    trace = prefill(build("ours", block=block, filing=filing, retain=["resend"]), prompt)
    assert (trace.published, trace.resend) == ((reached,), reached)


def test_a_second_stop_inside_a_block_after_a_hit_inside_it() -> None:
    """Known from the field: after an external hit at 28,700 the only stop below 29,184 is 29,184."""
    for room in (484, 500, 1000, 4096):
        chunk = build("generic").chunk(28_700, room, Prefill(32_320, 32_320), 4096)
        assert (chunk.end, chunk.publishes) == (29_184, (29_184,))
    assert build("generic").chunk(28_700, 483, Prefill(32_320, 32_320), 4096).end == 28_700


def test_a_match_without_a_state_at_its_end_is_reported() -> None:
    policy = build("ours", block=16)
    assert policy.reuse(1000, 48, [48, 32, 16]) == Reuse(48, 48)
    assert policy.reuse(1000, 48, [64, 32, 16]) == Reuse(32, 48)
    assert policy.reuse(1000, 48, []) == Reuse(0, 48)


@pytest.mark.parametrize("block", [64, 512, 1152, 2304])
def test_the_drop_costs_one_block_per_resend(block: int) -> None:
    for prompt in (2 * block + 1, 10_000, 20_000, 32_320):
        token, drop = (prefill(build("ours", block=block, filing=f), prompt) for f in ("token", "drop"))
        assert token.resend - drop.resend == block


@pytest.mark.parametrize("block", [64, 512])
def test_a_prompt_at_or_above_a_boundary_resends_from_the_one_below(block: int) -> None:
    for blocks in range(1, 20):
        trace = prefill(build("ours", block=block), blocks * block)
        assert trace.resend == (blocks - 1) * block
        assert prefill(build("ours", block=block), blocks * block + 1).resend == blocks * block


@pytest.mark.parametrize("preset", PRESETS)
def test_speculation_off_gives_every_filing_the_same_hits(preset: str) -> None:
    for prompt in (700, 1024, 32_320):
        traces = [
            prefill(build(preset, draft=None, filing=filing), prompt)
            for filing in ("token", "drop", "key", "tag")
        ]
        assert len({(trace.published, trace.resend, trace.extend) for trace in traces}) == 1


@pytest.mark.parametrize("preset", [*PRESETS, "none"])
@pytest.mark.parametrize("largest", [1024, 1022, 512, 300, 1])
def test_a_share_below_the_block_starves_nobody(preset: str, largest: int) -> None:
    """Two prompts share a budget as pieces below a block of 1,600: each piece must advance."""
    policy, prompt = build(preset, block=1600), 32_768 if largest > 1 else 1700
    assert sum(prefill(policy, prompt, budget=largest).chunks) == prompt


@pytest.mark.parametrize(
    ("preset", "stop"), [("generic", 576), ("seed", 576), ("vllm-0.33", 576), ("ours", 512)]
)
def test_public_presets_take_the_resend_stop_from_the_known_tokens(preset: str, stop: int) -> None:
    policy = build(preset, block=64, retain=["resend"], filing="drop")
    chunk = policy.chunk(0, 4096, Prefill(600, 650), 4096)
    assert {*chunk.exports, chunk.end} - {650} == {stop}
    assert chunk.publishes == (() if stop == 576 else (512,)), (
        "published is what a resend of the prompt looks for"
    )


@pytest.mark.parametrize(("room", "end"), [(1200, 1200), (1199, 1199), (1198, 1024)])
def test_a_replay_ends_one_token_before_the_known_ones(room: int, end: int) -> None:
    assert build("seed").chunk(0, room, Prefill(1000, 1200), 4096).end == end
    assert build("ours").chunk(1198, 1, Prefill(1000, 1200), 1).reason == "end of known tokens"
    assert build("ours").chunk(1199, 1, Prefill(1000, 1200), 1).reason == "decode"


def test_only_a_decode_checkpoint_outlasts_prefill() -> None:
    assert build("ours").outlasts_prefill(8960, 1000)
    assert not build("ours").outlasts_prefill(960, 960)
    assert not build("ours", retain=["progress"]).outlasts_prefill(8960, 1000)


def test_a_running_state_is_handed_over_on_a_boundary_that_retention_would_roll_to() -> None:
    for retain, expected in (("progress", [960]), ("decode", [1024]), ("resend", [])):
        policy = build("ours", retain=[retain])
        prefills = {m: Prefill(1000, max(1000, m + 1)) for m in (0, 960, 961, 1024)}
        assert [m for m, prefill in prefills.items() if policy.hands_over(m, prefill)] == expected


@pytest.mark.parametrize("drafter", ["EagleModel", "DeepSeekMTPModel"])
def test_seed_is_generic_for_a_drafter_that_declares_nothing(drafter: str) -> None:
    generic = build("generic", draft=drafter)
    assert build("seed", draft=drafter).name == "seed", "it is called what was asked for"
    for case in ({"prompt": 32_320}, {"prompt": 3000}, {"prompt": 32_320, "start": 28_700}):
        seed, plain = prefill(build("seed", draft=drafter), **case), prefill(generic, **case)
        assert (seed.chunks, seed.exports, seed.published) == (plain.chunks, plain.exports, plain.published)
        assert (seed.resend, seed.extend) == (plain.resend, plain.extend)


def test_seed_is_generic_on_a_kernel_without_export() -> None:
    seed = prefill(build("seed", capability=Capability(exports=0)), 32_320)
    generic = prefill(build("generic"), 32_320)
    assert (seed.chunks, seed.published, seed.reasons) == (generic.chunks, generic.published, generic.reasons)


@pytest.mark.parametrize("preset", [*PRESETS, "none"])
def test_a_kernel_without_export_is_asked_for_none(preset: str) -> None:
    policy = build(preset, capability=Capability(exports=0, free_chunk_ends=False))
    for prompt in (300, 1024, 32_320, 32_770):
        assert prefill(policy, prompt, junctions=(512,)).exports == ()
    assert prefill(policy, 9000, known=9000, start=100, budget=1000).exports == ()


def test_ours_without_export_stops_where_it_would_export() -> None:
    trace = prefill(build("ours", capability=Capability(exports=0)), 32_320)
    assert (trace.chunks, trace.published) == ((*(4096,) * 7, 3584, 64), (32_256, 32_320))


def test_one_export_is_spent_on_the_first_boundary() -> None:
    policy = build("ours", capability=Capability(exports=1))
    trace = prefill(policy, 32_320, start=28_672, junctions=(30_016,))
    assert (trace.chunks, trace.exports) == ((3584, 64), (30_016,))
    assert trace.published == (30_016, 32_256, 32_320)


def test_a_replayed_prompt_of_release_033_publishes_its_boundary_only_where_a_chunk_ends() -> None:
    policy = build("vllm-0.33")
    assert prefill(policy, 4100, known=9000).published == (4096,)
    assert prefill(policy, 4700, known=9000).published == ()


@pytest.mark.parametrize(
    ("retain", "published", "rolling"),
    [
        (["crossed"], (4032,), None),
        (["progress"], (), 4032),
        (["chunk-ends", "progress"], (), 4032),
        (["crossed", "progress"], (4032,), None),
        (["all"], tuple(range(64, 4081, 64)), None),
        ([], (), None),
    ],
)
def test_who_may_find_a_state_below_an_unaligned_end(
    retain: list[str], published: tuple[int, ...], rolling: int | None
) -> None:
    chunk = build("ours", retain=retain).chunk(0, 4080, Prefill(32_320, 32_320), 4080)
    assert (chunk.end, chunk.publishes, chunk.rolling) == (4080, published, rolling)
    assert chunk.exports == (published or (() if rolling is None else (rolling,)))


@pytest.mark.parametrize(("filing", "full"), [("token", 1024), ("drop", 1024), ("key", 960), ("tag", 960)])
def test_a_full_block_waits_for_the_token_its_key_needs(filing: str, full: int) -> None:
    policy = build("ours", filing=filing)
    assert policy.publishable(1024, 1024) == full
    assert policy.publishable(1024, 1025) == 1024
    assert policy.publishable(1023, 2000) == 960


def test_decode_keeps_the_newest_boundary_that_was_crossed() -> None:
    ours, generic, release = build("ours"), build("generic"), build("vllm-0.33")
    assert ours.decode_boundary(1022, 1024) == (1024, False)
    assert ours.decode_boundary(1024, 1028) == (None, False)
    assert generic.decode_boundary(1022, 1025) == (1024, True)
    assert release.decode_boundary(1022, 1025) == (None, False)
    assert build("ours", retain=["all"]).decode_boundary(1022, 1025) == (1024, True)


def test_all_publishes_an_end_on_a_boundary_too() -> None:
    chunk = build("ours", retain=["all"]).chunk(64, 128, Prefill(1000, 1000), 128)
    assert (chunk.exports, chunk.publishes) == ((128,), (128, 192))


def test_a_budget_below_the_export_grid_still_ends_on_it() -> None:
    policy, request = build("ours"), Prefill(1000, 1000)
    assert policy.chunk(0, 12, request, 12).end == 12
    assert policy.chunk(8, 12, request, 12).end == 16
