"""The measured half of `ablate`: one long prompt under the presets, on a real engine.

Per round and policy a fresh engine runs the prompt cold, sends it again, generates an answer, and continues it with new
text. Policies alternate within a round; medians over rounds are compared.
"""

import argparse
import json
import random
import sys
import time
from statistics import median
from typing import Any

import torch

from engine.llm import LLM
from engine.sampling import SamplingParams

ANSWER_TOKENS, NEXT_TOKENS = 600, 512


def run_measured(args: argparse.Namespace, markdown: Any) -> int:
    """Print the table of medians; exit code 0."""
    torch.set_num_threads(1)
    policies = [name for name in args.policies.split(",") if name != "none"]
    readings: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(args.rounds):
        for name in policies:
            for workload, reading in measure(
                name, args.max_batched_tokens, args.prompt_tokens, seed=number
            ).items():
                readings.setdefault((name, workload), []).append(reading)
            if sys.stderr.isatty():
                print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr)
    rows = [
        {
            "policy": name,
            "workload": workload,
            "forwards": found[0]["forwards"],
            "recomputed_tokens": found[0]["recomputed_tokens"],
            "seconds": round(median(reading["seconds"] for reading in found), 3),
        }
        for (name, workload), found in readings.items()
    ]
    print(json.dumps(rows) if args.json else markdown(rows))
    return 0


def measure(policy: str, budget: int, prompt_tokens: int, seed: int) -> dict[str, dict[str, Any]]:
    """Cold, resend and next turn of one prompt on one fresh engine."""
    needed = 2 * (prompt_tokens + ANSWER_TOKENS + NEXT_TOKENS + budget)
    llm = LLM(policy=policy, max_batched_tokens=budget, kv_tokens=needed, max_running_requests=1)
    choose = random.Random(seed)
    prompt = [choose.randrange(16, llm.config.vocab_size) for _ in range(prompt_tokens)]
    found = {"cold": time_prompt(llm, prompt), "resend": time_prompt(llm, prompt)}
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    answer = llm.generate([prompt], params)[0].token_ids
    new = [choose.randrange(16, llm.config.vocab_size) for _ in range(NEXT_TOKENS)]
    return found | {"next turn": time_prompt(llm, [*prompt, *answer, *new])}


def time_prompt(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    """Forwards, recomputed tokens and seconds to the first token."""
    request_id = llm.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    forwards, start = 0, time.perf_counter()
    while llm.has_work:
        llm.step()
        forwards += 1
    seconds = time.perf_counter() - start
    cached = llm.result(request_id).cached_tokens
    return {"forwards": forwards, "recomputed_tokens": len(prompt) - cached, "seconds": seconds}
