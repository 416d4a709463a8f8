"""The measured half of `ablate`: one long prompt under every policy, on engines of the embedded model.

A round, for every policy in turn: the cache is cleared, the prompt runs cold and gets an answer, is sent again for the
same answer, and goes on with new text as the next turn. Rounds have prompts of their own, equal for all policies;
medians over rounds count. Seconds are to the first token; `accepted` is the acceptance of drafts by position (defined
in `generate --help`) in the answers, cold and after the hit of the resend.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from statistics import mean, median
from typing import Any

import torch

from engine.llm import LLM
from engine.options import EngineOptions
from engine.output import SpeculationStatistics
from engine.sampling import SamplingParams
from scheduler.workloads import PROMPT

ANSWER_TOKENS, NEXT_TOKENS = 600, 512
FIRST_TOKEN_ID = 16  # below are the embedded model's special tokens


def measured_rows(
    cells: Sequence[tuple[str, argparse.Namespace]], rounds: int, prompt_tokens: int | None
) -> list[dict[str, Any]]:
    """A row of medians per policy and workload, the readings of its rounds beside them."""
    torch.set_num_threads(1)
    length = prompt_tokens or PROMPT
    engines = [engine(cell, length) for _, cell in cells]
    readings: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for seed in range(rounds):
        for index, llm in enumerate(engines):
            for workload, reading in measure(llm, length, seed).items():
                readings.setdefault((index, workload), []).append(reading)
            if sys.stderr.isatty():
                print(f"round {seed + 1} of {rounds}: {cells[index][0]}", file=sys.stderr)
    rows = []
    for (index, workload), found in readings.items():
        scheduler, names = engines[index].scheduler, {"policy": cells[index][0]}
        sizes = {"block": scheduler.blocks.block_size, "budget": scheduler.max_batched_tokens}
        rows.append(names | sizes | {"workload": workload} | summary(found))
    return rows


def summary(readings: list[dict[str, Any]]) -> dict[str, Any]:
    """Forwards and tokens, which are the same in every round, the median of the seconds, the mean acceptance."""
    seconds = [reading["seconds"] for reading in readings]
    counts = {name: readings[0][name] for name in ("forwards", "recomputed_tokens")}
    positions = zip(*(reading["acceptance"] for reading in readings), strict=True)
    accepted = " ".join(f"{mean(rates):.2f}" for rates in positions) or "-"
    return counts | {"seconds": round(median(seconds), 3), "accepted": accepted, "readings": seconds}


def engine(cell: argparse.Namespace, prompt_tokens: int) -> LLM:
    """An engine with one policy, its first forward behind it. The cache holds the conversation twice over."""
    options = {field.name: getattr(cell, field.name, None) for field in fields(EngineOptions)}
    needed = 2 * (prompt_tokens + ANSWER_TOKENS + NEXT_TOKENS + (cell.block_size or 0))
    llm = LLM(**{name: value for name, value in options.items() if value is not None} | {"kv_tokens": needed})
    time_prompt(llm, [FIRST_TOKEN_ID] * 64, 1)
    return llm


def measure(llm: LLM, prompt_tokens: int, seed: int) -> dict[str, dict[str, Any]]:
    """Cold, resend and next turn of one prompt."""
    llm.scheduler.blocks.reset_cache(llm.scheduler.running)
    choose, last = random.Random(seed), llm.config.vocab_size
    prompt = [choose.randrange(FIRST_TOKEN_ID, last) for _ in range(prompt_tokens)]
    found = {name: time_prompt(llm, prompt, ANSWER_TOKENS) for name in ("cold", "resend")}
    new = [choose.randrange(FIRST_TOKEN_ID, last) for _ in range(NEXT_TOKENS)]
    return found | {"next turn": time_prompt(llm, [*prompt, *found["resend"]["answer"], *new], 1)}


def time_prompt(llm: LLM, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """Forwards, recomputed tokens and seconds to the first token; the answer and the acceptance of its drafts."""
    llm.statistics = SpeculationStatistics(llm.draft_tokens)
    result = llm.result(llm.add_request(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True)))
    forwards, start = 0, time.perf_counter()
    while not result.token_ids:
        llm.step()
        forwards += 1
    seconds = time.perf_counter() - start
    while llm.has_work:
        llm.step()
    recomputed = len(prompt) - result.cached_tokens
    counts = {"forwards": forwards, "recomputed_tokens": recomputed, "seconds": seconds}
    return counts | {"answer": result.token_ids, "acceptance": llm.statistics.acceptance}
