"""Absorbed attention over pages is expanded attention over the selected rows, by every path and page size."""

import pytest
import torch
from torch import Tensor

from engine.cache import CacheShape, allocate_mla
from model.batch import Batch, Segment, physical_index, read_prefix
from model.indexer import Selection
from model.mla import Mla
from tests import tiny
from tests.driver import CPU, poison

CONFIG, NUM_TOKENS = tiny.TINY, 60
LAYER = "layers.3.self_attn"
DENSE_ROWS = CONFIG.index_topk + CONFIG.index_kpool - 1
BLOCK_SIZES = [8, 16, 24, 40]
# Products of float32 in another order, outputs of order 1.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def mla() -> Mla:
    return Mla(tiny.tree().at(LAYER), CONFIG, torch.float32, first_slot=0)


class Run:
    """One sequence through an MLA layer, in chunks."""

    def __init__(self, mla: Mla, block_size: int = 16, fill: float = float("nan")) -> None:
        self.mla, self.length = mla, 0
        self.table = tiny.shuffled_tables(2, NUM_TOKENS, block_size)[1]
        blocks = 2 * len(self.table)
        self.cache = allocate_mla(CONFIG, CacheShape(blocks, block_size, 2), CPU, 8)
        poison({0: self.cache}, fill)

    def feed(self, x: Tensor) -> tuple[Tensor, Selection]:
        batch = Batch(torch.zeros(len(x)), (Segment(0, len(x), self.length, 1, self.table),))
        self.mla.write(x, batch, self.cache)
        y, (selection,) = self.mla.attend(x, batch, self.cache)
        self.length += len(x)
        return y, selection

    def key_sets(self, x: Tensor, chunk: int) -> tuple[Tensor, list[list[int]]]:
        """Outputs of all rows and the rows that each attends to."""
        outputs, keys = [], []
        for part in x.split(chunk):
            first = self.length
            y, selection = self.feed(part)
            outputs.append(y)
            keys += [list(range(first + i + 1)) for i in range(selection.num_dense)]
            keys += [[row for row in rows if row >= 0] for rows in selection.rows.tolist()]
        return torch.cat(outputs), keys


def expanded(x: Tensor, keys: list[list[int]]) -> Tensor:
    """float64 attention with per-head keys and values, never absorbed: [num_tokens, hidden]."""
    tree, heads, nope = tiny.tree().at(LAYER), CONFIG.num_attention_heads, CONFIG.qk_nope_head_dim

    def project(name: str, y: Tensor) -> Tensor:
        return y.double() @ tree.linear(name).expand(torch.float64).T

    def norm(name: str, y: Tensor) -> Tensor:
        scale = (y.square().mean(1, keepdim=True) + CONFIG.rms_norm_eps).rsqrt()
        return tree.tensor(f"{name}.weight") * y * scale

    q = project("q_b_proj", norm("q_a_layernorm", project("q_a_proj", x))).view(len(x), heads, -1)
    latent = norm("kv_a_layernorm", project("kv_a_proj_with_mqa", x))
    k, v = project("kv_b_proj", latent).view(len(x), heads, -1).split([nope, CONFIG.v_head_dim], dim=2)
    out = torch.empty(len(x), heads, CONFIG.v_head_dim, dtype=torch.float64)
    for t, rows in enumerate(keys):
        weights = (torch.einsum("hd,nhd->hn", q[t], k[rows]) * nope**-0.5).softmax(1)
        out[t] = torch.einsum("hn,nhd->hd", weights, v[rows])
    return project("o_proj", out.flatten(1))


@pytest.mark.parametrize("chunk", [NUM_TOKENS, 1, 7])
def test_absorbed_is_expanded(mla: Mla, chunk: int) -> None:
    """Dense, masked and gathered rows against the whole sequence expanded."""
    x = tiny.normal(NUM_TOKENS, CONFIG.hidden_size)
    y, keys = Run(mla).key_sets(x, chunk)
    assert max(map(len, keys)) == DENSE_ROWS
    torch.testing.assert_close(y.double(), expanded(x, keys), atol=TOLERANCE, rtol=0)


def test_dense_until_the_first_drop(mla: Mla) -> None:
    """Up to `index_topk + index_kpool - 1` rows plain causal attention; one more row drops one pool."""
    x = tiny.normal(DENSE_ROWS + 1, CONFIG.hidden_size)
    y, keys = Run(mla).key_sets(x, len(x))
    causal = expanded(x, [list(range(t + 1)) for t in range(len(x))])
    torch.testing.assert_close(y[:-1].double(), causal[:-1], atol=TOLERANCE, rtol=0)
    dropped = sorted(set(range(len(x))) - set(keys[-1]))
    assert dropped in [list(range(begin, begin + 4)) for begin in (0, 4, 8)]
    assert (y[-1] - causal[-1]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("bytes_at_a_time", [1, 1 << 22])
@pytest.mark.parametrize("masked_widths", [0, 12], ids=["gathered", "masked"])
def test_neither_path_nor_blocking_changes_a_row(
    mla: Mla, masked_widths: int, bytes_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = tiny.normal(NUM_TOKENS, CONFIG.hidden_size)
    expected, _ = Run(mla).key_sets(x, 1)
    monkeypatch.setattr("model.mla.MASKED_WIDTHS", masked_widths)
    monkeypatch.setattr("model.mla.BLOCK_BYTES", bytes_at_a_time)
    y, _ = Run(mla).key_sets(x, NUM_TOKENS)
    torch.testing.assert_close(y, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [NUM_TOKENS, 13, 1])
def test_nan_in_unused_pages_changes_nothing(mla: Mla, chunk: int) -> None:
    x = tiny.normal(NUM_TOKENS - 5, CONFIG.hidden_size)
    clean, _ = Run(mla, fill=0.0).key_sets(x, chunk)
    poisoned, _ = Run(mla).key_sets(x, chunk)
    assert torch.equal(poisoned, clean)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_page_size_changes_nothing(mla: Mla, block_size: int) -> None:
    """Field bug C3, end to end: tokens and pooled entries, read and written through the same table."""
    x = tiny.normal(NUM_TOKENS, CONFIG.hidden_size)
    expected, keys = Run(mla).key_sets(x, 9)
    y, found = Run(mla, block_size).key_sets(x, 9)
    assert found == keys
    torch.testing.assert_close(y, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("unit", ["tokens", "pooled entries"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_tokens_entries_and_pages_in_mixed_units(block_size: int, unit: str) -> None:
    """Field bug C3: addresses are injective over requests, in range, and the same for writer and reader."""
    per_block = block_size if unit == "tokens" else block_size // CONFIG.index_kpool
    tables = tiny.shuffled_tables(5, 1000, block_size)
    capacity = tables.shape[1] * per_block
    cache = torch.full((tables.numel(), per_block, 1), -1.0)
    written = []
    for request, table in enumerate(tables):
        address = physical_index(table, torch.arange(capacity), per_block)
        cache.view(-1)[address] = request * capacity + torch.arange(capacity).float()
        written += address.tolist()
    assert sorted(written) == list(range(tables.numel() * per_block))
    for request, table in enumerate(tables):
        for count in (1, per_block - 1, per_block + 1, capacity):
            read = read_prefix(cache, table, count).flatten()
            assert torch.equal(read, request * capacity + torch.arange(count).float())
        with pytest.raises(IndexError):
            physical_index(table, torch.tensor([capacity]), per_block)
        with pytest.raises(IndexError, match="block table"):
            read_prefix(cache, table, capacity + 1)


def test_a_table_too_narrow_for_the_length_raises(mla: Mla) -> None:
    run = Run(mla)
    run.table = run.table[:2]
    run.feed(tiny.normal(32, CONFIG.hidden_size))
    with pytest.raises(IndexError):
        run.feed(tiny.normal(1, CONFIG.hidden_size))
