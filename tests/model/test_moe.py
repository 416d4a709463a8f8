"""Experts are chosen in float32 and clamped in every path and format, and both expert paths are equal."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from model import nvfp4
from model.moe import Mlp, Moe, choose_experts
from model.quantization import Format
from tests import tiny

EXPERTS, HIDDEN, INTER = tiny.TINY.n_routed_experts, tiny.TINY.hidden_size, tiny.TINY.moe_intermediate_size
SCALING = tiny.TINY.routed_scaling_factor
FORMATS: tuple[Format, ...] = ("plain", "fp8_block", "mxfp8", "nvfp4")
TRUNK, MTP = "layers.1.mlp", f"layers.{tiny.MTP_LAYER}.mlp"
by_format = pytest.mark.parametrize("format", FORMATS)


def real_router() -> tuple[Tensor, Tensor]:
    """Logits [1000, 288] and biases as narrow as released ones."""
    uniform = torch.rand(288, generator=torch.Generator().manual_seed(0))
    return tiny.normal(1000, 288), 6.817 + 0.246 * uniform


def expert_sets(experts: Tensor) -> list[set[int]]:
    return [set(row) for row in experts.tolist()]


def test_router_bias_rounded_experts_rechosen() -> None:
    """Field bug A4: the chosen experts are those of a float64 router; a bfloat16 bias changes most."""
    logits, bias = real_router()
    expected = expert_sets((logits.double().sigmoid() + bias.double()).topk(8).indices)
    assert expert_sets(choose_experts(logits, bias, 8, SCALING)[0]) == expected
    rounded = expert_sets(choose_experts(logits, bias.bfloat16().float(), 8, SCALING)[0])
    assert sum(a != b for a, b in zip(rounded, expected, strict=True)) > 500


def test_bias_chooses_and_never_weighs() -> None:
    logits, bias = real_router()
    experts, weights = choose_experts(logits, bias, 8, SCALING)
    torch.testing.assert_close(weights.sum(1), torch.full((1000,), SCALING))
    scores = logits.double().sigmoid().gather(1, experts)
    torch.testing.assert_close(
        weights.double(), SCALING * scores / scores.sum(1, keepdim=True), atol=1e-6, rtol=0
    )
    shifted, shifted_weights = choose_experts(logits, bias + 1.0, 8, SCALING)
    assert torch.equal(shifted, experts) and torch.equal(shifted_weights, weights)


def test_ties_choose_the_lowest_expert() -> None:
    logits = torch.zeros(3, 288)
    logits[1, 100:] = 1.0
    logits[2, [7, 200, 287]] = 1.0
    experts, _ = choose_experts(logits, torch.zeros(288), 4, SCALING)
    assert experts.tolist() == [[0, 1, 2, 3], [100, 101, 102, 103], [7, 200, 287, 0]]


def forced_projections(prefix: str, inter: int) -> dict[str, Tensor]:
    """Of x = e0: (gate, up) = (50, -50), (50, 50), (-50, 50) in the first channels, passed on by `down`."""
    gate, up = torch.zeros(inter, HIDDEN), torch.zeros(inter, HIDDEN)
    gate[:3, 0], up[:3, 0] = torch.tensor([50.0, 50.0, -50.0]), torch.tensor([-50.0, 50.0, 50.0])
    down = torch.eye(HIDDEN, inter)
    projections = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return {f"{prefix}.{name}.weight": values for name, values in projections.items()}


def assert_clamped(y: Tensor, factor: float = 1.0) -> None:
    # silu(10) * 10 = 99.99546; the gate has no lower clamp, so silu(-50) * 10 = -1e-20 (with one: -4.5e-3).
    expected = factor * torch.tensor([-99.99546, 99.99546, 0.0])
    torch.testing.assert_close(y[:, :3].float(), expected.expand(len(y), 3), atol=1e-3, rtol=0)


rows = pytest.mark.parametrize("num_rows", [1, 40])


@by_format
@rows
def test_clamp_missing_in_the_dense_layer(format: Format, num_rows: int) -> None:
    """Field bug B2."""
    overrides = forced_projections("layers.0.mlp", tiny.TINY.intermediate_size)
    mlp = Mlp(tiny.tree(overrides, format=format).at("layers.0.mlp"), tiny.TINY, torch.float32)
    assert_clamped(mlp.forward(torch.eye(HIDDEN)[:1].expand(num_rows, HIDDEN)))


@by_format
@rows
@pytest.mark.parametrize("prefix", [TRUNK, MTP], ids=["trunk", "mtp"])
@pytest.mark.parametrize("forced", ["routed", "shared"])
def test_clamp_missing_in_an_expert(format: Format, num_rows: int, prefix: str, forced: str) -> None:
    """Field bug B2: the forced experts alone contribute; routed ones are scaled, the shared one is not."""
    shared, routed = f"{prefix}.shared_experts", [f"{prefix}.experts.{i}" for i in range(EXPERTS)]
    on, off = (routed, [shared]) if forced == "routed" else ([shared], routed)
    overrides = {f"{name}.down_proj.weight": torch.zeros(HIDDEN, INTER) for name in off}
    for name in on:
        overrides |= forced_projections(name, INTER)
    moe = Moe(tiny.tree(overrides, format=format).at(prefix), tiny.TINY, torch.float32)
    y = moe.forward(torch.eye(HIDDEN)[:1].expand(num_rows, HIDDEN))
    assert_clamped(y, SCALING if forced == "routed" else 1.0)


@by_format
def test_one_token_and_many_give_the_same_rows(format: Format) -> None:
    moe = Moe(tiny.tree(format=format).at(TRUNK), tiny.TINY, torch.float32)
    x = tiny.normal(50, HIDDEN)
    together = moe.forward(x)
    alone = torch.cat([moe.forward(row[None]) for row in x])
    # Other shapes, other summation order; outputs of order 1.
    torch.testing.assert_close(alone, together, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ratio", [4.0, 0.25, 1.0])
def test_gate_and_up_tensor_scales_in_the_experts(ratio: float) -> None:
    """Field bug A1, in both expert paths: each projection has its own scale, another ratio per expert."""
    overrides = {}
    for expert in range(EXPERTS):
        gate_scale = torch.tensor(0.01 + 0.002 * expert)
        overrides[f"{TRUNK}.experts.{expert}.gate_proj.weight_scale_2"] = gate_scale
        up_scale = gate_scale * ratio ** (1 + expert % 2)
        overrides[f"{TRUNK}.experts.{expert}.up_proj.weight_scale_2"] = up_scale
    weights = tiny.tree(overrides, format="nvfp4")
    moe = Moe(weights.at(TRUNK), tiny.TINY, torch.float32)
    x = tiny.normal(20, HIDDEN)
    expected = reference_moe(moe, overrides, x)
    torch.testing.assert_close(moe.forward(x).double(), expected, atol=1e-4, rtol=1e-4)
    alone = torch.cat([moe.forward(row[None]) for row in x])
    torch.testing.assert_close(alone.double(), expected, atol=1e-4, rtol=1e-4)


def reference_moe(moe: Moe, scales: dict[str, Tensor], x: Tensor) -> Tensor:
    """float64, every projection dequantised alone with the scale that the test chose."""
    tree = tiny.tree(scales, format="nvfp4").at(TRUNK)
    chosen, weights = moe.router.route(x)
    y = moe.shared.forward(x).double()
    for expert in range(EXPERTS):
        gate, up, down = (
            projection(tree, scales, f"experts.{expert}.{name}")
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        inner = functional.silu((x.double() @ gate.T).clamp(max=10)) * (x.double() @ up.T).clamp(-10, 10)
        share = (weights * (chosen == expert)).sum(1, keepdim=True)
        y += share * (inner @ down.T)
    return y


def projection(tree: tiny.WeightTree, scales: dict[str, Tensor], name: str) -> Tensor:
    codes, block_scale, tensor_scale = tree.linear(name).parts()
    own = scales.get(f"{TRUNK}.{name}.weight_scale_2", tensor_scale)
    return nvfp4.dequantize(codes, block_scale, own).double()
