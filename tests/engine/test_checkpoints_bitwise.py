"""Every published checkpoint holds, bit for bit, what its own forward held at that boundary, from publication to
eviction, and that state is the token recurrence's.

Beside every forward a witness recomputes the states on the 16-token grid of each chunk, in the chunk's own shape,
and keeps the raw convolution rows; an auditor compares slots with it whenever they are published, hit or evicted.
Published pages keep their bits, too.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.runner import Runner
from model.batch import Batch, Segment
from model.kda import CHUNK_TOKENS, Kda, KdaInputs, KdaState, chunked, recurrence
from scheduler.checkpoint_policy import Policy
from scheduler.plan import StepPlan, StepResult
from tests.engine.equality import NEW_TOKENS, WHOLE, Ask, Player, page_tensors, policy_of, rounds, subject

PART_OF_LARGEST = 1e-5  # chunked and token-by-token arithmetic round differently in float32
CONV_ROWS = 3
EVERY_BOUNDARY = replace(policy_of("ours", "token"), retain=frozenset({"all"}))


class Witness:
    """What one KDA layer's forwards computed, by running slot and position."""

    def __init__(self, layer: Kda) -> None:
        self.layer = layer
        self.raw: dict[tuple[int, int], Tensor] = {}  # q|k|v of one token before the convolution
        self.inputs: dict[tuple[int, int], KdaInputs] = {}  # of one token
        self.matrices: dict[tuple[int, int], Tensor] = {}  # [heads, key, value] at a boundary

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the layer's forwards."""
        layer, seen = self.layer, dict[str, Any]()

        def convolve(qkv: Tensor, batch: Batch, state: KdaState) -> Tensor:
            seen["qkv"] = qkv
            return Kda._convolve(layer, qkv, batch, state)

        def inputs(*args: Tensor) -> KdaInputs:
            seen["inputs"] = Kda._inputs(layer, *args)
            return seen["inputs"]

        def forward(x: Tensor, batch: Batch, state: KdaState) -> Tensor:
            before = state.matrix.float()
            before = before.clone() if before is state.matrix else before
            result = Kda.forward(layer, x, batch, state)
            for segment in batch.segments:
                self._note(segment, before[segment.slot], seen["qkv"], seen["inputs"])
            return result

        vars(layer).update(_convolve=convolve, _inputs=inputs, forward=forward)
        try:
            yield
        finally:
            del layer._convolve, layer._inputs, layer.forward

    def _note(self, segment: Segment, before: Tensor, qkv: Tensor, inputs: KdaInputs) -> None:
        own = inputs.rows(segment.rows)
        for i in range(segment.num_tokens):
            self.raw[segment.slot, segment.start + i] = qkv[segment.row + i]
            self.inputs[segment.slot, segment.start + i] = own.rows(slice(i, i + 1))
        grid = tuple(range(CHUNK_TOKENS, segment.num_tokens, CHUNK_TOKENS))
        start = before if segment.start else torch.zeros_like(before)
        for offset, matrix in chunked(own, start, grid)[1].items():
            self.matrices[segment.slot, segment.start + offset] = matrix

    def state(self, slot: int, position: int) -> tuple[Tensor, Tensor]:
        """What the slot's request carried at a boundary: matrix, and raw convolution rows."""
        rows = [self.raw[slot, p] for p in range(position - CONV_ROWS, position)]
        return self.matrices[slot, position], torch.stack(rows)

    def by_recurrence(self, slot: int, position: int) -> Tensor:
        """The matrix after the slot's tokens 0 .. position - 1, one at a time from the inputs the layer had."""
        seen = [self.inputs[slot, p] for p in range(position)]
        whole = KdaInputs(*(torch.cat([getattr(one, f.name) for one in seen]) for f in fields(KdaInputs)))
        return recurrence(whole, torch.zeros_like(self.matrices[slot, position]))[1]


class Auditor(Player):
    """A player that compares every checkpoint with its witnesses when it is published, hit and evicted."""

    def __init__(self, policy: Policy, budget: int, name: str = "tiny", **options: Any) -> None:
        super().__init__(policy, budget, subject(name).model, **options)
        assert isinstance(self.runner, Runner)
        self.states = list(self.runner.cache.kda.values())
        layers = [layer.mixer for layer in self.runner.model.layers]
        self.witnesses = [Witness(mixer) for mixer in layers if isinstance(mixer, Kda)]
        self.expected: dict[
            int, tuple[int, bytes]
        ] = {}  # by slot: position and checksum that its forward left
        self.published: dict[int, int] = {}  # positions by slot
        self.events: Counter[str] = Counter()
        self.page_tensors = page_tensors(self.runner.cache.mla.values())
        self.pages: dict[int, bytes] = {}  # checksums of published pages

    def step(self) -> None:
        self._audit_published()  # of requests that left between two steps
        with ExitStack() as stack:
            for witness in self.witnesses:
                stack.enter_context(witness.watching())
            super().step()
        self._audit_published()

    def execute(self, plan: StepPlan) -> StepResult:
        for chunk in plan.chunks:
            if chunk.restore_from is not None:
                self._audit("hit", chunk.restore_from.slot, chunk.start)
        result = self.runner.execute(plan)
        for chunk in plan.chunks:
            for position, slot, _ in chunk.exports:
                parts = [
                    part.to(kept.dtype)
                    for witness, state in zip(self.witnesses, self.states, strict=True)
                    for part, kept in zip(
                        witness.state(chunk.recurrent_slot, position), (state.matrix, state.conv), strict=True
                    )
                ]
                self.expected[slot] = position, checksum(parts)
        return result

    def before_slot_reuse(self, slot: int) -> None:
        if slot in self.published:
            self._audit("eviction", slot, self.published.pop(slot))

    def before_page_reuse(self, page: int) -> None:
        self.pages.pop(page, None)

    def _audit_published(self) -> None:
        blocks, block = self.scheduler.blocks, self.scheduler.blocks.block_size
        assert all(self._page_checksum(page) == found for page, found in self.pages.items())
        for request in self.requests:
            for position, key in enumerate(request.keys or (), start=1):
                slot, page = blocks.slots.find(key), blocks.groups[0].find(key)
                if page is not None and page not in self.pages:
                    self.pages[page] = self._page_checksum(page)
                if slot is not None and slot not in self.published:
                    self.published[slot] = position * block
                    self._audit("publication", slot, position * block)

    def _page_checksum(self, page: int) -> bytes:
        return checksum([part[page] for part in self.page_tensors])

    def _audit(self, event: str, slot: int, position: int) -> None:
        found = checksum([part for state in self.states for part in (state.matrix[slot], state.conv[slot])])
        assert self.expected[slot] == (position, found), f"{event} of slot {slot} at {position}"
        self.events[event] += 1


def checksum(parts: Sequence[Tensor]) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def everything() -> list[list[Ask]]:
    """Most scenarios' asks, so that checkpoints are made, met and pushed out."""
    return [asks for name in ("mates", "extend", "branch") for asks in rounds(name, subject("tiny"))]


@pytest.mark.parametrize("budget", [12, 40, WHOLE])
@pytest.mark.parametrize("policy", ["generic", "seed", "vllm-0.33", "ours"])
def test_checkpoints_stay_what_their_forward_held(policy: str, budget: int) -> None:
    auditor = Auditor(policy_of(policy, "token"), budget, num_slots=7, max_running=3)
    auditor.play(everything(), interrupted=True)
    answers = [subject("tiny").answer(request.prompt)[: request.max_tokens] for request in auditor.requests]
    assert [request.output for request in auditor.requests] == answers
    assert auditor.events.keys() == {"publication", "hit", "eviction"}, auditor.events


def test_checkpoints_in_bfloat16() -> None:
    auditor = Auditor(policy_of("ours", "token"), 40, num_slots=7, max_running=3, state_dtype=torch.bfloat16)
    auditor.play(everything(), interrupted=True)
    assert auditor.events.keys() == {"publication", "hit", "eviction"}, auditor.events


def test_every_boundary_of_the_embedded_model() -> None:
    auditor = Auditor(EVERY_BOUNDARY, 64, "embedded", num_slots=9)
    auditor.play(rounds("resend", subject("embedded")))
    assert auditor.events.keys() == {"publication", "hit", "eviction"}, auditor.events


@pytest.mark.parametrize("part", ["matrix", "conv"])
def test_the_audit_sees_one_changed_number(part: str) -> None:
    auditor = Auditor(policy_of("ours", "token"), WHOLE)
    prompt = subject("tiny").prompts[0]
    auditor.play([[Ask(prompt, 2)]])
    slot = next(slot for slot, position in auditor.published.items() if position == 80)
    getattr(auditor.states[-1], part)[slot, 0, ..., 5] += 1
    with pytest.raises(AssertionError, match=f"hit of slot {slot} at 80"):
        auditor.play([[Ask(prompt, 2)]])


@pytest.mark.parametrize("budget", [3, 7, 40, 56, WHOLE])
@pytest.mark.parametrize("name", ["tiny", "embedded"])
def test_an_exported_state_is_the_recurrence_over_the_layers_own_inputs(name: str, budget: int) -> None:
    auditor = Auditor(EVERY_BOUNDARY, budget, name)
    auditor.play([[Ask(subject(name).prompts[0][:81], NEW_TOKENS[0])]])
    assert sorted(auditor.published.values()) == [16, 32, 48, 64, 80]
    running = auditor.plans[0].chunks[0].recurrent_slot
    for slot, position in auditor.published.items():
        for witness, state in zip(auditor.witnesses, auditor.states, strict=True):
            law = witness.by_recurrence(running, position)
            assert (state.matrix[slot] - law).abs().max() <= PART_OF_LARGEST * law.abs().max()
