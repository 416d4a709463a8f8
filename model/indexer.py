"""The k-pool indexer: which cached rows an MLA query attends to.

Rows are grouped into disjoint pools of `index_kpool`, counted from the sequence's first row. A complete pool
has one pooled key, a per-channel softmax average of its rows' index keys, constant from then on. The pool rule
for the query at row r:

* candidates are the pools whose *last* row is <= r;
* the best `index_topk / index_kpool` of them are selected (all, if there are fewer), ties to the lowest index;
* the tail, the (r + 1) % index_kpool newest rows, which belong to no complete pool, is always selected.

So at most `index_topk + index_kpool - 1` rows are selected, and a query that sees no more rows than that sees
all of them: plain causal attention. "Row" is the row of the layer's own sequence. The trunk caches row r in
slot r and pool p as entry p; the MTP layer files row r in slot r + 1 and pool p as entry p + 1
(`first_slot` = 1), the slot of the token that completes it. Grouping is always by row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.batch import Batch, Segment, physical_index, read_prefix, row_index
from model.config import Glm5NextConfig
from model.linear import Linear
from model.norms import layer_norm
from model.weights import WeightTree

SCORE_BLOCK_BYTES = 2 << 20  # of one intermediate; small enough to stay in a CPU's cache


@dataclass(frozen=True)
class IndexCache:
    """Index keys of one layer: pooled keys in pages, raw rows of the incomplete pool in each request's ring."""

    pooled: Tensor  # [num_blocks, block_size / index_kpool, index_head_dim]
    # [num_slots, ring_rows, 2, index_head_dim] float32: key and gate of row r at r % ring_rows. Rows of rejected drafts
    # are written too: with index_kpool + drafts rows they replace none that is still needed.
    ring: Tensor


@dataclass(frozen=True)
class Selection:
    """Rows selected for each query of one segment.

    The first `num_dense` queries attend to every row up to their own; query `num_dense` + i attends to
    `rows[i]` ([.., width] int64, -1 = unused).
    """

    num_dense: int
    rows: Tensor

    def last_row(self, row: int) -> "Selection":
        """The selection of the segment's last query, at `row`, spelled out for one later query to share."""
        if len(self.rows):
            return Selection(0, self.rows[-1:])
        return Selection(0, torch.arange(row + 1, device=self.rows.device).unsqueeze(0))


class Indexer:
    """One layer's indexer."""

    def __init__(self, tree: WeightTree, config: Glm5NextConfig, dtype: torch.dtype, first_slot: int) -> None:
        self.heads, self.head_dim, self.pool = config.index_n_heads, config.index_head_dim, config.index_kpool
        self.topk_pools, self.first_slot = config.index_topk_pools, first_slot
        self.dense_rows = config.index_topk + config.index_kpool - 1
        self.wq_b, self.wk = Linear(tree.linear("wq_b"), dtype), Linear(tree.linear("wk"), dtype)
        self.weights_proj = Linear(tree.linear("weights_proj"), dtype)
        self.gate = Linear(tree.linear("index_kpool_compress_gate"), dtype)
        self.ape = tree.tensor("index_kpool_compress_ape")  # [index_kpool, index_head_dim]
        self.k_norm_weight, self.k_norm_bias = tree.tensor("k_norm.weight"), tree.tensor("k_norm.bias")

    def write(self, x: Tensor, batch: Batch, cache: IndexCache) -> None:
        """Cache the index keys of the batch's rows. x [num_tokens, hidden]."""
        keys = layer_norm(self.wk(x), self.k_norm_weight, self.k_norm_bias)
        raw = torch.stack([keys, self.gate(x).float()], 1)
        for segment in batch.segments:
            self._write(raw[segment.rows], segment, cache)

    def select(self, x: Tensor, q_latent: Tensor, batch: Batch, cache: IndexCache) -> list[Selection]:
        """Rows that each row attends to, its own written. x [num_tokens, hidden], q_latent [num_tokens, rank]."""
        scored = [s for s in batch.segments if s.end - self.first_slot > self.dense_rows]
        if not scored:
            return [Selection(s.num_tokens, _no_rows(x.device)) for s in batch.segments]
        q = self.wq_b(q_latent).float().view(len(x), self.heads, self.head_dim)
        weights = self.weights_proj.in_float32(x) * (self.heads * self.head_dim) ** -0.5
        return [self._select_segment(q[s.rows], weights[s.rows], s, cache) for s in batch.segments]

    def pool_keys(self, raw: Tensor) -> Tensor:
        """raw [pools, index_kpool, 2, head_dim] (key, gate) -> pooled keys [pools, head_dim] float32."""
        keys, gates = raw.unbind(2)
        return ((gates + self.ape).softmax(1) * keys).sum(1)

    def _write(self, raw: Tensor, segment: Segment, cache: IndexCache) -> None:
        """Pool what the segment's rows complete, and leave the incomplete pool's raw rows in the ring."""
        ring, first = cache.ring[segment.slot], segment.start - self.first_slot
        if first < 0:  # slot 0 of the MTP layer is empty: no row belongs there
            raw, first = raw[1:], 0
        lead = first % self.pool
        rows = torch.cat([ring[ring_index(first - lead, first, ring)], raw]) if lead else raw
        pools = range(first // self.pool, (first + len(raw)) // self.pool)
        shared = min(max(segment.write_from // self.pool - self.first_slot - pools.start, 0), len(pools))
        if len(pools) > shared:
            completed = rows[shared * self.pool : len(pools) * self.pool]
            keys = self.pool_keys(completed.unflatten(0, (-1, self.pool)))
            entries = torch.arange(pools.start + shared, pools.stop, device=keys.device) + self.first_slot
            address = physical_index(segment.block_table, entries, cache.pooled.shape[1])
            cache.pooled.view(-1, self.head_dim)[address] = keys.to(cache.pooled.dtype)
        for export in segment.exports:
            end = segment.start + export.num_tokens - self.first_slot
            begin = end // self.pool * self.pool  # of the pool that is incomplete there
            if begin < end:
                kept_rows = rows[begin - first + lead : end - first + lead]
                cache.ring[export.slot][ring_index(begin, end, ring)] = kept_rows
        kept, end = min(len(raw), len(ring)), first + len(raw)
        if kept:
            ring[ring_index(end - kept, end, ring)] = raw[len(raw) - kept :]

    def _select_segment(self, q: Tensor, weights: Tensor, segment: Segment, cache: IndexCache) -> Selection:
        first = segment.start - self.first_slot
        num_dense = min(max(self.dense_rows - first, 0), segment.num_tokens)
        if num_dense == segment.num_tokens:
            return Selection(num_dense, _no_rows(q.device))
        q, weights, first = q[num_dense:], weights[num_dense:], first + num_dense
        num_entries = (first + len(q)) // self.pool + self.first_slot
        keys = read_prefix(cache.pooled, segment.block_table, num_entries)[self.first_slot :].float()
        block = max(1, SCORE_BLOCK_BYTES // (4 * self.heads * len(keys)))
        rows = []
        for begin in range(0, len(q), block):
            part = slice(begin, begin + block)
            query_rows = torch.arange(first + begin, first + min(begin + block, len(q)), device=q.device)
            scores = pool_scores(q[part], keys, weights[part])
            rows.append(select_rows(scores, query_rows, self.pool, self.topk_pools))
        return Selection(num_dense, torch.cat(rows))


def ring_index(start: int, end: int, ring: Tensor) -> Tensor | slice:
    """Where rows start .. end - 1 lie in a ring [ring_rows, ...]."""
    return row_index([row % len(ring) for row in range(start, end)], ring.device)


def _no_rows(device: torch.device) -> Tensor:
    return torch.empty(0, 0, dtype=torch.int64, device=device)


def pool_scores(q: Tensor, keys: Tensor, head_weights: Tensor) -> Tensor:
    """q [queries, heads, head_dim], keys [pools, head_dim], head_weights [queries, heads] -> [queries, pools].

    sum over heads of weight * relu(q . key), float32; the scale head_dim^-0.5 is folded into the weights.
    """
    per_head = (q.flatten(0, 1) @ keys.T).relu_().view(q.shape[0], q.shape[1], len(keys))
    return torch.bmm(head_weights.unsqueeze(1), per_head).squeeze(1)


def select_rows(scores: Tensor, query_rows: Tensor, pool: int, topk_pools: int) -> Tensor:
    """The pool rule. scores [queries, pools], query_rows [queries] int64, each seeing at least `topk_pools`
    complete pools -> selected rows [queries, topk_pools * pool + pool - 1] int64, ascending, -1 = unused tail.
    """
    num_pools = (query_rows + 1) // pool  # complete at each query
    candidate = torch.arange(scores.shape[1], device=scores.device) < num_pools.unsqueeze(1)
    chosen = top_mask(scores.masked_fill(~candidate, -torch.inf), topk_pools)
    pools = chosen.nonzero()[:, 1].view(len(scores), topk_pools)
    slots = torch.arange(pool, device=scores.device)
    body = (pools.unsqueeze(2) * pool + slots).flatten(1)
    tail = (num_pools * pool).unsqueeze(1) + slots[:-1]
    return torch.cat([body, tail.masked_fill(tail > query_rows.unsqueeze(1), -1)], dim=1)


def top_mask(scores: Tensor, k: int) -> Tensor:
    """Mask of the k largest entries of each row, ties to the lowest index. scores [rows, n], n >= k."""
    threshold = scores.topk(k, sorted=True).values[:, -1:]
    reaching = scores >= threshold
    if bool((reaching.sum(1) == k).all()):  # no tie at the threshold
        return reaching
    above, tied = scores > threshold, scores == threshold
    wanted = k - above.sum(1, keepdim=True)
    return above | (tied & (tied.cumsum(1) <= wanted))
