"""The speculation's half of `bench`: what drafting brings on a text's own prompts, and what it could bring at most.

Prompts are cut from a text at equal distances; two engines, without drafts and with the default depth, answer each in
turn, batch 1, stop ids ignored, greedily and at temperature 0.8. Only decode steps count: a prompt's first token and
the drafts made with it are outside. Every part is a sum over all prompts, divided by the steps. The ceiling is the
speed-up if steps had no other parts: mean_accepted_length x t_decode / (t_verify + t_draft), where t_decode is verify
and accept without drafts, t_verify is verify, accept and roll back, t_draft is catch up and draft.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.commands.bench_model import machine
from engine.commands.common import decode_utf8
from engine.llm import EMBEDDED_MODEL, LLM
from engine.options import DEFAULT_DRAFT_TOKENS
from engine.output import SpeculationStatistics
from engine.sampling import SamplingParams

PARTS = ("verify", "accept", "roll_back", "catch_up", "draft")  # methods of Speculation, in the round's order
TEMPERATURES = (0.0, 0.8)


class Timed:
    """An engine whose decode steps are counted and timed, part by part."""

    def __init__(self, args: argparse.Namespace, depth: int) -> None:
        kv_tokens = 4 * (args.after + args.decode)
        self.llm = LLM(args.model or EMBEDDED_MODEL, draft_tokens=depth, kv_tokens=kv_tokens)
        speculation = self.llm.runner.speculation
        for name in PARTS:
            setattr(speculation, name, self._timed(name, getattr(speculation, name)))
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self.steps, self.tokens, self.seconds = 0, 0, 0.0
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.llm.statistics = SpeculationStatistics(self.llm.draft_tokens)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            result = method(*args)
            self.parts[name] += time.perf_counter() - started
            return result

        return timed

    def answer(self, prompt: list[int], params: SamplingParams) -> None:
        """Answer one prompt; what it took until its first token is not counted."""
        result = self.llm.result(self.llm.add_request(prompt, params))
        before = dict(self.parts)
        while not result.token_ids:
            self.llm.step()
        self.parts, started = before, time.perf_counter()
        while self.llm.has_work:
            self.llm.step()
            self.steps += 1
        self.seconds += time.perf_counter() - started
        self.tokens += len(result.token_ids) - 1

    @property
    def tokens_per_s(self) -> float:
        """Of decode steps."""
        return self.tokens / self.seconds

    def ms_per_step(self, *parts: str) -> float:
        """Of the named parts."""
        return 1e3 * sum(self.parts[name] for name in parts) / self.steps


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 when every prompt was answered."""
    if args.decode < 3:  # two tokens after the prompt's: then a step can verify a draft
        raise ValueError(f"--decode is {args.decode}, expected at least 3 with --speculation")
    torch.set_num_threads(args.threads)
    plain, drafting = Timed(args, 0), Timed(args, DEFAULT_DRAFT_TOKENS)
    prompts = cut_prompts(
        plain.llm.encode(decode_utf8(args.speculation.read_bytes(), str(args.speculation))), args
    )
    report = {"machine": machine(args.threads), "prompts": len(prompts), "tokens": args.decode}
    results = [measure(plain, drafting, prompts, args.decode, each) for each in TEMPERATURES]
    print(json.dumps(report | {"results": results}, indent=1) if args.json else table(report, results))
    return 0


def cut_prompts(ids: list[int], args: argparse.Namespace) -> list[list[int]]:
    """`--repeat` prompts of `--after` tokens at equal distances. ValueError if the text is shorter than they are."""
    if len(ids) < args.repeat * args.after:
        needed = (
            f"--repeat {args.repeat} prompts of --after {args.after} tokens; lower one, or give more text"
        )
        raise ValueError(f"{args.speculation} has {len(ids)} tokens, too few for {needed}")
    starts = (i * len(ids) // args.repeat for i in range(args.repeat))
    return [ids[start : start + args.after] for start in starts]


def measure(
    plain: Timed, drafting: Timed, prompts: list[list[int]], num_tokens: int, temperature: float
) -> dict[str, Any]:
    """Both engines in turn on every prompt, after a prompt to warm up."""
    for number, prompt in enumerate([prompts[0], *prompts]):
        for engine in (plain, drafting):
            engine.answer(prompt, SamplingParams(num_tokens, temperature, seed=number, ignore_eos=True))
            if number == 0:
                engine.reset()
        if sys.stderr.isatty():
            print(f"temperature {temperature}: prompt {number} of {len(prompts)}", file=sys.stderr)
    return {"temperature": temperature} | compared(plain, drafting)


def compared(plain: Timed, drafting: Timed) -> dict[str, Any]:
    """The figures of one temperature; costs in milliseconds per step."""
    found = drafting.llm.statistics
    assert found.mean_accepted_length is not None
    ratio = drafting.tokens_per_s / plain.tokens_per_s
    ceiling = (
        found.mean_accepted_length * plain.ms_per_step("verify", "accept") / drafting.ms_per_step(*PARTS)
    )
    costs = {}
    for engine in (plain, drafting):
        parts = {name: engine.ms_per_step(name) for name in PARTS}
        other = 1e3 * engine.seconds / engine.steps - sum(parts.values())
        costs[f"depth {engine.llm.draft_tokens}"] = parts | {"other": other}
    return {
        "acceptance": found.acceptance,
        "mean_accepted_length": found.mean_accepted_length,
        "tokens_per_s": [plain.tokens_per_s, drafting.tokens_per_s],
        "ratio": ratio,
        "ceiling": ceiling,
        "ratio_over_ceiling": ratio / ceiling,
        "ms_per_step": costs,
    }


def table(report: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """The figures for people."""
    facts = report["machine"]
    lines = [f"{facts['cpu']}, {facts['threads']} thread(s), torch {facts['torch']}, {facts['date']}"]
    lines.append(f"{report['prompts']} prompts, {report['tokens']} tokens each")
    for row in results:
        accepted = " ".join(f"{rate:.2f}" for rate in row["acceptance"])
        without, with_drafts = row["tokens_per_s"]
        lines += [
            f"\ntemperature {row['temperature']}: accepted {accepted} by position,"
            f" {row['mean_accepted_length']:.2f} tokens per step",
            f"  {without:.1f} and {with_drafts:.1f} tokens/s, {row['ratio']:.2f}x;"
            f" ceiling {row['ceiling']:.2f}x, of which {row['ratio_over_ceiling']:.0%}",
        ]
        for depth, costs in row["ms_per_step"].items():
            cells = ", ".join(f"{name.replace('_', ' ')} {ms:.2f}" for name, ms in costs.items() if ms)
            lines.append(f"  {depth}, ms per step: {cells}")
    return "\n".join(lines)
