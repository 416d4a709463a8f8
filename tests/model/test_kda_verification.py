"""After a verification, `roll_back` leaves in every slot the state that its accepted tokens alone would have left.

The reference is `candidates`: a state per token, kept while the same tokens run one by one from a copy of the slot.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.cache import CacheShape, allocate_trunk
from model.batch import Batch, Export, Segment
from model.kda import ROW_BLOCK, Kda
from tests import tiny
from tests.driver import CPU, poison

DEPTH = 7
CONFIG = replace(tiny.TINY, num_hidden_layers=2, layer_types=("kda", "kda"))
HIDDEN, NUM_SLOTS, NUM_REPLAY_ROWS = CONFIG.hidden_size, 24, 6
NO_TABLE = torch.empty(0, dtype=torch.int64)
COPY, BOUNDARY, LATER = 20, 21, 22  # slots that no request runs in
# Replay is the recurrence; products of another number of rows round their float32 sums, of order 1, differently.
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}
State = tuple[
    Tensor, Tensor
]  # matrix [layers, heads, key, value] and convolution rows [3, layers, width] of a slot


@pytest.fixture(scope="module")
def layers() -> list[Kda]:
    weights = tiny.tree()
    return [Kda(weights.at(f"layers.{index}.self_attn"), tiny.TINY, torch.float32) for index in range(2)]


class Slots:
    """Recurrent slots of two layers that are fed the same x, every number NaN at first."""

    def __init__(
        self, layers: list[Kda], dtype: torch.dtype = torch.float32, fill: float = float("nan")
    ) -> None:
        shape = CacheShape(1, 16, NUM_SLOTS, NUM_REPLAY_ROWS, DEPTH, state_dtype=dtype)
        cache = allocate_trunk(CONFIG, shape, CPU)
        self.layers, self.state, self.views = layers, cache.recurrent, list(cache.kda.values())
        poison({0: self.state}, fill)

    def run(self, x: Tensor, *segments: Segment) -> Tensor:
        """y [layers, rows, hidden]; segments take the rows of x in order."""
        placed, row = [], 0
        for segment in segments:
            placed.append(replace(segment, row=row))
            row += segment.num_tokens
        batch = Batch(torch.zeros(len(x)), tuple(placed))
        return torch.stack(
            [layer.forward(x, batch, view) for layer, view in zip(self.layers, self.views, strict=True)]
        )

    def at(self, slot: int) -> State:
        return self.state.matrix[slot].clone(), self.state.conv[slot].clone()

    def put(self, slot: int, state: State) -> None:
        self.state.matrix[slot], self.state.conv[slot] = state

    def candidates(self, slot: int, x: Tensor, start: int) -> tuple[Tensor, list[State]]:
        """Outputs and states of the rows of x, run one by one from a copy of the slot; state i is after i rows."""
        self.state.copy(slot, COPY)
        outputs, states = [], [self.at(COPY)]
        for i, row in enumerate(x):
            outputs.append(self.run(row[None], tokens(COPY, 1, start + i)))
            states.append(self.at(COPY))
        return torch.cat(outputs, 1), states

    def roll_back(self, slot: int, row: int, *exports: tuple[int, int]) -> None:
        self.state.roll_back(slot, row, tuple(Export(*export) for export in exports))


def tokens(slot: int, num_tokens: int, start: int, replay: int | None = None) -> Segment:
    return Segment(0, num_tokens, start, slot, NO_TABLE, replay=replay)


def close(found: State, expected: State) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


def same(found: State, expected: State) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def carried(layers: list[Kda], start: int = 21, slot: int = 5, **options: object) -> Slots:
    """Slots of which one holds the state of a prompt of `start` tokens."""
    slots = Slots(layers, **options)  # type: ignore[arg-type]
    slots.run(tiny.normal(start, HIDDEN, seed=start), tokens(slot, start, 0))
    return slots


@pytest.mark.parametrize("num_drafts", range(DEPTH + 1))
def test_every_accepted_count(layers: list[Kda], num_drafts: int) -> None:
    """Known bug 27, field bug E3: matrix and convolution rows, both of the accepted tokens and no others."""
    slots, x = carried(layers), tiny.normal(num_drafts + 1, HIDDEN, seed=1)
    outputs, candidates = slots.candidates(5, x, 21)
    before = slots.at(5)
    verified = slots.run(x, tokens(5, len(x), 21, replay=3))
    torch.testing.assert_close(verified, outputs, **TOLERANCE)
    assert torch.equal(slots.state.matrix[5], before[0])
    waiting = slots.at(5)
    for num_new_tokens in range(1, num_drafts + 2):
        slots.put(5, waiting)
        slots.roll_back(5, 3, (num_new_tokens, 5))
        close(slots.at(5), candidates[num_new_tokens])


@pytest.mark.parametrize("start", [1, 2, 3])
def test_a_window_that_reaches_before_the_sequence(layers: list[Kda], start: int) -> None:
    slots, x = carried(layers, start), tiny.normal(4, HIDDEN, seed=2)
    _, candidates = slots.candidates(5, x, start)
    slots.run(x, tokens(5, 4, start, replay=0))
    slots.roll_back(5, 0, (1, 5))
    close(slots.at(5), candidates[1])


@pytest.mark.parametrize("accepted", range(DEPTH + 1))
def test_a_boundary_inside_or_at_the_end_of_the_accepted_run(layers: list[Kda], accepted: int) -> None:
    """Known bug 28: the boundary's state is that of a run that ended there, and the running one goes on."""
    slots, x = carried(layers), tiny.normal(DEPTH + 1, HIDDEN, seed=3)
    _, candidates = slots.candidates(5, x, 21)
    slots.run(x, tokens(5, len(x), 21, replay=1))
    waiting = slots.at(5)
    for boundary in range(1, accepted + 2):
        slots.put(5, waiting)
        slots.roll_back(5, 1, (boundary, BOUNDARY), (accepted + 1, 5))
        close(slots.at(BOUNDARY), candidates[boundary])
        close(slots.at(5), candidates[accepted + 1])
        if boundary == accepted + 1:
            assert same(slots.at(BOUNDARY), slots.at(5))


def test_two_boundaries_and_the_end(layers: list[Kda]) -> None:
    slots, x = carried(layers), tiny.normal(DEPTH + 1, HIDDEN, seed=4)
    _, candidates = slots.candidates(5, x, 21)
    slots.run(x, tokens(5, len(x), 21, replay=1))
    slots.roll_back(5, 1, (2, BOUNDARY), (5, LATER), (8, 5))
    for slot, count in ((BOUNDARY, 2), (LATER, 5), (5, 8)):
        close(slots.at(slot), candidates[count])


def test_step_after_step_with_every_pair_of_counts(layers: list[Kda]) -> None:
    """Field bug E3: the count of one step is not used for another."""
    for first in range(1, 5):
        for second in range(1, 5):
            slots, x = carried(layers), tiny.normal(first + second, HIDDEN, seed=first)
            _, candidates = slots.candidates(5, x, 21)
            done = 0
            for count in (first, second):
                rows = torch.cat([x[done : done + count], tiny.normal(4 - count, HIDDEN, seed=9)])
                slots.run(rows, tokens(5, 4, 21 + done, replay=0))
                slots.roll_back(5, 0, (count, 5))
                done += count
                close(slots.at(5), candidates[done])


def mixed_segments(first: Segment) -> list[Segment]:
    """`first`, then verifications of three lengths, prefills, a decode row and a row that starts, scattered."""
    return [
        first,
        tokens(17, 4, 40, replay=4),
        tokens(8, 1, 33),
        tokens(3, 2, 19, replay=0),
        replace(tokens(11, 37, 16), exports=(Export(16, BOUNDARY),)),
        tokens(14, 4, 50, replay=2),
        tokens(1, 1, 0),
        tokens(6, 8, 21, replay=5),
        tokens(2, 4, 64, replay=1),
    ]


@pytest.mark.parametrize("rows_before", [5, ROW_BLOCK - 60, ROW_BLOCK - 3])
def test_verifications_among_prefills_and_decodes(layers: list[Kda], rows_before: int) -> None:
    """Of other lengths, slots and replay rows; also where the layer cuts a large batch."""
    segments = mixed_segments(tokens(19, rows_before, 0))
    slots = Slots(layers)
    for segment in segments:
        if segment.start:
            prompt = tiny.normal(segment.start, HIDDEN, seed=segment.slot)
            slots.run(prompt, tokens(segment.slot, segment.start, 0))
    x = tiny.normal(sum(s.num_tokens for s in segments), HIDDEN, seed=7)
    parts = x.split([s.num_tokens for s in segments])
    alone = [slots.candidates(s.slot, part, s.start) for s, part in zip(segments, parts, strict=True)]
    y = slots.run(x, *segments)
    torch.testing.assert_close(y, torch.cat([outputs for outputs, _ in alone], 1), **TOLERANCE)
    close(slots.at(BOUNDARY), alone[4][1][16])
    for accepted, (segment, (_, states)) in enumerate(zip(segments, alone, strict=True)):
        if segment.replay is None:
            close(slots.at(segment.slot), states[-1])
            continue
        count = 1 + accepted % segment.num_tokens
        slots.roll_back(segment.slot, segment.replay, (count, segment.slot))
        close(slots.at(segment.slot), states[count])


def test_states_in_bfloat16(layers: list[Kda]) -> None:
    """A replay reads the rounded state, runs in float32 and rounds once, at every place that it leaves a state."""
    slots = carried(layers, dtype=torch.bfloat16)
    exact, x = carried(layers), tiny.normal(6, HIDDEN, seed=5)
    exact.put(5, slots.at(5))
    _, candidates = exact.candidates(5, x, 21)
    slots.run(x, tokens(5, 6, 21, replay=2))
    slots.roll_back(5, 2, (2, BOUNDARY), (5, 5))
    for slot, count in ((BOUNDARY, 2), (5, 5)):
        matrix, conv = slots.at(slot)
        # float32 values closer than TOLERANCE may round to neighbours: one bfloat16 step is 2**-7 at most.
        torch.testing.assert_close(matrix.float(), candidates[count][0], atol=2e-5, rtol=2**-7)
        torch.testing.assert_close(conv, candidates[count][1], **TOLERANCE)


def leavings(layers: list[Kda], rejected: Tensor, fill: float = float("nan")) -> Sequence[Tensor]:
    """What a verification of 3 tokens that stand and `rejected` ones leaves beside a mate, a boundary after 2."""
    slots = carried(layers, fill=fill)
    slots.run(tiny.normal(18, HIDDEN, seed=18), tokens(9, 18, 0))
    x = torch.cat([tiny.normal(3, HIDDEN, seed=6), rejected, tiny.normal(2, HIDDEN, seed=8)])
    y = slots.run(x, tokens(5, 3 + len(rejected), 21, replay=3), tokens(9, 2, 18, replay=1))
    slots.roll_back(5, 3, (2, BOUNDARY), (3, 5))
    slots.roll_back(9, 1, (2, 9))
    left = [part for slot in (5, 9, BOUNDARY) for part in slots.at(slot)]
    return [*left, y[:, :3], y[:, -2:]]


def test_what_rejected_tokens_are_changes_no_bit(layers: list[Kda]) -> None:
    one = leavings(layers, tiny.normal(4, HIDDEN, seed=10))
    other = leavings(layers, 50 * tiny.normal(4, HIDDEN, seed=11))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_unused_slots_and_replay_rows_are_never_read(layers: list[Kda]) -> None:
    rejected = tiny.normal(2, HIDDEN, seed=12)
    over_nan, over_ones = leavings(layers, rejected), leavings(layers, rejected, fill=1.0)
    assert all(torch.equal(a, b) for a, b in zip(over_nan, over_ones, strict=True))
    assert all(bool(part.isfinite().all()) for part in over_nan)
