"""Generate text from prompts, streaming it to stdout.

Prompts come from the arguments, `--prompt-file`, `--prompt-ids`, or stdin when none of these is given; all run
together and are printed one after the other. Stdout carries the answers (or one JSON document) alone. With drafts,
a verify step brings the accepted ones and one token more; `accepted` at position i is the share of steps with a draft
at i that accepted it and all before it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engine.commands.common import add_drafting_arguments, add_engine_arguments, decode_utf8, load_engine
from engine.conversation import Conversation
from engine.llm import LLM, Prompt
from engine.output import Delta, Result, SpeculationStatistics
from engine.sampling import MAX_LOGPROBS, SamplingParams
from engine.text import REASONING_EFFORTS, ends_in_thinking

Show = Callable[[list[Delta]], None]
HEALTHY_ACCEPTANCE, HEALTH_STEPS = 0.2, 50  # at the first position, and verify steps before it is judged
EXAMPLES = """examples:
  python cli.py generate "It is a truth universally acknowledged" --max-tokens 64
  python cli.py generate --chat "Who is Mr. Darcy?" --temperature 0.8 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `generate`."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompt text; several run together")
    add = parser.add_argument_group("prompts").add_argument
    repeat: dict[str, Any] = {"action": "append", "default": []}
    add("--prompt-file", **repeat, metavar="FILE", help="a prompt, UTF-8 (repeatable)")
    add("--prompt-ids", **repeat, metavar="IDS", help='token ids, "1,2,3" (repeatable)')
    add("--turns", metavar="FILE", help='a conversation, one {"user": text} a line; one result per turn')
    add("--chat", action="store_true", help="each prompt is a user's turn in the model's chat template")
    add("--system", metavar="TEXT", help="system message, with --chat")
    add("--reasoning-effort", choices=REASONING_EFFORTS, help="with --chat, where the template has it")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)
    add = parser.add_argument_group("random weights").add_argument
    add("--random-weights", action="store_true", help="seeded values in the declared formats")
    add("--num-layers", type=int, metavar="N", help="only the first N layers, with --random-weights")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of text")
    logprobs = f"with --json: log-probabilities of each token and the N likeliest ids (0 to {MAX_LOGPROBS})"
    parser.add_argument("--logprobs", type=int, metavar="N", help=logprobs)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen and drafted, and when a request ends."""
    title = "sampling (defaults: the model's generation_config.json, else greedy)"
    add = parser.add_argument_group(title).add_argument
    add("--max-tokens", type=int, metavar="N", help="new tokens (default: 256)")
    add("--temperature", type=float, metavar="T", help="0 is greedy")
    add("--top-p", type=float, metavar="P")
    add("--top-k", type=int, metavar="K")
    add("--min-p", type=float, metavar="P")
    add("--seed", type=int, help="default: fresh, and reported")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    add("--ignore-eos", action="store_true", help="do not end at the model's stop tokens")
    add_drafting_arguments(parser)


def params_from(args: argparse.Namespace, llm: LLM) -> SamplingParams:
    """The sampling parameters that the arguments describe, over the model's defaults."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return llm.default_params(**changes, stop=tuple(args.stop), ignore_eos=args.ignore_eos)


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 1 if a request failed; 130 after Ctrl-C."""
    texts, ids = read_prompts(args), [parse_ids(text) for text in args.prompt_ids]
    turns = read_turns(args) if args.turns else []
    check_chat_options(args, texts)
    llm = load_engine(args)
    params = replace(params_from(args, llm), logprobs=args.logprobs)
    show = (lambda deltas: None) if args.json else Printer(as_text=llm.tokenizer is not None).show
    if turns:
        results, interrupted = run_turns(llm, turns, params, conversation(llm, args), show)
    else:
        prompts: list[Prompt] = [conversation(llm, args).ask(text) if args.chat else text for text in texts]
        results, interrupted = run_prompts(llm, [*prompts, *ids], params, args.chat, show)
    if args.json:
        length = {"mean_accepted_length": llm.statistics.mean_accepted_length}
        facts = {"model": args.model, "seed": llm.seed, "speculation": asdict(llm.statistics) | length}
        print(json.dumps(facts | {"results": [as_json(r) for r in results]}))
    else:
        report(results, llm.seed)
        report_drafts(llm.statistics)
    return 130 if interrupted else int(any(result.finish_reason == "error" for result in results))


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Text prompts in the order arguments, files; stdin if there is no prompt of any kind."""
    texts = [*args.prompts, *(decode_utf8(Path(file).read_bytes(), file) for file in args.prompt_file)]
    if args.turns:
        if texts or args.prompt_ids:
            raise ValueError("--turns is a conversation of its own; give no other prompt beside it")
        return []
    if not texts and not args.prompt_ids:
        if sys.stdin.isatty():
            print("type a prompt, end it with Ctrl-D", file=sys.stderr)
        texts = [decode_utf8(sys.stdin.buffer.read(), "standard input")]
    if "" in texts:
        raise ValueError("a prompt is empty; expected at least one character")
    return texts


def parse_ids(text: str) -> list[int]:
    """ "1,2,3" -> [1, 2, 3]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f'--prompt-ids {text!r} is no list of ids; expected for instance "1,2,3"') from None


def check_chat_options(args: argparse.Namespace, texts: Sequence[str]) -> None:
    """Refuse options that could not act."""
    if args.logprobs is not None and not args.json:
        raise ValueError("--logprobs is printed by --json only; add it")
    if args.chat and args.prompt_ids:
        raise ValueError("--chat renders text; token ids go in as they are: give one or the other")
    for name in ("system", "reasoning_effort"):
        if getattr(args, name) is not None and not args.chat:
            raise ValueError(f"--{name.replace('_', '-')} acts with --chat only")
    if args.random_weights and (texts or args.turns):
        raise ValueError("--random-weights takes --prompt-ids only: random weights have no use for text")


def read_turns(args: argparse.Namespace) -> list[str]:
    """The user's texts of a `--turns` file."""
    # Not splitlines: JSON strings may hold other characters that end a line, such as U+2028.
    lines = decode_utf8(Path(args.turns).read_bytes(), args.turns).removesuffix("\n").split("\n")
    turns = []
    for number, line in enumerate(lines, start=1):
        try:
            turns.append(json.loads(line)["user"])
        except (ValueError, KeyError, TypeError):
            turns.append(None)
        if not isinstance(turns[-1], str) or not turns[-1]:
            raise ValueError(f'{args.turns} line {number} is no turn; expected {{"user": "text"}}')
    return turns


def conversation(llm: LLM, args: argparse.Namespace) -> Conversation:
    """An empty conversation as the arguments want it."""
    effort = args.reasoning_effort
    return Conversation(llm.tokenizer, templated=args.chat, system=args.system, reasoning_effort=effort)


def run_turns(
    llm: LLM, turns: Sequence[str], params: SamplingParams, talk: Conversation, show: Show
) -> tuple[list[Result], bool]:
    """One result per turn, each answer part of the next prompt; Ctrl-C ends with the turn it cut."""
    results: list[Result] = []
    for turn in turns:
        (result,), interrupted = run_prompts(llm, [talk.ask(turn)], params, talk.templated, show)
        results.append(result)
        if interrupted:
            return results, True
        talk.answered(result)
    return results, False


def run_prompts(
    llm: LLM, prompts: list[Prompt], params: SamplingParams, chat: bool, show: Show
) -> tuple[list[Result], bool]:
    """Results in prompt order, and whether Ctrl-C cut them short (what was generated is kept)."""
    ids, interrupted = [], False
    for prompt in prompts:
        thinking = chat and isinstance(prompt, str) and ends_in_thinking(prompt)
        ids.append(llm.add_request(prompt, params, split_reasoning=thinking))
    try:
        while llm.has_work:
            show(llm.step())
    except KeyboardInterrupt:
        interrupted = True
        show([delta for request_id in ids if (delta := llm.cancel(request_id))])
    return [llm.result(request_id) for request_id in ids], interrupted


class Printer:
    """Streams answers to stdout and reasoning to stderr: the first unfinished prompt live, later ones after it."""

    def __init__(self, as_text: bool) -> None:
        self._as_text = as_text  # else token ids
        self._current = 0  # request ids of a new engine count from 0
        self._pending: dict[int, list[Delta]] = {}

    def show(self, deltas: Sequence[Delta]) -> None:
        """Print what can be printed now."""
        for delta in deltas:
            self._pending.setdefault(delta.request_id, []).append(delta)
        while self._current in self._pending:
            for delta in self._pending.pop(self._current):
                print(delta.reasoning, end="", file=sys.stderr, flush=True)
                ids = "".join(f"{token} " for token in delta.token_ids)
                print(delta.text if self._as_text else ids, end="", flush=True)
                if delta.finish_reason is not None:
                    print(flush=True)
                    self._current += 1


def as_json(result: Result) -> dict[str, Any]:
    """One entry of `results`; `message`, `reasoning` and `log_probs` only where there are any."""
    absent = {name for name in ("message", "reasoning", "log_probs") if getattr(result, name) is None}
    return {k: value for k, value in asdict(result).items() if k not in {*absent, "prompt_log_probs"}}


def report(results: Sequence[Result], seed: int) -> None:
    """One line per result on stderr."""
    for result in results:
        counts = f"prompt {result.prompt_tokens} tokens ({result.cached_tokens} cached), new {len(result.token_ids)}"
        cut = "; cut inside <think>, no answer" if result.reasoning and not result.text else ""
        end = f"{result.finish_reason}{cut}, seed {seed}"
        print(f"{counts}, {result.pace}, {end}", file=sys.stderr)
        if result.message:
            print(f"error: {result.message}", file=sys.stderr)


def report_drafts(statistics: SpeculationStatistics) -> None:
    """A line on stderr about the verify steps, if there were any, and one more if the draft layer looks broken."""
    steps, acceptance = statistics.verify_steps, statistics.acceptance
    if steps:
        shown = " ".join(f"{rate:.2f}" for rate in acceptance)
        length = f"{statistics.mean_accepted_length:.2f} tokens per step"
        print(f"drafts: verify steps {steps}, accepted {shown} by position, {length}", file=sys.stderr)
    if steps >= HEALTH_STEPS and acceptance[0] < HEALTHY_ACCEPTANCE:
        found = f"{acceptance[0]:.2f} at the first position, expected at least {HEALTHY_ACCEPTANCE}"
        remedy = "check that the MTP layer belongs to this trunk, or use --draft-tokens 0"
        print(f"drafts: {found}; {remedy}", file=sys.stderr)
