"""One request's life: waiting -> running -> finished (or back to waiting, preempted), and what it owns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from scheduler.keys import KeyChain
from scheduler.plan import Checkpoint, ScheduledChunk, StepResult

FinishReason = Literal["stop", "length", "cancelled", "error"]
Status = Literal["waiting", "running", "finished"]


@dataclass
class Request:
    """A request as the scheduler sees it: token ids, limits and numbers of places; no text and no tensors."""

    request_id: int
    prompt: Sequence[int]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    score_prompt: bool = False  # report the log-probability of every prompt token but the first
    salt: bytes = b""  # requests of different salts never share cached content
    num_external_tokens: int = 0  # rows and state of the first tokens come from an external store
    output: list[int] = field(default_factory=list)
    status: Status = "waiting"
    num_computed_tokens: int = 0  # tokens whose cache rows and recurrent state exist, all of them verified
    num_drafted_tokens: int = 0  # slots of the draft pages that hold their rows
    drafts: tuple[int, ...] = ()  # proposed to follow the known tokens, not verified
    # Pages by group (target, and with a drafter draft); the first ones may be shared.
    tables: list[list[int]] = field(default_factory=list)
    num_published_blocks: list[int] = field(default_factory=list)  # by group
    recurrent_slot: int | None = None
    companion_slot: int | None = None
    keys: KeyChain | None = None
    restored: Checkpoint | None = None  # referenced until the forward that copies from it is committed
    rolling: Checkpoint | None = None  # private, see `progress` and `decode`
    reserved: list[Checkpoint] = field(default_factory=list)  # to be written by the forward under way
    junctions: tuple[int, ...] = ()
    write_from: int = 0  # tokens below are in shared pages: run, if they must be, but not written
    num_cached_tokens: int = 0  # what the first admission did not have to compute
    num_preemptions: int = 0

    @property
    def num_known_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt) + len(self.output)

    @property
    def max_known_tokens(self) -> int:
        """Most tokens the request can reach."""
        return len(self.prompt) + self.max_tokens

    @property
    def prefill_end(self) -> int:
        """Where prefill ends, replayed output included."""
        return len(self.prompt) + max(len(self.output) - 1, 0)

    @property
    def decodes(self) -> bool:
        """Whether every known token but the last is computed, so that the next row samples."""
        return self.num_computed_tokens >= self.prefill_end

    def token(self, position: int) -> int:
        """The known token at a position."""
        split = len(self.prompt)
        return self.prompt[position] if position < split else self.output[position - split]

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens start .. end - 1."""
        split = len(self.prompt)
        generated = self.output[max(start - split, 0) : max(end - split, 0)]
        return (*self.prompt[start:end], *generated)

    def cache_end(self, end: int, scratch_tokens: int) -> int:
        """Tokens for which a chunk up to `end` needs pages: where it samples, drafting writes `scratch_tokens` more."""
        return end if end < self.num_known_tokens else min(end + scratch_tokens, self.max_known_tokens)

    def advance(self, chunk: ScheduledChunk, result: StepResult, max_drafts: int) -> "Advance":
        """Take over what the request's chunk computed, sampled and proposed."""
        tokens = result.tokens.get(self.request_id, ())
        num_accepted_drafts = len(tokens) - 1 if tokens else 0
        self.num_computed_tokens = chunk.end - chunk.num_drafts + num_accepted_drafts
        self.num_drafted_tokens = result.num_drafted.get(self.request_id, self.num_drafted_tokens)
        delivered, reason = self._receive(tokens)
        self.drafts = ()
        if reason is None and (drafts := result.drafts.get(self.request_id)):
            # The step that accepts them all adds one token more.
            self.drafts = drafts[: min(max_drafts, self.max_tokens - len(self.output) - 1)]
        return Advance(self, delivered, reason)

    def _receive(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append new tokens one by one, up to a stop id, which is dropped, or the last allowed one; those appended, and
        whether that ends the request."""
        for count, token in enumerate(tokens):
            if token in self.stop_ids:
                return tokens[:count], "stop"
            self.output.append(token)
            if len(self.output) == self.max_tokens:
                return tokens[: count + 1], "length"
        scored = self.max_tokens == 0 and self.num_computed_tokens == len(self.prompt)
        return tokens, "length" if scored else None


@dataclass(frozen=True)
class Advance:
    """What a commit did to one request: the delivered tokens (never a stop id), and how it ended."""

    request: Request
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    message: str | None = None
