"""Every token's log-probability is the model's own, from the row it was chosen from (E6)."""

import math

import pytest
import torch

from engine.sampling import token_log_probs


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
