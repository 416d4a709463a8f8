"""What crosses the wall between scheduler and engine: a step's plan, and its result.

Both are plain data, by request id and never by row. A plan holds the blocks *added* in its step, never whole tables,
so that its cost does not grow with the context; the runner keeps the tables. A trace is the list of plans, with their
reasons.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Checkpoint(NamedTuple):
    """A recurrent state after `position` tokens, its slot, and with a drafter its companion."""

    position: int
    slot: int
    companion: int | None = None


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens `start` .. `end` - 1 of one request, to run in this step: known ones, then `num_drafts` drafts to verify.

    `admitted`: the request enters in this step, so `new_blocks` (by group) begin its tables and `restore_from`, if
    any, is the checkpoint that it continues. Rows below `write_from` are run and not written. `exports`: states in
    (start, end] that go to places of their own, unless a rejected draft lies below; `publishes` those of them that
    others may find after the commit, `rolling` the one kept privately. `samples`: every row from the last known token
    on may yield a token. `targets`: the known token after each row of a scored prompt. `limit`: the tokens that the
    request can reach at most; a sampling chunk has pages for what drafting may write beyond its end, up to there.
    `draft_start`: draft slots below hold their rows already. `next_token`: the known token at `end`, where draft rows
    are filed by hidden position and the last one needs it.
    """

    request_id: int
    token_ids: tuple[int, ...]
    start: int
    write_from: int
    admitted: bool
    new_blocks: tuple[tuple[int, ...], ...]
    recurrent_slot: int
    restore_from: Checkpoint | None
    exports: tuple[Checkpoint, ...]
    publishes: tuple[int, ...]
    rolling: int | None
    samples: bool
    decodes: bool
    reason: str
    limit: int
    targets: tuple[int, ...] = ()
    num_drafts: int = 0
    draft_start: int = 0
    next_token: int | None = None
    companion_slot: int | None = None

    @property
    def end(self) -> int:
        """Position after the last token, drafts included."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class TokenLogProbs:
    """A token's natural log-probability, and those of the most likely ids, descending."""

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class StepPlan:
    """One forward: chunks in row order; requests that ended since the last plan; why others wait; tokens left over."""

    chunks: tuple[ScheduledChunk, ...]
    released: tuple[int, ...] = ()
    waits: Mapping[int, str] = field(default_factory=dict)
    unused_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Rows of the forward."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True)
class StepResult:
    """By request id: new tokens in order (accepted drafts and one more), or the message of a failure.

    `log_probs`: of `targets`. `drafts`: what is proposed to follow the new tokens. `num_drafted`: slots of the draft
    layer that hold their rows now, if the number changed; rows may lag behind verified tokens in a request's last step
    only. `token_log_probs`: one entry per new token, for the engine's own use.
    """

    tokens: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    log_probs: Mapping[int, list[float]] = field(default_factory=dict)
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    num_drafted: Mapping[int, int] = field(default_factory=dict)
    token_log_probs: Mapping[int, tuple[TokenLogProbs, ...]] = field(default_factory=dict)
