"""Bytes, before anything is allocated: what a token and the whole cache cost.

They are those of the tensors that `engine/cache.py` would allocate, counted where tensors have no memory.
"""

from pathlib import Path

import torch
from torch import Tensor

from engine.cache import CacheShape, allocate_trunk
from model.config import Glm5NextConfig

KV_MEMORY_FRACTION = 0.25  # of the memory that is free when the engine starts
MAX_DEFAULT_KV_TOKENS = 1 << 20


def bytes_per_token(config: Glm5NextConfig, dtype: torch.dtype) -> int:
    """Latent row and share of a pooled index key, over all MLA layers of the trunk."""
    return cache_bytes(config, dtype, CacheShape(1, config.index_kpool, 0, 0)) // config.index_kpool


def cache_bytes(
    config: Glm5NextConfig, dtype: torch.dtype, shape: CacheShape, state_dtype: torch.dtype = torch.float32
) -> int:
    """All pages and slots."""
    return _tensor_bytes(allocate_trunk(config, shape, dtype, torch.device("meta"), state_dtype))


def default_kv_tokens(config: Glm5NextConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens of cache when the user asks for none: a share of the free memory, at most about a million."""
    budget = int(free_bytes(device) * KV_MEMORY_FRACTION)
    # A model cut to its first KDA layers has no attention cache at all.
    return min(budget // max(bytes_per_token(config, dtype), 1), MAX_DEFAULT_KV_TOKENS)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: no portable count in the standard library
        return 8 << 30
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def require_memory(what: str, needed: int, device: torch.device, remedy: str) -> None:
    """ValueError unless `needed` bytes are free on the device."""
    if needed > (free := free_bytes(device)):
        raise ValueError(f"{what} {needed:,} bytes, {free:,} are free on {device}; {remedy}")


def _tensor_bytes(owner: object) -> int:
    """Of all tensors below an object of dataclasses and dicts."""
    if isinstance(owner, Tensor):
        return owner.nbytes
    return sum(map(_tensor_bytes, (owner if isinstance(owner, dict) else vars(owner)).values()))
