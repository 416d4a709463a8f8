"""Every weight format expands to the numbers its parts stand for, alone and out of a stack of experts."""

import pytest
import torch

from model import nvfp4
from model.formats import Fp8BlockWeight, Mxfp8Weight, Nvfp4Weight, PlainWeight, Weight

FP8 = torch.float8_e4m3fn


def stacks() -> list[Weight]:
    """One stack [3, 160, 96] of each format; 160 and 96 are no multiples of an FP8 block."""
    values = torch.randn(3, 160, 96, generator=torch.Generator().manual_seed(0))
    packed = [torch.stack(parts) for parts in zip(*map(nvfp4.quantize, values), strict=True)]
    exponents = torch.arange(120, 129, dtype=torch.uint8)[torch.arange(3 * 160 * 3) % 9].view(3, 160, 3)
    return [
        PlainWeight(values),
        Fp8BlockWeight(values.to(FP8), torch.tensor([0.5, 2.0, 3.0, 1.5, 0.25, 7.0]).view(3, 2, 1)),
        Mxfp8Weight(values.to(FP8), exponents.view(torch.float8_e8m0fnu)),
        Nvfp4Weight(*packed),
    ]


by_format = pytest.mark.parametrize("stack", stacks(), ids=lambda stack: type(stack).__name__)


@by_format
def test_selected_experts_are_rows_of_the_stack(stack: Weight) -> None:
    expanded = stack.expand(torch.float32)
    assert stack.shape == expanded.shape == (3, 160, 96)
    chosen = torch.tensor([2, 0])
    assert torch.equal(stack.select(chosen).expand(torch.float32), expanded[chosen])
    assert stack.select(chosen).shape == (2, 160, 96)
    assert torch.equal(stack.select(1).expand(torch.float32), expanded[1])
    assert stack.select(1).shape == (160, 96)


@by_format
def test_a_narrow_result_is_the_float32_result_rounded_once(stack: Weight) -> None:
    assert torch.equal(stack.expand(torch.bfloat16), stack.expand(torch.float32).bfloat16())


def test_fp8_scale_of_row_and_column_block() -> None:
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    values = Fp8BlockWeight(torch.ones(130, 200).to(FP8), scale).expand(torch.float32)
    corners = [values[127, 127], values[127, 128], values[128, 127], values[129, 199]]
    assert [corner.item() for corner in corners] == [1.0, 2.0, 3.0, 4.0]


def test_mxfp8_exponent_byte_means_two_to_the_byte_minus_127() -> None:
    exponents = torch.tensor([[127, 120], [134, 1]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values = Mxfp8Weight(torch.full((2, 64), 1.5).to(FP8), exponents).expand(torch.float32)
    expected = [1.5, 1.5 * 2.0**-7, 1.5 * 2.0**7, 1.5 * 2.0**-126]
    assert values[:, [0, 32]].flatten().tolist() == expected


def test_plain_weight_of_the_same_dtype_is_not_copied() -> None:
    tensor = torch.ones(2, 2)
    assert PlainWeight(tensor).expand(torch.float32) is tensor


@pytest.mark.parametrize("ratio", [4.0, 0.25, 1.0])
def test_gate_and_up_halves_keep_their_own_tensor_scales(ratio: float) -> None:
    """Field bug A1: with gate's scale for both, the up half is off by gate / up."""
    codes = torch.arange(128, dtype=torch.uint8).view(16, 8)
    block_scale = torch.ones(16, 1).to(FP8)
    gate_scale, up_scale = torch.tensor([0.001, 0.003]), torch.tensor([0.001, 0.003]) * ratio
    both = [codes.expand(2, 16, 8), block_scale.view(torch.uint8).expand(2, 16, 1).view(FP8)]
    gate = Nvfp4Weight(*both, gate_scale).expand(torch.float32)
    up = Nvfp4Weight(*both, up_scale).expand(torch.float32)
    for expert in range(2):
        alone = nvfp4.dequantize(codes, block_scale, up_scale[expert])
        assert torch.equal(up[expert], alone)
    # Ratios are powers of two, so float32 keeps them exactly.
    assert torch.equal(up, gate * ratio)


def test_bytes_held_are_those_of_the_parts() -> None:
    plain, fp8, mxfp8, packed = (sum(part.nbytes for part in stack.parts()) for stack in stacks())
    elements = 3 * 160 * 96
    assert plain == 4 * elements
    assert fp8 == elements + 3 * 2 * 4
    assert mxfp8 == elements + elements // 32
    assert packed == elements // 2 + elements // 16 + 3 * 4
