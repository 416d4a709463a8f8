"""What a caller sees of a request: its deltas while it runs and its result; text, stop strings and reasoning."""

import time
from dataclasses import dataclass, field

from engine.detokenizer import Detokenizer, ReasoningSplitter, StopMatcher
from engine.sampling import SamplingParams
from engine.text import Tokenizer
from scheduler.plan import TokenLogProbs
from scheduler.request import FinishReason, Request


@dataclass(frozen=True)
class Delta:
    """News of one request: token ids, the text they made certain, and the reason if it ended."""

    request_id: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    reasoning: str = ""
    finish_reason: FinishReason | None = None


@dataclass
class Result:
    """One request's outcome so far.

    `token_ids` are the delivered tokens: no stop id; after a stop string up to the token that completed it,
    while `text` ends before it. `text` is None without a tokenizer, `reasoning` None unless it was split off,
    `log_probs`, one entry per delivered token, None unless asked for.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    finish_reason: FinishReason | None = None
    ttft_s: float | None = None
    decode_tokens_per_s: float | None = None
    reasoning: str | None = None
    message: str | None = None
    prompt_log_probs: list[float] = field(default_factory=list)
    log_probs: list[TokenLogProbs] | None = None

    @property
    def pace(self) -> str:
        """For people: the time to the first token, and the speed from there on."""
        ttft = "-" if self.ttft_s is None else f"{self.ttft_s:.3f} s"
        speed = "-" if self.decode_tokens_per_s is None else f"{self.decode_tokens_per_s:.1f} tokens/s"
        return f"first token {ttft}, {speed}"


@dataclass
class SpeculationStatistics:
    """Steps that verified drafts: `proposed[i]` of them carried a draft at position i, `accepted[i]` accepted it and
    all before it. Counted before a stop or limit cuts the run. Lists have `depth` entries."""

    depth: int
    verify_steps: int = 0
    proposed: list[int] = field(init=False)
    accepted: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.proposed, self.accepted = [0] * self.depth, [0] * self.depth

    def add_step(self, num_drafts: int, num_accepted_drafts: int) -> None:
        """Count one request's verify step."""
        self.verify_steps += 1
        for counts, number in ((self.proposed, num_drafts), (self.accepted, num_accepted_drafts)):
            for position in range(number):
                counts[position] += 1

    @property
    def acceptance(self) -> list[float]:
        """accepted[i] / proposed[i], of the positions that were proposed."""
        return [a / p for a, p in zip(self.accepted, self.proposed, strict=True) if p]

    @property
    def mean_accepted_length(self) -> float | None:
        """New tokens per verify step: accepted drafts and one more."""
        return 1 + sum(self.accepted) / self.verify_steps if self.verify_steps else None


class Output:
    """Collects one request's Result, token by token; `thinking`: its text begins in `<think>`."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, params: SamplingParams, thinking: bool
    ) -> None:
        self.request = request
        self.result = Result(len(request.prompt), log_probs=None if params.logprobs is None else [])
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._matcher, self._splitter = StopMatcher(params.stop), ReasoningSplitter(thinking)
        self._started, self._first_token_at = time.perf_counter(), 0.0
        if tokenizer:
            self.result.text, self.result.reasoning = "", "" if thinking else None

    def push(self, token: int, log_probs: TokenLogProbs | None = None) -> tuple[Delta, bool]:
        """Deliver one token; also whether it completed a stop string."""
        now, result = time.perf_counter(), self.result
        result.token_ids.append(token)
        if result.log_probs is not None:
            assert log_probs is not None, f"token {token} came without its log-probabilities"
            result.log_probs.append(log_probs)
        if result.ttft_s is None:
            result.ttft_s, self._first_token_at = now - self._started, now
        elif now > self._first_token_at:
            result.decode_tokens_per_s = (len(result.token_ids) - 1) / (now - self._first_token_at)
        shown, stopped = self._matcher.push(self._detokenizer.push([token]) if self._detokenizer else "")
        return self._delta((token,), *self._splitter.push(shown)), stopped

    def finish(self, reason: FinishReason, message: str | None = None) -> Delta:
        """The last delta: held-back text, and the reason."""
        self.result.finish_reason, self.result.message = reason, message
        shown, _ = self._matcher.push(self._detokenizer.finish() if self._detokenizer else "")
        reasoning, text = self._splitter.push(shown + self._matcher.finish())
        return self._delta((), reasoning + self._splitter.finish(), text)

    def _delta(self, tokens: tuple[int, ...], reasoning: str, text: str) -> Delta:
        result = self.result
        if result.text is not None:
            result.text += text
        if result.reasoning is not None:
            result.reasoning += reasoning
        return Delta(self.request.request_id, tokens, text, reasoning, result.finish_reason)
