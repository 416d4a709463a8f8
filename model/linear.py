"""Matrix products: which dtype they run in, and one callable around a weight of any format.

A product runs in the dtype its plain weight is resident in. That is the activation dtype, except on a CPU
without bfloat16 instructions, where bfloat16 products are ten times slower than float32 ones: there plain
weights are resident as float32 (the same values). Quantised weights stay packed and are expanded per call.
Results keep the product's dtype; what is stored between layers or steps is rounded by the one who stores it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model.formats import Weight


def matmul_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that products of `dtype` activations run in on this device."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        if not (capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")):
            return torch.float32
    return dtype


@dataclass(frozen=True)
class Linear:
    """y = x @ weight.T for a stored weight [out, in] of any format."""

    weight: Weight
    dtype: torch.dtype  # of the product

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] of any float dtype -> [..., out] in `self.dtype`."""
        x = x if x.dtype == self.dtype else x.to(self.dtype)
        return functional.linear(x, self.weight.expand(self.dtype))

    def in_float32(self, x: Tensor) -> Tensor:
        """The same product in float32, for router logits and index head weights (near ties flip otherwise)."""
        return functional.linear(x.float(), self.weight.expand(torch.float32))
