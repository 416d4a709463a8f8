"""The tensors behind the block manager's numbers: pages of the MLA layers, recurrent slots of the KDA layers.

Memory is reserved, not cleared: a request reads only what it wrote, and starts from zero state by its position.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import Glm5NextConfig
from model.glm5_next import TrunkCache
from model.indexer import IndexCache
from model.kda import KdaState
from model.mla import MlaCache
from model.mtp import DraftCache


@dataclass(frozen=True)
class CacheShape:
    """Sizes of the cache: pages of `block_size` tokens, recurrent slots (as many companions), and, for up to
    `draft_tokens` drafts a step, replay rows of `num_running` requests. `own_index`: draft passes write index keys.
    `dtype`: of latents, pooled index keys and convolution rows; `hidden_dtype`: of the trunk's activations."""

    num_blocks: int
    block_size: int
    num_slots: int
    num_running: int = 0
    draft_tokens: int = 0
    own_index: bool = False
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    hidden_dtype: torch.dtype = torch.float32


def allocate_trunk(config: Glm5NextConfig, shape: CacheShape, device: torch.device) -> TrunkCache:
    """Pages and slots of every trunk layer."""
    layers, heads, head_dim = len(config.kda_layers), config.linear_num_heads, config.linear_head_dim
    rows, depth = shape.num_running if shape.draft_tokens else 0, shape.draft_tokens
    width, history = 3 * config.linear_width, config.linear_conv_kernel_dim - 1

    def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    recurrent = KdaState(
        matrix=empty(shape.num_slots, layers, heads, head_dim, head_dim, dtype=shape.state_dtype),
        conv=empty(shape.num_slots, history, layers, width, dtype=shape.dtype),
        replay=empty(rows, 1 + depth, layers, heads, 3 * head_dim + 1, dtype=torch.float32),
        conv_tail=empty(rows, depth, layers, width, dtype=shape.dtype),
    )
    kda = {layer: recurrent.layer(index) for index, layer in enumerate(config.kda_layers)}
    ring_rows = config.index_kpool + depth
    mla = {layer: allocate_mla(config, shape, device, ring_rows) for layer in config.mla_layers}
    return TrunkCache(recurrent, kda, mla)


def allocate_draft(config: Glm5NextConfig, shape: CacheShape, device: torch.device) -> DraftCache:
    """Pages and companions of the draft layer."""
    # Rows of known tokens never have to be taken back. Only passes with an index of their own write others.
    ring_rows = config.index_kpool + (shape.draft_tokens - 1 if shape.own_index else 0)
    mla = allocate_mla(config, shape, device, ring_rows)
    hidden = torch.empty(shape.num_slots, config.hidden_size, dtype=shape.hidden_dtype, device=device)
    return DraftCache(mla, hidden)


def allocate_mla(config: Glm5NextConfig, shape: CacheShape, device: torch.device, ring_rows: int) -> MlaCache:
    """Pages and rings of one MLA layer, a trunk layer's or the draft layer's."""
    blocks, size, pool = shape.num_blocks, shape.block_size, config.index_kpool
    if size % pool:
        raise ValueError(f"block size {size} is not a multiple of index_kpool {pool}")
    pooled = torch.empty(blocks, size // pool, config.index_head_dim, dtype=shape.dtype, device=device)
    ring = torch.empty(shape.num_slots, ring_rows, 2, config.index_head_dim, device=device)
    latent = torch.empty(blocks, size, config.kv_lora_rank, dtype=shape.dtype, device=device)
    return MlaCache(latent, IndexCache(pooled, ring))
