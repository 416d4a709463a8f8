"""Chat with a model over one engine, and see after each turn what the prefix cache saved.

A line of input is a turn; an empty line or the end of input ends the session. Answers go to stdout; after each, a line
on stderr tells prompt, cached and recomputed tokens, time to first token and speed, and one what its drafts brought
(defined in `generate --help`). A turn that fails is forgotten.
"""

import argparse
import sys

from engine.commands.common import add_engine_arguments, decode_utf8, load_engine
from engine.commands.generate import Printer, add_sampling_arguments, params_from, report_drafts, run_prompts
from engine.conversation import Conversation
from engine.output import Result, SpeculationStatistics
from scheduler.scheduler import RequestRefused

EXAMPLES = """examples:
  python cli.py chat --plain --max-tokens 60
  python cli.py chat --policy generic --block-size 64"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `chat`."""
    add = parser.add_argument
    add("--plain", action="store_true", help="join texts as they are instead of using the template")
    add("--system", metavar="TEXT", help="system message, in the template")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the session; exit code 0, 1 if a turn failed, 130 after Ctrl-C."""
    if args.plain and args.system is not None:
        raise ValueError("--system acts in the template; it has no place in --plain text")
    llm = load_engine(args)
    params = params_from(args, llm)
    conversation = Conversation(llm.tokenizer, templated=not args.plain, system=args.system)
    show, code = Printer(as_text=True).show, 0
    while line := read_turn():
        llm.statistics = SpeculationStatistics(llm.draft_tokens)  # of this turn
        try:
            prompt = conversation.ask(line)
            (result,), interrupted = run_prompts(llm, [prompt], params, not args.plain, show)
        except RequestRefused as error:  # the conversation has outgrown the context; a shorter turn may fit
            print(f"error: {error}", file=sys.stderr)
            code = 1
            continue
        print(summary(result), file=sys.stderr)
        report_drafts(llm.statistics)
        if interrupted:
            return 130
        if result.finish_reason == "error":
            code = 1
        else:
            conversation.answered(result)
    return code


def summary(result: Result) -> str:
    """What the turn cost."""
    if result.message:
        return f"error: {result.message}"
    recomputed = result.prompt_tokens - result.cached_tokens
    counts = f"prompt {result.prompt_tokens}, cached {result.cached_tokens}, recomputed {recomputed} tokens"
    return f"[{counts}; {result.pace}]"


def read_turn() -> str:
    """One line of input; empty at the end. A prompt sign appears on a terminal only."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return decode_utf8(sys.stdin.buffer.readline(), "standard input").rstrip("\r\n")
