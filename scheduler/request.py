"""One request's life: waiting -> running -> finished, and the counts that the scheduler keeps about it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
Status = Literal["waiting", "running", "finished"]


@dataclass
class Request:
    """A request as the scheduler sees it: token ids and limits, no text and no tensors."""

    request_id: int
    prompt: Sequence[int]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    score_prompt: bool = False  # report the log-probability of every prompt token but the first
    output: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # tokens whose cache rows and recurrent state exist
    block_table: list[int] = field(default_factory=list)
    recurrent_slot: int | None = None
    status: Status = "waiting"
    finish_reason: FinishReason | None = None

    @property
    def num_known_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt) + len(self.output)

    @property
    def max_known_tokens(self) -> int:
        """Most tokens the request can reach; its pages are reserved for these."""
        return len(self.prompt) + self.max_tokens

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens start .. end - 1."""
        split = len(self.prompt)
        generated = self.output[max(start - split, 0) : max(end - split, 0)]
        return (*self.prompt[start:end], *generated)
