"""Our NVFP4 packer writes ModelOpt's bytes, and the unpacker returns its values, bit for bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from model import nvfp4

VECTORS = load_file(Path(__file__).parents[1] / "data" / "nvfp4_vectors.safetensors")
CASES = ["normal_bf16", "normal_fp32", "wide_range_bf16", "ties_fp32", "zeros_and_tiny_bf16"]
FP8 = torch.float8_e4m3fn


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def test_every_code_has_its_value_in_either_nibble() -> None:
    values = VECTORS["table.e2m1"]
    byte = torch.arange(256, dtype=torch.uint8)
    scale = torch.ones(256, 1, dtype=FP8)
    unpacked = nvfp4.dequantize(byte[:, None].repeat(1, 8), scale, torch.tensor(1.0))
    assert torch.equal(unpacked[:, 0::2], values[byte.int() & 15][:, None].expand(256, 8))
    assert torch.equal(unpacked[:, 1::2], values[byte.int() >> 4][:, None].expand(256, 8))


def test_rounding_ties_signs_and_saturation() -> None:
    assert torch.equal(nvfp4.encode_e2m1(VECTORS["round.e2m1.input"]), VECTORS["round.e2m1.code"])


@pytest.mark.parametrize("case", CASES)
def test_bytes_equal_modelopt(case: str) -> None:
    codes, block_scale, tensor_scale = nvfp4.quantize(VECTORS[f"{case}.input"])
    assert torch.equal(codes, VECTORS[f"{case}.modelopt.weight"])
    assert torch.equal(block_scale.view(torch.uint8), VECTORS[f"{case}.modelopt.weight_scale"])
    assert torch.equal(bits(tensor_scale), bits(VECTORS[f"{case}.modelopt.weight_scale_2"]))


@pytest.mark.parametrize("case", CASES)
def test_values_equal_modelopt(case: str) -> None:
    parts = [VECTORS[f"{case}.modelopt.{name}"] for name in ("weight", "weight_scale", "weight_scale_2")]
    values = nvfp4.dequantize(parts[0], parts[1].view(FP8), parts[2])
    assert torch.equal(bits(values), bits(VECTORS[f"{case}.modelopt.dequantized"]))


@pytest.mark.parametrize("case", CASES)
def test_divisor_form_means_the_same_values(case: str) -> None:
    codes, scale = VECTORS[f"{case}.ct.weight_packed"], VECTORS[f"{case}.ct.weight_scale"].view(FP8)
    divisor = VECTORS[f"{case}.ct.weight_global_scale"].squeeze()
    ones = nvfp4.dequantize(codes, torch.ones_like(scale.float()).to(FP8), torch.tensor(1.0))
    expected = ones * (scale.float() / divisor).repeat_interleave(16, 1)
    # One reciprocal and one product more than a division: two float32 steps at most.
    torch.testing.assert_close(nvfp4.dequantize(codes, scale, 1 / divisor), expected, rtol=2.4e-7, atol=0)


def test_known_answer_low_nibble_first() -> None:
    """Byte 0xA3 with block scale 2.0: multiplier 0.5 and divisor 2.0 both give 1.5, -1.0."""
    codes, scale = torch.full((1, 8), 0xA3, dtype=torch.uint8), torch.tensor([[2.0]]).to(FP8)
    for multiplier in (torch.tensor(0.5), torch.tensor(2.0).reciprocal()):
        assert nvfp4.dequantize(codes, scale, multiplier)[0, :2].tolist() == [1.5, -1.0]


def test_an_all_zero_matrix_stays_zero() -> None:
    codes, block_scale, tensor_scale = nvfp4.quantize(torch.zeros(2, 32))
    assert not codes.any()
    assert block_scale.float().eq(1.0).all()
    assert not nvfp4.dequantize(codes, block_scale, tensor_scale).any()


@pytest.mark.parametrize("weight", [torch.zeros(2, 24), torch.zeros(16), torch.full((1, 16), torch.nan)])
def test_what_cannot_be_quantised_is_refused(weight: Tensor) -> None:
    with pytest.raises(ValueError, match="found"):
        nvfp4.quantize(weight)
