"""A plan in, a result out: batch tensors, one forward of the trunk, one token per sampling row.

The runner keeps what lives as long as a request and is a tensor: its block table and its sampler.
"""

import torch
from torch import Tensor

from engine.sampling import Sampler, SamplingError, SamplingParams
from model.batch import Batch, Export, Segment
from model.glm5_next import Glm5Next, TrunkCache
from scheduler.plan import ScheduledChunk, StepPlan, StepResult

LOGIT_ROWS = 256  # rows of full logits held at a time when a prompt is scored


class Runner:
    """Executes plans on one model and its cache."""

    def __init__(self, model: Glm5Next, cache: TrunkCache) -> None:
        self.model, self.cache = model, cache
        self._block_tables: dict[int, Tensor] = {}
        self._samplers: dict[int, Sampler] = {}

    def add(self, request_id: int, params: SamplingParams, seed: int) -> None:
        """Prepare to sample for a request."""
        self._samplers[request_id] = Sampler(params, seed)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. A request whose logits can't be sampled is reported in `errors`; the others go on."""
        for request_id in plan.released:
            self._block_tables.pop(request_id, None)
            self._samplers.pop(request_id, None)
        for chunk in plan.chunks:
            if chunk.restore_from is not None:
                self.cache.copy_state(chunk.restore_from.slot, chunk.recurrent_slot)
        batch = self._batch(plan)
        hidden = self.model.forward(batch, self.cache)
        rows = list(zip(plan.chunks, (hidden[segment.rows] for segment in batch.segments), strict=True))
        tokens, errors = self._sample({chunk.request_id: own[-1] for chunk, own in rows if chunk.samples})
        scores = {chunk.request_id: self._score(own, chunk.targets) for chunk, own in rows if chunk.targets}
        return StepResult({i: (token,) for i, token in tokens.items()}, errors, scores)

    def _batch(self, plan: StepPlan) -> Batch:
        token_ids: list[int] = []
        segments = []
        for chunk in plan.chunks:
            size, table = len(chunk.token_ids), self._extended_table(chunk)
            exports = tuple(Export(export.position - chunk.start, export.slot) for export in chunk.exports)
            row, slot = len(token_ids), chunk.recurrent_slot
            segments.append(Segment(row, size, chunk.start, slot, table, exports, chunk.write_from))
            token_ids += chunk.token_ids
        return Batch(torch.tensor(token_ids, device=self.model.device), tuple(segments))

    def _extended_table(self, chunk: ScheduledChunk) -> Tensor:
        pages = chunk.new_blocks[0]
        if pages:
            added = torch.tensor(pages, device=self.model.device)
            known = added[:0] if chunk.admitted else self._block_tables[chunk.request_id]
            self._block_tables[chunk.request_id] = torch.cat([known, added])
        return self._block_tables[chunk.request_id]

    def _sample(self, last_rows: dict[int, Tensor]) -> tuple[dict[int, int], dict[int, str]]:
        """Tokens and error messages by request, from the hidden state [hidden] of each one's last row."""
        tokens: dict[int, int] = {}
        errors: dict[int, str] = {}
        if not last_rows:
            return tokens, errors
        logits = self.model.logits(torch.stack(list(last_rows.values())))
        for request_id, row in zip(last_rows, logits, strict=True):
            try:
                tokens[request_id] = self._samplers[request_id].sample(row)
            except SamplingError as error:
                errors[request_id] = str(error)
        return tokens, errors

    def _score(self, hidden: Tensor, targets: tuple[int, ...]) -> list[float]:
        """Log-probability of each target under its row; hidden [rows, hidden], at most rows targets."""
        wanted = torch.tensor(targets, device=hidden.device).unsqueeze(1).split(LOGIT_ROWS)
        parts = zip(hidden[: len(targets)].split(LOGIT_ROWS), wanted, strict=True)
        found = [self.model.logits(rows).log_softmax(-1).gather(1, ids) for rows, ids in parts]
        log_probs: list[float] = torch.cat(found).flatten().tolist()
        return log_probs
