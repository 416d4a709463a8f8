"""The NVFP4 format: 4-bit e2m1 codes, one e4m3 scale per 16 input columns, one float32 scale per matrix.

Invariants: the even column lies in the low nibble; every scale multiplies; code 8 (minus zero) reads as +0.
`quantize` follows ModelOpt's weight rule bit for bit; `dequantize` is `value * (block_scale * tensor_scale)`
in float32, in this order.
"""

import functools
import math

import torch
from torch import Tensor

BLOCK = 16  # input columns that share one block scale
E2M1_MAX, E4M3_MAX, E4M3_TINY = 6.0, 448.0, 2.0**-9
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Upper bound of each code, inclusive. A tie goes to the even code, so bounds below an even code end one
# float32 step earlier.
_STEP_DOWN = 1.0 - 2.0**-24
E2M1_BOUNDS = (0.25, 0.75 * _STEP_DOWN, 1.25, 1.75 * _STEP_DOWN, 2.5, 3.5 * _STEP_DOWN, 5.0)


def encode_e2m1(values: Tensor) -> Tensor:
    """Nearest e2m1 code of each float32 value, as uint8 0..15; magnitudes above 6 saturate."""
    bounds = torch.tensor(E2M1_BOUNDS, dtype=torch.float32, device=values.device)
    magnitude = torch.bucketize(values.abs().contiguous(), bounds)
    return (magnitude + 8 * (values < 0)).to(torch.uint8)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise [out, in] (in a multiple of 16) to codes uint8 [out, in/2], block scales e4m3 [out, in/16] and
    the tensor scale float32 []. Raises ValueError on a width that is no multiple of 16 or a non-finite value.
    """
    if weight.dim() != 2 or weight.shape[1] % BLOCK:
        raise ValueError(f"found shape {list(weight.shape)}; NVFP4 needs [out, in], in a multiple of {BLOCK}")
    blocks = weight.float().view(len(weight), -1, BLOCK)
    block_amax = blocks.abs().amax(-1)
    amax = block_amax.max()
    if not math.isfinite(amax.item()):
        raise ValueError("found a value that is not finite; NVFP4 cannot represent it")
    tensor_scale = amax / (E2M1_MAX * E4M3_MAX)
    block_scale = (block_amax / (E2M1_MAX * tensor_scale)).clamp(E4M3_TINY, E4M3_MAX)
    block_scale = torch.where(block_amax > 0, block_scale, 1.0).to(torch.float8_e4m3fn)
    scale = block_scale.float() * tensor_scale
    codes = encode_e2m1(blocks / scale[..., None])
    # A scale is 0 where the whole matrix is; 0 / 0 is no code.
    codes = torch.where(scale[..., None] > 0, codes, 0)
    return pack(codes.flatten(1)), block_scale, tensor_scale


def pack(codes: Tensor) -> Tensor:
    """Codes uint8 [out, in] to bytes uint8 [out, in/2], the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def dequantize(codes: Tensor, block_scale: Tensor, tensor_scale: Tensor) -> Tensor:
    """float32 [.., out, in] from codes uint8 [.., out, in/2], block_scale e4m3 [.., out, in/16] and
    tensor_scale float32 [..].
    """
    pairs = _pair_table(codes.device).index_select(0, codes.flatten().int())
    values = pairs.view(torch.float32).view(*block_scale.shape, BLOCK)
    scale_bytes = block_scale.view(torch.uint8).flatten().int()
    scale = _e4m3_table(codes.device).index_select(0, scale_bytes).view(block_scale.shape)
    scale = scale * tensor_scale[..., None, None]
    return values.mul_(scale[..., None]).flatten(-2)


# Table look-ups: on a CPU several times faster than arithmetic on the bits.
@functools.cache
def _e4m3_table(device: torch.device) -> Tensor:
    """float32 [256]: the value of each e4m3 byte."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


@functools.cache
def _pair_table(device: torch.device) -> Tensor:
    """int64 [256]: per byte the float32 pair (low nibble, high nibble), moved as one word."""
    value = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32) + 0.0
    byte = torch.arange(256)
    return torch.stack((value[byte & 15], value[byte >> 4]), dim=-1).view(torch.int64).flatten().to(device)
