"""Which token comes out: the one home of every sampling rule.

Rules are applied in this order: temperature, top_k, top_p, min_p. Each works on the distribution that the
rule before it left, renormalised. Invariants:

- equal logits rank by ascending id, so greedy choice, top_k and top_p never depend on a sort's whim;
- the most likely token survives every rule, so a row with one finite logit can always be sampled;
- a draw costs one uniform number of the request's own generator, and so does the test of a draft; temperature 0
  costs none. Batch mates, batch order and the device change nothing but the last bits of the probabilities;
- drafts do not change the distribution of the tokens, though other drafts are another sample of it: another depth,
  or batch mates that leave no room for some of them.

Temperature 0 is the argmax. top_k 0 or -1, top_p 1 and min_p 0 are no limit; top_p 0 leaves the top token, min_p 1
also those equal to it.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scheduler.plan import TokenLogProbs

NUM_SEEDS = 2**32  # a CPU generator of torch ignores higher bits
MAX_LOGPROBS = 20


class SamplingError(ValueError):
    """Sampling parameters or logits that no token can be chosen from."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens, when it ends, and how many log-probabilities it lists with each token.

    Raises SamplingError on a value out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        seed_good = self.seed is None or _within(self.seed, int, 0, NUM_SEEDS - 1)
        logprobs_good = self.logprobs is None or _within(self.logprobs, int, 0, MAX_LOGPROBS)
        stop_good = isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop)
        checks = {
            "max_tokens": (_within(self.max_tokens, int, 1), "an integer >= 1"),
            "temperature": (_within(self.temperature, int | float, 0), "a finite number >= 0"),
            "top_p": (_within(self.top_p, int | float, 0, 1), "a number from 0 to 1"),
            "top_k": (_within(self.top_k, int, -1), "an integer >= 1, or 0 for no limit"),
            "min_p": (_within(self.min_p, int | float, 0, 1), "a number from 0 to 1"),
            "seed": (seed_good, "an integer from 0 to 2**32 - 1"),
            "stop": (stop_good, "a tuple of non-empty strings"),
            "logprobs": (logprobs_good, f"an integer from 0 to {MAX_LOGPROBS}"),
        }
        for field, (good, expected) in checks.items():
            if not good:
                raise SamplingError(f"{field} is {getattr(self, field)!r}, expected {expected}")


def default_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams fields that generation_config.json sets; none, hence greedy, if it says not to."""
    fields = ("temperature", "top_p", "top_k", "min_p")
    given = {name: generation_config[name] for name in fields if generation_config.get(name) is not None}
    samples = generation_config.get("do_sample", "temperature" in given)
    return {"temperature": 1.0} | given if samples else {}


def filtered_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that tokens are drawn from.

    logits [vocab] or [rows, vocab], any float dtype -> same shape, float64, each row sums to 1. Temperature 0
    puts all mass on the argmax. Raises SamplingError when any row has NaN, +inf or no finite entry.
    """
    top = logits.amax(dim=-1, keepdim=True)
    _require_finite(top)
    if params.temperature == 0:
        zeros = torch.zeros_like(logits, dtype=torch.float64)
        return zeros.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # Subtracting first keeps the quotient finite or -inf, however small the temperature.
    probs = ((logits.double() - top.double()) / params.temperature).softmax(dim=-1)
    if params.top_k > 0 or params.top_p < 1:
        probs = _keep_top(probs, logits.argsort(dim=-1, descending=True, stable=True), params)
    if params.min_p > 0:
        floor = params.min_p * probs.amax(dim=-1, keepdim=True)
        probs = probs.where(probs >= floor, 0.0)
    return probs / probs.sum(dim=-1, keepdim=True)


def token_log_probs(logits: Tensor, tokens: Sequence[int], num_top: int) -> tuple[TokenLogProbs, ...]:
    """What the model itself gave each token and the `num_top` most likely ids, equals by ascending id.

    logits [rows, vocab], row i being the one that tokens[i] was chosen from. Log-softmax of the raw logits, before
    temperature and filters, so drafts and sampling rules change nothing. Ids of probability 0 are not listed.
    """
    log_probs = logits.log_softmax(dim=-1)
    own = log_probs.gather(-1, torch.tensor(tokens, device=logits.device).unsqueeze(-1)).squeeze(-1).tolist()
    ranked = logits.argsort(dim=-1, descending=True, stable=True)[:, :num_top]
    lists = zip(tokens, own, ranked.tolist(), log_probs.gather(-1, ranked).tolist(), strict=True)
    return tuple(
        TokenLogProbs(token, log_prob, tuple((i, p) for i, p in zip(*top, strict=True) if p > -math.inf))
        for token, log_prob, *top in lists
    )


class Sampler:
    """One request's tokens: its rules and its own random stream."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self._params = params
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    def propose(self, logits: Tensor) -> tuple[int, Tensor | None]:
        """A draft token from draft logits [vocab], and the distribution [vocab] float64 that it was drawn from.

        None at temperature 0: the token is the argmax and holds all the mass. Raises SamplingError as `verify` does.
        """
        if self._params.temperature == 0:
            return self.verify(logits.unsqueeze(0))[0], None
        probs = filtered_probs(logits, self._params)
        return self.draw(probs), probs

    def verify(
        self, logits: Tensor, drafts: Sequence[int] = (), proposals: Sequence[Tensor | None] = ()
    ) -> tuple[int, ...]:
        """The accepted drafts and one token more, distributed as without drafts.

        logits [1 + len(drafts), vocab] float32: the row before each draft, and the one after the last. `proposals`:
        what `propose` gave with each draft. Raises SamplingError on NaN, +inf or no finite entry in a row that
        counts; a row after the first refused draft does not. At temperature 0 a draft is accepted if it is the
        argmax, else by rejection sampling (Leviathan et al. 2023, Chen et al. 2023), which is exact for any proposal.
        """
        if self._params.temperature == 0:
            choices = logits.argmax(dim=-1).tolist()  # the first, hence lowest, id among equals; NaN wins
            refused = (i for i, draft in enumerate(drafts) if draft != choices[i])
            num_new_tokens = next(refused, len(drafts)) + 1
            _require_finite(logits[:num_new_tokens].amax(dim=-1))
            return tuple(choices[:num_new_tokens])
        tokens: list[int] = []
        for row, draft, proposal in zip(logits[:-1], drafts, proposals, strict=True):
            tokens.append(self._keep_or_replace(draft, filtered_probs(row, self._params), proposal))
            if tokens[-1] != draft:
                return tuple(tokens)
        return (*tokens, self.draw(filtered_probs(logits[-1], self._params)))

    def _keep_or_replace(self, draft: int, target: Tensor, proposal: Tensor | None) -> int:
        """The draft, with probability min(1, target / proposal), or a draw from where target exceeds proposal."""
        if proposal is None:
            proposal = torch.zeros_like(target)
            proposal[draft] = 1
        if self._uniform() * float(proposal[draft]) < float(target[draft]):
            return draft
        # Here target < proposal at the draft, so elsewhere it exceeds, unless both are equal but for rounding:
        # then the target's own draw is right, and may well be the draft.
        excess = (target - proposal).clamp(min=0)
        return self.draw(excess if bool(excess.any()) else target)

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def draw(self, probs: Tensor) -> int:
        """Draw an id from probs [vocab] float64 (need not be normalised) with one uniform number."""
        # Summing the support alone, in id order on the CPU: rounding can't hit an id of probability 0.
        support = probs.nonzero().squeeze(-1)
        cumulative = probs[support].cpu().cumsum(0)
        return int(support[torch.searchsorted(cumulative, self._uniform() * cumulative[-1], right=True)])


def _keep_top(probs: Tensor, order: Tensor, params: SamplingParams) -> Tensor:
    """Zero what top_k, then top_p leave out. `order` [.., vocab] lists the ids from most to least likely."""
    ranked = probs.gather(-1, order)
    if params.top_k > 0:
        ranked[..., params.top_k :] = 0
    if params.top_p < 1:
        ranked /= ranked.sum(dim=-1, keepdim=True)
        mass_before = ranked.cumsum(dim=-1) - ranked
        kept = mass_before < params.top_p
        kept[..., 0] = True
        ranked *= kept
    return torch.zeros_like(probs).scatter_(-1, order, ranked)


def _require_finite(top: Tensor) -> None:
    if not bool(top.isfinite().all()):
        found = f"the largest logit is {float(top[~top.isfinite()][0])}, expected a finite number"
        raise SamplingError(f"{found}; the model's output is broken for this request")


def _within(value: Any, kind: Any, low: int, high: float = sys.float_info.max) -> bool:
    """Whether `value` is of a number type and from `low` to `high`; NaN, infinity and a bool are not."""
    return isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high
