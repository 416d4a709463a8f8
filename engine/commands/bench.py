"""Measure loading, prefill and decode at batch 1, beside transformers on the same weights.

Ours runs in bfloat16 without drafts. Transformers gets the checkpoint expanded to BF16 in a temporary
directory, its own default kernels, and for each quantity the dtype that was faster in a first reading. The
two sides alternate, every round with tokens of its own, and medians are compared, so that neither a cache of
an earlier round nor a slow minute of the machine decides. Imports and warm-up are not counted.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.llm import EMBEDDED_MODEL, LLM
from engine.sampling import SamplingParams
from model.config import load_config, read_json
from model.parameters import parameter_specs
from model.weights import load_weights


class Engine(Protocol):
    """One side of the comparison, greedy at batch 1. Both methods return tokens per second."""

    def prefill(self, token_ids: list[int]) -> float:
        """Time the prompt, last logits only."""

    def decode(self, token_ids: list[int], num_tokens: int) -> float:
        """Time `num_tokens` steps after the prompt, whose own time does not count."""


Measure = Callable[[Engine, int], float]
EXAMPLES = """examples:
  python cli.py bench
  python cli.py bench --no-peer --prefill 512 --repeat 3 --json"""


class OurEngine:
    """The public API, greedy, stop ids ignored."""

    def __init__(self, directory: Path) -> None:
        self.llm = LLM(directory, dtype="bfloat16")

    def prefill(self, token_ids: list[int]) -> float:
        result = self.llm.generate([token_ids], SamplingParams(max_tokens=1, ignore_eos=True))[0]
        assert result.ttft_s is not None
        return len(token_ids) / result.ttft_s

    def decode(self, token_ids: list[int], num_tokens: int) -> float:
        # The first token comes out of the prefill, which is not timed here.
        params = SamplingParams(max_tokens=num_tokens + 1, ignore_eos=True)
        speed = self.llm.generate([token_ids], params)[0].decode_tokens_per_s
        assert speed is not None
        return speed


class Transformers:
    """Glm5NextForConditionalGeneration with its default kernels and cache, greedy."""

    def __init__(self, directory: Path, dtype: str) -> None:
        import transformers  # the peer alone needs it, and it is slow to import

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        model_class = transformers.Glm5NextForConditionalGeneration
        self.model = model_class.from_pretrained(directory, dtype=dtype).eval()

    @torch.inference_mode()
    def prefill(self, token_ids: list[int]) -> float:
        start = time.perf_counter()
        self._forward(torch.tensor([token_ids]), cache=None)
        return len(token_ids) / (time.perf_counter() - start)

    @torch.inference_mode()
    def decode(self, token_ids: list[int], num_tokens: int) -> float:
        token, cache = self._forward(torch.tensor([token_ids]), cache=None)
        start = time.perf_counter()
        for _ in range(num_tokens):
            token, cache = self._forward(token, cache)
        return num_tokens / (time.perf_counter() - start)

    def _forward(self, token_ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """token_ids [1, num_tokens] -> the next token [1, 1] and the cache."""
        output = self.model(input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits.argmax(dim=-1), output.past_key_values


@dataclass(frozen=True)
class Workload:
    """What one round measures. Prompts are random ids, equal for both sides and new for every seed."""

    prefill_tokens: int
    context_tokens: int
    decode_tokens: int
    vocab_size: int

    def prefill(self, engine: Engine, seed: int) -> float:
        """Tokens per second of one prefill."""
        return engine.prefill(self._prompt(self.prefill_tokens, seed))

    def decode(self, engine: Engine, seed: int) -> float:
        """Tokens per second of one decode."""
        return engine.decode(self._prompt(self.context_tokens, seed), self.decode_tokens)

    def _prompt(self, num_tokens: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        token_ids: list[int] = torch.randint(self.vocab_size, (num_tokens,), generator=generator).tolist()
        return token_ids


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python cli.py bench`."""
    parser.add_argument(
        "--model", type=Path, default=EMBEDDED_MODEL, help="model directory (default: embedded)"
    )
    parser.add_argument(
        "--prefill", type=positive, default=2048, metavar="TOKENS", help="prompt of the prefill"
    )
    parser.add_argument("--decode", type=positive, default=64, metavar="TOKENS", help="tokens decoded")
    parser.add_argument("--after", type=positive, default=256, metavar="TOKENS", help="context before them")
    parser.add_argument(
        "--repeat", type=positive, default=5, metavar="ROUNDS", help="medians of so many rounds"
    )
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads of both sides")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def positive(text: str) -> int:
    """An integer >= 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 when every round ran."""
    torch.set_num_threads(args.threads)
    load_s, ours = _load_ours(args.model, args.repeat)
    work = Workload(args.prefill, args.after, args.decode, ours.llm.config.vocab_size)
    peers: dict[str, Engine] = {} if args.no_peer else _load_peers(args.model)
    report = {
        "model": str(args.model),
        "machine": machine(args.threads),
        "rounds": args.repeat,
        "load_s": load_s,
        f"prefill of {args.prefill}": compare(ours, peers, args.repeat, work.prefill),
        f"decode of {args.decode} after {args.after}": compare(ours, peers, args.repeat, work.decode),
    }
    print(json.dumps(report, indent=1) if args.json else table(report))
    return 0


def _load_ours(directory: Path, repeat: int) -> tuple[float, OurEngine]:
    """Median seconds of loading, and the last engine loaded."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        engine = OurEngine(directory)
        seconds.append(time.perf_counter() - start)
    return median(seconds), engine


def _load_peers(directory: Path) -> dict[str, Engine]:
    with tempfile.TemporaryDirectory() as expanded:
        write_bf16(directory, Path(expanded))
        return {dtype: Transformers(Path(expanded), dtype) for dtype in ("bfloat16", "float32")}


def compare(ours: Engine, peers: dict[str, Engine], repeat: int, measure: Measure) -> dict[str, Any]:
    """Alternate ours with the faster peer; tokens/s of every round, their medians and the ratio."""
    first = {dtype: measure(peer, 0) for dtype, peer in peers.items()}
    measure(ours, 0)
    racing = {"ours bfloat16": ours}
    if first:
        fastest = max(first, key=lambda dtype: first[dtype])
        racing[f"transformers {fastest}"] = peers[fastest]
    speeds: dict[str, list[float]] = {name: [] for name in racing}
    for seed in range(1, repeat + 1):
        for name, engine in racing.items():
            speeds[name].append(measure(engine, seed))
            if sys.stderr.isatty():
                print(f"round {seed}: {name} {speeds[name][-1]:.1f} tokens/s", file=sys.stderr)
    medians = {name: median(values) for name, values in speeds.items()}
    our_speed, *peer_speed = medians.values()
    ratio = our_speed / peer_speed[0] if peer_speed else None
    return {"tokens_per_s": speeds, "medians": medians, "ratio": ratio}


def write_bf16(source: Path, target: Path) -> None:
    """Expand a checkpoint's trunk into `target`: BF16 and F32 tensors and a config without quantisation."""
    raw = read_json(source / "config.json")
    for level in (raw, raw.get("text_config", {})):
        level.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(dict(_expanded(source)), target / "model.safetensors", metadata={"format": "pt"})


def _expanded(source: Path) -> Iterator[tuple[str, Tensor]]:
    config, bf16 = load_config(source), torch.bfloat16
    tree = load_weights(source, config, linear_dtype=bf16, device=torch.device("cpu"), with_mtp=False)
    for spec in parameter_specs(config, with_mtp=False):
        prefix = "" if spec.stem == "lm_head" else "model.language_model."
        linear = spec.kind == "linear"
        yield prefix + spec.name, tree.linear(spec.stem).expand(bf16) if linear else tree.tensor(spec.name)


def machine(threads: int) -> dict[str, str | int]:
    """What a reader must know to compare two tables."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "threads": threads,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "date": date.today().isoformat(),
    }


def table(report: dict[str, Any]) -> str:
    """The report for people: the machine, then one row per quantity with medians and the ratio."""
    facts = report["machine"]
    rows = [
        f"{facts['cpu']}, {facts['threads']} thread(s), torch {facts['torch']}, "
        f"transformers {facts['transformers']}, {facts['date']}",
        f"{report['model']} loads in {report['load_s']:.2f} s; tokens/s, medians of {report['rounds']}:",
    ]
    for title, result in report.items():
        if isinstance(result, dict) and "medians" in result:
            cells = [f"{name} {speed:.1f}" for name, speed in result["medians"].items()]
            ratio = [f"{result['ratio']:.2f}x"] if result["ratio"] else []
            rows.append("   ".join([f"{title:<24}", *cells, *ratio]))
    return "\n".join(rows)
