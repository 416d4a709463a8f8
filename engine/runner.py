"""A plan in, a result out: batch tensors, one forward of the trunk, one token per sampling row.

The runner keeps what lives as long as a request and is a tensor: its block table and its sampler.
"""

import torch
from torch import Tensor

from engine.sampling import Sampler, SamplingError, SamplingParams
from model.batch import Batch, Segment
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
        batch = self._batch(plan)
        hidden = self.model.forward(batch, self.cache)
        tokens, errors = self._sample(plan, batch, hidden)
        log_probs = {
            chunk.request_id: self._score(hidden[segment.rows], chunk.targets)
            for chunk, segment in zip(plan.chunks, batch.segments, strict=True)
            if chunk.targets
        }
        return StepResult(tokens, errors, log_probs)

    def _batch(self, plan: StepPlan) -> Batch:
        device, row, segments = self.model.device, 0, []
        for chunk in plan.chunks:
            table = self._extended_table(chunk)
            segments.append(Segment(row, len(chunk.token_ids), chunk.start, chunk.recurrent_slot, table))
            row += len(chunk.token_ids)
        token_ids = [token for chunk in plan.chunks for token in chunk.token_ids]
        return Batch(torch.tensor(token_ids, device=device), tuple(segments))

    def _extended_table(self, chunk: ScheduledChunk) -> Tensor:
        table = self._block_tables.get(chunk.request_id)
        if chunk.new_blocks:
            added = torch.tensor(chunk.new_blocks, device=self.model.device)
            table = added if table is None else torch.cat([table, added])
            self._block_tables[chunk.request_id] = table
        assert table is not None
        return table

    def _sample(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> tuple[dict[int, int], dict[int, str]]:
        tokens, errors = {}, {}
        sampling = [
            (chunk.request_id, segment.row + segment.num_tokens - 1)
            for chunk, segment in zip(plan.chunks, batch.segments, strict=True)
            if chunk.samples
        ]
        if sampling:
            logits = self.model.logits(
                hidden[torch.tensor([row for _, row in sampling], device=hidden.device)]
            )
            for (request_id, _), row_logits in zip(sampling, logits, strict=True):
                try:
                    tokens[request_id] = self._samplers[request_id].sample(row_logits)
                except SamplingError as error:
                    errors[request_id] = str(error)
        return tokens, errors

    def _score(self, hidden: Tensor, targets: tuple[int, ...]) -> list[float]:
        """Log-probability of each target under its row; hidden [rows, hidden], at most rows targets."""
        wanted = torch.tensor(targets, device=hidden.device)
        parts = []
        for begin in range(0, len(targets), LOGIT_ROWS):
            part = wanted[begin : begin + LOGIT_ROWS]
            log_probs = self.model.logits(hidden[begin : begin + len(part)]).log_softmax(-1)
            parts.append(log_probs.gather(1, part.unsqueeze(1)).squeeze(1))
        return [float(value) for value in torch.cat(parts).tolist()]
