"""What crosses the wall between scheduler and engine: a step's plan, and its result.

Both are plain data. A plan holds the blocks *added* in its step, never whole tables, so that its cost does not
grow with the context; the runner keeps the tables. A trace is the list of plans, with their reasons.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens `start` .. `start + len(token_ids)` - 1 of one request, to run in this step.

    `admitted`: the request enters in this step, so `new_blocks` (by group) begin its tables and `restore_from`, if
    any, is the slot whose state it continues. Rows below `write_from` are run and not written. `exports`: positions
    in (start, end] whose state goes to a slot; `publishes` those of them that others may find after the commit,
    `rolling` the one kept privately. `samples`: the last row yields a token. `targets`: the known token after each
    row of a scored prompt.
    """

    request_id: int
    token_ids: tuple[int, ...]
    start: int
    write_from: int
    admitted: bool
    new_blocks: tuple[tuple[int, ...], ...]
    recurrent_slot: int
    restore_from: int | None
    exports: tuple[tuple[int, int], ...]
    publishes: tuple[int, ...]
    rolling: int | None
    samples: bool
    decodes: bool
    reason: str
    targets: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Position after the last token."""
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
    """By request id: the sampled token, or the message of a failure; log-probabilities of `targets`."""

    tokens: Mapping[int, int] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    log_probs: Mapping[int, list[float]] = field(default_factory=dict)
