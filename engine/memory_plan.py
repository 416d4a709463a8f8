"""Bytes, before anything is allocated: what a token and the whole cache cost.

They are those of the tensors that `engine/cache.py` would allocate, counted where tensors have no memory.
"""

import ctypes
from collections.abc import Iterable
from pathlib import Path

import torch

from engine.cache import CacheShape, allocate_draft, allocate_trunk
from model.config import Glm5NextConfig
from model.mla import MlaCache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KV_MEMORY_FRACTION = 0.25  # of the memory that is free when the engine starts
MAX_DEFAULT_KV_TOKENS = 1 << 20


def cache_parts(config: Glm5NextConfig, shape: CacheShape) -> dict[str, int]:
    """Bytes by kind. A running request has one recurrent slot, and with drafts one replay row and one companion; a
    checkpoint has a slot and a companion."""
    device = torch.device("meta")
    trunk = allocate_trunk(config, shape, device)
    parts = {"pages": _pages(trunk.mla.values())}
    state, rings = trunk.recurrent, sum(layer.index.ring.nbytes for layer in trunk.mla.values())
    parts["recurrent slots"] = state.matrix.nbytes + state.conv.nbytes + rings
    if shape.draft_tokens:
        draft = allocate_draft(config, shape, device)
        parts["draft pages"] = _pages([draft.mla])
        parts["replay rows"] = state.replay.nbytes + state.conv_tail.nbytes
        parts["companions"] = draft.hidden.nbytes + draft.mla.index.ring.nbytes
    return parts


def bytes_per_token(config: Glm5NextConfig, dtype: torch.dtype, draft_tokens: int = 0) -> int:
    """Latent row and share of a pooled index key, over all MLA layers, the draft layer's if it is used."""
    shape = CacheShape(1, config.index_kpool, 0, draft_tokens=draft_tokens, dtype=dtype)
    return sum(cache_parts(config, shape).values()) // config.index_kpool


def default_kv_tokens(
    config: Glm5NextConfig, dtype: torch.dtype, device: torch.device, draft_tokens: int
) -> int:
    """Tokens of cache when the user asks for none: a share of the free memory, at most about a million."""
    budget = int(free_bytes(device) * KV_MEMORY_FRACTION)
    # A model cut to its first KDA layers has no attention cache at all.
    return min(budget // max(bytes_per_token(config, dtype, draft_tokens), 1), MAX_DEFAULT_KV_TOKENS)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: no portable count in the standard library
        return 8 << 30
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def keep_freed_memory() -> None:
    """Let this process keep what it frees, where the C library is glibc. By default large blocks go back to the system,
    and every step pays for them anew, page by page: half the time of a verification on a CPU."""
    if hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest value that is allowed
        library.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def require_memory(what: str, needed: int, device: torch.device, remedy: str) -> None:
    """ValueError unless `needed` bytes are free on the device."""
    if needed > (free := free_bytes(device)):
        raise ValueError(f"{what} {needed:,} bytes, {free:,} are free on {device}; {remedy}")


def _pages(layers: Iterable[MlaCache]) -> int:
    return sum(layer.latent.nbytes + layer.index.pooled.nbytes for layer in layers)
