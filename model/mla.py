"""MLA without rope, in absorbed form over a paged latent cache; sparse by the k-pool indexer.

One latent row per token serves every head as key and value. The head's key projection is absorbed into its
query and the value projection is applied after the weighted sum, so attention runs on the cached rows as they
are. The scale is that of the un-absorbed head, qk_nope_head_dim^-0.5. Attention has no position code: order
comes from the KDA layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.batch import Batch, Segment, physical_index, read_prefix
from model.config import Glm5NextConfig
from model.indexer import IndexCache, Indexer, Selection
from model.linear import Linear
from model.norms import rms_norm
from model.weights import WeightTree

BLOCK_BYTES = 1 << 20  # of gathered latents, or of scores, at a time
# Several queries over a context of up to this many selections are cheaper as products with every row.
MASKED_WIDTHS = 12


@dataclass(frozen=True)
class MlaCache:
    """Pages of one MLA layer: `latent` [num_blocks, block_size, kv_lora_rank], slot s of a request in its
    block s // block_size, and the indexer's part."""

    latent: Tensor
    index: IndexCache


class Mla:
    """One MLA mixer with its indexer: x [num_tokens, hidden] -> y [num_tokens, hidden].

    `first_slot` 0: row r of the layer lies in slot r (trunk); 1: in slot r + 1, and slot 0 stays empty (MTP).
    """

    def __init__(self, tree: WeightTree, config: Glm5NextConfig, dtype: torch.dtype, first_slot: int) -> None:
        self.heads, self.first_slot, self.dtype = config.num_attention_heads, first_slot, dtype
        self.rms_eps, self.scale = config.rms_norm_eps, config.qk_nope_head_dim**-0.5
        self.q_a_proj = Linear(tree.linear("q_a_proj"), dtype)
        self.q_b_proj = Linear(tree.linear("q_b_proj"), dtype)
        self.kv_a_proj = Linear(tree.linear("kv_a_proj_with_mqa"), dtype)
        self.o_proj = Linear(tree.linear("o_proj"), dtype)
        self.q_a_norm = tree.tensor("q_a_layernorm.weight")
        self.kv_a_norm = tree.tensor("kv_a_layernorm.weight")
        kv_b = tree.linear("kv_b_proj").expand(dtype).view(self.heads, -1, config.kv_lora_rank)
        # [heads, qk_nope_head_dim, kv_lora_rank] and [heads, kv_lora_rank, v_head_dim]
        self.key_up = kv_b[:, : config.qk_nope_head_dim]
        self.value_up = kv_b[:, config.qk_nope_head_dim :].transpose(1, 2)
        self.indexer = Indexer(tree.at("indexer"), config, dtype, first_slot)

    def forward(self, x: Tensor, batch: Batch, cache: MlaCache) -> Tensor:
        """Write the batch's rows, then attend."""
        self.write(x, batch, cache)
        return self.attend(x, batch, cache)[0]

    def write(self, x: Tensor, batch: Batch, cache: MlaCache) -> None:
        """Cache the batch's latent rows and index keys; rows depend on x [num_tokens, hidden] alone."""
        latent = rms_norm(self.kv_a_proj(x), self.kv_a_norm, self.rms_eps).to(cache.latent.dtype)
        for segment in batch.segments:
            self._write(latent[segment.rows], segment, cache.latent)
        self.indexer.write(x, batch, cache.index)

    def attend(
        self, x: Tensor, batch: Batch, cache: MlaCache, selections: list[Selection] | None = None
    ) -> tuple[Tensor, list[Selection]]:
        """y [num_tokens, hidden] of rows that are written, and the rows each of them saw: those of `selections`, if
        given (MTP iterations 2..k, whose own rows need not be written)."""
        q_latent = rms_norm(self.q_a_proj(x), self.q_a_norm, self.rms_eps)
        if selections is None:
            selections = self.indexer.select(x, q_latent, batch, cache.index)
        q = self.q_b_proj(q_latent).view(len(x), self.heads, -1) * self.scale
        # [num_tokens, heads, kv_lora_rank]
        absorbed = torch.bmm(q.transpose(0, 1), self.key_up).transpose(0, 1)
        mixed = torch.empty_like(absorbed)
        for segment, selection in zip(batch.segments, selections, strict=True):
            mixed[segment.rows] = self._attend(absorbed[segment.rows], segment, selection, cache.latent)
        out = torch.bmm(mixed.transpose(0, 1), self.value_up).transpose(0, 1).flatten(1)
        return self.o_proj(out), selections

    def _write(self, latent: Tensor, segment: Segment, cache: Tensor) -> None:
        first = max(segment.start, self.first_slot, segment.write_from)
        slots = torch.arange(first, max(segment.end, first), device=latent.device)
        address = physical_index(segment.block_table, slots, cache.shape[1])
        cache.view(-1, cache.shape[2])[address] = latent[len(latent) - len(slots) :]

    def _attend(self, q: Tensor, segment: Segment, selection: Selection, cache: Tensor) -> Tensor:
        """q [num_tokens, heads, kv_lora_rank], already scaled -> weighted latents of the same shape."""
        out, dense = torch.zeros_like(q), selection.num_dense
        first, end = segment.start - self.first_slot, segment.end - self.first_slot
        empty = max(-first, 0)  # the row of the MTP layer's token 0: nothing to see
        if dense > empty:
            latents = self._prefix(segment, first + dense, cache)
            out[empty:dense] = prefix_attention(q[empty:dense], latents, first + empty)
        queries, width = segment.num_tokens - dense, selection.rows.shape[1]
        if queries > 1 and end <= MASKED_WIDTHS * width:
            latents = self._prefix(segment, end, cache)
            out[dense:] = prefix_attention(q[dense:], latents, first + dense, selection.rows)
            return out
        block = BLOCK_BYTES // max(width * cache.shape[2] * cache.element_size(), 1) or 1
        for begin in range(0, len(selection.rows), block):
            rows = selection.rows[begin : begin + block]
            slots = rows.clamp(min=0).flatten() + self.first_slot
            address = physical_index(segment.block_table, slots, cache.shape[1])
            gathered = cache.view(-1, cache.shape[2])[address].view(*rows.shape, -1).to(self.dtype)
            part = slice(dense + begin, dense + begin + len(rows))
            out[part] = gathered_attention(q[part], gathered, rows >= 0)
        return out

    def _prefix(self, segment: Segment, num_rows: int, cache: Tensor) -> Tensor:
        """Latents of the layer's first `num_rows` rows, [num_rows, kv_lora_rank]."""
        rows = read_prefix(cache, segment.block_table, num_rows + self.first_slot)
        return rows[self.first_slot :].to(self.dtype)


def gathered_attention(q: Tensor, latents: Tensor, used: Tensor) -> Tensor:
    """q [queries, heads, kv_lora_rank] over its own latents [queries, width, kv_lora_rank]; used [queries, width]."""
    scores = torch.bmm(q, latents.transpose(1, 2)).float().masked_fill_(~used.unsqueeze(1), -torch.inf)
    return torch.bmm(scores.softmax(-1).to(q.dtype), latents)


def prefix_attention(q: Tensor, latents: Tensor, first: int, rows: Tensor | None = None) -> Tensor:
    """Attention by products with every latent that a block of queries can see, the others hidden.

    q [queries, heads, kv_lora_rank] of rows first, first + 1, ...; latents [first + queries, kv_lora_rank];
    rows [queries, width] int64 selected, -1 = unused; without them a query sees every row up to its own.
    """
    queries, heads, width = q.shape
    out, block = torch.empty_like(q), max(1, BLOCK_BYTES // (4 * heads * len(latents)))
    for begin in range(0, queries, block):
        part, end = q[begin : begin + block], first + min(begin + block, queries)
        visible = latents[:end]
        if rows is None:
            mask = torch.full((len(part), end), -torch.inf, device=q.device).triu_(first + begin + 1)
        else:
            selected = rows[begin : begin + block]
            # The column after the last takes the unused entries and is cut off.
            mask = torch.full((len(part), end + 1), -torch.inf, device=q.device)
            mask = mask.scatter_(1, selected.masked_fill(selected < 0, end), 0.0)[:, :-1]
        scores = (part.reshape(-1, width) @ visible.T).float().view(len(part), heads, -1)
        weights = scores.add_(mask.unsqueeze(1)).softmax(-1).to(q.dtype)
        out[begin : begin + block] = (weights.view(-1, end) @ visible).view_as(part)
    return out
