"""How one weight matrix, or a stack of experts, lies in memory, and how it becomes numbers again.

Every format has the same two operations: `expand` gives the matrix in a compute dtype, `select` picks experts
from a stack without expanding it. All scales multiply. Nothing here synchronises with a device.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from model import nvfp4

FP8_BLOCK = 128  # rows and columns that share one scale of an FP8 block weight
MXFP8_GROUP = 32  # input columns that share one exponent of an MXFP8 weight


@dataclass(frozen=True)
class Weight(ABC):
    """A matrix [out, in] or a stack [.., out, in] of them; the first axis of every part is the stack's."""

    def parts(self) -> tuple[Tensor, ...]:
        """The stored tensors, in field order."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, [out, in] or [experts, out, in]: that of the first part, unless it is packed."""
        return tuple(self.parts()[0].shape)

    @abstractmethod
    def expand(self, dtype: torch.dtype) -> Tensor:
        """The values [.., out, in] in `dtype`, computed in float32."""

    def grouped(self, size: int) -> Self:
        """A stack [n, out, in] seen as [n / size, size, out, in]."""
        return type(self)(*(part.unflatten(0, (-1, size)) for part in self.parts()))

    def select(self, index: Tensor | int) -> Self:
        """Along the first axis of a stack: int64 [k] gives a stack of k (a copy), an int the entry (a view)."""
        if isinstance(index, Tensor):
            return type(self)(*(part.index_select(0, index) for part in self.parts()))
        return type(self)(*(part[index] for part in self.parts()))


@dataclass(frozen=True)
class PlainWeight(Weight):
    """Values as they are, [.., out, in] in a float dtype."""

    tensor: Tensor

    def expand(self, dtype: torch.dtype) -> Tensor:
        return self.tensor if self.tensor.dtype == dtype else self.tensor.to(dtype)


@dataclass(frozen=True)
class Fp8BlockWeight(Weight):
    """codes e4m3 [.., out, in], scale float32 [.., ceil(out/128), ceil(in/128)]."""

    codes: Tensor
    scale: Tensor

    def expand(self, dtype: torch.dtype) -> Tensor:
        rows = self.scale.repeat_interleave(FP8_BLOCK, -2)[..., : self.shape[-2], :]
        scale = rows.repeat_interleave(FP8_BLOCK, -1)[..., : self.shape[-1]]
        return (self.codes.float() * scale).to(dtype)


@dataclass(frozen=True)
class Mxfp8Weight(Weight):
    """codes e4m3 [.., out, in], exponents e8m0 [.., out, in/32] (byte b means 2^(b-127))."""

    codes: Tensor
    exponents: Tensor

    def expand(self, dtype: torch.dtype) -> Tensor:
        groups = self.codes.float().view(*self.exponents.shape, MXFP8_GROUP)
        return (groups * self.exponents.float()[..., None]).flatten(-2).to(dtype)


@dataclass(frozen=True)
class Nvfp4Weight(Weight):
    """codes uint8 [.., out, in/2], block_scale e4m3 [.., out, in/16], tensor_scale float32 [..]."""

    codes: Tensor
    block_scale: Tensor
    tensor_scale: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    def expand(self, dtype: torch.dtype) -> Tensor:
        values = nvfp4.dequantize(self.codes, self.block_scale, self.tensor_scale)
        return values if dtype == torch.float32 else values.to(dtype)
