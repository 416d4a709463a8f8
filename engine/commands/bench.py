"""Measure loading, prefill and decode beside transformers, or the scheduler alone (`--scheduler`)."""

import argparse
from pathlib import Path

COUNTS = {
    "prefill": (2048, "tokens of the prefill"),
    "decode": (64, "tokens decoded"),
    "after": (256, "tokens of context before them"),
    "repeat": (5, "rounds, whose medians count"),
    "threads": (1, "CPU threads of both sides"),
}
EXAMPLES = """examples:
  python cli.py bench --no-peer --prefill 512 --repeat 3 --json
  python cli.py bench --scheduler"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    add = parser.add_argument
    add("--model", type=Path, help="model directory (default: embedded)")
    for name, (default, text) in COUNTS.items():
        add(f"--{name}", type=int, metavar="N", help=f"{text} (default: {default})")
    add("--no-peer", action="store_true", help="leave transformers out")
    add("--scheduler", action="store_true", help="time plans, commits and lookups; no model, no torch")
    add("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 when every round ran."""
    for name in ("model", "prefill", "decode", "after", "threads", "no_peer") if args.scheduler else ():
        if getattr(args, name):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} acts on the model's measurement; it has no place beside --scheduler")
    for name, (default, _) in COUNTS.items():
        count = default if getattr(args, name) is None else getattr(args, name)
        if count < 1:
            raise ValueError(f"--{name} is {count}, expected at least 1")
        setattr(args, name, count)
    if args.scheduler:
        from engine.commands.bench_scheduler import run as run_scheduler

        return run_scheduler(args)
    from engine.commands.bench_model import run as run_model  # needs torch

    return run_model(args)
