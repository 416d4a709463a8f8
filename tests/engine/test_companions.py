"""A companion holds, bit for bit, what its own forward held at that boundary, from publication to eviction; a hit
needs it if and only if something drafts.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from model.batch import Batch, Segment
from model.glm5_next import TrunkCache
from model.indexer import IndexCache
from scheduler.plan import Checkpoint, StepPlan, StepResult
from scheduler.pool import Pool
from tests.engine.drafting import BLOCK, DEPTH, VOCAB, Probe, answer, scripted
from tests.engine.test_checkpoints_bitwise import checksum
from tests.tiny import TINY, token_ids

TEXT = token_ids(81, seed=1, vocab_size=VOCAB)
A, B = token_ids(23, seed=2, vocab_size=VOCAB), token_ids(23, seed=3, vocab_size=VOCAB)
POOL = TINY.index_kpool
EVENTS = {"publication", "hit", "eviction"}


class Auditor(Probe):
    """A probe that watches forwards, and compares companions with them when they are published, hit and evicted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.hidden: dict[tuple[int, int], Tensor] = {}  # by running slot and position
        self.raw: dict[tuple[int, int], Tensor] = {}  # index rows by running companion and row
        self.expected: dict[int, tuple[int, bytes]] = {}  # by companion: position, checksum of its forward's
        self.published: dict[int, int] = {}  # positions by companion
        self.events: Counter[str] = Counter()
        self.offsets: set[int] = set()  # of boundaries inside verified chunks
        self.handed_over = 0
        runner, indexer = self.llm.runner, self.llm.mtp.mla.indexer  # type: ignore[union-attr]
        self._execute, self._forward, self._write = runner.execute, self.llm.model.forward, indexer._write
        vars(runner)["execute"] = self.execute
        vars(self.llm.model)["forward"] = self.forward
        vars(indexer)["_write"] = self.write

    def forward(self, batch: Batch, cache: TrunkCache) -> Tensor:
        hidden = self._forward(batch, cache)
        for segment in batch.segments:
            for i, row in enumerate(hidden[segment.rows].clone()):
                self.hidden[segment.slot, segment.start + i] = row
        return hidden

    def write(self, raw: Tensor, segment: Segment, cache: IndexCache) -> None:
        for i, row in enumerate(raw.clone()):
            self.raw[segment.slot, segment.start - 1 + i] = row
        self._write(raw, segment, cache)

    def execute(self, plan: StepPlan) -> StepResult:
        for chunk in plan.chunks:
            if chunk.restore_from is not None:
                self.audit("hit", chunk.restore_from.companion, chunk.start)
        result = self._execute(plan)
        for chunk in plan.chunks:
            num_accepted = max(len(result.tokens.get(chunk.request_id, ())) - 1, 0)
            computed = chunk.end - chunk.num_drafts + num_accepted
            own = Checkpoint(computed, chunk.recurrent_slot, chunk.companion_slot)
            for position, _, companion in (*chunk.exports, own):
                if position <= computed and position % BLOCK == 0 and companion is not None:
                    rows = range((position - 1) // POOL * POOL, position - 1)
                    parts = [self.hidden[own.slot, position - 1]]
                    parts += [self.raw[chunk.companion_slot or 0, row] for row in rows]
                    self.expected[companion] = position, checksum(parts)
                    if chunk.num_drafts:
                        self.offsets.add(position - chunk.start)
        return result

    def step(self) -> None:
        running = {request.companion_slot for request in self.llm.scheduler.running}
        super().step()
        self.audit_published(running)

    def audit_published(self, running: set[int | None]) -> None:
        companions = self.blocks.companions
        assert companions is not None
        for request in self.requests:
            for block, key in enumerate(request.keys or (), start=1):
                companion = companions.find(key)
                if companion is not None and companion not in self.published:
                    self.published[companion] = block * BLOCK
                    self.audit("publication", companion, block * BLOCK)
                    self.handed_over += companion in running

    def before_companion_reuse(self, companion: int) -> None:
        if companion in self.published:
            self.audit("eviction", companion, self.published.pop(companion))

    def audit(self, event: str, companion: int | None, position: int) -> None:
        assert companion is not None
        ring = self.drafts.mla.index.ring[companion]
        live = [ring[row % len(ring)] for row in range((position - 1) // POOL * POOL, position - 1)]
        found = checksum([self.drafts.hidden[companion], *live])
        assert self.expected[companion] == (position, found), (
            f"{event} of companion {companion} at {position}"
        )
        self.events[event] += 1

    def play(self, prompts: Sequence[Sequence[int]], max_tokens: int, most: int = DEPTH) -> list[int]:
        """Requests together, scripted to accept 0 to `most` drafts in turn; preempted once in decode."""
        scripts = [scripted(p, max_tokens + 4, lambda known: known * 7 // 3 % (most + 1)) for p in prompts]
        ids = [self.add(p, max_tokens, script) for p, script in zip(prompts, scripts, strict=True)]
        while self.llm.has_work:
            self.step()
            first = self.requests[ids[0]]
            if first in self.llm.scheduler.running and len(first.output) > 2 and not first.num_preemptions:
                self.llm.scheduler.preempt(first)
        assert [self.requests[i].output for i in ids] == [answer(p, max_tokens) for p in prompts]
        return ids


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("budget", "retain"), [(12, None), (40, "all"), (4096, None), (4096, "all")])
def test_companions_stay_what_their_forward_held(budget: int, retain: str | None, share: bool) -> None:
    auditor = Auditor(max_batched_tokens=budget, retain=retain, checkpoint_slots=4, index_share=share)
    for prompts in ([TEXT, A], [TEXT, [*TEXT[:64], *A]], [[*TEXT[:32], *B]], [[*TEXT, *answer(TEXT, 12)]]):
        auditor.play(prompts, 12)
    assert auditor.events.keys() == EVENTS, auditor.events


def test_boundaries_at_every_offset_of_an_accepted_run() -> None:
    """Four requests accept all drafts, each at another position in its block."""
    auditor = Auditor(retain="all", max_running_requests=4)
    prompts = [TEXT[i : 26 + 2 * i] for i in range(4)]
    scripts = [scripted(prompt, 44, lambda known: DEPTH) for prompt in prompts]
    for prompt, script in zip(prompts, scripts, strict=True):
        auditor.add(prompt, 40, script)
    while auditor.llm.has_work:
        auditor.step()
    assert auditor.offsets == {1, 2, 3, 4} and auditor.events["publication"] > 8
    for request_id in range(4):
        assert auditor.samplers[request_id].num_accepted[1] == DEPTH
        auditor.assert_cold(request_id)


def test_a_request_that_leaves_on_a_boundary_hands_its_companion_over() -> None:
    """No slot is left for a rolling checkpoint: preempted at 48 in prefill, and at 32 in decode, it leaves its own."""
    auditor = Auditor(max_batched_tokens=48, max_running_requests=1, checkpoint_slots=1, debug=False)
    for prompt, at in ((TEXT, 48), (A, 32)):
        request = auditor.requests[auditor.add(prompt, 12, scripted(prompt, 16, lambda known: 2))]
        taken = auditor.blocks._reserve(0)
        while auditor.llm.has_work:
            auditor.step()
            if request.num_computed_tokens == at and not request.num_preemptions:
                running = {request.companion_slot}
                auditor.blocks._release(taken)
                auditor.llm.scheduler.preempt(request)
                auditor.audit_published(running)
        auditor.assert_cold(request.request_id)
    assert auditor.handed_over == 2 and auditor.events["hit"] == 2


def test_two_requests_hit_one_checkpoint_at_once_and_diverge() -> None:
    auditor = Auditor(retain="all")
    auditor.run((TEXT, 2))
    results = auditor.run(([*TEXT[:64], *A], 8), ([*TEXT[:64], *B], 8))
    assert [result.cached_tokens for result in results] == [64, 64]
    auditor.run((TEXT, 8))
    assert auditor.events["hit"] == 3
    for request_id in (1, 2, 3):
        auditor.assert_cold(request_id)


@pytest.mark.parametrize("part", ["hidden", "ring"])
def test_the_audit_sees_one_changed_number(part: str) -> None:
    auditor = Auditor()
    auditor.run((TEXT, 2))
    companion = next(place for place, position in auditor.published.items() if position == 80)
    changed = auditor.drafts.hidden if part == "hidden" else auditor.drafts.mla.index.ring
    changed[companion].view(-1, changed.shape[-1])[0, 5] += 1
    with pytest.raises(AssertionError, match=f"hit of companion {companion} at 80"):
        auditor.run((TEXT, 2))


def forget(pool: Pool, key: bytes) -> None:
    """Evict an idle place of choice."""
    place = pool._place_of.pop(key)
    del pool._key_of[place], pool._idle[place]
    pool._free.append(place)


@pytest.mark.parametrize(
    ("kind", "at", "falls_to"), [("none", 80, 80), ("companion", 80, 64), ("draft page", 48, 32)]
)
def test_35_restored_prefixes_without_all_of_their_parts(kind: str, at: int, falls_to: int) -> None:
    """I19: without the companion, or one draft page, a hit falls to the next complete boundary, and only then; what it
    says and drafts stays right."""
    used = Probe(retain="all")
    used.run((TEXT, 2))
    keys = used.requests[0].keys
    assert keys is not None and used.blocks.companions is not None
    if kind != "none":
        forget(used.blocks.companions if kind == "companion" else used.blocks.groups[1], keys.at(at))
    assert used.run((TEXT, 8))[0].cached_tokens == falls_to
    used.assert_cold(1)


@pytest.mark.parametrize("draft_tokens", [0, DEPTH])
def test_i19_what_the_target_needs_depends_on_no_draft_data(draft_tokens: int) -> None:
    """Every draft row and companion made wrong: hits and tokens stay; without a drafter there are none to need."""
    used = Probe(retain="all", draft_tokens=draft_tokens)
    used.run((TEXT, 2))
    if draft_tokens:
        layer = used.drafts.mla
        for tensor in (used.drafts.hidden, layer.latent, layer.index.pooled, layer.index.ring):
            tensor.nan_to_num_(0).add_(1)
    assert (used.blocks.companions is not None) == (draft_tokens > 0)
    result = used.run((TEXT, 8))[0]
    assert result.cached_tokens == 80 and result.token_ids == answer(TEXT, 8)
    if draft_tokens:
        assert max(used.errors(1).values()) > 0.1
