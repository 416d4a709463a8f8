"""Checkpoint parameters into memory: each one read once, straight into its final dtype and device.

Invariants: everything that can be checked from headers is checked before the first value is read; every
parameter is taken exactly once (`finish` proves it); float32 roles keep their bits; all scales multiply
afterwards. Besides the result, at most one tensor is alive at a time.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint import StoredParameter, part_shapes, raise_if_any, read_checkpoint
from model.config import Glm5NextConfig
from model.formats import Fp8BlockWeight, Mxfp8Weight, Nvfp4Weight, PlainWeight, Weight
from model.parameters import parameter_specs
from model.quantization import Format
from model.shards import Reader, StoredTensor, WeightError, shard_reader

Progress = Callable[[int, int], None]
# A format in memory: its class, and the dtypes of its parts; None stands for `linear_dtype`.
RESIDENT: Mapping[Format, tuple[type[Weight], tuple[torch.dtype | None, ...]]] = {
    "plain": (PlainWeight, (None,)),
    "nvfp4": (Nvfp4Weight, (torch.uint8, torch.float8_e4m3fn, torch.float32)),
    "fp8_block": (Fp8BlockWeight, (torch.float8_e4m3fn, torch.float32)),
    "mxfp8": (Mxfp8Weight, (torch.float8_e4m3fn, torch.float8_e8m0fnu)),
}


@dataclass(frozen=True)
class WeightTree:
    """Parameters under a prefix, relative to which names are given; all branches share the bookkeeping."""

    parameters: Mapping[str, StoredParameter]
    read: Reader
    linear_dtype: torch.dtype
    device: torch.device
    prefix: str = ""
    has_mtp: bool = False  # whether the checkpoint has a draft layer, asked for or not
    taken: Counter[str] = field(default_factory=Counter)

    def at(self, prefix: str) -> "WeightTree":
        """The branch below `prefix`, e.g. "layers.3.mlp"."""
        return replace(self, prefix=f"{self.prefix}{prefix}.")

    @property
    def resident_bytes(self) -> int:
        """Bytes that all parameters take once they are in memory, those of other branches too."""
        return sum(resident_bytes(p, self.linear_dtype) for p in self.parameters.values())

    def has(self, name: str) -> bool:
        """Whether the parameter `name` (full, or a Linear's without `.weight`) exists."""
        return self._find(name) is not None

    def tensor(self, name: str) -> Tensor:
        """A float32 role, e.g. "A_log" or "o_norm.weight": float32, the file's shape."""
        parameter = self._get(name)
        destination = self._empty(parameter.spec.shape, torch.float32)
        self._fill(parameter, [destination])
        return destination

    def linear(self, name: str) -> Weight:
        """A matrix [out, in] without `.weight`, e.g. "q_a_proj", in the format of the file."""
        return self.fused([name]) if self._get(name).format == "plain" else self.stack([name]).select(0)

    def pair(self, first: str, second: str) -> Weight:
        """Two matrices of one shape and input: plain ones as [2 * out, in], others as a stack [2, out, in]."""
        plain = self._get(first).format == "plain"
        return self.fused([first, second]) if plain else self.stack([first, second])

    def fused(self, names: Sequence[str]) -> PlainWeight:
        """Output rows of several Linears of one input, concatenated in order: [sum of out, in]; quantised ones,
        which no known checkpoint has here, are expanded."""
        parameters = [self._get(name) for name in names]
        rows = [parameter.spec.shape[0] for parameter in parameters]
        out, width = sum(rows), parameters[0].spec.shape[1]
        # A product with one row reads a wide matrix about twice as fast on a CPU if its outputs lie side by side.
        tensor = self._empty((width, out)).T if out > width else self._empty((out, width))
        for name, parameter, destination in zip(names, parameters, torch.split(tensor, rows), strict=True):
            if parameter.format == "plain":
                self._fill(parameter, [destination])
            else:
                destination.copy_(self.linear(name).expand(tensor.dtype))
        return PlainWeight(tensor)

    def stack(self, names: Sequence[str]) -> Weight:
        """Several matrices of one shape and format as [len(names), out, in]; each keeps its own scales."""
        parameters = [self._get(name) for name in names]
        format, shape = parameters[0].format, parameters[0].spec.shape
        assert all(parameter.format == format for parameter in parameters), "see checkpoint._mixed_stacks"
        weight_class, dtypes = RESIDENT[format]
        parts = zip(part_shapes(format, shape), dtypes, strict=True)
        stacks = [self._empty((len(names), *part_shape), dtype) for part_shape, dtype in parts]
        for parameter, *destinations in zip(parameters, *stacks, strict=True):
            self._fill(parameter, destinations)
        return weight_class(*stacks)

    def experts(self, *projections: str) -> Weight:
        """Routed experts' projections: [experts, out, in], or [experts, len(projections), out, in] for several."""
        experts = takewhile(lambda expert: self.has(f"experts.{expert}.{projections[0]}"), count())
        stack = self.stack([f"experts.{expert}.{name}" for expert in experts for name in projections])
        return stack if len(projections) == 1 else stack.grouped(len(projections))

    def finish(self) -> None:
        """Raise WeightError unless every parameter was taken exactly once."""
        wrong = (name for name in self.parameters if self.taken[name] != 1)
        problems = (f"{name}: taken {self.taken[name]} times by the model, expected once" for name in wrong)
        raise_if_any("model", problems, "the model and the checkpoint do not cover each other")

    def _find(self, name: str) -> StoredParameter | None:
        full = self.prefix + name
        return self.parameters.get(full) or self.parameters.get(f"{full}.weight")

    def _get(self, name: str) -> StoredParameter:
        parameter = self._find(name)
        if parameter is None:
            raise WeightError(f"the model asks for {self.prefix}{name}, which the checkpoint does not have")
        return parameter

    def _empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.linear_dtype, device=self.device)

    def _fill(self, parameter: StoredParameter, destinations: Sequence[Tensor]) -> None:
        """Copy the parts of a parameter into resident memory, casting on the way."""
        self.taken[parameter.spec.name] += 1
        for part, destination in zip(parameter.parts, destinations, strict=True):
            value = self.read(part).reshape(destination.shape)  # a file may hold a tensor scale as [1]
            if value.dtype == torch.uint8 and destination.dtype == torch.float8_e8m0fnu:
                value = value.view(torch.float8_e8m0fnu)
            destination.copy_(value)
        if parameter.divides:
            destinations[-1].reciprocal_()


def resident_bytes(parameter: StoredParameter, linear_dtype: torch.dtype, ranks: int = 1) -> int:
    """Memory of one rank's share. Raises WeightError if `ranks` does not divide the axis that is cut."""
    spec = parameter.spec
    shape = list(spec.shape)
    if spec.split is not None:
        if shape[spec.split] % ranks:
            raise WeightError(f"{spec.name} {shape} cannot be cut into {ranks} equal parts; use another --tp")
        shape[spec.split] //= ranks
    dtypes = RESIDENT[parameter.format][1] if spec.kind == "linear" else (torch.float32,)
    shapes = part_shapes(parameter.format, tuple(shape))
    return sum(math.prod(s) * (d or linear_dtype).itemsize for s, d in zip(shapes, dtypes, strict=True))


def load_weights(
    directory: Path,
    config: Glm5NextConfig,
    *,
    linear_dtype: torch.dtype,
    device: torch.device,
    with_mtp: bool | None = True,
    progress: Progress | None = None,
) -> WeightTree:
    """Check the whole directory from its headers and return the tree that reads it.

    `with_mtp` None: with the draft layer if there is one. `progress(done_bytes, total_bytes)` is called for every
    tensor. Raises WeightError.
    """
    checkpoint = read_checkpoint(directory)
    with_mtp = checkpoint.has_mtp if with_mtp is None else with_mtp
    if with_mtp and not checkpoint.has_mtp:
        raise WeightError(f"{directory} has no MTP layer; run with draft_tokens 0 or use one that has it")
    if with_mtp:
        raise_if_any(directory, checkpoint.mtp_problems, "the MTP layer is damaged; run with draft_tokens 0")
    names = [spec.name for spec in parameter_specs(config, with_mtp=with_mtp)]
    parameters = {name: checkpoint.parameters[name] for name in names}
    done_bytes, total_bytes = 0, sum(parameter.nbytes for parameter in parameters.values())
    read_shard = shard_reader()

    def read(tensor: StoredTensor) -> Tensor:
        nonlocal done_bytes
        done_bytes += tensor.nbytes
        if progress is not None:
            progress(done_bytes, total_bytes)
        return read_shard(tensor)

    return WeightTree(parameters, read, linear_dtype, device, has_mtp=checkpoint.has_mtp)
