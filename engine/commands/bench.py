"""Measure loading, prefill and decode beside transformers, drafting beside none, or the scheduler alone."""

import argparse
from importlib import import_module
from pathlib import Path

COUNTS = {
    "prefill": (2048, "tokens of the prefill"),
    "decode": (64, "tokens decoded"),
    "after": (256, "tokens of context before them"),
    "repeat": (5, "rounds, whose medians count"),
    "threads": (1, "CPU threads of both sides"),
}
IDLE = {  # what does not act in which mode
    "scheduler": ("model", "prefill", "decode", "after", "threads", "no_peer"),
    "speculation": ("prefill", "after", "repeat", "no_peer"),
}
EXAMPLES = """examples:
  python cli.py bench --speculation tests/data/heldout.json --decode 200
  python cli.py bench --no-peer --prefill 512 --repeat 3 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    add = parser.add_argument
    add("--model", type=Path, help="model directory (default: embedded)")
    for name, (default, text) in COUNTS.items():
        add(f"--{name}", type=int, metavar="N", help=f"{text} (default: {default})")
    add("--no-peer", action="store_true", help="leave transformers out")
    mode = parser.add_mutually_exclusive_group().add_argument
    mode("--speculation", type=Path, metavar="FILE",
         help="drafts beside none, on prompts from a JSON list of texts, --decode tokens each")  # fmt: skip
    mode("--scheduler", action="store_true", help="time plans, commits and lookups; no model, no torch")
    add("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 when every round ran."""
    mode = "scheduler" if args.scheduler else "speculation" if args.speculation else "model"
    for name in IDLE.get(mode, ()):
        if getattr(args, name):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} acts on the model's measurement; it has no place beside --{mode}")
    for name, (default, _) in COUNTS.items():
        count = default if getattr(args, name) is None else getattr(args, name)
        if count < 1:
            raise ValueError(f"--{name} is {count}, expected at least 1")
        setattr(args, name, count)
    # Two of the three need torch, one must not.
    return int(import_module(f"engine.commands.bench_{mode}").run(args))
