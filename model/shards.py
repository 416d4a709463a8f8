"""The safetensors files of a directory: their headers, checked against the file sizes and the index.

Only headers are read here, so a directory of 200 GB takes seconds. Values come through `ShardReader`, memory
mapped, one tensor at a time.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from model.config import read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class WeightError(ValueError):
    """A checkpoint that cannot be loaded; the message says found, expected and what to do."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: its name there, file dtype (header spelling), shape and size in bytes."""

    name: str
    shard: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def describe(self) -> str:
        """Dtype and shape, for messages."""
        return f"{self.dtype} {list(self.shape)} in {self.shard.name}"


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """All tensors by file name. Raises WeightError on a missing or truncated shard, a name in two shards,
    or an index that disagrees with the shards.
    """
    index = directory / INDEX
    if not index.exists():
        if not (directory / SINGLE).exists():
            raise WeightError(f"{directory} holds neither {INDEX} nor {SINGLE}; expected a checkpoint")
        return _merge([directory / SINGLE])
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise WeightError(f"{index} has no weight_map; download it again")
    shards = [directory / name for name in sorted(set(weight_map.values()))]
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise WeightError(
            f"{directory}: {len(missing)} of {len(shards)} shards missing, download {missing[:5]}"
        )
    tensors = _merge(shards)
    for name in weight_map.keys() ^ tensors.keys():
        side = "the index but in no shard" if name in weight_map else "a shard but not in the index"
        raise WeightError(f"{directory}: tensor {name} is in {side}; download index and shards again")
    return tensors


def _merge(shards: Iterable[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for tensor in read_header(shard):
            if tensor.name in tensors:
                raise WeightError(
                    f"{tensor.name} is in both {tensors[tensor.name].shard.name} and {shard.name}"
                )
            tensors[tensor.name] = tensor
    return tensors


def read_header(shard: Path) -> list[StoredTensor]:
    """Tensors of one safetensors file. Raises WeightError if the file is shorter or longer than it says."""
    size = shard.stat().st_size
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length or length > MAX_HEADER_BYTES:
            raise WeightError(f"{shard}: {size} bytes hold no complete header; download it again")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = [_stored(shard, name, entry) for name, entry in header.items()]
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise WeightError(f"{shard}: broken header ({error}); download it again") from None
    if size != 8 + length + end:
        raise WeightError(f"{shard}: {size} bytes, its header declares {8 + length + end}; download it again")
    return tensors


def _stored(shard: Path, name: str, entry: dict[str, Any]) -> StoredTensor:
    start, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if dtype in DTYPE_BYTES and end - start != DTYPE_BYTES[dtype] * math.prod(shape):
        raise ValueError(f"{name} {dtype} {list(shape)} has {end - start} bytes")
    return StoredTensor(name, shard, dtype, shape, end - start)


class ShardReader:
    """Values of stored tensors, on the CPU in the file's dtype, straight from the memory map."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def read(self, tensor: StoredTensor) -> Tensor:
        """The tensor as a view of the mapped file; the caller copies it."""
        if tensor.shard not in self._open:
            self._open[tensor.shard] = safe_open(tensor.shard, framework="pt")
        value: Tensor = self._open[tensor.shard].get_tensor(tensor.name)
        return value
