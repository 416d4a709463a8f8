"""Measure the teacher-forced loss of a text file, in nats per token and per byte.

The text is cut into windows of `--window` tokens that are scored independently through the engine, in chunks
under its token budget; the first token of a window has no prediction and is not counted.
"""

import argparse
import json
import time
from pathlib import Path

from engine.commands.common import add_engine_arguments, load_engine
from engine.llm import LLM

EXAMPLES = """examples:
  python cli.py eval README.md
  python cli.py eval README.md --window 256 --dtype float32 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `eval`."""
    parser.add_argument("file", metavar="FILE", help="UTF-8 text")
    parser.add_argument(
        "--window", type=int, default=1024, metavar="N", help="tokens per window (default: %(default)s)"
    )
    add_engine_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the losses; exit code 0."""
    if args.window < 2:
        raise ValueError(f"--window is {args.window}, expected at least 2 tokens")
    try:
        text = Path(args.file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{args.file} is not UTF-8 (byte {error.start}); convert it") from None
    llm = load_engine(args)
    started = time.perf_counter()
    losses = window_losses(llm, llm.encode(text), args.window)
    scored = sum(len(window) for window in losses)
    if not scored:
        raise ValueError(f"{args.file} has fewer than 2 tokens; there is nothing to predict")
    total = sum(sum(window) for window in losses)
    document = {
        "model": args.model,
        "tokens": scored,
        "bytes": len(text.encode()),
        "nats_per_token": total / scored,
        # Bytes of unscored first tokens count, so that windows of any size compare by their per-token loss.
        "nats_per_byte": total / scored * (scored + len(losses)) / len(text.encode()),
        "tokens_per_s": scored / (time.perf_counter() - started),
    }
    if args.json:
        print(json.dumps(document))
    else:
        print(
            f"{document['nats_per_token']:.4f} nats per token, {document['nats_per_byte']:.4f} per byte"
            f" ({scored} tokens in windows of {args.window}, {document['tokens_per_s']:.0f} tokens/s)"
        )
    return 0


def window_losses(llm: LLM, token_ids: list[int], window: int) -> list[list[float]]:
    """Negative log-probabilities, nats, of every predicted token, per window."""
    windows = [token_ids[begin : begin + window] for begin in range(0, len(token_ids), window)]
    return [[-value for value in log_probs] for log_probs in llm.score([w for w in windows if w])]
