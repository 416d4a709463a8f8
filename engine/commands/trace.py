"""Show how prompts would be scheduled: chunks, exports, published checkpoints, and why.

Runs the real scheduler without a model. Prompts are given by length (and share no token), or as text through a
model's tokenizer; every request leaves after its prompt.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.commands.policy_options import (
    add_drafter_arguments,
    add_policy_arguments,
    assumed_drafter,
    policy_from,
)
from engine.commands.trace_svg import draw
from scheduler.checkpoint_policy import Capability, Policy
from scheduler.plan import StepPlan
from scheduler.simulation import RequestTrace, Simulation

EXAMPLES = """examples:
  python cli.py trace --lengths 32320 --policy generic
  python cli.py trace --lengths 2002,2002,2002 --svg trace.svg"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trace`."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text prompts, with --model")
    parser.add_argument("--model", metavar="DIR", help="whose tokenizer encodes text prompts")
    parser.add_argument("--lengths", metavar="N,N", help="prompt lengths in tokens, instead of text")
    parser.add_argument("--separate", action="store_true", help="each prompt alone, on an empty cache")
    parser.add_argument(
        "--cached", type=int, default=0, metavar="N", help="the first N tokens are there already"
    )
    parser.add_argument("--kv-tokens", type=int, default=1 << 26, metavar="N", help="per attention group")
    parser.add_argument(
        "--checkpoint-slots", type=int, default=1 << 16, metavar="N", help="beyond the running ones"
    )
    add_policy_arguments(parser)
    add_drafter_arguments(parser)
    parser.add_argument("--svg", metavar="FILE", help="draw the steps")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the step table, or the JSON document; exit code 0."""
    prompts = prompts_from(args)
    policy = policy_from(args, Capability(), assumed_drafter(args))
    groups = [[prompt] for prompt in prompts] if args.separate else [prompts]
    traces: list[RequestTrace] = []
    plans: list[StepPlan] = []
    for group in groups:
        simulation = Simulation(
            policy,
            max_batched_tokens=args.max_batched_tokens,
            mixed_prefill_tokens=args.mixed_prefill_tokens,
            num_blocks=max(args.kv_tokens // policy.block_size, 1),
            num_slots=args.checkpoint_slots + len(group),
        )
        requests = [simulation.request(tokens, external=args.cached) for tokens in group]
        for request in requests:
            request.request_id += len(traces)
        new_traces, new_plans = simulation.run(requests)
        traces, plans = traces + new_traces, plans + new_plans
    document = as_document(policy, args.max_batched_tokens, traces, plans)
    if args.svg:
        Path(args.svg).write_text(draw(document), encoding="utf-8")
    print(json.dumps(document) if args.json else table(document))
    return 0


def prompts_from(args: argparse.Namespace) -> list[Sequence[int]]:
    """Token ids of every prompt. ValueError unless there is exactly one kind of prompt."""
    if bool(args.lengths) == bool(args.prompts):
        raise ValueError("give prompts as text or as --lengths, one of the two")
    if args.lengths:
        lengths = [int(part) if part.strip().isdigit() else 0 for part in args.lengths.split(",")]
        if min(lengths) < 1 or args.cached >= min(lengths):
            raise ValueError(
                f"--lengths {args.lengths!r}: expected lengths in tokens above --cached {args.cached}"
            )
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        return [range(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    from engine.text import Tokenizer  # text alone needs it

    tokenizer = Tokenizer.load(Path(args.model)) if args.model else None
    if tokenizer is None:
        raise ValueError("text prompts need --model, a directory with tokenizer.json")
    return [tokenizer.encode(text) for text in args.prompts]


def as_document(
    policy: Policy, budget: int, traces: Sequence[RequestTrace], plans: Sequence[StepPlan]
) -> dict[str, Any]:
    """The JSON document: requests in order, then every step."""
    return {
        "policy": policy.name,
        "block": policy.block_size,
        "budget": budget,
        "requests": [_request(trace) for trace in traces],
        "steps": [_step(number, plan) for number, plan in enumerate(plans, start=1)],
    }


def _request(trace: RequestTrace) -> dict[str, Any]:
    return {
        "prompt": len(trace.request.prompt),
        "cached": trace.chunks[0].start,
        "forwards": len(trace.chunks),
        "chunks": [len(chunk.token_ids) for chunk in trace.chunks],
        "exports": [[m for m, _ in chunk.exports if m < chunk.end] for chunk in trace.chunks],
        "published": trace.published,
        "resend_hit": trace.resend_hit,
        "extend_hit": trace.extend_hit,
        "checkpoints_held": len(trace.published),
    }


def _step(number: int, plan: StepPlan) -> dict[str, Any]:
    chunks = [
        {
            "request": chunk.request_id,
            "start": chunk.start,
            "end": chunk.end,
            "write_from": chunk.write_from,
            "exports": [m for m, _ in chunk.exports if m < chunk.end],
            "publishes": list(chunk.publishes),
            "reason": chunk.reason,
        }
        for chunk in plan.chunks
    ]
    decodes = sum(chunk.decodes for chunk in plan.chunks)
    return {"step": number, "chunks": chunks, "decodes": decodes, "unused": plan.unused_tokens}


def table(document: dict[str, Any]) -> str:
    """The steps for people, and a line per request."""
    lines = [f"policy {document['policy']}, block {document['block']}, budget {document['budget']}", ""]
    lines.append(
        f"{'step':>5} {'request':>7} {'start':>9} {'end':>9} {'tokens':>7}  exports; publishes; why it ends there"
    )
    for step in document["steps"]:
        for chunk in step["chunks"]:
            marks = [f"exports {_list(chunk['exports'])}"] if chunk["exports"] else []
            marks += [f"publishes {_list(chunk['publishes'])}"] if chunk["publishes"] else []
            size = chunk["end"] - chunk["start"]
            position = f"{chunk['start']:>9,} {chunk['end']:>9,} {size:>7,}"
            lines.append(
                f"{step['step']:>5} {chunk['request']:>7} {position}  {'; '.join([*marks, chunk['reason']])}"
            )
    lines.append("")
    for index, request in enumerate(document["requests"]):
        found = _list(request["published"][-3:]) if request["published"] else "nothing"
        lines.append(
            f"request {index}: {request['prompt']:,} tokens in {request['forwards']} forwards; holds"
            f" {request['checkpoints_held']} checkpoints (newest {found}); a resend hits {request['resend_hit']:,},"
            f" a longer prompt {request['extend_hit']:,}"
        )
    return "\n".join(lines)


def _list(positions: Sequence[int]) -> str:
    return ", ".join(f"{m:,}" for m in positions)
