"""The tensors behind the block manager's numbers: pages of the MLA layers, recurrent slots of the KDA layers.

Memory is reserved, not cleared: a request reads only what it wrote, and starts from zero state by its position.
"""

import torch

from engine.memory_plan import CacheShape
from model.config import Glm5NextConfig
from model.glm5_next import TrunkCache
from model.indexer import IndexCache
from model.kda import KdaState
from model.mla import MlaCache


def allocate_trunk(
    config: Glm5NextConfig, shape: CacheShape, dtype: torch.dtype, device: torch.device
) -> TrunkCache:
    """Pages and slots of every trunk layer. Latents and convolution rows in `dtype`, states in float32."""
    if shape.block_size % config.index_kpool:
        raise ValueError(
            f"block size {shape.block_size} is not a multiple of index_kpool {config.index_kpool}"
        )
    heads, head_dim = config.linear_num_heads, config.linear_head_dim
    conv_rows = config.linear_conv_kernel_dim - 1
    kda = {
        layer: KdaState(
            torch.empty(shape.num_slots, heads, head_dim, head_dim, device=device),
            torch.empty(shape.num_slots, conv_rows, 3 * config.linear_width, dtype=dtype, device=device),
        )
        for layer in config.kda_layers
    }
    return TrunkCache(kda, {layer: allocate_mla(config, shape, dtype, device) for layer in config.mla_layers})


def allocate_mla(
    config: Glm5NextConfig, shape: CacheShape, dtype: torch.dtype, device: torch.device
) -> MlaCache:
    """Pages and rings of one MLA layer, a trunk layer's or the MTP layer's."""
    entries, width = shape.block_size // config.index_kpool, config.index_head_dim
    index = IndexCache(
        torch.empty(shape.num_blocks, entries, width, dtype=dtype, device=device),
        torch.empty(shape.num_slots, shape.ring_rows, 2, width, device=device),
    )
    latent = torch.empty(shape.num_blocks, shape.block_size, config.kv_lora_rank, dtype=dtype, device=device)
    return MlaCache(latent, index)
