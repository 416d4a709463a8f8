"""Every sampling rule picks what its definition says, also at the edges of its parameters (F1)."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.sampling import Sampler, SamplingError, SamplingParams, default_sampling, filtered_probs

TENTHS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


def _support(logits: Tensor, **rules: Any) -> list[int]:
    return filtered_probs(logits, SamplingParams(**{"temperature": 1.0} | rules)).nonzero().flatten().tolist()


def sampled(sampler: Sampler, logits: Tensor) -> int:
    """A token without drafts."""
    (token,) = sampler.verify(logits.unsqueeze(0))
    return token


@pytest.mark.parametrize("vocab", [7, 2048, 154880])
def test_greedy_takes_the_lowest_id_among_ties(vocab: int) -> None:
    logits = torch.full((vocab,), -1.0)
    logits[[vocab // 3, vocab // 2, vocab - 1]] = 5.0
    assert sampled(Sampler(SamplingParams(), seed=0), logits) == vocab // 3


def test_temperature_zero_in_a_distribution_is_the_argmax() -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0], [9.0, 0.0, 1.0]])
    assert filtered_probs(rows, SamplingParams()).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 5e-324])
def test_tiny_temperature_with_huge_logits_is_the_argmax(temperature: float) -> None:
    logits = torch.tensor([-1e4, 9999.0, 1e4, -math.inf])
    probs = filtered_probs(logits, SamplingParams(temperature=temperature))
    assert probs.tolist() == [0, 0, 1, 0]


def test_temperature_divides_the_logits() -> None:
    probs = filtered_probs(torch.tensor([1.0, 2.0]), SamplingParams(temperature=0.5))
    # float64 arithmetic on both sides
    assert probs.tolist() == pytest.approx([1 / (1 + math.e**2), 1 / (1 + math.e**-2)], abs=1e-12)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"top_p": 0.0}, [1]),
        ({"top_p": 1e-8}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.89}, [1, 2, 3]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"top_k": -1}, [0, 1, 2, 3]),
        ({"top_k": 0}, [0, 1, 2, 3]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 2, 3]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"min_p": 0.0}, [0, 1, 2, 3]),
        ({"min_p": 0.49}, [1, 2, 3]),
        ({"min_p": 1.0}, [1]),
        # top_p counts the mass that top_k left: 0.4 / 0.7 = 0.571 and not 0.4
        ({"top_k": 2, "top_p": 0.55}, [1]),
        ({"top_k": 2, "top_p": 0.58}, [1, 3]),
    ],
)
def test_filter_keeps(rules: dict[str, float], kept: list[int]) -> None:
    assert _support(TENTHS, **rules) == kept


def test_filters_rank_ties_by_id_and_min_p_keeps_them_all() -> None:
    logits = torch.zeros(1000)
    assert _support(logits, top_k=3) == [0, 1, 2]
    assert _support(logits, top_p=0.0) == [0]
    assert _support(logits, min_p=1.0) == list(range(1000))


def test_top_p_just_below_one_still_filters() -> None:
    # 1 - top_p is far below the bfloat16 step; the last of these ids holds 2e-9 of the mass
    assert _support(torch.tensor([0.0, -10.0, -20.0]), top_p=1 - 1e-8) == [0, 1]


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.floats(0.01, 5),
    st.integers(0, 50),
    st.floats(0, 1),
    st.floats(0, 1),
)
@settings(deadline=None)
def test_filtered_probs_is_a_distribution_holding_the_argmax(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = torch.tensor(logits)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = filtered_probs(row, params)
    assert probs.sum().item() == pytest.approx(1, abs=1e-12)  # float64 rounding of 40 terms
    assert probs[row.argmax()] == probs.max()
    assert torch.equal(filtered_probs(torch.stack([row, -row]), params)[0], probs)


def test_draws_follow_the_distribution() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, top_k=3), seed=1)
    counts = torch.bincount(torch.tensor([sampled(sampler, TENTHS) for _ in range(4000)]), minlength=4) / 4000
    assert counts[0] == 0
    # three standard deviations of a share near 1/2 over 4000 draws
    assert counts[1:].tolist() == pytest.approx([4 / 9, 2 / 9, 3 / 9], abs=0.024)


def test_same_seed_gives_the_same_tokens_alone_and_among_batch_mates() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9)
    rows = torch.randn(20, 3, 50, generator=torch.Generator().manual_seed(0))
    alone, mixed = Sampler(params, seed=7), Sampler(params, seed=7)
    mates = [Sampler(SamplingParams(temperature=2.0), seed=8), Sampler(SamplingParams(), seed=7)]
    expected = [sampled(alone, row[1]) for row in rows]
    found = []
    for row in rows:
        sampled(mates[0], row[0])
        found.append(sampled(mixed, row[1]))
        sampled(mates[1], row[2])
    assert found == expected
    assert [sampled(Sampler(params, seed=9), row[1]) for row in rows] != expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[math.nan, 1.0], [1.0, math.nan], [-math.inf, -math.inf], [math.inf, 0.0]])
def test_a_row_without_a_choice_fails_with_a_message(bad: list[float], temperature: float) -> None:
    with pytest.raises(SamplingError, match="largest logit"):
        sampled(Sampler(SamplingParams(temperature=temperature, top_p=0.5), seed=0), torch.tensor(bad))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", bad) for bad in (-1, -0.1, math.nan, math.inf, 10**400, "1", None)],
        *[(field, bad) for field in ("top_p", "min_p") for bad in (-0.1, 1.1, 1.5, math.nan, None)],
        *[("top_k", bad) for bad in (-2, 1.5, True)],
        *[("max_tokens", bad) for bad in (0, -1, 2.0)],
        *[("seed", bad) for bad in (-1, 2**32, 0.5)],
        *[("logprobs", bad) for bad in (-1, 21, 2.0, True)],
        *[("stop", bad) for bad in ("end", ["end"], ("",), (1,))],
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SamplingError, match=f"{field} is .*, expected"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_generation_config_sets_sampling_unless_it_says_greedy() -> None:
    released = {"temperature": 1.0, "top_p": 0.95, "top_k": None, "eos_token_id": [1]}
    assert default_sampling(released) == {"temperature": 1.0, "top_p": 0.95}
    assert default_sampling({"do_sample": True, "top_k": 5}) == {"temperature": 1.0, "top_k": 5}
    assert default_sampling(released | {"do_sample": False}) == {}
    assert default_sampling({}) == {}
