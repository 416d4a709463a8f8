"""What drafting brings on given prompts, and what it could bring at most, as JSON:

    python -m tests.measure_speculation tests/data/heldout.json 200

Two engines, without drafts and with the default depth, answer every prompt in turn, batch 1, stop ids ignored, greedily
and at temperature 0.8. Only decode steps count: a prompt's first token and the drafts made with it are outside. Every
part is a sum over all prompts, divided by the steps. The ceiling is the speed-up if steps had no other parts:
mean_accepted_length x t_decode / (t_verify + t_draft), where t_decode is verify and accept without drafts, t_verify is
verify, accept and roll back, t_draft is catch up and draft.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from engine.commands.bench_model import machine
from engine.commands.policy_options import DEFAULT_DRAFT_TOKENS
from engine.llm import EMBEDDED_MODEL, LLM
from engine.output import SpeculationStatistics
from engine.sampling import SamplingParams

PARTS = ("verify", "accept", "roll_back", "catch_up", "draft")  # the round's steps, in order
TEMPERATURES = (0.0, 0.8)


class Timed:
    """An engine whose decode steps are counted and timed, part by part."""

    def __init__(self, model: Path, depth: int) -> None:
        self.llm = LLM(model, draft_tokens=depth)
        self.reset()
        for name in PARTS:
            self._time(name)

    def reset(self) -> None:
        """Forget what was counted."""
        self.steps, self.tokens, self.seconds = 0, 0, 0.0
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.llm.statistics = SpeculationStatistics(self.llm.draft_tokens)

    def _time(self, name: str) -> None:
        speculation, drafter = self.llm.runner.speculation, self.llm.runner.drafter
        owner = speculation if hasattr(speculation, name) else drafter
        if owner is None:  # steps of a drafter, without one
            return
        method = getattr(owner, name)

        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            result = method(*args)
            self.parts[name] += time.perf_counter() - started
            return result

        setattr(owner, name, timed)

    def answer(self, prompt: list[int], params: SamplingParams) -> None:
        """Answer one prompt; what it took until its first token is not counted."""
        result, before = self.llm.result(self.llm.add_request(prompt, params)), dict(self.parts)
        while not result.token_ids:
            self.llm.step()
        self.parts, started = before, time.perf_counter()
        while self.llm.has_work:
            self.llm.step()
            self.steps += 1
        self.seconds += time.perf_counter() - started
        self.tokens += len(result.token_ids) - 1

    def ms_per_step(self) -> dict[str, float]:
        """By part, and what is outside the round."""
        parts = {name: 1e3 * seconds / self.steps for name, seconds in self.parts.items()}
        return parts | {"other": 1e3 * self.seconds / self.steps - sum(parts.values())}


def measure(
    engines: list[Timed], prompts: list[list[int]], num_tokens: int, temperature: float
) -> dict[str, Any]:
    """Both engines in turn on every prompt, after one to warm up; costs in milliseconds per step."""
    for number, prompt in enumerate([prompts[0], *prompts]):
        for engine in engines:
            engine.answer(prompt, SamplingParams(num_tokens, temperature, seed=number, ignore_eos=True))
            if number == 0:
                engine.reset()
    costs, found = [engine.ms_per_step() for engine in engines], engines[1].llm.statistics
    speeds = [engine.tokens / engine.seconds for engine in engines]
    forward, rounds = costs[0]["verify"] + costs[0]["accept"], sum(costs[1][name] for name in PARTS)
    ratio, ceiling = speeds[1] / speeds[0], (found.mean_accepted_length or 1) * forward / rounds
    return {
        "temperature": temperature,
        "acceptance": found.acceptance,
        "mean_accepted_length": found.mean_accepted_length,
        "tokens_per_s": speeds,
        "ratio": ratio,
        "ceiling": ceiling,
        "ratio_over_ceiling": ratio / ceiling,
        "ms_per_step": {f"depth {e.llm.draft_tokens}": cost for e, cost in zip(engines, costs, strict=True)},
    }


def main(file: str, num_tokens: str = "200") -> None:
    """Print the figures as JSON. `file`: a JSON list of prompts."""
    torch.set_num_threads(1)
    engines = [Timed(EMBEDDED_MODEL, depth) for depth in (0, DEFAULT_DRAFT_TOKENS)]
    prompts = [engines[0].llm.encode(text) for text in json.loads(Path(file).read_text(encoding="utf-8"))]
    results = [measure(engines, prompts, int(num_tokens), temperature) for temperature in TEMPERATURES]
    print(json.dumps(machine(threads=1) | {"prompts": len(prompts), "results": results}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
