"""Generate text from prompts, streaming it to stdout.

Prompts come from the arguments, `--prompt-file`, `--prompt-ids`, or stdin when none of these is given; all run
together and are printed one after the other. Stdout carries the answers (or one JSON document) alone.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.commands.common import add_engine_arguments, load_engine
from engine.llm import LLM, Prompt
from engine.output import Delta, Result
from engine.sampling import SamplingParams
from engine.text import ends_in_thinking

EXAMPLES = """examples:
  python cli.py generate "It is a truth universally acknowledged" --max-tokens 64
  python cli.py generate --chat "Who is Mr. Darcy?" --temperature 0 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `generate`."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompt text; several run together")
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompt-file", action="append", default=[], metavar="FILE", help="a prompt, UTF-8 (repeatable)"
    )
    group.add_argument(
        "--prompt-ids", action="append", default=[], metavar="IDS", help='token ids, "1,2,3" (repeatable)'
    )
    group.add_argument(
        "--chat", action="store_true", help="each prompt is a user's turn in the model's chat template"
    )
    group.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    group.add_argument(
        "--reasoning-effort", choices=("low", "high", "max"), help="with --chat, where the template has it"
    )
    group = parser.add_argument_group("sampling (defaults: the model's generation_config.json, else greedy)")
    group.add_argument("--max-tokens", type=int, metavar="N", help="new tokens (default: 256)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--seed", type=int, help="default: fresh, and reported")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the model's stop tokens")
    add_engine_arguments(parser)
    group = parser.add_argument_group("random weights")
    group.add_argument("--random-weights", action="store_true", help="seeded values in the declared formats")
    group.add_argument(
        "--num-layers", type=int, metavar="N", help="only the first N layers, with --random-weights"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of text")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 1 if a request failed; 130 after Ctrl-C."""
    texts, ids = read_prompts(args), [parse_ids(text) for text in args.prompt_ids]
    check_chat_options(args, texts)
    llm = load_engine(args, seed=args.seed, random_weights=args.random_weights, num_layers=args.num_layers)
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    params = llm.default_params(**changes, stop=tuple(args.stop or ()), ignore_eos=args.ignore_eos)
    prompts: list[Prompt] = [render_chat(llm, text, args) if args.chat else text for text in texts]
    printer = None if args.json else Printer(as_text=llm.tokenizer is not None)
    results, interrupted = run_prompts(llm, [*prompts, *ids], params, args.chat, printer)
    if args.json:
        print(json.dumps({"model": args.model, "seed": llm.seed, "results": [as_json(r) for r in results]}))
    else:
        report(results, llm.seed)
    return 130 if interrupted else int(any(result.finish_reason == "error" for result in results))


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Text prompts in the order arguments, files; stdin if there is no prompt of any kind."""
    texts = list(args.prompts)
    for name in args.prompt_file:
        try:
            texts.append(Path(name).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8 (byte {error.start}); convert it") from None
    if not texts and not args.prompt_ids:
        try:
            texts.append(sys.stdin.buffer.read().decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not UTF-8 (byte {error.start}); convert it") from None
    if "" in texts:
        raise ValueError("a prompt is empty; expected at least one character")
    return texts


def parse_ids(text: str) -> list[int]:
    """ "1,2,3" -> [1, 2, 3]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f'--prompt-ids {text!r} is no list of token ids; expected for instance "1,2,3"'
        ) from None


def check_chat_options(args: argparse.Namespace, texts: Sequence[str]) -> None:
    """Refuse options that could not act."""
    if args.chat and args.prompt_ids:
        raise ValueError("--chat renders text; token ids go in as they are: give one or the other")
    for name in ("system", "reasoning_effort"):
        if getattr(args, name) is not None and not args.chat:
            raise ValueError(f"--{name.replace('_', '-')} acts with --chat only")
    if args.random_weights and texts:
        raise ValueError("--random-weights takes --prompt-ids only: random weights have no use for text")


def render_chat(llm: LLM, text: str, args: argparse.Namespace) -> str:
    """One user turn (after the system message, if any) in the checkpoint's template."""
    if llm.tokenizer is None:
        raise ValueError("--chat needs the model's tokenizer.json, and there is none")
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    messages = [*system, {"role": "user", "content": text}]
    return llm.tokenizer.chat(messages, reasoning_effort=args.reasoning_effort)


def run_prompts(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, chat: bool, printer: "Printer | None"
) -> tuple[list[Result], bool]:
    """Results in prompt order, and whether Ctrl-C cut them short (what was generated is kept)."""
    request_ids, interrupted = [], False
    for prompt in prompts:
        thinking = chat and isinstance(prompt, str) and ends_in_thinking(prompt)
        request_ids.append(llm.add_request(prompt, params, split_reasoning=thinking))
    try:
        while llm.has_work:
            deltas = llm.step()
            if printer:
                printer.show(deltas, request_ids)
    except KeyboardInterrupt:
        interrupted = True
        cancelled = [llm.cancel(request_id) for request_id in request_ids]
        if printer:
            printer.show([delta for delta in cancelled if delta], request_ids)
    return [llm.result(request_id) for request_id in request_ids], interrupted


class Printer:
    """Streams answers to stdout and reasoning to stderr: the first unfinished prompt live, later ones after it."""

    def __init__(self, as_text: bool) -> None:
        self._as_text = as_text  # else token ids
        self._current = 0
        self._pending: dict[int, list[Delta]] = {}

    def show(self, deltas: Sequence[Delta], request_ids: Sequence[int]) -> None:
        """Print what can be printed now."""
        for delta in deltas:
            self._pending.setdefault(delta.request_id, []).append(delta)
        while self._current < len(request_ids):
            ended = False
            for delta in self._pending.pop(request_ids[self._current], []):
                print(delta.reasoning, end="", file=sys.stderr, flush=True)
                ids = "".join(f"{token} " for token in delta.token_ids)
                print(delta.text if self._as_text else ids, end="", flush=True)
                ended = delta.finish_reason is not None
            if not ended:
                return
            print(flush=True)
            self._current += 1


def as_json(result: Result) -> dict[str, Any]:
    """One entry of `results`; `message` and `reasoning` only where there are any."""
    entry: dict[str, Any] = {
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "ttft_s": result.ttft_s,
        "decode_tokens_per_s": result.decode_tokens_per_s,
    }
    optional = {"reasoning": result.reasoning, "message": result.message}
    return entry | {name: value for name, value in optional.items() if value is not None}


def report(results: Sequence[Result], seed: int) -> None:
    """One line per result on stderr."""
    for result in results:
        ttft = "-" if result.ttft_s is None else f"{result.ttft_s:.3f} s"
        speed = "-" if result.decode_tokens_per_s is None else f"{result.decode_tokens_per_s:.1f} tokens/s"
        line = (
            f"prompt {result.prompt_tokens} tokens, new {len(result.token_ids)}, first token {ttft}, {speed}"
        )
        cut = "; cut inside <think>, no answer" if result.reasoning and not result.text else ""
        print(f"{line}, {result.finish_reason}{cut}, seed {seed}", file=sys.stderr)
        if result.message:
            print(f"error: {result.message}", file=sys.stderr)
