"""Show how prompts would be scheduled: chunks, exports, published checkpoints, and why.

Runs the real scheduler and no model. Prompts are given by length (they share no token), or as text through a model's
tokenizer; they arrive together and leave after their prompt. The JSON document holds what the table and the picture
show; only why a request waits is in the table alone.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from engine.commands import policy_options
from engine.commands.trace_svg import draw
from scheduler.checkpoint_policy import Capability, Policy
from scheduler.plan import ScheduledChunk, StepPlan
from scheduler.simulation import RequestTrace, Simulation

EMBEDDED_MODEL = Path(__file__).resolve().parents[2] / "model" / "embedded"
PLENTY_TOKENS, PLENTY_SLOTS = 1 << 26, 1 << 16
EXAMPLES = """examples:
  python cli.py trace --lengths 32320 --policy generic
  python cli.py trace --lengths 2002,2002,2002 --svg trace.svg"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trace`."""
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="prompt text, instead of --lengths")
    add("--model", metavar="DIR", help="whose tokenizer encodes text (default: the embedded model)")
    add("--lengths", metavar="N,N", help="prompt lengths in tokens")
    add("--separate", action="store_true", help="each prompt alone, on an empty cache")
    add("--cached", type=policy_options.at_least(0), default=0, metavar="N",
        help="an external store brings rows and state of each prompt's first N tokens")  # fmt: skip
    policy_options.add_policy_arguments(parser)
    policy_options.add_drafter_arguments(parser)
    add("--svg", metavar="FILE", help="draw the steps")
    add("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the step table, or the JSON document; exit code 0."""
    prompts = prompts_from(args)
    drafter = policy_options.assumed_drafter(args)
    policy = policy_options.policy_from(args, Capability(), drafter)
    traces: list[RequestTrace] = []
    plans: list[StepPlan] = []
    for group in [[prompt] for prompt in prompts] if args.separate else [prompts]:
        simulation = simulate(args, policy, len(group))
        requests = [simulation.request(tokens, external=args.cached) for tokens in group]
        for request in requests:
            request.request_id += len(traces)
        new_traces, new_plans = simulation.run(requests)
        traces, plans = traces + new_traces, plans + new_plans
    document = as_document(policy, args.max_batched_tokens, traces, plans)
    if args.svg:
        Path(args.svg).write_text(draw(document), encoding="utf-8")
    print(json.dumps(document) if args.json else table(document, [plan.waits for plan in plans]))
    return 0


def prompts_from(args: argparse.Namespace) -> list[Sequence[int]]:
    """Token ids of every prompt. ValueError unless there is exactly one kind of prompt."""
    if bool(args.lengths) == bool(args.prompts):
        raise ValueError("give prompts as text or as --lengths, one of the two")
    prompts = lengths_as_prompts(args) if args.lengths else encoded(args)
    shortest = min(map(len, prompts))
    if args.cached and args.cached >= shortest:
        found = f"--cached is {args.cached}, the shortest prompt has {shortest} tokens"
        raise ValueError(f"{found}; at least the last token of a prompt has to be computed")
    return prompts


def lengths_as_prompts(args: argparse.Namespace) -> list[Sequence[int]]:
    """Prompts of the given lengths that share no token. No model is needed, and none may be named."""
    lengths = [int(part) if part.strip().isdecimal() else 0 for part in args.lengths.split(",")]
    if min(lengths) < 1:
        raise ValueError(f"--lengths is {args.lengths!r}, expected tokens, for instance 32320,32770")
    if args.model is not None:
        raise ValueError("--model encodes text; --lengths need no model: give one or the other")
    return [range(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]


def encoded(args: argparse.Namespace) -> list[Sequence[int]]:
    """Text through the model's tokenizer."""
    from engine.text import Tokenizer  # slow to import, and lengths need none

    directory = args.model or EMBEDDED_MODEL
    tokenizer = Tokenizer.load(Path(directory))
    if tokenizer is None:
        raise ValueError(f"{directory} has no tokenizer.json; name another --model, or give --lengths")
    return [tokenizer.encode(text) for text in args.prompts]


def simulate(args: argparse.Namespace, policy: Policy, num_requests: int) -> Simulation:
    """A scheduler over an empty cache of the size that the arguments name."""
    spare = PLENTY_SLOTS if args.checkpoint_slots is None else args.checkpoint_slots
    return Simulation(policy, **policy_options.sizes_from(args, policy, PLENTY_TOKENS, num_requests + spare))


def as_document(
    policy: Policy, budget: int, traces: Sequence[RequestTrace], plans: Sequence[StepPlan]
) -> dict[str, Any]:
    """The JSON document: requests in order, then every step."""
    settings = {"policy": policy.name, "block": policy.block_size, "budget": budget}
    steps = [_step(number, plan) for number, plan in enumerate(plans, start=1)]
    return settings | {"requests": [_request(trace) for trace in traces], "steps": steps}


def _request(trace: RequestTrace) -> dict[str, Any]:
    chunks, published = trace.chunks, trace.published
    sizes = {"prompt": len(trace.request.prompt), "cached": chunks[0].start, "forwards": len(chunks)}
    per_chunk = {"chunks": [len(c.token_ids) for c in chunks], "exports": [_exports(c) for c in chunks]}
    hits = {"resend_hit": trace.resend_hit, "extend_hit": trace.extend_hit}
    return {**sizes, **per_chunk, "published": published, **hits, "checkpoints_held": len(published)}


def _step(number: int, plan: StepPlan) -> dict[str, Any]:
    chunks = [_chunk(chunk) for chunk in plan.chunks]
    decodes = sum(chunk.decodes for chunk in plan.chunks)
    return {"step": number, "chunks": chunks, "decodes": decodes, "unused": plan.unused_tokens}


def _chunk(chunk: ScheduledChunk) -> dict[str, Any]:
    span = {"start": chunk.start, "end": chunk.end, "write_from": chunk.write_from}
    marks = {"exports": _exports(chunk), "publishes": list(chunk.publishes)}
    return {"request": chunk.request_id, **span, **marks, "reason": chunk.reason}


def _exports(chunk: ScheduledChunk) -> list[int]:
    """Positions inside the chunk; the state at its end needs no export."""
    return [export.position for export in chunk.exports if export.position < chunk.end]


def table(document: dict[str, Any], waits: Sequence[Mapping[int, str]]) -> str:
    """The steps for people, who waits in each and why, and a line per request."""
    lines = [f"policy {document['policy']}, block {document['block']}, budget {document['budget']}", ""]
    columns = f"{'step':>5} {'request':>7} {'start':>9} {'end':>9} {'tokens':>7}"
    lines.append(f"{columns}  exports; publishes; why it ends there")
    for step, waiting in zip(document["steps"], waits, strict=True):
        lines += [f"{step['step']:>5} {_chunk_line(chunk)}" for chunk in step["chunks"]]
        unused = f"({step['unused']:,} tokens of the step unused)"
        for reason in dict.fromkeys(waiting.values()):
            who = ", ".join(str(request) for request, why in waiting.items() if why == reason)
            lines.append(f"{step['step']:>5} {who:>7} {reason} {unused}")
    requests = [_request_line(number, request) for number, request in enumerate(document["requests"])]
    return "\n".join([*lines, "", *requests])


def _chunk_line(chunk: Mapping[str, Any]) -> str:
    marks = [f"exports {_list(chunk['exports'])}"] if chunk["exports"] else []
    marks += [f"publishes {_list(chunk['publishes'])}"] if chunk["publishes"] else []
    size = chunk["end"] - chunk["start"]
    replayed = min(chunk["write_from"], chunk["end"]) - chunk["start"]
    marks += [f"runs {replayed:,} without writing"] if replayed > 0 else []
    columns = f"{chunk['request']:>7} {chunk['start']:>9,} {chunk['end']:>9,} {size:>7,}"
    return f"{columns}  {'; '.join([*marks, chunk['reason']])}"


def _request_line(number: int, request: Mapping[str, Any]) -> str:
    found = f" (newest: {_list(request['published'][-3:])})" if request["published"] else ""
    tokens = f"{request['prompt']:,} tokens, {request['cached']:,} cached, {request['forwards']} forwards"
    held = f"holds {request['checkpoints_held']} checkpoints{found}"
    hits = f"a resend hits {request['resend_hit']:,}, a longer prompt {request['extend_hit']:,}"
    return f"request {number}: {tokens}; {held}; {hits}"


def _list(positions: Sequence[int]) -> str:
    return ", ".join(f"{m:,}" for m in positions)
