"""The scheduler without a model: requests of given tokens, every sampled token invented.

What `trace` and `ablate` report is this arithmetic. A request's figures are taken when its prefill ends, before
anything is generated: rolling checkpoints are private then and do not count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from scheduler.block_manager import BlockManager
from scheduler.checkpoint_policy import Policy
from scheduler.plan import ScheduledChunk, StepPlan, StepResult
from scheduler.request import Request
from scheduler.scheduler import NO_CAP, Scheduler

INVENTED_TOKEN = 1 << 40  # above every vocabulary: invented tokens never equal prompt tokens


def ends_of(plan: StepPlan) -> dict[int, int]:
    """By request id: the draft rows that a step without drafts has made, as many as its tokens."""
    return {chunk.request_id: chunk.end for chunk in plan.chunks}


@dataclass
class RequestTrace:
    """What one request's prefill did: its chunks in order, and what a lookup finds when it has ended."""

    request: Request
    chunks: list[ScheduledChunk] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    resend_hit: int = 0
    extend_hit: int = 0


class Simulation:
    """One scheduler over pools of the given sizes; `budgets` are Scheduler's, by name, else plenty. Caches
    persist from `run` to `run`."""

    def __init__(
        self, policy: Policy, *, num_blocks: int = 1 << 20, num_slots: int = 1 << 16, **budgets: Any
    ) -> None:
        plenty = {"context_limit": 1 << 40, "max_running_requests": 256, "mixed_prefill_tokens": NO_CAP}
        self.scheduler = Scheduler(BlockManager(policy, num_blocks, num_slots), **plenty | budgets)
        self._ids, self._invented = count(), count(INVENTED_TOKEN + 1)

    def request(self, tokens: Sequence[int], new_tokens: int = 1, external: int = 0) -> Request:
        """A request for `new_tokens` tokens; an external store brings the first `external` of its prompt."""
        return Request(next(self._ids), tokens, new_tokens, num_external_tokens=external)

    def run(self, requests: Iterable[Request]) -> tuple[list[RequestTrace], list[StepPlan]]:
        """Run requests that arrive together to their ends."""
        traces = {request.request_id: RequestTrace(request) for request in requests}
        for trace in traces.values():
            self.scheduler.add(trace.request)
        plans = []
        while self.scheduler.has_work:
            plans.append(self.step(traces))
        return list(traces.values()), plans

    def step(self, traces: dict[int, RequestTrace]) -> StepPlan:
        """One step; `traces` of requests that finish their prefill in it are completed."""
        plan = self.scheduler.schedule()
        assert plan.chunks, f"nothing could be scheduled: {dict(plan.waits)}"
        sampled = [chunk.request_id for chunk in plan.chunks if chunk.samples]
        tokens = {request_id: (next(self._invented),) for request_id in sampled}
        self.scheduler.commit(plan, StepResult(tokens, num_drafted=ends_of(plan)))
        for chunk in plan.chunks:
            trace = traces[chunk.request_id]
            if not chunk.decodes:
                trace.chunks.append(chunk)
                if chunk.samples:
                    self._complete(trace)
        return plan

    def _complete(self, trace: RequestTrace) -> None:
        blocks, prompt = self.scheduler.blocks, trace.request.prompt
        trace.resend_hit = blocks.lookup(Request(-1, prompt, 1)).state_at
        longer = [*prompt, *range(INVENTED_TOKEN - blocks.block_size - 1, INVENTED_TOKEN)]
        probe = Request(-1, longer, 1)
        trace.extend_hit = blocks.lookup(probe).state_at
        trace.published = blocks.checkpoints(probe)
