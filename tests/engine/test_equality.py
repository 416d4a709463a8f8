"""Policies, filings, budgets, hits, preemptions, batch mates and drafts change no greedy token in float32, and a
failing combination says where it first went wrong.

Without `-m slow` a selection of cells is run in which every pair of values meets. Without a drafter filings mean
nothing: cells with equal plans are run once.
"""

from itertools import product

import pytest
from torch import Tensor

from model.batch import Batch
from model.glm5_next import TrunkCache
from model.kda import KdaState
from scheduler.plan import ScheduledChunk, StepPlan
from tests.engine.cells import AXES, Cell, all_pairs, pairs, plans_of, play, selection
from tests.engine.divergence import first_divergence, recording, wrong_tokens
from tests.engine.drafts import Oracle
from tests.engine.equality import WHOLE, Player, policy_of, rounds, subject

SELECTION = selection()
PRODUCT = list(product(*(AXES[axis] for axis in ("budget", "policy", "filing", "scenario"))))
SPECULATION = [*product((1, 2, 3), AXES["drafter"]), (0, "real")]  # 13, prime to the lengths of all axes
# Model, block, depth, where draft rows lie, chunks of every step.
Work = tuple[str, int, int, bool, tuple[tuple[ScheduledChunk, ...], ...]]
checked: set[Work] = set()


def expected_tokens(cell: Cell) -> list[list[int]]:
    of = subject(cell.subject)
    return [of.answer(ask.prompt)[: ask.new_tokens] for asks in rounds(cell.scenario, of) for ask in asks]


def verify(cell: Cell) -> None:
    """Check a cell, unless one with equal plans was checked."""
    planned = plans_of(cell)
    if planned is None:
        check(cell, None)
        return
    block, by_token = policy_of(cell.policy, cell.filing).block_size, cell.filing == "token"
    chunks = tuple(plan.chunks for plan in planned)
    work: Work = (cell.subject, block, cell.depth, by_token or not cell.depth, chunks)
    if work not in checked:
        check(cell, planned)
        checked.add(work)


def check(cell: Cell, planned: list[StepPlan] | None) -> None:
    """Run a cell: its tokens, the hits it was promised, its drafts, and that it did what was planned for it."""
    player = play(cell)
    if [request.output for request in player.requests] != expected_tokens(cell):
        pytest.fail(f"{cell}\n{explanation(cell)}")
    assert planned is None or player.plans == planned
    check_hits(cell, player)
    check_drafts(cell, player)


def check_drafts(cell: Cell, player: Player) -> None:
    """As many drafts were verified as budget and depth allow, and accepted as the drafter deserves."""
    most = min(cell.depth, cell.budget - 1)
    assert max((drafts for drafts, _ in player.verified), default=0) == most
    proposed, accepted = (sum(counts) for counts in zip((0, 0), *player.verified, strict=True))
    if cell.drafter == "perfect":
        assert accepted == proposed
    elif cell.drafter == "random":
        assert accepted <= proposed / 10
    elif cell.drafter == "adversarial" and most:
        assert 0 < accepted < proposed and len(set(player.verified)) > 1


def explanation(cell: Cell) -> str:
    """The wrong tokens of a cell, and the first tensor that is not that of an uncached forward."""
    model = subject(cell.subject).model
    with recording(model) as forwards:
        player = play(cell)
    lines = wrong_tokens(model, player, dict(enumerate(expected_tokens(cell))))
    return "\n".join([*lines, f"first divergence: {first_divergence(model, player, forwards)}"])


def check_hits(cell: Cell, player: Player) -> None:
    """Warm requests hit where the policy promises it, and preempted ones resume from a checkpoint."""
    asks = [ask for asks in rounds(cell.scenario, subject(cell.subject)) for ask in asks]
    block, given_up = player.scheduler.blocks.block_size, player.scheduler.blocks.policy.dropped
    # Here `seed` keeps only the last boundary of a long chunk, and `drop` is not allowed to use that one.
    owing = not (cell.policy == "seed" and given_up and cell.budget >= 64)
    for request, ask in zip(player.requests, asks, strict=True):
        if ask.hit and owing:
            owed = cell.policy != "none" and (len(ask.prompt) - 1) // block * block > given_up
            assert (request.num_cached_tokens > 0) == owed
    if cell.scenario != "resumed":
        return
    assert player.scheduler.num_preemptions >= 4
    restored = [c for plan in player.plans for c in plan.chunks if c.restore_from is not None]
    assert len(restored) >= (1 if given_up else 2) or cell.policy == "none" or not owing


def test_the_selection_holds_every_pair_of_values() -> None:
    assert set().union(*(pairs(cell._asdict()) for cell in SELECTION)) == set(all_pairs())
    assert len(SELECTION) <= 50  # of 24,000; no cover of 5 x 6 values has fewer than 30


@pytest.mark.parametrize("cell", SELECTION, ids=str)
def test_greedy_tokens_are_those_of_the_prompt_alone(cell: Cell) -> None:
    verify(cell)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"), [*product(["tiny"], range(750)), *product(["embedded"], range(0, 750, 7))]
)
def test_full_product(name: str, number: int) -> None:
    """Every budget, policy, filing and scenario, each with the next depth and drafter; a seventh on `embedded`."""
    verify(Cell(name, *PRODUCT[number], *SPECULATION[number % len(SPECULATION)]))


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "drafter"), SPECULATION)
@pytest.mark.parametrize("scenario", AXES["scenario"])
def test_every_drafter_at_every_depth(scenario: str, depth: int, drafter: str) -> None:
    verify(Cell("tiny", 16, "ours", "token", scenario, depth, drafter))


@pytest.mark.parametrize("policy", AXES["policy"])
def test_filings_plan_alike_without_a_drafter_and_differ_with_one(policy: str) -> None:
    of, hits = subject("tiny"), {}
    for filing in AXES["filing"]:
        cells = [Cell("tiny", 16, policy, filing, scenario) for scenario in AXES["scenario"]]
        assert [plans_of(cell) for cell in cells] == [
            plans_of(cell._replace(filing="token")) for cell in cells
        ]
        player = play(Cell("tiny", WHOLE, policy, filing, "resend", depth=3), Oracle(of.answer))
        hits[filing] = player.requests[1].num_cached_tokens
    assert policy == "none" or hits["drop"] < hits["token"]


def test_the_trace_names_a_fault_in_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, layer = Cell("tiny", 16, "ours", "token", "cold"), subject("tiny").model.layers[3]
    starts, layer_forward, ffn_forward = [0], layer.forward, layer.ffn.forward

    def forward(streams: Tensor, batch: Batch, cache: TrunkCache) -> Tensor:
        starts[0] = batch.segments[0].start
        return layer_forward(streams, batch, cache)

    monkeypatch.setattr(layer, "forward", forward)
    monkeypatch.setattr(layer.ffn, "forward", lambda x: ffn_forward(x) * (-3 if starts[0] == 80 else 1))
    with pytest.raises(pytest.fail.Exception) as failure:
        check(cell, plans_of(cell))
    text = str(failure.value)
    assert "first divergence: step 5, layer 3, ffn, request 0, position 80" in text
    assert "argmax margin" in text and str(cell) in text


@pytest.mark.parametrize("part", ["matrix", "conv"])
def test_the_trace_names_a_state_that_a_hit_lost(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell, copy = Cell("tiny", WHOLE, "ours", "token", "resend"), KdaState.copy

    def lossy_copy(state: KdaState, source: int, target: int) -> None:
        copy(state, source, target)
        getattr(state, part)[target] = 0

    monkeypatch.setattr(KdaState, "copy", lossy_copy)
    with pytest.raises(pytest.fail.Exception) as failure:
        check(cell, plans_of(cell))
    hit = next(i for i, plan in enumerate(plans_of(cell)) if plan.chunks[0].restore_from is not None)
    assert f"first divergence: step {hit}, layer 0, kda, request 1, position 80" in str(failure.value)


def test_the_trace_finds_nothing_in_a_sound_run() -> None:
    model = subject("tiny").model
    with recording(model) as forwards:
        player = play(Cell("tiny", 16, "ours", "token", "mates"))
    assert first_divergence(model, player, forwards, tolerance=1e-4) is None
    assert "forward" not in vars(model)
