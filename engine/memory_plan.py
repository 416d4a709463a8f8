"""Bytes, before anything is allocated: what a token, a recurrent slot and the whole cache cost.

Pure functions over the config. `engine/cache.py` allocates exactly these bytes (a test compares).
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from model.config import Glm5NextConfig

KV_MEMORY_FRACTION = 0.25  # of the memory that is free when the engine starts
MAX_DEFAULT_KV_TOKENS = 1 << 20


@dataclass(frozen=True)
class CacheShape:
    """Sizes of the cache: pages of `block_size` tokens, recurrent slots, and raw index rows per slot."""

    num_blocks: int
    block_size: int
    num_slots: int
    ring_rows: int


def bytes_per_token(config: Glm5NextConfig, dtype: torch.dtype) -> int:
    """Latent row and share of a pooled index key, over all MLA layers of the trunk."""
    per_pool = config.index_kpool * config.kv_lora_rank + config.index_head_dim
    return len(config.mla_layers) * per_pool * dtype.itemsize // config.index_kpool


def bytes_per_slot(config: Glm5NextConfig, dtype: torch.dtype, ring_rows: int) -> int:
    """One recurrent slot: KDA matrices (float32), convolution rows, and the index ring of the MLA layers."""
    matrix = config.linear_width * config.linear_head_dim * torch.float32.itemsize
    conv = (config.linear_conv_kernel_dim - 1) * 3 * config.linear_width * dtype.itemsize
    ring = ring_rows * 2 * config.index_head_dim * torch.float32.itemsize
    return len(config.kda_layers) * (matrix + conv) + len(config.mla_layers) * ring


def cache_bytes(config: Glm5NextConfig, dtype: torch.dtype, shape: CacheShape) -> int:
    """All pages and slots."""
    pages = shape.num_blocks * shape.block_size * bytes_per_token(config, dtype)
    return pages + shape.num_slots * bytes_per_slot(config, dtype, shape.ring_rows)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: no portable count in the standard library
        return 8 << 30
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def default_kv_tokens(config: Glm5NextConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens of cache when the user asks for none: a share of the free memory, at most about a million."""
    budget = int(free_bytes(device) * KV_MEMORY_FRACTION)
    # A model cut to its first KDA layers has no attention cache at all.
    return min(budget // max(bytes_per_token(config, dtype), 1), MAX_DEFAULT_KV_TOKENS)
