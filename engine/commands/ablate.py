"""Compare checkpoint policies over workloads: forwards, recomputed tokens, checkpoints, regret.

Without `--run` it is the scheduler's arithmetic (no model, no torch). `regret` is recomputed tokens over those of an
offline optimum that keeps every state on a 16-token grid.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from typing import Any

from engine.commands.policy_options import (
    add_drafter_arguments,
    add_policy_arguments,
    assumed_drafter,
    policy_from,
)
from scheduler.checkpoint_policy import PRESETS, Capability, Policy
from scheduler.simulation import Simulation
from scheduler.workloads import PROMPT, WORKLOADS, Workload, optimum

EXAMPLES = """examples:
  python cli.py ablate --workloads cold,resend
  python cli.py ablate --policies ours --blocks 16,64,512 --json"""
PLENTY_TOKENS, PLENTY_SLOTS = 1 << 24, 1 << 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ablate`."""
    group = parser.add_argument_group("cells")
    group.add_argument("--policies", default=",".join(PRESETS), metavar="LIST", help="presets (default: all)")
    group.add_argument("--blocks", metavar="LIST", help="block sizes (default: each preset's own)")
    group.add_argument("--budgets", metavar="LIST", help="step budgets (default: --max-batched-tokens)")
    group.add_argument("--workloads", default=",".join(WORKLOADS), metavar="LIST", help="default: all")
    add_policy_arguments(parser)
    add_drafter_arguments(parser)
    group = parser.add_argument_group("measuring the embedded model")
    group.add_argument(
        "--run", action="store_true", help="cold, resend and next turn of one prompt, in seconds"
    )
    group.add_argument("--rounds", type=int, default=3, metavar="N", help="readings per cell (default: 3)")
    group.add_argument("--prompt-tokens", type=int, default=PROMPT, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the cells as Markdown or JSON; exit code 0."""
    if args.run:
        from engine.commands.ablate_run import run_measured  # needs torch

        return run_measured(args, markdown)
    rows = []
    blocks = _numbers(args.blocks) if args.blocks else [args.block_size]
    budgets = _numbers(args.budgets) if args.budgets else [args.max_batched_tokens]
    for name, block, budget in product(args.policies.split(","), blocks, budgets):
        args.policy, args.block_size = name, block
        policy = policy_from(args, Capability(), assumed_drafter(args))
        for workload in _workloads(args.workloads):
            rows.append(cell(policy, budget, args.mixed_prefill_tokens, workload))
    print(json.dumps(rows) if args.json else markdown(rows))
    return 0


def cell(policy: Policy, budget: int, mixed_prefill_tokens: int, workload: Workload) -> dict[str, Any]:
    """One policy under one workload."""
    simulation = Simulation(
        policy,
        max_batched_tokens=budget,
        mixed_prefill_tokens=mixed_prefill_tokens,
        num_blocks=(workload.kv_tokens or PLENTY_TOKENS) // policy.block_size,
        num_slots=workload.num_slots or PLENTY_SLOTS,
    )
    measured, everything = workload.run(simulation)
    chunks = [chunk for trace in measured for chunk in trace.chunks]
    computed, best = sum(len(chunk.token_ids) for chunk in chunks), optimum(measured, everything)
    blocks = simulation.scheduler.blocks
    return {
        "policy": policy.name,
        "block": policy.block_size,
        "budget": budget,
        "workload": workload.name,
        "forwards": len(chunks),
        "smallest_forward_tokens": min(len(chunk.token_ids) for chunk in chunks),
        "prompt_tokens": sum(len(trace.request.prompt) for trace in measured),
        "recomputed_tokens": computed,
        "regret": round(computed / best, 3),
        "checkpoints_held": blocks.slots.num_keyed,
        "duplicate_publications": sum(group.num_duplicate_publications for group in blocks.groups),
        "state_evictions": blocks.slots.num_evictions,
        "page_evictions": blocks.groups[0].num_evictions,
        "preemptions": simulation.scheduler.num_preemptions,
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of equal keys as a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_text(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is no list of numbers; expected for instance 64,512") from None


def _workloads(text: str) -> list[Workload]:
    names = text.split(",")
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise ValueError(f"workload {unknown[0]!r} is unknown; expected any of {', '.join(WORKLOADS)}")
    return [WORKLOADS[name] for name in names]
