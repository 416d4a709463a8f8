"""An MTP row lies in its token's slot and depends on the tokens up to there, not on how they were chunked."""

import pytest
import torch
from torch import Tensor

from model.batch import physical_index, read_prefix
from model.glm5_next import Glm5Next
from model.mtp import Mtp
from tests import tiny
from tests.driver import Drafter, Sequencer, chunked

NUM_TOKENS = 40
POOL = tiny.TINY.index_kpool
# Float32 through eight layers in another summation order; hidden states and rows of order 1.
TOLERANCE = 1e-4
Model = tuple[Glm5Next, Mtp]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny.model()


def prefilled(model: Model, tokens: list[int], chunk: int) -> Drafter:
    """A drafter whose rows of `tokens` are written, trunk and MTP layer in the same chunks."""
    sequencer = Sequencer(model[0], len(tokens) + 8)
    drafter = Drafter(model[1], sequencer)
    for part in chunked(tokens, chunk):
        drafter.feed(part, sequencer.feed(part))
    return drafter


def pages(drafter: Drafter, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Latent rows by slot, and pooled keys by entry, of the layer's own cache."""
    cache, table = drafter.sequencer.draft_cache, drafter.sequencer.table
    entries = (num_tokens - 1) // POOL + 1
    return read_prefix(cache.latent, table, num_tokens), read_prefix(cache.index.pooled, table, entries)


@pytest.mark.parametrize("chunk", [16, 7, 1])
def test_last_row_of_a_chunk_takes_the_prompts_next_token(model: Model, chunk: int) -> None:
    """Field bug E1: a row for every token but the first, chunked as whole, also in slots 15 and 31."""
    tokens = tiny.token_ids(NUM_TOKENS)
    latent, pooled = pages(prefilled(model, tokens, chunk), NUM_TOKENS)
    expected, expected_pooled = pages(prefilled(model, tokens, NUM_TOKENS), NUM_TOKENS)
    assert latent[1:].isfinite().all() and pooled[1:].isfinite().all()
    torch.testing.assert_close(latent[1:], expected[1:], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(pooled[1:], expected_pooled[1:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [NUM_TOKENS, 1])
def test_slot_zero_stays_empty(model: Model, chunk: int) -> None:
    latent, pooled = pages(prefilled(model, tiny.token_ids(NUM_TOKENS), chunk), NUM_TOKENS)
    assert latent[0].isnan().all() and pooled[0].isnan().all()


def test_a_row_depends_only_on_tokens_up_to_its_own(model: Model) -> None:
    """Other tokens from position 20 on: rows of slots below 20, and pools that end there, keep every bit."""
    tokens = tiny.token_ids(NUM_TOKENS)
    other = tokens[:20] + [(token + 1) % tiny.TINY.vocab_size for token in tokens[20:]]
    latent, pooled = pages(prefilled(model, tokens, NUM_TOKENS), NUM_TOKENS)
    changed, changed_pooled = pages(prefilled(model, other, NUM_TOKENS), NUM_TOKENS)
    assert torch.equal(latent[1:20], changed[1:20])
    assert not torch.equal(latent[20], changed[20])
    # Entry j pools tokens 4j - 3 .. 4j.
    assert torch.equal(pooled[1:5], changed_pooled[1:5])
    assert not torch.equal(pooled[5], changed_pooled[5])


def test_the_hidden_state_of_token_zeros_row_is_never_read(model: Model) -> None:
    tokens = tiny.token_ids(12)
    sequencer = Sequencer(model[0], 20)
    hidden = sequencer.feed(tokens)
    outputs = []
    for value in (0.0, float("nan")):
        drafter = Drafter(model[1], sequencer)
        drafter.previous = torch.full_like(drafter.previous, value)
        outputs.append(drafter.feed(tokens, hidden)[0][1:])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("num_tokens", [3, 12, 21, 38])
def test_drafts_after_a_prefill_are_those_after_a_decode(model: Model, num_tokens: int, share: bool) -> None:
    tokens = tiny.token_ids(num_tokens + 1, seed=num_tokens)
    known, sampled = tokens[:-1], tokens[-1]
    drafts, logits = prefilled(model, known, num_tokens).draft(sampled, 3, share)
    for chunk in (1, 5):
        same, close = prefilled(model, known, chunk).draft(sampled, 3, share)
        torch.testing.assert_close(close, logits, atol=TOLERANCE, rtol=0)
        assert same == drafts


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
def test_drafting_leaves_the_rows_of_known_tokens_alone(model: Model, share: bool) -> None:
    """With sharing the later passes write nothing at all; without it only rows after the known ones."""
    tokens = tiny.token_ids(NUM_TOKENS)
    drafter = prefilled(model, tokens, NUM_TOKENS)
    before = pages(drafter, NUM_TOKENS)
    drafter.draft(7, 3, share)
    for left, right in zip(before, pages(drafter, NUM_TOKENS), strict=True):
        assert torch.equal(left[1:], right[1:])
    cache, table = drafter.sequencer.draft_cache.latent, drafter.sequencer.table
    address = physical_index(table, torch.arange(NUM_TOKENS + 1, NUM_TOKENS + 3), cache.shape[1])
    assert cache.view(-1, cache.shape[2])[address].isnan().all() == share
