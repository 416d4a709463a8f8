"""What crosses the wall between scheduler and engine: a step's plan, and its result.

Both are plain data. A plan holds the blocks *added* in its step, never whole tables, so that its cost does not
grow with the context; the runner keeps the tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens `start` .. `start + len(token_ids)` - 1 of one request, to run in this step.

    `samples`: these are the last known tokens, so the last row yields a new one. `targets`: for a scored
    prompt, the known token after each row (as many as are known).
    """

    request_id: int
    token_ids: tuple[int, ...]
    start: int
    new_blocks: tuple[int, ...]
    recurrent_slot: int
    samples: bool
    targets: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class StepPlan:
    """One forward: chunks in row order, and the requests that left since the last plan."""

    chunks: tuple[ScheduledChunk, ...]
    released: tuple[int, ...] = ()

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
