"""Cells of the equality tests: the axes, a selection in which every two values that matter together meet, and how to
play one, on its model or without."""

from collections.abc import Mapping
from itertools import combinations, product
from typing import Any, NamedTuple

from model.glm5_next import Glm5Next
from scheduler.checkpoint_policy import DECLARED_DRAFT_ARCHITECTURE
from scheduler.plan import StepPlan
from tests.engine.drafts import SCRIPTS, Drafts, Oracle, Script
from tests.engine.equality import WHOLE, Player, policy_of, rounds, subject

AXES: Mapping[str, tuple[Any, ...]] = {  # cheap values first: `selection` takes them when it may choose
    "subject": ("tiny", "embedded"),
    "budget": (WHOLE, 64, 16, 3, 1),
    "policy": ("generic", "seed", "vllm-0.33", "ours", "none"),
    "filing": ("token", "drop", "key", "tag", "off"),
    "scenario": ("cold", "resend", "extend", "branch", "resumed", "mates"),
    "depth": (3, 2, 1, 0),
    "drafter": ("perfect", "adversarial", "real", "random"),
}
Pair = frozenset[tuple[str, Any]]  # two (axis, value)


class Cell(NamedTuple):
    """One combination of AXES, in their order."""

    subject: str
    budget: int
    policy: str
    filing: str
    scenario: str
    depth: int = 0
    drafter: str = "perfect"

    def __str__(self) -> str:
        return "-".join(str(value) for value in self).replace(str(WHOLE), "whole")


def pairs(values: Mapping[str, Any]) -> set[Pair]:
    """Every two (axis, value). At depth 0 there is no drafter, and filing draft rows means nothing."""
    idle = ("filing", "drafter") if values.get("depth") == 0 else ()
    return set(map(frozenset, combinations([item for item in values.items() if item[0] not in idle], 2)))


def all_pairs() -> dict[Pair, None]:
    """Every pair that some cell has, those of the longest axes first."""
    axes = sorted(combinations(AXES, 2), key=lambda two: -len(AXES[two[0]]) * len(AXES[two[1]]))
    every = [
        dict(zip(two, values, strict=True)) for two in axes for values in product(*map(AXES.__getitem__, two))
    ]
    return dict.fromkeys(pair for values in every for pair in pairs(values))


def selection() -> list[Cell]:
    """Few cells with every pair: around each pair that is missing, axis by axis, the value that brings most."""
    missing, chosen = all_pairs(), []
    while missing:
        values = dict(next(iter(missing)))
        for axis in AXES:
            if axis not in values:
                gain = {v: len(pairs(values | {axis: v}) & missing.keys()) for v in AXES[axis]}
                values[axis] = max(AXES[axis], key=gain.__getitem__)
        if not pairs(values) & missing.keys():  # depth 0 made the pair mean nothing
            values["depth"] = 3
        chosen.append(Cell(**values))
        for pair in pairs(values):
            missing.pop(pair, None)
    return chosen


def play(cell: Cell, executor: Glm5Next | Oracle | None = None) -> Player:
    """A cell on its model, or on `executor`."""
    of = subject(cell.subject)
    policy = policy_of(cell.policy, cell.filing, DECLARED_DRAFT_ARCHITECTURE if cell.depth else None)
    script = Script(cell.drafter, cell.depth, of.answer) if cell.depth and cell.drafter in SCRIPTS else None
    player = Player(policy, cell.budget, executor or of.model, drafts=Drafts(cell.depth, of.mtp, script))
    player.play(rounds(cell.scenario, of), interrupted=cell.scenario == "resumed")
    return player


def plans_of(cell: Cell) -> list[StepPlan] | None:
    """The plans of a cell if its answers are right, without running the model; None if its drafts need it."""
    if cell.depth and cell.drafter not in SCRIPTS:
        return None
    return play(cell, Oracle(subject(cell.subject).answer)).plans
