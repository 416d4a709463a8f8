"""Chat with a model over one engine, and see after each turn what the prefix cache saved.

A line of input is a turn; an empty line or the end of input ends the session. Answers go to stdout; after each, a line
on stderr tells prompt, cached and recomputed tokens, time to first token and speed.
"""

import argparse
import sys

from engine.commands.common import add_engine_arguments, load_engine
from engine.commands.generate import Printer, add_sampling_arguments, params_from, run_prompts
from engine.conversation import Conversation

EXAMPLES = """examples:
  python cli.py chat --plain --max-tokens 60
  python cli.py chat --policy generic --block-size 64"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `chat`."""
    parser.add_argument(
        "--plain", action="store_true", help="join texts as they are instead of using the template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message, in the template")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the session; exit code 0, or 130 after Ctrl-C."""
    if args.plain and args.system is not None:
        raise ValueError("--system acts in the template; it has no place in --plain text")
    llm = load_engine(args)
    params = params_from(args, llm)
    conversation = Conversation(llm.tokenizer, templated=not args.plain, system=args.system)
    printer = Printer(as_text=True)
    while line := read_turn():
        (result,), interrupted = run_prompts(
            llm, [conversation.ask(line)], params, not args.plain, printer.show
        )
        conversation.answered(result)
        recomputed = result.prompt_tokens - result.cached_tokens
        speed = "-" if result.decode_tokens_per_s is None else f"{result.decode_tokens_per_s:.1f} tokens/s"
        print(
            f"[prompt {result.prompt_tokens}, cached {result.cached_tokens}, recomputed {recomputed}; first token"
            f" {result.ttft_s or 0:.3f} s, {speed}]",
            file=sys.stderr,
        )
        if interrupted:
            return 130
    return 0


def read_turn() -> str:
    """One line of input; empty at the end. A prompt sign appears on a terminal only."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().rstrip("\n")
