"""Options that several commands share, and how they become an engine."""

import argparse
import sys
import time
from dataclasses import fields
from typing import Any

import torch

from engine.llm import EMBEDDED_MODEL, LLM
from engine.options import EngineOptions

DEFAULTS = {field.name: field.default for field in fields(EngineOptions)}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """`--model` and the engine's options; defaults are EngineOptions'."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", default=str(EMBEDDED_MODEL), help="checkpoint directory (default: the embedded model)"
    )
    group.add_argument("--dtype", choices=("bfloat16", "float32"), default=DEFAULTS["dtype"])
    group.add_argument("--device", default=DEFAULTS["device"], help="cpu or cuda (default: cpu)")
    group.add_argument("--max-batched-tokens", type=int, default=DEFAULTS["max_batched_tokens"], metavar="N",
                       help="token budget of a step (default: %(default)s)")  # fmt: skip
    group.add_argument("--block-size", type=int, default=DEFAULTS["block_size"], metavar="N",
                       help="tokens of a cache page (default: %(default)s)")  # fmt: skip
    group.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")


def load_engine(args: argparse.Namespace, **options: Any) -> LLM:
    """The engine that the arguments describe; loading progress goes to stderr, on a terminal only."""
    if args.threads < 1:
        raise ValueError(f"--threads is {args.threads}, expected at least 1")
    torch.set_num_threads(args.threads)
    progress = LoadProgress() if sys.stderr.isatty() else None
    shared = ("dtype", "device", "max_batched_tokens", "block_size")
    return LLM(args.model, progress=progress, **{name: getattr(args, name) for name in shared}, **options)


class LoadProgress:
    """A line on stderr that counts loaded bytes, at most ten times a second."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next or done == total:
            self._next = now + 0.1
            end = "\n" if done == total else ""
            print(
                f"\rloading {done / 1e6:,.1f} of {total / 1e6:,.1f} MB", end=end, file=sys.stderr, flush=True
            )
