"""The tiny model in an engine whose drafts are on record, and what the bare draft layer makes of the same tokens.

Free places of every kind are NaN, draft pages and companions too, and the books are checked after every step.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from engine.llm import LLM
from engine.output import Result
from engine.sampling import Sampler, SamplingParams
from model.glm5_next import Glm5Next
from model.mtp import Mtp
from scheduler.request import Request
from tests import driver
from tests.engine.equality import clear_freed, page_tensors, slot_tensors
from tests.scripted import TINY

DEPTH, BLOCK, VOCAB = 3, 16, 256
# Draft logits of two float32 programs that sum in another order, as in tests/model/test_references.py.
TOLERANCE = 1e-3
Script = Callable[[int, int], int]  # (known tokens, pass) -> the draft


class RecordingSampler(Sampler):
    """A greedy request's sampler that keeps draft logits by number of known tokens, and drafts what a script says."""

    def __init__(self, num_prompt: int, script: Script | None = None) -> None:
        super().__init__(SamplingParams(), seed=0)
        self.num_known, self.script = num_prompt, script
        self.num_accepted: list[int] = []  # drafts, by step
        self.logits: dict[int, list[Tensor]] = {}  # of each pass
        self.drafts: dict[int, list[int]] = {}

    def verify(
        self, logits: Tensor, drafts: Sequence[int] = (), proposals: Sequence[Tensor | None] = ()
    ) -> tuple[int, ...]:
        tokens = super().verify(logits, drafts, proposals)
        self.num_known += len(tokens)
        self.num_accepted.append(len(tokens) - 1)
        return tokens

    def propose(self, logits: Tensor) -> tuple[int, None]:
        drafts = self.drafts.setdefault(self.num_known, [])
        drafts.append(self.script(self.num_known, len(drafts)) if self.script else int(logits.argmax()))
        self.logits.setdefault(self.num_known, []).append(logits.clone())
        return drafts[-1], None


class Probe:
    """An engine; requests and samplers by request id."""

    def __init__(self, filing: str = "token", *, model: Any = TINY, **options: Any) -> None:
        settings = {"kv_tokens": 1024, "max_running_requests": 3, "block_size": BLOCK, "debug": True}
        self.llm = LLM(model, dtype="float32", draft_filing=filing, **settings | options)
        self.blocks, self.cache = self.llm.scheduler.blocks, self.llm.runner.cache
        clear_freed(self.blocks.slots, slot_tensors(self.cache), self.before_slot_reuse)
        clear_freed(self.blocks.groups[0], page_tensors(self.cache.mla.values()), ignore)
        if self.llm.runner.drafter is not None:
            self.drafts = self.llm.runner.drafter.cache
            assert self.blocks.companions is not None
            layer = self.drafts.mla
            clear_freed(self.blocks.groups[1], page_tensors([layer]), ignore)
            companion = [self.drafts.hidden, layer.index.ring]
            clear_freed(self.blocks.companions, companion, self.before_companion_reuse)
        self.requests: list[Request] = []
        self.samplers: list[RecordingSampler] = []

    def before_slot_reuse(self, slot: int) -> None:
        """Called when a slot is handed out, before its content goes."""

    def before_companion_reuse(self, companion: int) -> None:
        """The same for a companion."""

    def add(self, prompt: Sequence[int], max_tokens: int, script: Script | None = None) -> int:
        """Queue a request that stops at `max_tokens`; its id."""
        request_id = self.llm.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        self.samplers.append(RecordingSampler(len(prompt), script))
        self.llm.runner._requests[request_id].sampler = self.samplers[-1]
        self.requests.append(self.llm.scheduler.waiting[-1])
        return request_id

    def step(self) -> None:
        """One round."""
        self.llm.step()

    def run(self, *asks: tuple[Sequence[int], int], script: Script | None = None) -> list[Result]:
        """Requests (prompt, max_tokens) that arrive together, to their end."""
        ids = [self.add(*ask, script) for ask in asks]
        while self.llm.has_work:
            self.step()
        return [self.llm.result(i) for i in ids]

    def errors(self, request_id: int) -> dict[int, float]:
        """How far a request's draft logits are from the bare layer's, by known tokens; also checks its tokens."""
        request, sampler = self.requests[request_id], self.samplers[request_id]
        assert request.output == answer(request.prompt, request.max_tokens)
        tokens = request.tokens(0, request.num_known_tokens)
        expected = bare_logits(tokens, sampler.drafts, self.llm.options.index_share)
        return {
            known: float((torch.stack(sampler.logits[known]) - logits).abs().nan_to_num(torch.inf).max())
            for known, logits in expected.items()
        }

    def assert_cold(self, request_id: int) -> None:
        """The request drafted what a cold run drafts, and drafted at all."""
        errors = self.errors(request_id)
        assert errors and max(errors.values()) <= TOLERANCE, errors


def ignore(place: int) -> None:
    """Nobody waits for what a reused place held."""


@lru_cache
def bare() -> tuple[Glm5Next, Mtp]:
    """Trunk and draft layer of the tiny model."""
    return driver.load_model(TINY)


_answers: dict[tuple[int, ...], list[int]] = {}


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The bare trunk's greedy continuation."""
    known = _answers.get(tuple(prompt), [])
    if len(known) < count:
        known = _answers[tuple(prompt)] = driver.greedy(bare()[0], prompt, count)
    return known[:count]


def bare_logits(tokens: Sequence[int], drafts: Mapping[int, list[int]], share: bool) -> dict[int, Tensor]:
    """Draft logits [passes, vocab] after the first n of `tokens`, for each n in `drafts`, whose drafts are fed."""
    trunk, mtp = bare()
    sequencer = driver.Sequencer(trunk, len(tokens) + 8)
    drafter, hidden, logits = driver.Drafter(mtp, sequencer), sequencer.feed(tokens), {}
    for known, given in sorted(drafts.items()):
        if drafter.length < known - 1:
            drafter.feed(tokens[drafter.length : known - 1], hidden[drafter.length : known - 1])
        drafter.previous = hidden[known - 2 : known - 1]
        logits[known] = drafter.draft(tokens[known - 1], len(given), share, given)[1]
        drafter.previous = hidden[known - 1 : known]
    return logits


def scripted(prompt: Sequence[int], count: int, num_accepted: Callable[[int], int]) -> Script:
    """Drafts of which `num_accepted(known tokens)` are right and the rest wrong; `count` tokens are generated."""
    right = [*prompt, *answer(prompt, count)]

    def draft(known: int, step: int) -> int:
        return (right[known + step] + (step >= num_accepted(known))) % VOCAB

    return draft
