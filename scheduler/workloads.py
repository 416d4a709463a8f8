"""Workloads for `ablate`: who asks for what, in which order, and what an offline optimum would still compute.

A workload runs requests on a Simulation and returns the traces to be measured. Prompts share exactly the tokens
that its name says. The optimum keeps every state on a 16-token grid for ever: a prompt then computes only what follows
the longest prefix it shares with any earlier request (at least its last token).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from scheduler.simulation import RequestTrace, Simulation

PROMPT = 32_320
OPTIMUM_GRID = 16


@dataclass(frozen=True)
class Workload:
    """`run` returns (measured traces, all traces in order). `kv_tokens`, `num_slots`: None means plenty."""

    name: str
    run: Callable[[Simulation], tuple[list[RequestTrace], list[RequestTrace]]]
    kv_tokens: int | None = None
    num_slots: int | None = None


def fresh(length: int, start: count = count(1 << 30)) -> list[int]:  # type: ignore[type-arg]  # noqa: B008
    """Tokens that occur nowhere else."""
    return [next(start) for _ in range(length)]


def _run(simulation: Simulation, *rounds: Sequence[Sequence[int]]) -> list[RequestTrace]:
    """Rounds one after the other; the requests of a round arrive together."""
    return [
        trace
        for prompts in rounds
        for trace in simulation.run([simulation.request(tokens) for tokens in prompts])[0]
    ]


def _cold(simulation: Simulation) -> tuple[list[RequestTrace], list[RequestTrace]]:
    traces = _run(simulation, [fresh(PROMPT)])
    return traces, traces


def _resend(simulation: Simulation) -> tuple[list[RequestTrace], list[RequestTrace]]:
    tokens = fresh(PROMPT)
    traces = _run(simulation, [tokens], [tokens])
    return traces[1:], traces


def _next_turn(simulation: Simulation) -> tuple[list[RequestTrace], list[RequestTrace]]:
    first = simulation.request(fresh(PROMPT), new_tokens=600)
    traces, _ = simulation.run([first])
    traces += _run(simulation, [[*first.prompt, *first.output, *fresh(512)]])
    return traces[1:], traces


def _shared(together: bool) -> Callable[[Simulation], tuple[list[RequestTrace], list[RequestTrace]]]:
    def run(simulation: Simulation) -> tuple[list[RequestTrace], list[RequestTrace]]:
        system = fresh(8_192)
        prompts = [[*system, *fresh(1_024)] for _ in range(8)]
        traces = (
            _run(simulation, prompts) if together else _run(simulation, *([prompt] for prompt in prompts))
        )
        return traces, traces

    return run


def _branching_pair(simulation: Simulation) -> tuple[list[RequestTrace], list[RequestTrace]]:
    common = fresh(8_192)
    branch = [*common, *fresh(2_000)]
    traces = _run(simulation, [[*common, *fresh(2_000)]], [branch], [branch])
    return traces[2:], traces


def _fork(at: int) -> Callable[[Simulation], tuple[list[RequestTrace], list[RequestTrace]]]:
    def run(simulation: Simulation) -> tuple[list[RequestTrace], list[RequestTrace]]:
        trunk = fresh(PROMPT)
        forks = [[*trunk[:at], *fresh(PROMPT - at)] for _ in range(2)]
        traces = _run(simulation, [trunk], *([fork] for fork in forks))
        return traces[1:], traces

    return run


def _pressure(simulation: Simulation) -> tuple[list[RequestTrace], list[RequestTrace]]:
    traces = _run(simulation, [fresh(16_384) for _ in range(8)])
    return traces, traces


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("cold", _cold),
        Workload("resend", _resend),
        Workload("next-turn", _next_turn),
        Workload("shared-in-turn", _shared(together=False)),
        Workload("shared-at-once", _shared(together=True)),
        Workload("branching-pair", _branching_pair),
        Workload("fork-inside", _fork(PROMPT // 2 + 100)),
        Workload("fork-at-boundary", _fork(16_384)),
        Workload("pressure", _pressure, kv_tokens=4 * 16_384, num_slots=8),
    )
}


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
