"""Checkpoint parameters into memory: each one read once, straight into its final dtype and device.

Invariants: everything that can be checked from headers is checked before the first value is read; every
parameter is taken exactly once (`finish` proves it); float32 roles keep their bits; all scales multiply
afterwards. Besides the result, at most one tensor is alive at a time.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from model.checkpoint import Checkpoint, StoredParameter, part_shapes, raise_if_any, read_checkpoint
from model.config import Glm5NextConfig, read_json
from model.formats import Fp8BlockWeight, Mxfp8Weight, Nvfp4Weight, PlainWeight, Weight
from model.parameters import parameter_specs
from model.quantization import Format
from model.shards import ShardReader, StoredTensor, WeightError

Progress = Callable[[int, int], None]
# Resident dtypes of each format's parts; None stands for `linear_dtype`.
PART_DTYPES: Mapping[Format, tuple[torch.dtype | None, ...]] = {
    "plain": (None,),
    "nvfp4": (torch.uint8, torch.float8_e4m3fn, torch.float32),
    "fp8_block": (torch.float8_e4m3fn, torch.float32),
    "mxfp8": (torch.float8_e4m3fn, torch.float8_e8m0fnu),
}
WEIGHT_CLASSES: Mapping[Format, type[Weight]] = {
    "plain": PlainWeight,
    "nvfp4": Nvfp4Weight,
    "fp8_block": Fp8BlockWeight,
    "mxfp8": Mxfp8Weight,
}


class Reader(Protocol):
    """Where the values of stored tensors come from: shards, or a random generator."""

    def read(self, tensor: StoredTensor) -> Tensor: ...


class WeightStore:
    """The parameters to be taken, and the bookkeeping that all branches of a tree share."""

    def __init__(
        self,
        parameters: Mapping[str, StoredParameter],
        reader: Reader,
        linear_dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        self.parameters = parameters
        self.linear_dtype = linear_dtype
        self.device = device
        self._reader = reader
        self._progress = progress
        self._taken: Counter[str] = Counter()
        self._done_bytes = 0
        self._total_bytes = sum(parameter.nbytes for parameter in parameters.values())

    def allocate(self, format: Format, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Uninitialised resident tensors for the parts of a weight of `format`."""
        dtypes = PART_DTYPES[format]
        return [
            torch.empty(shape, dtype=dtype or self.linear_dtype, device=self.device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]

    def fill(self, parameter: StoredParameter, destinations: Sequence[Tensor]) -> None:
        """Copy the parts of a parameter into resident memory, casting on the way."""
        self._taken[parameter.spec.name] += 1
        for part, destination in zip(parameter.parts, destinations, strict=True):
            value = self._reader.read(part).reshape(destination.shape)
            if value.dtype == torch.uint8 and destination.dtype == torch.float8_e8m0fnu:
                value = value.view(torch.float8_e8m0fnu)
            destination.copy_(value)
        if parameter.divides:
            destinations[-1].reciprocal_()
        self._done_bytes += parameter.nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)

    def problems(self) -> list[str]:
        """Parameters not taken exactly once."""
        counts = {name: self._taken[name] for name in self.parameters if self._taken[name] != 1}
        return [f"{name}: taken {count} times by the model, expected once" for name, count in counts.items()]


class WeightTree:
    """Parameters under a prefix. Names are the file's, relative to the prefix."""

    def __init__(self, store: WeightStore, prefix: str = "") -> None:
        self._store = store
        self._prefix = prefix

    def at(self, prefix: str) -> "WeightTree":
        """The branch below `prefix`, e.g. "layers.3.mlp"; shares the bookkeeping."""
        return WeightTree(self._store, f"{self._prefix}{prefix}.")

    @property
    def resident_bytes(self) -> int:
        """Bytes that all parameters of the store take once they are in memory."""
        return sum(resident_bytes(p, self._store.linear_dtype) for p in self._store.parameters.values())

    def has(self, name: str) -> bool:
        """Whether the parameter `name` (full, or a Linear's without `.weight`) exists."""
        return self._find(name) is not None

    def tensor(self, name: str) -> Tensor:
        """A float32 role, e.g. "A_log" or "o_norm.weight": float32, the file's shape."""
        parameter = self._get(name)
        destination = torch.empty(parameter.spec.shape, dtype=torch.float32, device=self._store.device)
        self._store.fill(parameter, [destination])
        return destination

    def linear(self, name: str) -> Weight:
        """A matrix [out, in] without `.weight`, e.g. "q_a_proj", in the format of the file."""
        parameter = self._get(name)
        parts = self._store.allocate(parameter.format, _part_shapes(parameter))
        self._store.fill(parameter, parts)
        return WEIGHT_CLASSES[parameter.format](*parts)

    def fused(self, names: Sequence[str]) -> PlainWeight:
        """Output rows of several plain Linears of one input, concatenated in order: [sum of out, in]."""
        parameters = [self._get(name) for name in names]
        for parameter in parameters:
            if parameter.format != "plain":
                raise WeightError(f"{parameter.spec.name} is {parameter.format}; only plain weights fuse")
        rows = [parameter.spec.shape[0] for parameter in parameters]
        (tensor,) = self._store.allocate("plain", [(sum(rows), parameters[0].spec.shape[1])])
        for parameter, destination in zip(parameters, torch.split(tensor, rows), strict=True):
            self._store.fill(parameter, [destination])
        return PlainWeight(tensor)

    def stack(self, names: Sequence[str]) -> Weight:
        """Several matrices of one shape and format as [len(names), out, in]; each keeps its own scales."""
        parameters = [self._get(name) for name in names]
        first = parameters[0]
        for other in parameters:
            if other.format != first.format:
                raise WeightError(
                    f"{first.spec.name} is stored as {first.format}, {other.spec.name} as {other.format};"
                    " matrices that are used together must share a format"
                )
        stacks = self._store.allocate(
            first.format, [(len(parameters), *shape) for shape in _part_shapes(first)]
        )
        for index, parameter in enumerate(parameters):
            self._store.fill(parameter, [stack[index] for stack in stacks])
        return WEIGHT_CLASSES[first.format](*stacks)

    def experts(self, *projections: str) -> Weight:
        """Routed experts' projections: [experts, out, in], or [experts, len(projections), out, in] for several."""
        names: list[str] = []
        while self.has(f"experts.{len(names) // len(projections)}.{projections[0]}"):
            names += [f"experts.{len(names) // len(projections)}.{name}" for name in projections]
        stack = self.stack(names)
        return stack if len(projections) == 1 else stack.grouped(len(projections))

    def finish(self) -> None:
        """Raise WeightError unless every parameter was taken exactly once."""
        raise_if_any("model", self._store.problems(), "the model and the checkpoint do not cover each other")

    def _find(self, name: str) -> StoredParameter | None:
        full = self._prefix + name
        return self._store.parameters.get(full) or self._store.parameters.get(f"{full}.weight")

    def _get(self, name: str) -> StoredParameter:
        parameter = self._find(name)
        if parameter is None:
            raise WeightError(f"the model asks for {self._prefix}{name}, which the checkpoint does not have")
        return parameter


def resident_bytes(parameter: StoredParameter, linear_dtype: torch.dtype, ranks: int = 1) -> int:
    """Memory of one rank's share. Raises WeightError if `ranks` does not divide the axis that is cut."""
    spec = parameter.spec
    shape = list(spec.shape)
    if spec.split is not None:
        if shape[spec.split] % ranks:
            raise WeightError(f"{spec.name} {shape} cannot be cut into {ranks} equal parts; use another --tp")
        shape[spec.split] //= ranks
    if spec.kind == "float32":
        return math.prod(shape) * torch.float32.itemsize
    dtypes = PART_DTYPES[parameter.format]
    shapes = part_shapes(parameter.format, tuple(shape))
    return sum(math.prod(s) * (d or linear_dtype).itemsize for s, d in zip(shapes, dtypes, strict=True))


def _part_shapes(parameter: StoredParameter) -> list[tuple[int, ...]]:
    # A file may hold a tensor scale as [1]; in memory it is [].
    return [part.shape if part.shape != (1,) else () for part in parameter.parts]


def load_weights(
    directory: Path,
    config: Glm5NextConfig,
    *,
    linear_dtype: torch.dtype,
    device: torch.device,
    with_mtp: bool = True,
    num_layers: int | None = None,
    progress: Progress | None = None,
) -> WeightTree:
    """Check the whole directory from its headers and return the tree that reads it.

    `progress(done_bytes, total_bytes)` is called after every parameter. Raises WeightError.
    """
    checkpoint = read_checkpoint(directory, config, read_json(directory / "config.json"))
    if with_mtp:
        _require_mtp(directory, checkpoint)
    names = [spec.name for spec in parameter_specs(config, num_layers=num_layers, with_mtp=with_mtp)]
    parameters = {name: checkpoint.parameters[name] for name in names}
    return WeightTree(WeightStore(parameters, ShardReader(), linear_dtype, device, progress))


def _require_mtp(directory: Path, checkpoint: Checkpoint) -> None:
    if not checkpoint.has_mtp:
        raise WeightError(f"{directory} has no MTP layer; run without drafts or use one that has it")
    raise_if_any(directory, checkpoint.mtp_problems, "the MTP layer is damaged; run without drafts")
