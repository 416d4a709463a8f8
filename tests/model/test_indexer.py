"""Which rows a query sees: the pool rule at any length, chunk border and tie, whatever else pages hold."""

import pytest
import torch
from torch import Tensor

from engine.cache import CacheShape, allocate_mla
from model.batch import Batch, Segment, read_prefix
from model.indexer import Indexer, Selection, select_rows, top_mask
from tests import tiny
from tests.driver import CPU, chunked, poison

POOL, TOPK = tiny.TINY.index_kpool, tiny.TINY.index_topk
DENSE_ROWS = TOPK + POOL - 1
LAYER = "layers.3.self_attn.indexer"
NUM_TOKENS = 50


@pytest.fixture(scope="module")
def indexer() -> Indexer:
    return Indexer(tiny.tree().at(LAYER), tiny.TINY, torch.float32, 0)


def inputs(num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor]:
    """x and the query latent."""
    return tiny.normal(num_tokens, tiny.TINY.hidden_size), tiny.normal(
        num_tokens, tiny.TINY.q_lora_rank, seed=1
    )


class Run:
    """One sequence through an indexer: key sets by query, and its cache."""

    def __init__(self, indexer: Indexer, fill: float = float("nan")) -> None:
        self.indexer, self.length = indexer, 0
        self.key_sets: list[set[int]] = []
        self.table = tiny.shuffled_tables(1, NUM_TOKENS + 16, 16)[0]
        self.cache = allocate_mla(tiny.TINY, CacheShape(len(self.table), 16, 2), CPU, 8).index
        poison({0: self.cache}, fill)

    def feed(self, x: Tensor, q_latent: Tensor) -> Selection:
        segment = Segment(0, len(x), self.length, 1, self.table)
        batch = Batch(torch.zeros(len(x)), (segment,))
        self.indexer.write(x, batch, self.cache)
        (selection,) = self.indexer.select(x, q_latent, batch, self.cache)
        first = self.length - self.indexer.first_slot
        self.key_sets += [set(range(first + i + 1)) for i in range(selection.num_dense)]
        self.key_sets += [set(row) - {-1} for row in selection.rows.tolist()]
        self.length += len(x)
        return selection

    def pooled(self, count: int) -> Tensor:
        return read_prefix(self.cache.pooled, self.table, count)


def run(
    indexer: Indexer, chunk: int = NUM_TOKENS, fill: float = float("nan"), count: int = NUM_TOKENS
) -> Run:
    x, q_latent = inputs()
    sequence = Run(indexer, fill)
    for part in chunked(range(count), chunk):
        sequence.feed(x[part[0] : part[-1] + 1], q_latent[part[0] : part[-1] + 1])
    return sequence


# The buffers hold 12345, 0 or NaN before the run.
@pytest.mark.parametrize("fill", [12345.0, 0.0, float("nan")])
@pytest.mark.parametrize("chunk", [16, 1])
def test_rows_with_fewer_pools_than_the_buffer_is_wide(indexer: Indexer, chunk: int, fill: float) -> None:
    """Field bug C1: the tokens seen at each length."""
    seen = dict(enumerate(run(indexer, chunk, fill, count=16).key_sets, start=1))
    for length in range(1, DENSE_ROWS + 1):
        assert seen[length] == set(range(length))
    pools_of_three = [set(range(8)), set(range(4)) | set(range(8, 12)), set(range(4, 12))]
    assert seen[12] in pools_of_three
    assert seen[13] - {12} in pools_of_three and 12 in seen[13]
    for length in range(12, 17):
        assert len(seen[length]) == TOPK + length % POOL


def test_unused_entries_are_minus_one_and_the_width_is_fixed() -> None:
    scores = tiny.normal(6, 5)
    rows = select_rows(scores, torch.arange(11, 17), POOL, TOPK // POOL)
    assert rows.shape == (6, DENSE_ROWS)
    assert [(row == -1).sum().item() for row in rows] == [3, 2, 1, 0, 3, 2]
    tails = [set(row[TOPK:].tolist()) - {-1} for row in rows]
    assert tails == [set(), {12}, {12, 13}, {12, 13, 14}, set(), {16}]


def test_a_pool_is_a_candidate_when_its_last_row_is_visible() -> None:
    """The best score belongs to a pool that only the last query may use."""
    scores = torch.tensor([[0.0, 1.0, 2.0, 9.0]]).expand(2, 4)
    rows = select_rows(scores, torch.tensor([14, 15]), POOL, 2)
    assert rows[0].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert rows[1].tolist() == [8, 9, 10, 11, 12, 13, 14, 15, -1, -1, -1]


@pytest.mark.parametrize("seed", range(5))
def test_ties_go_to_the_lowest_index(seed: int) -> None:
    scores = torch.randint(-2, 3, (40, 30), generator=torch.Generator().manual_seed(seed)).float()
    for k in (1, 7, 30):
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(
            top_mask(scores, k), torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)
        )


def test_when_every_score_is_zero_the_first_pools_are_selected() -> None:
    """With all heads' weights zero every pool ties, in one forward and token by token."""
    zero = torch.zeros(tiny.TINY.index_n_heads, tiny.TINY.hidden_size)
    silent = Indexer(
        tiny.tree({f"{LAYER}.weights_proj.weight": zero}).at(LAYER), tiny.TINY, torch.float32, first_slot=0
    )
    for chunk in (NUM_TOKENS, 1):
        for row, seen in enumerate(run(silent, chunk).key_sets[DENSE_ROWS:], start=DENSE_ROWS):
            tail = set(range((row + 1) // POOL * POOL, row + 1))
            assert seen == set(range(TOPK)) | tail


@pytest.mark.parametrize("chunk", [*range(1, 10), 16, 23])
def test_a_prefill_row_selects_what_its_decode_step_selects(indexer: Indexer, chunk: int) -> None:
    """The ring carries raw rows across every border; random scores lie far apart against float32 rounding."""
    whole, parts = run(indexer), run(indexer, chunk)
    assert parts.key_sets == whole.key_sets
    count = NUM_TOKENS // POOL
    torch.testing.assert_close(parts.pooled(count), whole.pooled(count), atol=1e-5, rtol=0)
    assert any(seen != set(range(row + 1)) for row, seen in enumerate(whole.key_sets[: DENSE_ROWS + 1]))


def test_a_pooled_key_is_constant_once_complete(indexer: Indexer) -> None:
    x, q_latent = inputs()
    sequence, keys = Run(indexer), []
    for t in range(NUM_TOKENS):
        sequence.feed(x[t : t + 1], q_latent[t : t + 1])
        count = (t + 1) // POOL
        now = sequence.pooled(count)
        for before in keys[-1:]:
            assert torch.equal(now[: len(before)], before)
        keys.append(now.clone())
        # Nothing is written before its pool is complete.
        assert sequence.cache.pooled.isnan().all(-1).sum() == 16 // POOL * len(sequence.table) - count


def test_a_pooled_key_weighs_its_rows_per_channel(indexer: Indexer) -> None:
    raw = tiny.normal(3, POOL, 2, tiny.TINY.index_head_dim)
    pooled = indexer.pool_keys(raw)
    for channel in range(tiny.TINY.index_head_dim):
        weights = (raw[:, :, 1, channel] + indexer.ape[:, channel]).softmax(1)
        expected = (weights * raw[:, :, 0, channel]).sum(1)
        torch.testing.assert_close(pooled[:, channel], expected)


@pytest.mark.parametrize("chunk", [*range(1, 10), NUM_TOKENS])
def test_the_mtp_layer_groups_by_row(indexer: Indexer, chunk: int) -> None:
    """Row r is token r + 1: the same pools as a trunk layer fed from token 1, filed one entry later."""
    shifted = Indexer(tiny.tree().at(LAYER), tiny.TINY, torch.float32, first_slot=1)
    x, q_latent = inputs()
    trunk, mtp = Run(indexer), Run(shifted)
    trunk.feed(x[1:], q_latent[1:])
    for part in chunked(range(NUM_TOKENS), chunk):
        mtp.feed(x[part[0] : part[-1] + 1], q_latent[part[0] : part[-1] + 1])
    assert mtp.key_sets[1:] == trunk.key_sets
    count = (NUM_TOKENS - 1) // POOL
    assert mtp.pooled(1).isnan().all()
    torch.testing.assert_close(mtp.pooled(count + 1)[1:], trunk.pooled(count), atol=1e-5, rtol=0)


def test_a_block_of_scores_does_not_change_the_selection(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(indexer).key_sets
    monkeypatch.setattr("model.indexer.SCORE_BLOCK_BYTES", 1)
    assert run(indexer).key_sets == whole
