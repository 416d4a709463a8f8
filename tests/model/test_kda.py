"""KDA's chunk form is its token recurrence: at any length, split, packing, gate and export."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from model.batch import Batch, Export, Segment
from model.kda import CHUNK_TOKENS, Kda, KdaInputs, KdaState, chunked, recurrence
from model.norms import l2_norm
from tests import tiny

LAYER = "layers.0.self_attn."
HEADS, DIM, HIDDEN = tiny.TINY.linear_num_heads, tiny.TINY.linear_head_dim, tiny.TINY.hidden_size
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 500]
NUM_SLOTS = 40
NO_TABLE = torch.empty(0, dtype=torch.int64)
# A chunk form and a recurrence sum float32 terms of order 1 in another order; measured: up to 2e-6.
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}


def close(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def random_inputs(num_tokens: int, seed: int = 0) -> KdaInputs:
    q, k, v, g = tiny.normal(4, num_tokens, HEADS, DIM, seed=seed)
    beta = tiny.normal(num_tokens, HEADS, seed=seed + 1).sigmoid()
    return KdaInputs(l2_norm(q) * DIM**-0.5, l2_norm(k), v, -5 * (2 * g).sigmoid(), beta)


@pytest.fixture(scope="module")
def kda() -> Kda:
    return Kda(tiny.tree().at(LAYER[:-1]), tiny.TINY, torch.float32)


class Slots:
    """The recurrent slots of one layer, and forwards of chunks of x by slot."""

    def __init__(self, kda: Kda, fill: float = float("nan")) -> None:
        self.kda = kda
        self.state = KdaState(
            torch.full((NUM_SLOTS, HEADS, DIM, DIM), fill),
            torch.full((NUM_SLOTS, 3, 3 * HEADS * DIM), fill),
            replay=torch.empty(0),
            conv_tail=torch.empty(0),
        )

    def run(
        self, chunks: dict[int, Tensor], starts: dict[int, int], exports: tuple[Export, ...] = ()
    ) -> Tensor:
        segments, row = [], 0
        for slot, x in chunks.items():
            segments.append(Segment(row, len(x), starts.get(slot, 0), slot, NO_TABLE, exports))
            row += len(x)
        x = torch.cat(list(chunks.values()))
        return self.kda.forward(x, Batch(torch.zeros(len(x)), tuple(segments)), self.state)

    def token_by_token(self, slot: int, x: Tensor) -> Tensor:
        return torch.cat([self.run({slot: row[None]}, {slot: t}) for t, row in enumerate(x)])

    def at(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.state.matrix[slot].clone(), self.state.conv[slot].clone()


def measured_log_decay(a_log: Tensor, dt_bias: Tensor, f: float) -> Tensor:
    """g [heads, channels] of a layer whose f projection gives `f`, read off a state of ones, not updated."""
    select = torch.zeros(DIM, HIDDEN)
    select[0, 0] = 1.0
    spread = torch.zeros(HEADS * DIM, DIM)
    spread[:, 0] = f
    no_update = torch.zeros(HEADS, HIDDEN)
    no_update[:, 0] = -80.0  # beta = 2e-35
    overrides = {
        LAYER + "A_log": a_log,
        LAYER + "dt_bias": dt_bias,
        LAYER + "f_a_proj.weight": select,
        LAYER + "f_b_proj.weight": spread,
        LAYER + "b_proj.weight": no_update,
    }
    slots = Slots(Kda(tiny.tree(overrides).at(LAYER[:-1]), tiny.TINY, torch.float32), fill=1.0)
    slots.run({0: torch.eye(HIDDEN)[:1]}, {0: 1})
    return slots.state.matrix[0, :, :, 0].log()


# float32 states near 1 and near e^-5 resolve their logarithm to about 1e-7.
@pytest.mark.parametrize(("f", "expected"), [(-3.0, -3.07e-5), (0.0, -2.5), (3.0, -4.99997)])
def test_lower_bound_is_a_factor_not_a_clamp(f: float, expected: float) -> None:
    """Field bug B1: the clipped softplus form gives -0.194, -2.773, -5.0."""
    g = measured_log_decay(torch.full((HEADS,), math.log(4)), torch.zeros(HEADS * DIM), f)
    torch.testing.assert_close(g, torch.full((HEADS, DIM), expected), atol=1e-6, rtol=0)


def test_decay_rate_is_per_head_and_its_bias_per_channel() -> None:
    a_log, dt_bias = torch.linspace(-1, 1, HEADS), tiny.normal(HEADS * DIM)
    g = measured_log_decay(a_log, dt_bias, 0.3)
    expected = -5 * torch.sigmoid(a_log.exp()[:, None] * (0.3 + dt_bias.view(HEADS, DIM)))
    torch.testing.assert_close(g, expected, atol=1e-5, rtol=0)


def test_l2_norm_adds_its_epsilon_to_the_sum_of_squares() -> None:
    # Sum of squares 1e-6, the epsilon itself: a maximum would give 1, the model's 1e-5 gives 0.30.
    torch.testing.assert_close(l2_norm(torch.tensor([1e-3, 0.0])), torch.tensor([2**-0.5, 0.0]))


def test_small_inputs_show_every_epsilon_and_the_query_scale(kda: Kda) -> None:
    """Field bug B1. The output norm hides a factor on q, unless the output is small against its epsilon."""
    tree, x = tiny.tree().at(LAYER[:-1]), 1e-3 * tiny.normal(1, HIDDEN).double()

    def project(name: str, y: Tensor) -> Tensor:
        return y @ tree.linear(name).expand(torch.float64).T

    def convolved(letter: str) -> Tensor:
        last_tap = tree.tensor(f"{letter}_conv1d.weight")[:, 0, -1]
        return functional.silu(project(f"{letter}_proj", x) * last_tap).view(HEADS, DIM)

    q, k = (y * (y.square().sum(1, keepdim=True) + 1e-6).rsqrt() for y in map(convolved, "qk"))
    beta = project("b_proj", x).sigmoid().view(HEADS, 1)
    out = DIM**-0.5 * (q * k).sum(1, keepdim=True) * beta * convolved("v")
    normed = (
        out
        * (out.square().mean(1, keepdim=True) + tiny.TINY.rms_norm_eps).rsqrt()
        * tree.tensor("o_norm.weight")
    )
    gate = project("g_b_proj", project("g_a_proj", x)).sigmoid()
    expected = project("o_proj", normed.view(1, -1) * gate)
    y = Slots(kda).run({0: x.float()}, {})
    torch.testing.assert_close(y.double(), expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("carried", [False, True], ids=["from-zero", "incoming-state"])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_last_short_chunk(num_tokens: int, carried: bool) -> None:
    """Field bug B3: outputs, the state at every boundary on the grid, and the final state."""
    inputs, state = random_inputs(num_tokens), tiny.normal(HEADS, DIM, DIM, seed=9) * carried
    grid = tuple(range(CHUNK_TOKENS, num_tokens + 1, CHUNK_TOKENS))
    out, states = chunked(inputs, state, grid)
    expected, final = recurrence(inputs, state)
    close(out, expected)
    close(states[num_tokens], final)
    for boundary in grid[::4]:
        close(states[boundary], recurrence(inputs.rows(slice(boundary)), state)[1])


def test_gate_at_its_floor_stays_finite() -> None:
    inputs = random_inputs(130)
    floor = KdaInputs(inputs.q, inputs.k, inputs.v, torch.full_like(inputs.g, -5.0), inputs.beta)
    state = tiny.normal(HEADS, DIM, DIM)
    out, states = chunked(floor, state)
    expected, final = recurrence(floor, state)
    assert out.isfinite().all()
    close((out, states[130]), (expected, final))


def test_near_collinear_keys() -> None:
    """Keys almost equal, full updates, no decay: the triangular system at its worst."""
    inputs = random_inputs(100)
    k = l2_norm(torch.ones(100, HEADS, DIM) + 1e-3 * inputs.k)
    worst = KdaInputs(inputs.q, k, inputs.v, torch.full_like(inputs.g, -1e-6), torch.ones(100, HEADS))
    state = torch.zeros(HEADS, DIM, DIM)
    out, states = chunked(worst, state)
    expected, final = recurrence(worst, state)
    close((out, states[100]), (expected, final))


def test_export_off_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match=f"multiples of {CHUNK_TOKENS}"):
        chunked(random_inputs(40), torch.zeros(HEADS, DIM, DIM), (17,))


@pytest.mark.parametrize("carried", [False, True], ids=["from-zero", "incoming-state"])
def test_short_chunks_packed_with_others(kda: Kda, carried: bool) -> None:
    """Field bug B3: all lengths in one forward, then four decoded tokens; free slots hold NaN throughout."""
    before = 21 * carried
    xs = {slot: tiny.normal(before + n + 4, HIDDEN, seed=slot) for slot, n in enumerate(LENGTHS)}
    packed, alone = Slots(kda), Slots(kda)
    if carried:
        packed.run({slot: x[:before] for slot, x in xs.items()}, {})
    starts = dict.fromkeys(xs, before)
    out = packed.run({slot: x[before:-4] for slot, x in xs.items()}, starts).split(LENGTHS)
    decoded = [
        packed.run({slot: x[i - 4, None] for slot, x in xs.items()}, {s: before + LENGTHS[s] + i for s in xs})
        for i in range(4)
    ]
    for slot, x in xs.items():
        expected = alone.token_by_token(slot, x)
        close(out[slot], expected[before:-4])
        close(torch.stack([rows[slot] for rows in decoded]), expected[-4:])
        close(packed.at(slot), alone.at(slot))
    assert packed.state.matrix[len(LENGTHS) :].isnan().all()


def test_packing_and_foreign_states_change_nothing(kda: Kda) -> None:
    """Field bug B3: a segment's rows and states have the same bits whatever lies beside it."""
    x, other = tiny.normal(37, HIDDEN), tiny.normal(37, HIDDEN, seed=1)
    first, second = Slots(kda), Slots(kda, fill=1e9)
    a = first.run({3: x, 5: other}, {})[:37]
    b = second.run({3: x, 7: torch.full_like(other, float("nan"))}, {})[:37]
    assert torch.equal(a, b)
    assert torch.equal(first.state.matrix[3], second.state.matrix[3])
    assert torch.equal(first.state.conv[3], second.state.conv[3])


@pytest.mark.parametrize("split", range(1, 40))
def test_a_split_at_any_token(kda: Kda, split: int) -> None:
    x = tiny.normal(40, HIDDEN)
    whole, parts = Slots(kda), Slots(kda)
    expected = whole.run({0: x}, {})
    out = torch.cat([parts.run({0: x[:split]}, {}), parts.run({0: x[split:]}, {0: split})])
    close(out, expected)
    close(parts.at(0), whole.at(0))


@pytest.mark.parametrize("start", [0, 1, 16, 21])
def test_an_export_is_the_state_of_a_forward_that_ends_there(kda: Kda, start: int) -> None:
    x = tiny.normal(start + 70, HIDDEN)
    slot_of = {16: 10, 32: 11, 48: 12, 64: 13, 70: 14}
    exports = tuple(Export(n, slot) for n, slot in slot_of.items())
    slots = Slots(kda)
    if start:
        slots.run({0: x[:start]}, {})
    slots.run({0: x[start:]}, {0: start}, exports)
    for n, slot in slot_of.items():
        ending = Slots(kda)
        ending.token_by_token(0, x[: start + n])
        close(slots.at(slot), ending.at(0))
    assert torch.equal(slots.state.matrix[14], slots.state.matrix[0])


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_an_export_before_the_convolution_is_filled(kda: Kda, num_tokens: int) -> None:
    x = tiny.normal(num_tokens, HIDDEN)
    slots = Slots(kda)
    slots.run({0: x}, {}, (Export(num_tokens, 1),))
    assert torch.equal(slots.state.conv[1, : 3 - num_tokens], torch.zeros(3 - num_tokens, 3 * HEADS * DIM))
    for part in (slots.state.matrix, slots.state.conv):
        assert torch.equal(part[0], part[1])
    assert slots.state.conv[1].isfinite().all()
