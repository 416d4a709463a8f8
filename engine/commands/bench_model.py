"""The model's half of `bench`: loading, prefill and decode at batch 1, beside transformers on the same weights.

Ours runs in bfloat16 without drafts. Transformers gets the checkpoint expanded to BF16 in a temporary
directory and its own default kernels, in bfloat16 and in float32. All sides take turns, every round with tokens
of its own, and ours is compared with the better median of the two dtypes, so that neither a cache of an earlier
round nor a slow minute of the machine decides. Imports and warm-up are not counted.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.commands.quantize import converted
from engine.llm import EMBEDDED_MODEL, LLM
from engine.sampling import SamplingParams
from model.checkpoint import read_checkpoint
from model.config import read_json

# A dtype of transformers that its warm-up shows so many times slower is left out of the rounds.
HOPELESS = 2.0


class OurEngine:
    """The public API, greedy at batch 1, stop ids ignored."""

    def __init__(self, directory: Path) -> None:
        self.llm = LLM(directory, dtype="bfloat16", draft_tokens=0)  # the peer has no draft layer

    def prefill(self, token_ids: list[int]) -> float:
        """Tokens per second of a prompt, last logits only."""
        result = self.llm.generate([token_ids], SamplingParams(max_tokens=1, ignore_eos=True))[0]
        assert result.ttft_s is not None
        return len(token_ids) / result.ttft_s

    def decode(self, token_ids: list[int], num_tokens: int) -> float:
        """Tokens per second of `num_tokens` steps after a prompt, whose own time does not count."""
        params = SamplingParams(max_tokens=num_tokens + 1, ignore_eos=True)  # the first is the prompt's
        speed = self.llm.generate([token_ids], params)[0].decode_tokens_per_s
        assert speed is not None
        return speed


class Transformers:
    """Glm5NextForConditionalGeneration with its default kernels and cache; the same two measures."""

    def __init__(self, directory: Path, dtype: str) -> None:
        import transformers  # the peer alone needs it, and it is slow to import

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        model_class = transformers.Glm5NextForConditionalGeneration
        self.model = model_class.from_pretrained(directory, dtype=dtype).eval()

    def prefill(self, token_ids: list[int]) -> float:
        start = time.perf_counter()
        self._forward(torch.tensor([token_ids]), cache=None)
        return len(token_ids) / (time.perf_counter() - start)

    def decode(self, token_ids: list[int], num_tokens: int) -> float:
        token, cache = self._forward(torch.tensor([token_ids]), cache=None)
        start = time.perf_counter()
        for _ in range(num_tokens):
            token, cache = self._forward(token, cache)
        return num_tokens / (time.perf_counter() - start)

    @torch.inference_mode()
    def _forward(self, token_ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """token_ids [1, num_tokens] -> the next token [1, 1] and the cache."""
        output = self.model(input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits.argmax(dim=-1), output.past_key_values


Engine = OurEngine | Transformers
Measure = Callable[[Engine, list[int]], float]


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 when every round ran."""
    args.model = args.model or EMBEDDED_MODEL
    torch.set_num_threads(args.threads)
    load_s = []
    for _ in range(args.repeat):
        start = time.perf_counter()
        ours = OurEngine(args.model)
        load_s.append(time.perf_counter() - start)
    sides = {"ours bfloat16": ours} | ({} if args.no_peer else load_peers(args.model))
    report: dict[str, Any] = {"model": str(args.model), "machine": machine(args.threads)}
    report |= {"rounds": args.repeat, "load_s": median(load_s)}
    decode = f"decode of {args.decode} after {args.after}"
    quantities: tuple[tuple[str, int, Measure], ...] = (
        (f"prefill of {args.prefill}", args.prefill, lambda side, ids: side.prefill(ids)),
        (decode, args.after, lambda side, ids: side.decode(ids, args.decode)),
    )
    for title, num_tokens, measure in quantities:
        shape, dice = (args.repeat + 1, num_tokens), torch.Generator().manual_seed(num_tokens)
        prompts = torch.randint(ours.llm.config.vocab_size, shape, generator=dice).tolist()
        report[title] = compare(sides, prompts, measure)
    print(json.dumps(report, indent=1) if args.json else table(report))
    return 0


def load_peers(directory: Path) -> dict[str, Engine]:
    """Transformers in both dtypes, on the expanded checkpoint."""
    with tempfile.TemporaryDirectory() as expanded:
        write_bf16(directory, Path(expanded))
        dtypes = ("bfloat16", "float32")
        return {f"transformers {dtype}": Transformers(Path(expanded), dtype) for dtype in dtypes}


def compare(sides: Mapping[str, Engine], prompts: list[list[int]], measure: Measure) -> dict[str, Any]:
    """Tokens/s of all sides, in turns, after a prompt to warm up; medians, and the first side's over the best other.

    A side that is HOPELESS times slower than the best of the others while warming up runs no rounds.
    """
    warm_up, *rounds = prompts
    ours, *peers = sides
    first = {name: measure(side, warm_up) for name, side in sides.items()}
    best = max((first[name] for name in peers), default=0)
    racing = [ours, *(name for name in peers if first[name] * HOPELESS > best)]
    speeds: dict[str, list[float]] = {name: [] for name in racing}
    for token_ids in rounds:
        for name in speeds:
            speeds[name].append(measure(sides[name], token_ids))
            if sys.stderr.isatty():
                print(f"{name} {speeds[name][-1]:.1f} tokens/s", file=sys.stderr)
    medians = {name: median(values) for name, values in speeds.items()}
    best = max((speed for name, speed in medians.items() if name != ours), default=0)
    return {"tokens_per_s": speeds, "medians": medians, "ratio": medians[ours] / best if best else None}


def write_bf16(source: Path, target: Path) -> None:
    """Expand a checkpoint into `target`: quantised matrices in BF16 and a config without quantisation."""
    raw = read_json(source / "config.json")
    for level in (raw, raw.get("text_config", {})):
        level.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    tensors = dict(converted(read_checkpoint(source), quantised_roles=()))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def machine(threads: int) -> dict[str, str | int]:
    """What a reader must know to compare two tables."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {name: version(name) for name in ("torch", "transformers")}
    cpu = (names or [platform.processor()])[0]
    return {"cpu": cpu, "threads": threads, **versions, "date": str(date.today())}


def table(report: dict[str, Any]) -> str:
    """The report for people: the machine, then one row per quantity with medians and the ratio."""
    facts = report["machine"]
    versions = f"torch {facts['torch']}, transformers {facts['transformers']}"
    rows = [
        f"{facts['cpu']}, {facts['threads']} thread(s), {versions}, {facts['date']}",
        f"{report['model']} loads in {report['load_s']:.2f} s; tokens/s, medians of {report['rounds']}:",
    ]
    for title, result in report.items():
        if isinstance(result, dict) and "medians" in result:
            cells = [f"{name} {speed:.1f}" for name, speed in result["medians"].items()]
            ratio = [f"{result['ratio']:.2f}x"] if result["ratio"] else []
            rows.append("   ".join([f"{title:<24}", *cells, *ratio]))
    return "\n".join(rows)
