"""Worked examples with several requests, with requests that leave early, and with long answers, figure by figure.

The mixed cap is off, prompts share no token, and requests leave after their prompt, unless a test says otherwise.
"""

import pytest

from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request
from scheduler.simulation import ends_of
from tests.scheduler.simulation import PRESETS, Simulation, engine, prompt, published

PUBLIC = ("generic", "seed", "vllm-0.33", "ours")


def cold(preset: str, *lengths: int, budget: int = 4096) -> tuple[Simulation, list[StepPlan]]:
    """Prompts that arrive together at an empty cache."""
    run = Simulation(engine(preset, budget=budget, pages=4096, slots=64), content=False)
    for seed, length in enumerate(lengths):
        run.add(prompt(length, seed))
    return run, run.drain()


def by_step(plans: list[StepPlan]) -> list[list[int]]:
    return [[len(chunk.token_ids) for chunk in plan.chunks] for plan in plans]


def exports(plans: list[StepPlan]) -> list[int]:
    """Positions handed out inside of chunks."""
    return [m for plan in plans for chunk in plan.chunks for m, *_ in chunk.exports if m < chunk.end]


@pytest.mark.parametrize(
    ("preset", "steps", "unused", "exported"),
    [
        ("generic", [[1024] * 3, [978] * 3], 1024, []),
        ("seed", [[2002, 2002], [2002]], 92, [1536] * 3),
        ("vllm-0.33", [[2002, 2002], [2002]], 92, [1536] * 3),
        ("ours", [[2002, 2002, 80], [1922]], 12, [1984] * 3),
        ("none", [[2002, 2002, 92], [1910]], 0, []),
    ],
)
def test_three_prompts_of_2002(preset: str, steps: list[list[int]], unused: int, exported: list[int]) -> None:
    run, plans = cold(preset, 2002, 2002, 2002)
    assert (by_step(plans), plans[0].unused_tokens) == (steps, unused)
    rolling = {64} if preset == "ours" else set()  # `progress` of the third, whose 80 tokens cross a boundary
    assert [m for m in exports(plans) if m not in rolling] == exported
    assert all(len(published(run, request)) == (preset != "none") for request in run.requests.values())


@pytest.mark.parametrize(
    ("preset", "steps", "boundary"),
    [
        ("generic", [[4096], [904, 3072], [1024], [904]], None),
        ("seed", [[4096], [904, 3072], [1928]], 4608),
        ("vllm-0.33", [[4096], [904, 3072], [1928]], 4608),
        ("ours", [[4096], [904, 3184], [1816]], 4992),
        ("none", [[4096], [904, 3192], [1808]], None),
    ],
)
def test_two_prompts_of_5000(preset: str, steps: list[list[int]], boundary: int | None) -> None:
    _, plans = cold(preset, 5000, 5000)
    assert by_step(plans) == steps
    assert [m for m in exports(plans) if m > 4000] == ([boundary] * 2 if boundary else [])


@pytest.mark.parametrize(("preset", "forwards"), [*zip(PRESETS, (33, 32, 32, 32, 32), strict=True)])
def test_four_prompts_of_32320(preset: str, forwards: int) -> None:
    assert len(cold(preset, *[32320] * 4)[1]) == forwards


WITH_A_DECODER = {
    "generic": [*[3584] * 8, 3072, 576],
    "seed": [*[3584] * 8, 3648],
    "vllm-0.33": [*[3584] * 8, 3648],
    "ours": [*[4080] * 7, 3760],
}


@pytest.mark.parametrize("preset", PUBLIC)
def test_a_decoder_with_three_drafts_costs_a_block_or_a_grid_step(preset: str) -> None:
    """Four rows of the step are the decoder's."""
    assert by_step(cold(preset, 32320, budget=4092)[1]) == [[n] for n in WITH_A_DECODER[preset]]


@pytest.mark.parametrize("preset", PUBLIC)
def test_a_decoder_without_drafts_costs_the_same(preset: str) -> None:
    run = Simulation(engine(preset, pages=4096, slots=64), content=False)
    run.add(prompt(1, 1), 100), run.step()
    run.add(prompt(32320))
    assert by_step(run.drain())[: len(WITH_A_DECODER[preset])] == [[1, n] for n in WITH_A_DECODER[preset]]


LEAVING = {"generic": (118_784, 21), "seed": (118_784, 20), "vllm-0.33": (0, 49), "ours": (122_880, 19)}


@pytest.mark.parametrize("preset", PUBLIC)
@pytest.mark.parametrize("how", ["preempt", "finish"])
def test_a_prefill_of_200000_tokens_leaves_after_30_forwards(preset: str, how: str) -> None:
    run = Simulation(engine(preset, pages=4096, slots=64), content=False)
    request = run.add(prompt(200_000))
    for _ in range(30):
        run.step()
    assert request.num_computed_tokens == 122_880
    getattr(run, how)(request)
    if how == "finish":
        run.add(request.prompt)
    plans = run.drain()
    assert (plans[0].chunks[0].start, len(plans)) == LEAVING[preset]


@pytest.mark.parametrize(
    ("preset", "checkpoints", "next_turn"),
    [
        ("ours", 3, 97_792),
        pytest.param("generic", 136, 97_280, marks=pytest.mark.slow),
        pytest.param("seed", 136, 97_280, marks=pytest.mark.slow),
        pytest.param("vllm-0.33", 1, 32_256, marks=pytest.mark.slow),
    ],
)
def test_an_answer_of_65536_tokens(preset: str, checkpoints: int, next_turn: int) -> None:
    """While it runs: the prompt's own checkpoints, its running slot, one rolling and one being written."""
    scheduler = engine(preset, pages=2048, slots=200)
    request, slots = Request(0, prompt(32_320), 65_536), scheduler.blocks.slots
    scheduler.add(request)
    most_held = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        held = sum(count > 0 for count in slots._references.values()) if plan.chunks[0].exports else 0
        most_held = max(most_held, held) if request.output else 0
        tokens = {c.request_id: (7,) for c in plan.chunks if c.samples}
        scheduler.commit(plan, StepResult(tokens, num_drafted=ends_of(plan)))
    assert most_held <= 3
    assert len(slots._key_of) == checkpoints
    turn = Request(1, [*request.prompt, *request.output, *prompt(512, 9)], 1)
    assert scheduler.blocks.lookup(turn).state_at == next_turn


class TestBranchingPair:
    """A = X + a, B = X + b, B again, where X is one block: the draft row of X's last slot under each filing."""

    @staticmethod
    def run(filing: str) -> tuple[Simulation, list[Request]]:
        shared, a, b = prompt(16), prompt(40, 1), prompt(40, 2)
        run = Simulation(engine("ours", 16, 4096, pages=64, filing=filing))
        return run, [run.run([*shared, *tail], 3) for tail in (a, b, b)]

    @pytest.mark.parametrize("filing", ["token", "key", "tag"])
    def test_is_exact(self, filing: str) -> None:
        run, requests = self.run(filing)
        assert run.wrong_draft_rows == []
        assert requests[2].num_cached_tokens == 48

    def test_under_token_both_share_the_block_at_which_they_branch(self) -> None:
        run, (_, _, again) = self.run("token")
        assert published(run, again)[0] == 16  # the junction that the first B made
        assert run.blocks.groups[0].num_duplicate_publications == 0

    def test_drop_reuses_a_row_made_with_the_other_request_s_token(self) -> None:
        """The first B gives the shared block up and is right. The second matches one block more, gives up that one,
        and reads A's page: its last row was made with a, while B goes on with b."""
        run, (first, b, again) = self.run("drop")
        assert (b.num_cached_tokens, again.num_cached_tokens) == (0, 32)
        assert set(run.wrong_draft_rows) == {(again.request_id, 15)}
        assert run.blocks.groups[1].num_duplicate_publications >= 1
        page = run.blocks.groups[1].find((first.keys or again.keys).at(16))  # type: ignore[union-attr]
        with_a, with_b = (run.states[r.request_id][17] for r in (first, again))
        assert with_a != with_b and run.pages[1][page or 0][15] == with_a

    def test_off_reads_the_wrong_row_at_once(self) -> None:
        run, (_, b, again) = self.run("off")
        assert set(run.wrong_draft_rows) == {(b.request_id, 15), (again.request_id, 15)}
