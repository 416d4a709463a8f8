"""Every token's log-probability is the model's own, from the row it was chosen from (E6)."""

import math
from dataclasses import replace

import pytest
import torch

from engine.llm import LLM
from engine.sampling import SamplingParams, token_log_probs
from tests import driver
from tests.tiny import token_ids


def test_values_are_the_log_softmax_of_each_row() -> None:
    rows = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 3.0]])
    found = token_log_probs(rows, (0, 2), 2)
    for row, entry, token, ids in zip(rows.tolist(), found, (0, 2), ((1, 0), (2, 0)), strict=True):
        total = math.log(sum(math.exp(logit) for logit in row))
        assert entry.token == token and tuple(id_ for id_, _ in entry.top) == ids
        values = [entry.log_prob, *(value for _, value in entry.top)]
        # float32 arithmetic on logits of a few units
        assert values == pytest.approx([row[i] - total for i in (token, *ids)], abs=1e-6)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_ties_rank_by_id_and_the_chosen_token_is_always_listed(num_top: int) -> None:
    (entry,) = token_log_probs(torch.zeros(1, 2048), (77,), num_top)
    assert (entry.token, [id_ for id_, _ in entry.top]) == (77, list(range(num_top)))
    assert entry.log_prob == pytest.approx(-math.log(2048), abs=1e-5)  # float32 sum of 2048 terms


def test_ids_that_cannot_come_are_not_listed() -> None:
    (entry,) = token_log_probs(torch.tensor([[0.0, -math.inf]]), (0,), 20)
    assert entry.top == ((0, 0.0),) and entry.log_prob == 0


@pytest.mark.parametrize(
    "params",
    [SamplingParams(logprobs=5), SamplingParams(temperature=0.7, top_k=1, logprobs=5)],
    ids=["greedy", "top_k 1"],
)
def test_drafts_change_no_log_probability(params: SamplingParams) -> None:
    """Symptom E6: values of another row, zeros, nulls, or values after the temperature."""
    prompt, wanted = token_ids(37), replace(params, max_tokens=20, ignore_eos=True)
    runs = [
        LLM(driver.DATA / "bf16", dtype="float32", draft_tokens=depth, kv_tokens=512).generate(
            [prompt], wanted
        )[0]
        for depth in (0, 3)
    ]
    trunk, _ = driver.load_model(driver.DATA / "bf16")
    rows = driver.logits(trunk, [*prompt, *runs[0].token_ids])[36:-1].log_softmax(-1)
    for run in runs:
        assert run.log_probs is not None and [entry.token for entry in run.log_probs] == run.token_ids
        for entry, row in zip(run.log_probs, rows, strict=True):
            best = row.topk(5)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            # Float32 through eight layers, in forwards of other row counts.
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-3)
            assert entry.log_prob == entry.top[0][1]
    assert runs[0].token_ids == runs[1].token_ids
