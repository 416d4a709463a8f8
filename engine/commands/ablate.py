"""Compare checkpoint policies over workloads: forwards, recomputed tokens, checkpoints, regret.

Without `--run` it is the scheduler's arithmetic: no model, no torch, no chance. Every value of a policy may be a list;
the cells are all combinations, times workloads. Counts of forwards and tokens are of the measured requests, those of
checkpoints, pages and preemptions of the whole workload. Tokens count as *recomputed* whenever a forward runs them.

* `regret`: recomputed tokens over those of an offline optimum that keeps every state on a 16-token grid.
* `lost_to_drop`, `lost_to_missing_state`: tokens whose attention pages matched and which were run all the same. (A
  match of one block, which the drop takes whole, is not seen.)
* `unused_tokens`: budget left over by steps after which a prompt is unfinished.
* megabytes: checkpoints of GLM-5.3-Flash on one of four GPUs, per 100,000 tokens of cached prefix.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from engine.commands import policy_options
from scheduler.checkpoint_policy import PRESETS, Capability, Policy
from scheduler.plan import StepPlan
from scheduler.simulation import RequestTrace, Simulation
from scheduler.workloads import WORKLOADS, Workload, optimum

EXAMPLES = """examples:
  python cli.py ablate --workloads resend,next-turn
  python cli.py ablate --policy ours --exports 0,1,many --block-size 16,64,512 --json"""
PLENTY_TOKENS, PLENTY_SLOTS = 1 << 24, 1 << 14
RUNNING = 8  # requests that any workload has at once
# 34 KDA layers of 16 heads: a float32 matrix of 128 x 128 each, and three bfloat16 rows of q, k, v.
CHECKPOINT_BYTES = 34 * 16 * (128 * 128 * 4 + 3 * 3 * 128 * 2)
OF_RUN, OF_ARITHMETIC = ("rounds", "prompt_tokens"), ("workloads", "draft_architecture")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ablate`."""
    parser.add_argument("--workloads", metavar="LIST", help=f"of {', '.join(WORKLOADS)} (default: all)")
    policy_options.add_policy_arguments(parser, axes=True)
    policy_options.add_drafter_arguments(parser, axis=True)
    add = parser.add_argument_group("measuring the embedded model").add_argument
    add("--run", action="store_true", help="cold, resend and next turn of one prompt, in seconds")
    add("--rounds", type=policy_options.at_least(1), metavar="N", help="readings per cell (default: 3)")
    add("--prompt-tokens", type=policy_options.at_least(1), metavar="N", help="default: 32320")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the cells as Markdown or JSON; exit code 0."""
    for name in OF_ARITHMETIC if args.run else OF_RUN:
        if getattr(args, name) is not None:
            when = "without" if args.run else "with"
            raise ValueError(f"--{name.replace('_', '-')} acts {when} --run only")
    if args.run:
        from engine.commands.ablate_run import measured_rows  # needs torch

        labelled = [(label(cell), cell) for cell in cells(args)]
        rows = measured_rows(labelled, args.rounds or 3, args.prompt_tokens)
    else:
        workloads = named_workloads(args.workloads)
        rows = [simulated_row(cell, workload) for cell in cells(args) for workload in workloads]
    print(json.dumps(rows) if args.json else markdown(rows))
    return 0


def cells(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Every combination of the policy's values. A measurement leaves out `none`, unless it is asked for."""
    presets = [name for name in PRESETS if not args.run or name != "none"]
    axes = (*policy_options.AXES, "draft_tokens")
    lists = [presets if (given := getattr(args, name)) is None else given for name in axes]
    for values in product(*lists):
        yield argparse.Namespace(**vars(args) | dict(zip(axes, values, strict=True)))


def label(cell: argparse.Namespace) -> str:
    """The preset and what overrides it."""
    names = ("retain", "exports", "chunk_ends", "draft_filing", "draft_tokens")
    given = {name.replace("_", " "): value for name in names if (value := getattr(cell, name)) is not None}
    changes = [f"{name} {value}" for name, value in given.items()]
    return ", ".join(["none" if cell.no_prefix_cache else cell.policy, *changes])


def named_workloads(text: str | None) -> list[Workload]:
    """Workloads of a list of names. ValueError on an unknown one."""
    names = list(WORKLOADS) if text is None else text.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise ValueError(f"workload {unknown[0]!r} is unknown; expected any of {', '.join(WORKLOADS)}")
    return [WORKLOADS[name] for name in names]


class Recorder(Simulation):
    """A simulation that sums up what its steps left unused while a prompt was unfinished."""

    unused_tokens = 0

    def step(self, traces: dict[int, RequestTrace]) -> StepPlan:
        plan = super().step(traces)
        requests = (*self.scheduler.waiting, *self.scheduler.running)
        if any(request.num_computed_tokens < len(request.prompt) for request in requests):
            self.unused_tokens += plan.unused_tokens
        return plan


def simulated_row(cell: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """One policy under one workload. `--kv-tokens` and `--checkpoint-slots` replace the workload's own."""
    policy = policy_options.policy_from(cell, Capability(), policy_options.assumed_drafter(cell))
    slots = workload.num_slots if cell.checkpoint_slots is None else cell.checkpoint_slots + RUNNING
    tokens = workload.kv_tokens or PLENTY_TOKENS
    simulation = Recorder(policy, **policy_options.sizes_from(cell, policy, tokens, slots or PLENTY_SLOTS))
    measured, everything = workload.run(simulation)
    names = {"policy": label(cell), "block": policy.block_size, "budget": cell.max_batched_tokens}
    figures = computed(policy, measured, optimum(measured, everything)) | kept(simulation, everything)
    return names | {"workload": workload.name} | figures


def computed(policy: Policy, measured: Sequence[RequestTrace], best: int) -> dict[str, Any]:
    """What the measured requests ran, and what they ran although its attention was cached."""
    chunks = [chunk for trace in measured for chunk in trace.chunks]
    lookups = [chunk for chunk in chunks if chunk.admitted]
    sizes = [len(chunk.token_ids) for chunk in chunks]
    prompts = sum(len(trace.request.prompt) for trace in measured)
    reused = sum(trace.chunks[0].start for trace in measured)
    return {
        "forwards": len(chunks),
        "smallest_forward": min(sizes),
        "first_chunks": [len(chunk.token_ids) for chunk in measured[0].chunks],
        "prompt_tokens": prompts,
        "reused_tokens": reused,
        "recomputed_tokens": sum(sizes),
        "regret": round(sum(sizes) / best, 3),
        "lost_to_drop": policy.dropped * sum(chunk.write_from > 0 for chunk in lookups),
        "lost_to_missing_state": sum(max(chunk.write_from - chunk.start, 0) for chunk in lookups),
        "rerun_after_preemption": sum(sizes) + reused - prompts,
    }


def kept(simulation: Recorder, everything: Sequence[RequestTrace]) -> dict[str, Any]:
    """What the cache held, gave and lost."""
    blocks = simulation.scheduler.blocks
    held, cached_tokens = blocks.slots.num_keyed, blocks.groups[0].num_keyed * blocks.block_size
    per_100k = held * 100_000 / cached_tokens if cached_tokens else 0.0
    hits = {  # tokens of workloads are unique, so that one names all before it
        (chunk.start, *trace.request.tokens(chunk.start - 1, chunk.start))
        for trace in everything
        for chunk in trace.chunks
        if chunk.restore_from is not None
    }
    return {
        "checkpoints_published": held + blocks.slots.num_evictions,
        "of_them_hit": len(hits),
        "checkpoints_held": held,
        "held_per_100k_tokens": round(per_100k, 2),
        "mb_per_100k_tokens": round(per_100k * CHECKPOINT_BYTES / 1e6, 1),
        "duplicate_publications": sum(group.num_duplicate_publications for group in blocks.groups),
        "state_evictions": blocks.slots.num_evictions,
        "page_evictions": blocks.groups[0].num_evictions,
        "preemptions": simulation.scheduler.num_preemptions,
        "unused_tokens": simulation.unused_tokens,
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of equal keys as a Markdown table. Lists are left out, columns of zeros are named below it."""
    shown = [name for name, value in rows[0].items() if not isinstance(value, list)]
    zero = [name for name in shown if all(row[name] == 0 for row in rows)]
    shown = [name for name in shown if name not in zero]
    lines = ["| " + " | ".join(name.replace("_", " ") for name in shown) + " |", "|" + "---|" * len(shown)]
    lines += ["| " + " | ".join(_text(row[name]) for name in shown) + " |" for row in rows]
    if zero:
        lines += ["", f"Zero everywhere: {', '.join(name.replace('_', ' ') for name in zero)}."]
    return "\n".join(lines)


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)
