"""Verified drafts leave the distribution of every token as it is without drafts (E5).

The model is scripted: a table whose row t holds the logits after token t, for the target and for the drafter.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from engine import sampling
from engine.sampling import Sampler, SamplingError, SamplingParams, filtered_probs, token_log_probs

VOCAB, NUM_SAMPLES = 8, 20_000
CHANCE = 1e-3  # of a failure without a fault; the seeds are fixed, so it happens always or never
SETTINGS: dict[str, dict[str, Any]] = {
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p and min_p": {"temperature": 1.0, "top_p": 0.8, "min_p": 0.1},
    "temperature": {"temperature": 0.8},
}


def table(seed: int) -> Tensor:
    return 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


TARGET = table(0)
OTHER = TARGET + table(1) / 2
BEST = OTHER.argmax(dim=-1).tolist()
Propose = Callable[[Sampler, int], tuple[int, Tensor | None]]


def matching(sampler: Sampler, last: int) -> tuple[int, Tensor | None]:
    return sampler.propose(TARGET[last])


def mismatched(sampler: Sampler, last: int) -> tuple[int, Tensor | None]:
    return sampler.propose(OTHER[last])


def greedy(_: Sampler, last: int) -> tuple[int, Tensor | None]:
    return BEST[last], None


def p_value(counts: Mapping[Any, int], expected: Mapping[Any, float]) -> float:
    """Chance of a larger chi-square, sum of (count - expected)^2 / expected, if `expected` is true.

    Cells that expect fewer than 5 are one cell, as the approximation wants it. The tail of the distribution with k
    degrees of freedom is the regularised upper incomplete gamma function Q(k / 2, chi_square / 2).
    """
    if any(count and not expected.get(cell) for cell, count in counts.items()):
        return 0.0
    large = [cell for cell, wanted in expected.items() if wanted >= 5]
    pairs = [(float(counts.get(cell, 0)), expected[cell]) for cell in large]
    rest = sum(expected.values()) - sum(wanted for _, wanted in pairs)
    if rest >= 5:
        pairs.append((sum(counts.values()) - sum(count for count, _ in pairs), rest))
    chi_square = sum((count - wanted) ** 2 / wanted for count, wanted in pairs)
    half_degrees = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_degrees, torch.tensor(chi_square / 2, dtype=torch.float64)))


def test_the_p_value_is_that_of_the_tables() -> None:
    """Three critical values of 0.001 as printed: 10.828, 13.816 and 24.322 for 1, 2 and 7 degrees of freedom."""
    for degrees, critical in ((1, 10.828), (2, 13.816), (7, 24.322)):
        expected = dict.fromkeys(range(degrees + 1), 1000.0)
        # +d in one cell and -d in another of 1000 expected each: chi-square is 2 d^2 / 1000
        shift = math.sqrt(critical * 500)
        counts: Any = expected | {0: 1000 + shift, 1: 1000 - shift}
        assert p_value(counts, expected) == pytest.approx(CHANCE, rel=1e-3)  # the tables have 5 digits


@pytest.fixture
def memoised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come from tables, so each is filtered once: what is tested is what happens with the result."""
    known = cache(lambda row, params: filtered_probs(torch.tensor(row), params))
    monkeypatch.setattr(sampling, "filtered_probs", lambda row, params: known(tuple(row.tolist()), params))


def three_tokens(sampler: Sampler, propose: Propose, depth: int = 3) -> tuple[int, ...]:
    """Tokens 1 to 3 after token 0, by rounds of at most `depth` drafts."""
    tokens = [0]
    while len(tokens) <= 3:
        chain, proposals = tokens[-1:], list[Tensor | None]()
        for _ in range(min(depth, 4 - len(tokens))):
            draft, proposal = propose(sampler, chain[-1])
            chain.append(draft)
            proposals.append(proposal)
        tokens += sampler.verify(TARGET[chain], chain[1:], proposals)
    return tuple(tokens[1:4])


def joint(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Expected counts of the first three tokens after token 0."""
    probs = filtered_probs(TARGET, params).tolist()
    cells = product(range(VOCAB), repeat=3)
    return {(a, b, c): NUM_SAMPLES * probs[0][a] * probs[a][b] * probs[b][c] for a, b, c in cells}


def pooled(counts: Mapping[tuple[int, ...], float], positions: Sequence[int]) -> Counter[tuple[int, ...]]:
    """Counts of the tokens at some of the positions."""
    totals: Counter[tuple[int, ...]] = Counter()
    for cell, count in counts.items():
        totals[tuple(cell[position] for position in positions)] += count  # type: ignore[assignment]
    return totals


DRAFTERS: list[Propose] = [matching, mismatched, greedy]
# Every drafter and every setting once; the other pairs are slow.
CASES = [
    pytest.param(
        propose, rules, id=f"{propose.__name__}, {name}", marks=[] if column == line else [pytest.mark.slow]
    )
    for line, propose in enumerate(DRAFTERS)
    for column, (name, rules) in enumerate(SETTINGS.items())
]


@pytest.mark.usefixtures("memoised")
@pytest.mark.parametrize(("propose", "rules"), CASES)
@torch.inference_mode()
def test_three_tokens_follow_the_plain_distribution(propose: Propose, rules: dict[str, Any]) -> None:
    params = SamplingParams(**rules)
    sampler, expected = Sampler(params, seed=1), joint(params)
    # With all depths each of the three is now a kept draft, now a replaced one, now the token after the last.
    found = Counter(three_tokens(sampler, propose, depth=1 + i % 3) for i in range(NUM_SAMPLES))
    # Each alone, and with the ones before it, on which it depends.
    for positions in ([0], [1], [2], [0, 1], [1, 2], [0, 1, 2]):
        assert p_value(pooled(found, positions), pooled(expected, positions)) > CHANCE, positions


class TestSampledFirstTokensAreBiased:
    """Symptom of E5: the first token's frequencies are not the target's (.5, .3, .2)."""

    probs, draft_probs = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    expected: ClassVar = {0: 10_000.0, 1: 6_000.0, 2: 4_000.0}

    @pytest.mark.parametrize("wrong", [(0.445, 0.357, 0.198), (0.4, 0.6, 0.0)])
    def test_the_statistic_sees_the_wrong_rules(self, wrong: tuple[float, ...]) -> None:
        """Accept if equal and else draw again; a greedy draft scored with the soft draft probability."""
        counts = {token: round(share * NUM_SAMPLES) for token, share in enumerate(wrong)}
        assert p_value(counts, self.expected) < CHANCE

    def first_tokens(self, draft: int | None, num_samples: int) -> Counter[int]:
        """Counts with the draft drawn from `draft_probs`, or with this one under `draft_probs`."""
        params = SamplingParams(temperature=1.0)
        sampler, rows = Sampler(params, seed=2), self.probs.log().repeat(2, 1)
        counts: Counter[int] = Counter()
        for _ in range(num_samples):
            token, proposal = sampler.propose(self.draft_probs.log())
            counts[sampler.verify(rows, [token if draft is None else draft], [proposal])[0]] += 1
        return counts

    @pytest.mark.usefixtures("memoised")
    @torch.inference_mode()
    def test_ours_are_not(self) -> None:
        assert p_value(self.first_tokens(None, NUM_SAMPLES), self.expected) > CHANCE

    @pytest.mark.usefixtures("memoised")
    @torch.inference_mode()
    def test_a_draft_that_was_not_drawn_from_its_distribution_is_the_second_wrong_rule(self) -> None:
        counts = self.first_tokens(draft=1, num_samples=1000)
        # three standard deviations of a share of 0.4 over 1000 draws
        assert counts[0] / 1000 == pytest.approx(0.4, abs=0.047) and counts[2] == 0


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_no_draft_is_ever_accepted_above_temperature_zero(temperature: float) -> None:
    """Symptom of E5. A draft is accepted as often as the two distributions overlap."""
    params = SamplingParams(temperature=temperature)
    target = torch.tensor([4.0, 3.5, 3.0, 0.0])
    drafter = target + torch.tensor([0.3, 0.0, 0.1, 0.0])
    sampler, num_accepted = Sampler(params, seed=3), 0
    for _ in range(400):
        draft, proposal = sampler.propose(drafter)
        num_accepted += len(sampler.verify(target.repeat(2, 1), [draft], [proposal])) - 1
    overlap = torch.minimum(filtered_probs(target, params), filtered_probs(drafter, params)).sum().item()
    assert overlap > 0.8
    # three standard deviations of a share of 0.9 over 400 draws
    assert num_accepted / 400 == pytest.approx(overlap, abs=0.045)


def test_top_k_1_is_greedy_with_the_same_drafts() -> None:
    generator = torch.Generator().manual_seed(4)
    greedy_sampler = Sampler(SamplingParams(), seed=0)
    sampler = Sampler(SamplingParams(temperature=0.7, top_k=1), seed=5)
    lengths = set()
    for step in range(40):
        logits = torch.randn(4, VOCAB, generator=generator)
        drafts = [int(row.argmax()) for row in logits[:3]]
        if step % 4 < 3:
            drafts[step % 4] = (drafts[step % 4] + 1) % VOCAB
        tokens = greedy_sampler.verify(logits, drafts, [None] * 3)
        assert tokens == sampler.verify(logits, drafts, [None] * 3)
        assert tokens == tuple(logits.argmax(-1).tolist())[: step % 4 + 1]
        assert sampler.propose(logits[0])[0] == greedy_sampler.propose(logits[0])[0] == tokens[0]
        lengths.add(len(tokens))
    assert lengths == {1, 2, 3, 4}


RULES = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.5, "min_p": 0.1},
]


@pytest.mark.parametrize("rules", RULES[:2])
def test_a_broken_row_counts_only_if_it_is_reached(rules: dict[str, Any]) -> None:
    sampler = Sampler(SamplingParams(**rules), seed=0)
    rows = torch.tensor([[0.0, 5.0, 1.0], [math.nan, 0.0, 0.0], [0.0, 5.0, 1.0]])
    assert sampler.verify(rows, [2, 1], [None, None]) == (1,)
    with pytest.raises(SamplingError, match="largest logit is nan"):
        sampler.verify(rows, [1, 1], [None, None])


def test_a_refused_draft_without_an_excess_is_replaced_from_the_target() -> None:
    """Rounding may leave the target nowhere above the proposal; here twice the target stands for that."""
    sampler, target = Sampler(SamplingParams(temperature=1.0, top_k=2), seed=6), torch.tensor([1.0, 0.0, 1.0])
    doubled = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    tokens = Counter(sampler.verify(target.repeat(2, 1), [0], [doubled])[0] for _ in range(200))
    # refused every second time, then either token: three standard deviations of a share of 1/4 over 200 draws
    assert tokens[2] / 200 == pytest.approx(0.25, abs=0.092) and tokens[1] == 0


@pytest.mark.parametrize("rules", RULES)
def test_logits_stay_as_they_were(rules: dict[str, Any]) -> None:
    """Symptom of E6: log-probabilities of logits that sampling has scaled in place."""
    sampler, logits = Sampler(SamplingParams(**rules), seed=0), TARGET[:4].clone()
    draft, proposal = sampler.propose(logits[0])
    before = None if proposal is None else proposal.clone()
    tokens = sampler.verify(logits, [draft] * 3, [proposal] * 3)
    token_log_probs(logits[: len(tokens)], tokens, 3)
    assert torch.equal(logits, TARGET[:4])
    assert proposal is before is None or (before is not None and torch.equal(proposal, before))


@pytest.mark.parametrize("rules", RULES[1:])
def test_a_seed_gives_the_same_tokens_alone_and_between_others(rules: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95)
    alone, mixed, mate = (
        Sampler(params, seed=7),
        Sampler(params, seed=7),
        Sampler(SamplingParams(**rules), seed=7),
    )
    expected = [three_tokens(alone, mismatched) for _ in range(20)]
    found = []
    for _ in range(20):
        three_tokens(mate, mismatched)
        found.append(three_tokens(mixed, mismatched))
    assert found == expected and len(set(found)) > 5
    other = Sampler(params, seed=8)
    assert [three_tokens(other, mismatched) for _ in range(20)] != expected
