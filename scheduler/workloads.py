"""Workloads for `ablate`: who asks for what, in which order, and what an offline optimum would still compute.

Prompts share exactly the tokens
that its name says. The optimum keeps every state on a 16-token grid for ever: a prompt then computes only what follows
the longest prefix it shares with any earlier request (at least its last token).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from scheduler.request import Request
from scheduler.simulation import RequestTrace, Simulation

PROMPT = 32_320
OPTIMUM_GRID = 16
Rounds = Iterator[list[Request]]  # one after the other; the requests of a round arrive together


@dataclass(frozen=True)
class Workload:
    """Rounds of requests, the first `skip` requests not measured. `kv_tokens`, `num_slots`: None means plenty."""

    name: str
    rounds: Callable[[Simulation], Rounds]
    skip: int = 0
    kv_tokens: int | None = None
    num_slots: int | None = None

    def run(self, simulation: Simulation) -> tuple[list[RequestTrace], list[RequestTrace]]:
        """(measured traces, all traces in order)."""
        traces = [t for requests in self.rounds(simulation) for t in simulation.run(requests)[0]]
        return traces[self.skip :], traces


def fresh(length: int, start: count = count(1 << 30)) -> list[int]:  # type: ignore[type-arg]  # noqa: B008
    """Tokens that occur nowhere else."""
    return [next(start) for _ in range(length)]


def _fresh(simulation: Simulation, requests: int = 1, length: int = PROMPT) -> Rounds:
    yield [simulation.request(fresh(length)) for _ in range(requests)]


def _resend(simulation: Simulation) -> Rounds:
    tokens = fresh(PROMPT)
    for _ in range(2):
        yield [simulation.request(tokens)]


def _next_turn(simulation: Simulation) -> Rounds:
    first = simulation.request(fresh(PROMPT), new_tokens=600)
    yield [first]
    yield [simulation.request([*first.prompt, *first.output, *fresh(512)])]


def _shared(simulation: Simulation, per_round: int) -> Rounds:
    system = fresh(8_192)
    for _ in range(0, 8, per_round):
        yield [simulation.request([*system, *fresh(1_024)]) for _ in range(per_round)]


def _branching_pair(simulation: Simulation) -> Rounds:
    common = fresh(8_192)
    first, branch = ([*common, *fresh(2_000)] for _ in range(2))
    for tokens in (first, branch, branch):
        yield [simulation.request(tokens)]


def _fork(simulation: Simulation, at: int) -> Rounds:
    trunk = fresh(PROMPT)
    for tokens in (trunk, *([*trunk[:at], *fresh(PROMPT - at)] for _ in range(2))):
        yield [simulation.request(tokens)]


_WORKLOADS = (
    Workload("cold", _fresh),
    Workload("resend", _resend, skip=1),
    Workload("next-turn", _next_turn, skip=1),
    Workload("shared-in-turn", partial(_shared, per_round=1)),
    Workload("shared-at-once", partial(_shared, per_round=8)),
    Workload("branching-pair", _branching_pair, skip=2),
    Workload("fork-inside", partial(_fork, at=PROMPT // 2 + 100), skip=1),
    Workload("fork-at-boundary", partial(_fork, at=16_384), skip=1),
    Workload("pressure", partial(_fresh, requests=8, length=16_384), kv_tokens=4 * 16_384, num_slots=8),
)
WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _WORKLOADS}


def optimum(measured: Sequence[RequestTrace], everything: Sequence[RequestTrace]) -> int:
    """Tokens of the measured prompts that the offline optimum computes."""
    total = 0
    for trace in measured:
        prompt = trace.request.prompt
        earlier = everything[: everything.index(trace)]
        shared = max((_common(prompt, [*e.request.prompt, *e.request.output]) for e in earlier), default=0)
        total += len(prompt) - min(shared, len(prompt) - 1) // OPTIMUM_GRID * OPTIMUM_GRID
    return total


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
