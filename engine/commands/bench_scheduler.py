"""The scheduler's half of `bench`: what plans, commits and lookups cost, as contexts and cache grow tenfold twice.

Policy `ours`, with a drafter (two attention groups and companions), budget 4096. At every scale the cache holds one
long prompt and the contexts of 256 requests that decode, each a token longer than the one before, so that in every
step some cross a block. Readings are CPU seconds of this process, which other work on the machine disturbs least;
medians are printed.
"""

import argparse
import json
import time
from collections.abc import Callable
from itertools import count
from statistics import median
from typing import Any

from scheduler.checkpoint_policy import DECLARED_DRAFT_ARCHITECTURE, Capability, make_policy
from scheduler.plan import StepResult
from scheduler.request import Request
from scheduler.simulation import INVENTED_TOKEN, Simulation, ends_of

NUM_DECODES, BUDGET, STEPS_PER_ROUND = 256, 4096, 10
SCALES = (1, 10, 100)
# At scale 1: the prefix that is looked up, and what a decode follows.
LONG_TOKENS, CONTEXT_TOKENS = 10_000, 1_000
ROWS = {
    "decode_s": f"plan and commit {NUM_DECODES} decodes",
    "chunk_s": f"plan and commit one chunk of {BUDGET:,}",
    "lookup_hashing_s": "look up the long prompt, with hashing",
    "lookup_s": "look it up again, keys known",
}


def run(args: argparse.Namespace) -> int:
    """Print a table, or the JSON document; exit code 0."""
    readings = [measure(scale, args.repeat) for scale in SCALES]
    print(json.dumps({"repeat": args.repeat, "scales": readings}) if args.json else table(readings))
    return 0


def measure(scale: int, rounds: int) -> dict[str, Any]:
    """Medians in seconds at one scale, and what it consists of."""
    bench = SchedulerBench(scale * LONG_TOKENS, scale * CONTEXT_TOKENS, rounds)
    chunks = [bench.step() for _ in range(rounds)]
    bench.drain()
    hashing, known = zip(*(bench.lookup() for _ in range(rounds)), strict=True)
    bench.start_decodes()
    steps = [bench.step() for _ in range(rounds * STEPS_PER_ROUND)]
    pages = bench.scheduler.blocks.groups[0].num_keyed
    sizes = {"long_tokens": bench.long_tokens, "context_tokens": bench.context_tokens, "cached_pages": pages}
    times = (steps, chunks, hashing, known)
    return sizes | {name: median(values) for name, values in zip(ROWS, times, strict=True)}


class SchedulerBench:
    """One scheduler whose next steps are chunks of a long prompt; its first `long_tokens` are computed."""

    def __init__(self, long_tokens: int, context_tokens: int, rounds: int) -> None:
        policy = make_policy("ours", Capability(), draft_architecture=DECLARED_DRAFT_ARCHITECTURE)
        self.long_tokens, self.context_tokens, self.rounds = long_tokens, context_tokens, rounds
        chunks = (rounds + 1) * BUDGET
        longest = context_tokens + NUM_DECODES + rounds * STEPS_PER_ROUND + BUDGET
        needed = long_tokens + chunks + NUM_DECODES * longest
        num_blocks = needed // policy.block_size
        self.scheduler = Simulation(policy, max_batched_tokens=long_tokens, num_blocks=num_blocks).scheduler
        self._invented = count(INVENTED_TOKEN)
        self._long = range(long_tokens + chunks)
        self.scheduler.add(Request(0, self._long, 1))
        self.step()
        self.scheduler.max_batched_tokens = BUDGET

    def step(self) -> float:
        """Plan and commit one step; the seconds of both, without what stands for the model between them."""
        planned, plan = timed(self.scheduler.schedule)
        tokens = {chunk.request_id: (next(self._invented),) for chunk in plan.chunks if chunk.samples}
        result = StepResult(tokens, num_drafted=ends_of(plan))
        return planned + timed(lambda: self.scheduler.commit(plan, result))[0]

    def drain(self) -> None:
        """Finish what there is."""
        while self.scheduler.has_work:
            self.step()

    def lookup(self) -> tuple[float, float]:
        """Seconds to look the long prompt up: its keys unknown, then known."""
        request = Request(-1, self._long[: self.long_tokens], 1)
        hashing, reuse = timed(lambda: self.scheduler.blocks.lookup(request))
        assert reuse.attention_to > self.long_tokens - 2 * self.scheduler.blocks.block_size
        return hashing, timed(lambda: self.scheduler.blocks.lookup(request))[0]

    def start_decodes(self) -> None:
        """Bring NUM_DECODES requests to where every step is one token of each."""
        start = len(self._long)
        for number in range(NUM_DECODES):
            end = start + self.context_tokens + number
            self.scheduler.add(Request(number + 1, range(start, end), self.rounds * STEPS_PER_ROUND + 2))
            start = end
        self.scheduler.max_batched_tokens = start  # all prefills in one step
        self.step()
        self.scheduler.max_batched_tokens = BUDGET


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds and result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def table(readings: list[dict[str, Any]]) -> str:
    """One row per quantity, one column per scale, times in milliseconds."""
    rows = {"": [f"{scale}x" for scale in SCALES]}
    for name in ("long_tokens", "context_tokens", "cached_pages"):
        rows[name.replace("_", " ")] = [f"{reading[name]:,}" for reading in readings]
    for name, text in ROWS.items():
        rows[text] = [f"{reading[name] * 1000:.2f} ms" for reading in readings]
    return "\n".join(f"{text:<42}" + "".join(f"{cell:>13}" for cell in row) for text, row in rows.items())
