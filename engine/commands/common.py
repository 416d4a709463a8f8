"""What several commands share: engine options and how they become an engine, and reading text."""

import argparse
import sys
import time
from dataclasses import fields
from typing import Any

import torch

from engine.commands.policy_options import DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS, add_policy_arguments
from engine.llm import EMBEDDED_MODEL, LLM
from engine.options import DTYPES, EngineOptions

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineOptions)}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """`--model`, `--threads` and the engine's options; defaults are EngineOptions'."""
    add = parser.add_argument_group("engine").add_argument
    add("--model", default=str(EMBEDDED_MODEL), help="checkpoint directory (default: the embedded model)")
    add("--dtype", choices=DTYPES, help="width of weights and caches (default: %(default)s)")
    add("--device", help="cpu or cuda (default: %(default)s)")
    add("--state-dtype", choices=DTYPES, help="width of recurrent states (default: %(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="CPU threads (default: %(default)s)")
    add_policy_arguments(parser)
    parser.set_defaults(**DEFAULTS)


def add_drafting_arguments(parser: argparse.ArgumentParser) -> None:
    """How the draft layer speculates."""
    add = parser.add_argument_group("speculation (changes the speed, never a greedy token)").add_argument
    text = (
        f"drafts per step, 0 to {MAX_DRAFT_TOKENS} (default: {DEFAULT_DRAFT_TOKENS}; 0 without an MTP layer)"
    )
    add("--draft-tokens", type=int, metavar="N", help=text)
    add("--no-index-share", dest="index_share", action="store_false",
        help="later draft passes select keys of their own (default: the first one's)")  # fmt: skip


def load_engine(args: argparse.Namespace) -> LLM:
    """The engine that the arguments describe; loading progress goes to stderr, on a terminal only."""
    if args.threads < 1:
        raise ValueError(f"--threads is {args.threads}, expected at least 1")
    torch.set_num_threads(args.threads)
    options = {name: getattr(args, name) for name in DEFAULTS}
    llm = LLM(args.model, progress=LoadProgress() if sys.stderr.isatty() else None, **options)
    used = f"drafts per step: {llm.draft_tokens}" if llm.draft_tokens else "in the checkpoint, not used"
    mtp = used if llm.has_mtp else "none"
    print(f"stop ids {', '.join(map(str, llm.stop_ids)) or 'none'}; MTP layer: {mtp}", file=sys.stderr)
    parts = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in llm.cache_parts.items())
    print(f"cache: {parts}", file=sys.stderr)
    return llm


def decode_utf8(content: bytes, name: str) -> str:
    """The text of a file as it is, line ends included. ValueError if it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 (byte {error.start}); convert it") from None


class LoadProgress:
    """A line on stderr that counts loaded bytes, at most ten times a second."""

    _next = 0.0

    def __call__(self, done: int, total: int) -> None:
        if (now := time.monotonic()) < self._next and done < total:
            return
        self._next = now + 0.1
        line, end = f"\rloading {done / 1e6:,.1f} of {total / 1e6:,.1f} MB", "\n" if done == total else ""
        print(line, end=end, file=sys.stderr, flush=True)
