"""What lies in the draft layer's pages is a function of known tokens alone, and what is drafted from it is what the
reference implementation drafts, however the engine came by it.
"""

import json
from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from model.batch import read_prefix
from tests import driver
from tests.engine.drafting import BLOCK, DEPTH, TOLERANCE, VOCAB, Probe, answer, bare, scripted
from tests.scripted import TINY
from tests.tiny import TINY as CONFIG
from tests.tiny import token_ids

TEXT = token_ids(81, seed=1, vocab_size=VOCAB)
A, B = token_ids(23, seed=2, vocab_size=VOCAB), token_ids(23, seed=3, vocab_size=VOCAB)
POOL = CONFIG.index_kpool
ROW_TOLERANCE = 1e-4  # hidden states and rows of order 1, float32 through eight layers in another order


@lru_cache
def bare_rows(tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Latents [rows, rank] and pooled keys [pools, index_head_dim] of a sequence's draft rows, in one forward."""
    sequencer = driver.Sequencer(bare()[0], len(tokens))
    drafter = driver.Drafter(bare()[1], sequencer)
    drafter.feed(tokens, sequencer.feed(tokens))
    cache, table = sequencer.draft_cache, sequencer.table
    entries = (len(tokens) - 1) // POOL + 1
    latents = read_prefix(cache.latent, table, len(tokens))[1:]
    return latents, read_prefix(cache.index.pooled, table, entries)[1:]


def rows_of(used: Probe, request_id: int) -> tuple[Tensor, Tensor]:
    """The same of a running request, from the engine's pages; what lies below the layer's first row is NaN."""
    request, layer, first = used.requests[request_id], used.drafts.mla, first_slot(used)
    table = torch.tensor(request.tables[1])
    num_rows = request.num_drafted_tokens - first
    latents = read_prefix(layer.latent, table, num_rows + first)
    pooled = read_prefix(layer.index.pooled, table, num_rows // POOL + first)
    assert latents[:first].isnan().all() and pooled[:first].isnan().all()
    return latents[first:], pooled[first:]


def first_slot(used: Probe) -> int:
    return used.llm.mtp.first_slot if used.llm.mtp else 0


def check_rows(used: Probe, request_id: int) -> None:
    """All rows of a running request are those of its known tokens."""
    request = used.requests[request_id]
    prompt = tuple(request.prompt)
    expected = bare_rows((*prompt, *answer(prompt, request.max_tokens)))
    for found, wanted in zip(rows_of(used, request_id), expected, strict=True):
        torch.testing.assert_close(found, wanted[: len(found)], atol=ROW_TOLERANCE, rtol=0)


def run_checked(used: Probe, *prompts: Sequence[int], preempt_at: int | None = None) -> None:
    """Run prompts together, accepting 0 to 3 drafts; check rows after each step, from a hit on."""
    ids = [used.add(p, 12, scripted(p, 16, lambda known: known % (DEPTH + 1))) for p in prompts]
    for step in range(1000):
        if not used.llm.has_work:
            break
        used.step()
        for request in list(used.llm.scheduler.running):
            check_rows(used, request.request_id)
            if step == preempt_at and request.request_id == ids[0]:
                used.llm.scheduler.preempt(request)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("filing", ["token", "key", "tag"])
def test_i18_every_row_of_every_hit_is_a_function_of_its_tokens(filing: str, share: bool) -> None:
    """Forks on a boundary, hits on prompts and on decode boundaries, and a resume. Slot 0 stays empty."""
    used = Probe(filing, index_share=share, retain="all", max_batched_tokens=64)
    run_checked(used, [*TEXT[:32], *A])
    run_checked(used, [*TEXT[:32], *B], [*TEXT[:32], *B[1:]], preempt_at=2)
    run_checked(used, [*TEXT[:32], *A, *answer([*TEXT[:32], *A], 12)[:10], *B])
    hits = [request.num_cached_tokens for request in used.requests]
    forked = 32 if filing == "token" else BLOCK
    assert hits == [0, forked, forked, 64] and used.requests[1].num_preemptions == 1


@pytest.mark.parametrize("filing", ["drop", "off"])
def test_i18_the_check_sees_the_row_of_another_continuation(filing: str) -> None:
    used = Probe(filing, retain="all")
    used.run(([*TEXT[:BLOCK], *A], 2), script=lambda known, step: 0)
    with pytest.raises(AssertionError):
        for _ in range(2):  # `drop` meets the other's page in the second run
            run_checked(used, [*TEXT[:BLOCK], *B])


@pytest.mark.parametrize("filing", ["token", "key"])
def test_e1_last_row_of_a_non_final_chunk_needs_the_prompts_next_token(filing: str) -> None:
    """40 tokens in chunks of 16 and whole: a row for every token but the first."""
    found = []
    for budget in (16, 4096):
        used = Probe(filing, max_batched_tokens=budget)
        request_id = used.add(TEXT[:40], 8)
        while not used.requests[request_id].output:
            used.step()
        assert used.requests[request_id].num_drafted_tokens == 40 + first_slot(used)
        check_rows(used, request_id)
        found.append(rows_of(used, request_id))
    assert len(found[0][0]) == 40
    for chunked, whole in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, atol=ROW_TOLERANCE, rtol=0)


class FedLayer:
    """What a probe's draft layer is fed and gives back, in order."""

    def __init__(self, used: Probe) -> None:
        assert used.llm.mtp is not None
        self.mtp = used.llm.mtp
        self.fed: list[tuple[Tensor, Tensor, Tensor]] = []  # token ids, previous hidden states, residual rows
        self.given: list[Tensor] = []  # y
        enter, read = self.mtp.enter, self.mtp.read

        def recording_enter(token_ids: Tensor, previous: Tensor) -> Tensor:
            x = enter(token_ids, previous)
            self.fed.append((token_ids.clone(), previous.clone(), x.clone()))
            return x

        def recording_read(*args: object) -> object:
            y, selections = read(*args)  # type: ignore[arg-type]
            self.given.append(y.clone())
            return y, selections

        vars(self.mtp).update(enter=recording_enter, read=recording_read)


@pytest.mark.parametrize("budget", [16, 4096])
def test_e2_what_the_mtp_layer_is_fed(budget: int) -> None:
    """(a) the reference's hidden states after the final norm; (b) the layer's own y in passes 2 and 3; (c) the normed
    embedding first, the normed hidden state second."""
    prompt = json.loads((TINY / "ref.json").read_text())["prompts"][6]
    hidden = load_file(TINY / "ref.safetensors")["p6.hidden"].view(len(prompt), -1)
    used = Probe(max_batched_tokens=budget)
    layer, request_id = FedLayer(used), used.add(prompt, 8)
    while not used.requests[request_id].output:
        used.step()
    catch_up, passes = layer.fed[: 1 - DEPTH], layer.fed[1 - DEPTH :]
    tokens, previous = (torch.cat(parts) for parts in list(zip(*catch_up, strict=True))[:2])
    assert tokens.tolist() == [*prompt, *used.requests[request_id].output][-len(tokens) :]
    torch.testing.assert_close(previous[-len(prompt) :], hidden, atol=TOLERANCE, rtol=0)
    for (token, y, _), own, draft in zip(
        passes, layer.given, used.samplers[0].drafts[len(prompt) + 1], strict=False
    ):
        assert torch.equal(y, own) and token.tolist() == [draft]
    for ids, states, x in layer.fed:
        torch.testing.assert_close(x, entered(ids, states), atol=ROW_TOLERANCE, rtol=0, equal_nan=True)


def entered(token_ids: Tensor, previous: Tensor) -> Tensor:
    """eh_proj of the two halves, from the checkpoint's own tensors."""
    weights = {}
    for file in sorted(TINY.glob("model-*.safetensors")):
        weights |= load_file(file)
    tensors = {name.rpartition("layers.8.")[2]: tensor.float() for name, tensor in weights.items()}
    embedding = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    halves = (embedding[token_ids], tensors["enorm.weight"]), (previous, tensors["hnorm.weight"])
    normed = [x * (x.pow(2).mean(-1, keepdim=True) + CONFIG.rms_norm_eps).rsqrt() * w for x, w in halves]
    return torch.cat(normed, dim=1) @ tensors["eh_proj.weight"].T


@pytest.mark.parametrize("budget", [16, 4096])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("directory", ["bf16", "modelopt", "ct"])
def test_the_engines_first_drafts_are_the_references(directory: str, share: bool, budget: int) -> None:
    """Eight prompts at once, in chunks of 16 and whole."""
    path, kind = driver.DATA / directory, "shared" if share else "own"
    expected, tensors = json.loads((path / "ref.json").read_text()), load_file(path / "ref.safetensors")
    used = Probe(model=path, index_share=share, max_batched_tokens=budget, max_running_requests=8)
    used.run(*((prompt, DEPTH + 2) for prompt in expected["prompts"]))
    for index, (prompt, sampler) in enumerate(zip(expected["prompts"], used.samplers, strict=True)):
        wanted = torch.stack([tensors[f"p{index}.mtp.{kind}{i}"].flatten() for i in range(DEPTH)])
        found = torch.stack(sampler.logits[len(prompt) + 1])
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
        assert sampler.drafts[len(prompt) + 1] == expected["mtp_drafts"][kind][index]
        assert used.requests[index].output == expected["greedy"][index][: DEPTH + 2]
