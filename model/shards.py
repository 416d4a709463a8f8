"""The safetensors files of a directory: their headers, checked against the file sizes and the index.

Only headers are read here, so a directory of 200 GB takes seconds. Values come through `shard_reader`, memory
mapped, one tensor at a time.
"""

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from model.config import read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class WeightError(ValueError):
    """A checkpoint that cannot be loaded; the message says found, expected and what to do."""


class StoredTensor(NamedTuple):
    """One tensor of a file: its name there, file dtype (header spelling), shape and size in bytes."""

    name: str
    shard: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def describe(self) -> str:
        """Dtype and shape, for messages."""
        return f"{self.dtype} {list(self.shape)} in {self.shard.name}"


Reader = Callable[[StoredTensor], Tensor]  # gives the values on the CPU in the file's dtype


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """All tensors by file name. Raises WeightError on a missing or truncated shard, a name that is there twice,
    or an index that disagrees with the shards.
    """
    index = directory / INDEX
    if not index.exists():
        if not (directory / SINGLE).exists():
            raise WeightError(f"{directory} holds neither {INDEX} nor {SINGLE}; expected a checkpoint")
        return _merge([directory / SINGLE])
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise WeightError(f"{index} has no weight_map of tensor to shard; download it again")
    shards = [directory / name for name in sorted(set(weight_map.values()))]
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        found = f"{len(missing)} of {len(shards)} shards missing"
        raise WeightError(f"{directory}: {found}, download {missing[:5]}")
    tensors = _merge(shards)
    for name in weight_map.keys() ^ tensors.keys():
        side = "the index but in no shard" if name in weight_map else "a shard but not in the index"
        raise WeightError(f"{directory}: tensor {name} is in {side}; download index and shards again")
    return tensors


def _merge(shards: Iterable[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for tensor in (tensor for shard in shards for tensor in _read_header(shard)):
        first = tensors.setdefault(tensor.name, tensor)
        if first is not tensor:
            raise WeightError(f"{tensor.name} is in both {first.shard.name} and {tensor.shard.name}")
    return tensors


def _read_header(shard: Path) -> list[StoredTensor]:
    """Raises WeightError if the header is broken, or the file shorter or longer than it says."""
    size = shard.stat().st_size
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length or length > MAX_HEADER_BYTES:
            raise WeightError(f"{shard}: {size} bytes hold no complete header; download it again")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
            header.pop("__metadata__", None)
            tensors = [_stored(shard, name, entry) for name, entry in header.items()]
            spans = sorted(entry["data_offsets"] for entry in header.values())
            end = max((stop for _, stop in spans), default=0)
            if any(start != stop for (_, stop), (start, _) in zip([[0, 0], *spans], spans, strict=False)):
                raise ValueError("its tensors overlap or leave gaps")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise WeightError(f"{shard}: broken header ({error}); download it again") from None
    if size != 8 + length + end:
        raise WeightError(f"{shard}: {size} bytes, its header declares {8 + length + end}; download it again")
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        ((name, count),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name} is there {count} times")
    return entries


def _stored(shard: Path, name: str, entry: dict[str, Any]) -> StoredTensor:
    start, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if dtype in DTYPES and end - start != DTYPES[dtype].itemsize * math.prod(shape):
        raise ValueError(f"{name} {dtype} {list(shape)} has {end - start} bytes")
    return StoredTensor(name, shard, dtype, shape, end - start)


def shard_reader() -> Reader:
    """Values as views of the mapped files, which stay open with the reader; the caller copies them."""
    opened: Callable[[Path], Any] = functools.cache(functools.partial(safe_open, framework="pt"))
    return lambda tensor: opened(tensor.shard).get_tensor(tensor.name)
