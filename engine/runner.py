"""A plan in, a result out: plans become batch tensors, a round is run on them, and its turns become plain numbers.

The runner keeps what lives as long as a request and is a tensor: its block tables and its sampler.
"""

from dataclasses import replace

import torch

from engine.sampling import Sampler, SamplingParams
from engine.speculation import Drafter, RequestTensors, Speculation, Turn
from model.batch import Batch, Export, Segment
from model.glm5_next import Glm5Next, TrunkCache
from scheduler.plan import ScheduledChunk, StepPlan, StepResult

LOGIT_ROWS = 256  # rows of full logits held at a time when a prompt is scored


class Runner:
    """Executes plans on one model and its cache, with a drafter or without."""

    def __init__(self, model: Glm5Next, cache: TrunkCache, drafter: Drafter | None = None) -> None:
        self.model, self.cache, self.drafter = model, cache, drafter
        self.speculation = Speculation(model, cache, drafter)
        self._requests: dict[int, RequestTensors] = {}

    def add(self, request_id: int, params: SamplingParams, seed: int) -> None:
        """Prepare to sample for a request."""
        self._requests[request_id] = RequestTensors(Sampler(params, seed), params.logprobs)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. A request whose logits can't be sampled is reported in `errors`; the others go on."""
        for request_id in plan.released:
            self._requests.pop(request_id, None)
        for chunk in plan.chunks:
            self._enter(chunk)
        batch, turns = self._batch(plan)
        self.speculation.round(batch, turns)
        by_id = {turn.chunk.request_id: turn for turn in turns if turn.error is None}
        return StepResult(
            tokens={i: turn.tokens for i, turn in by_id.items() if turn.chunk.samples},
            errors={turn.chunk.request_id: turn.error for turn in turns if turn.error is not None},
            log_probs={i: self._score(turn) for i, turn in by_id.items() if turn.chunk.targets},
            drafts={i: tuple(turn.drafts) for i, turn in by_id.items()},
            num_drafted={i: turn.draft_segment.end for i, turn in by_id.items() if turn.draft_segment},
            token_log_probs={i: turn.log_probs for i, turn in by_id.items()},
        )

    def _enter(self, chunk: ScheduledChunk) -> None:
        """Extend the tables by the step's new blocks; bring the state that a hit continues."""
        own = self._requests[chunk.request_id]
        if chunk.admitted:
            own.tables = [torch.empty(0, dtype=torch.int64, device=self.model.device)] * len(chunk.new_blocks)
        for group, pages in enumerate(chunk.new_blocks):
            if pages:
                added = torch.tensor(pages, device=self.model.device)
                own.tables[group] = torch.cat([own.tables[group], added])
        if (restored := chunk.restore_from) is not None:
            self.cache.recurrent.copy(restored.slot, chunk.recurrent_slot)
            if self.drafter is not None:
                assert restored.companion is not None and chunk.companion_slot is not None
                self.drafter.cache.copy_companion(restored.companion, chunk.companion_slot)

    def _batch(self, plan: StepPlan) -> tuple[Batch, list[Turn]]:
        token_ids: list[int] = []
        turns = []
        num_verified = 0
        for chunk in plan.chunks:
            own, row, start = self._requests[chunk.request_id], len(token_ids), chunk.start
            exports = tuple(Export(c.position - start, c.slot) for c in chunk.exports)
            size, slot = len(chunk.token_ids), chunk.recurrent_slot
            segment = Segment(row, size, start, slot, own.tables[0], exports, chunk.write_from)
            if chunk.num_drafts:  # what it leaves is decided when the drafts are
                segment = replace(segment, exports=(), replay=num_verified)
                num_verified += 1
            turns.append(Turn(chunk, own, segment))
            token_ids += chunk.token_ids
        ids = torch.tensor(token_ids, device=self.model.device)
        return Batch(ids, tuple(turn.segment for turn in turns)), turns

    def _score(self, turn: Turn) -> list[float]:
        """Log-probability of each target of a scored prompt, under its row."""
        hidden, targets = turn.hidden, turn.chunk.targets
        wanted = torch.tensor(targets, device=hidden.device).unsqueeze(1).split(LOGIT_ROWS)
        parts = zip(hidden[: len(targets)].split(LOGIT_ROWS), wanted, strict=True)
        found = [self.model.logits(rows).log_softmax(-1).gather(1, ids) for rows, ids in parts]
        log_probs: list[float] = torch.cat(found).flatten().tolist()
        return log_probs
