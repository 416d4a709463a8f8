"""The tensors behind the block manager's numbers: pages of the MLA layers, recurrent slots of the KDA layers.

Memory is reserved, not cleared: a request reads only what it wrote, and starts from zero state by its position.
"""

from dataclasses import dataclass

import torch

from model.config import Glm5NextConfig
from model.glm5_next import TrunkCache
from model.indexer import IndexCache
from model.kda import KdaState
from model.mla import MlaCache


@dataclass(frozen=True)
class CacheShape:
    """Sizes of the cache: pages of `block_size` tokens, recurrent slots, and raw index rows per slot."""

    num_blocks: int
    block_size: int
    num_slots: int
    ring_rows: int


def allocate_trunk(
    config: Glm5NextConfig,
    shape: CacheShape,
    dtype: torch.dtype,
    device: torch.device,
    state_dtype: torch.dtype = torch.float32,
) -> TrunkCache:
    """Pages and slots of every trunk layer. Latents and convolution rows in `dtype`, states in `state_dtype`."""
    slots, head_dim = shape.num_slots, config.linear_head_dim
    matrix = (slots, config.linear_num_heads, head_dim, head_dim)
    conv = (slots, config.linear_conv_kernel_dim - 1, 3 * config.linear_width)
    kda = {
        layer: KdaState(
            torch.empty(matrix, dtype=state_dtype, device=device),
            torch.empty(conv, dtype=dtype, device=device),
        )
        for layer in config.kda_layers
    }
    return TrunkCache(kda, {layer: allocate_mla(config, shape, dtype, device) for layer in config.mla_layers})


def allocate_mla(
    config: Glm5NextConfig, shape: CacheShape, dtype: torch.dtype, device: torch.device
) -> MlaCache:
    """Pages and rings of one MLA layer, a trunk layer's or the MTP layer's."""
    blocks, size, pool = shape.num_blocks, shape.block_size, config.index_kpool
    if size % pool:
        raise ValueError(f"block size {size} is not a multiple of index_kpool {pool}")
    pooled = torch.empty(blocks, size // pool, config.index_head_dim, dtype=dtype, device=device)
    ring = torch.empty(shape.num_slots, shape.ring_rows, 2, config.index_head_dim, device=device)
    latent = torch.empty(blocks, size, config.kv_lora_rank, dtype=dtype, device=device)
    return MlaCache(latent, IndexCache(pooled, ring))
