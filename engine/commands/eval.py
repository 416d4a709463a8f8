"""Measure the teacher-forced loss of a text file, in nats per token and per byte.

The text is cut into windows of `--window` tokens that are scored independently through the engine, in chunks
under its token budget; the first token of a window has no prediction and is not counted.
"""

import argparse
import json
import time
from pathlib import Path

from engine.commands.common import add_engine_arguments, decode_utf8, load_engine

EXAMPLES = """examples:
  python cli.py eval README.md
  python cli.py eval README.md --window 256 --dtype float32 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `eval`."""
    add = parser.add_argument
    add("file", metavar="FILE", help="UTF-8 text")
    add("--window", type=int, default=1024, metavar="N", help="tokens per window (default: %(default)s)")
    add_engine_arguments(parser)
    parser.set_defaults(draft_tokens=0)  # nothing is generated
    add("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the losses; exit code 0."""
    if args.window < 2:
        raise ValueError(f"--window is {args.window}, expected at least 2 tokens")
    text = decode_utf8(Path(args.file).read_bytes(), args.file)
    llm = load_engine(args)
    started, ids = time.perf_counter(), llm.encode(text)
    windows = llm.score([ids[begin : begin + args.window] for begin in range(0, len(ids), args.window)])
    scored, num_bytes = sum(map(len, windows)), len(text.encode())
    if not scored:
        raise ValueError(f"{args.file} has fewer than 2 tokens; there is nothing to predict")
    per_token = -sum(map(sum, windows)) / scored
    # Bytes of unscored first tokens count, so that windows of any size compare by their per-token loss.
    per_byte = per_token * (scored + len(windows)) / num_bytes
    speed = scored / (time.perf_counter() - started)
    if args.json:
        losses = {"nats_per_token": per_token, "nats_per_byte": per_byte, "tokens_per_s": speed}
        print(json.dumps({"model": args.model, "tokens": scored, "bytes": num_bytes, **losses}))
    else:
        counts = f"{scored} tokens in windows of {args.window}, {speed:.0f} tokens/s"
        print(f"{per_token:.4f} nats per token, {per_byte:.4f} per byte ({counts})")
    return 0
