"""Where drafts come from in tests: from the draft layer, or from a script in its place that knows the answer.

A script is a function of the request and of how many tokens it has, so that a run with a model and one without
verify the same drafts.
"""

from collections.abc import Callable, Sequence
from copy import copy
from itertools import takewhile
from typing import NamedTuple

from model.mtp import Mtp
from scheduler.plan import ScheduledChunk, StepPlan, StepResult
from scheduler.request import Request
from tests import tiny

Answer = Callable[[Sequence[int]], list[int]]  # what a prompt is answered
SCRIPTS = ("perfect", "adversarial", "random")
UNSAID = 254  # a stop id that no answer of these tests holds; the adversary drafts it


class Script:
    """`perfect` drafts are the answer; `random` ones are not; of the `adversarial` ones one is wrong, each in turn or
    none, and those after it are right."""

    def __init__(self, kind: str, depth: int, answer: Answer) -> None:
        self.kind, self.depth, self.answer = kind, depth, answer

    def __call__(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """Drafts after the request's first `num_tokens` generated tokens."""
        if self.kind == "random":
            return tuple(tiny.token_ids(self.depth, seed=100 * request.request_id + num_tokens))
        drafts = self.answer(request.prompt)[num_tokens : num_tokens + self.depth]
        wrong = (num_tokens // 2 + request.request_id) % (self.depth + 1)
        if self.kind == "adversarial" and wrong < len(drafts):
            drafts[wrong] = UNSAID
        return tuple(drafts)


class Drafts(NamedTuple):
    """How a player speculates: the draft layer runs in any case, a `script` replaces what it says."""

    depth: int = 0
    mtp: Mtp | None = None
    script: Script | None = None

    @property
    def index_share(self) -> bool:
        """One depth goes without, so that both ways are played."""
        return self.depth != 2


def filed(mtp: Mtp, first_slot: int) -> Mtp:
    """The same layer with the row of a token in the token's slot (1) or in that of its hidden state (0)."""
    other = copy(mtp)
    other.mla = copy(mtp.mla)
    other.mla.indexer = copy(mtp.mla.indexer)
    other.first_slot = other.mla.first_slot = other.mla.indexer.first_slot = first_slot
    return other


def drafts_of(chunk: ScheduledChunk) -> tuple[int, ...]:
    """The drafts that a chunk verifies."""
    return chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]


class Oracle:
    """A runner without a model, for requests whose answers are known; `first_slot` is the draft layer's, or None."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.prompts = answer, dict[int, Sequence[int]]()
        self.first_slot: int | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        tokens, num_drafted = {}, {}
        for chunk in plan.chunks:
            prompt, known = self.prompts[chunk.request_id], chunk.end - chunk.num_drafts
            if chunk.samples:
                following = self.answer(prompt)[known - len(prompt) :]
                right = zip(drafts_of(chunk), following, strict=False)
                accepted = sum(1 for _ in takewhile(lambda two: two[0] == two[1], right))
                tokens[chunk.request_id] = tuple(following[: accepted + 1])
                known += accepted + 1
            known += chunk.next_token is not None
            if self.first_slot is not None:
                num_drafted[chunk.request_id] = known - 1 + self.first_slot
        return StepResult(tokens, num_drafted=num_drafted)
