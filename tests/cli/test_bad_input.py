"""Unusable input: exit code 2, a message with found, expected and what to do, and nothing written."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.command import Outcome, run_cli
from tests.oracles import copy_checkpoint
from tests.scripted import TINY

Capture = pytest.CaptureFixture[str]
M = "model.language_model."
NORM, SHARD = f"{M}norm.weight", "model-00002-of-00002.safetensors"


def assert_refused(outcome: Outcome, words: list[str]) -> None:
    assert outcome.code == 2
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err


def missing_shard(directory: Path) -> None:
    (directory / SHARD).unlink()


def truncated_shard(directory: Path) -> None:
    content = (directory / SHARD).read_bytes()
    (directory / SHARD).write_bytes(content[:-100])


def config_edit(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        edit(config)
        path.write_text(json.dumps(config))

    return apply


def set_layer_type(config: dict[str, Any]) -> None:
    config["text_config"]["layer_types"][2] = "sliding_attention"


def tensor_edit(edit: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        def edited(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            edit(tensors)
            return tensors

        copy_checkpoint(TINY, directory / "edited", edited)
        for file in (directory / "edited").iterdir():
            file.rename(directory / file.name)
        (directory / "edited").rmdir()

    return apply


DEFECTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "missing shard": (missing_shard, ["1 of 2 shards missing", "download", SHARD]),
    "truncated shard": (truncated_shard, [SHARD, "bytes, its header declares", "download it again"]),
    "unknown quant_method": (
        config_edit(lambda config: config.update(quantization_config={"quant_method": "gptq"})),
        ["quant_method", "gptq", "modelopt"],
    ),
    "missing tensor": (
        tensor_edit(lambda tensors: tensors.pop(NORM)),
        ["norm.weight: missing, expected shape [64]", "download"],
    ),
    "stray tensor": (
        tensor_edit(lambda tensors: tensors.update({f"{M}stray.weight": torch.zeros(3)})),
        ["stray.weight: unknown tensor F32 [3]", "download"],
    ),
    "wrong shape": (
        tensor_edit(lambda tensors: tensors.update({NORM: torch.zeros(65)})),
        ["norm.weight: weight has shape [65], expected [64]", "download"],
    ),
    "unsupported layer type": (
        config_edit(set_layer_type),
        ["layer_types holds ['sliding_attention']", "linear_attention", "deepseek_sparse_attention"],
    ),
}


@pytest.mark.parametrize("command", ["generate", "eval", "inspect", "quantize"])
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_damaged_checkpoint(capsys: Capture, tmp_path: Path, defect: str, command: str) -> None:
    damage, words = DEFECTS[defect]
    copytree(TINY, tmp_path / "model")
    damage(tmp_path / "model")
    (tmp_path / "text").write_text("text")
    arguments: dict[str, tuple[object, ...]] = {
        "generate": ("--prompt-ids", "5", "--json", "--model", tmp_path / "model"),
        "eval": (tmp_path / "text", "--model", tmp_path / "model"),
        "inspect": (tmp_path / "model",),
        "quantize": (tmp_path / "model", tmp_path / "target"),
    }
    before = sorted(tmp_path.rglob("*"))
    assert_refused(run_cli(capsys, command, *arguments[command]), words)
    assert sorted(tmp_path.rglob("*")) == before


LONG = ",".join(["5"] * 4096)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", ""], ["a prompt is empty", "at least one character"]),
        (["generate", "--prompt-ids", LONG, "--model", TINY], ["4096 tokens", "holds 4096", "shorten"]),
        (
            ["generate", "--prompt-ids", "", "--model", TINY],
            ["--prompt-ids ''", 'expected for instance "1,2,3"'],
        ),
        (["generate", "--prompt-ids", "256", "--model", TINY], ["token id 256", "expected 0 to 255"]),
        (["generate", "text", "--model", TINY], ["no tokenizer.json", "give token ids"]),
        (["generate", "x", "--temperature", "-1"], ["temperature is -1.0", "expected a finite number >= 0"]),
        (["generate", "x", "--top-p", "nan"], ["top_p is nan", "expected a number from 0 to 1"]),
        (["generate", "x", "--max-tokens", "0"], ["max_tokens is 0", "expected an integer >= 1"]),
        (["generate", "x", "--seed", "-1"], ["seed is -1", "expected an integer from 0 to 2**32 - 1"]),
        (["generate", "x", "--seed", 2**32], ["seed is 4294967296", "from 0 to 2**32 - 1"]),
        (["generate", "x", "--stop", ""], ["stop is ('',)", "non-empty"]),
        (["generate", "x", "--stop", "y", "--model", TINY, "--prompt-ids", "5"], ["no tokenizer.json"]),
        (["generate", "x", "--top_k", "3"], ["unrecognized arguments: --top_k", "usage:"]),
        (["generate", "x", "--system", "y"], ["--system acts with --chat only"]),
        (["generate", "x", "--reasoning-effort", "low"], ["--reasoning-effort acts with --chat only"]),
        (["generate", "x", "--chat", "--reasoning-effort", "low"], ["effort 'low'", "leave it out"]),
        (["generate", "x", "--chat", "--reasoning-effort", "none"], ["'none'", "low", "high", "max"]),
        (["generate", "x", "--chat", "--prompt-ids", "5"], ["--chat renders text", "one or the other"]),
        (["generate", "x", "--random-weights"], ["--random-weights takes --prompt-ids only"]),
        (["generate", "x", "--num-layers", "2"], ["num_layers", "random weights only"]),
        (["generate", "x", "--block-size", "24"], ["block size is 24", "multiple of 16"]),
        (["generate", "x", "--max-batched-tokens", "0"], ["--max-batched-tokens", "at least 1"]),
        (["generate", "x", "--kv-tokens", "0"], ["--kv-tokens", "at least 1"]),
        (["generate", "x", "--checkpoint-slots", "-1"], ["--checkpoint-slots", "at least 0"]),
        (["generate", "x", "--mixed-prefill-tokens", "-1"], ["--mixed-prefill-tokens", "at least 0"]),
        (
            ["generate", "x", "--policy", "theirs"],
            ["--policy", "'theirs'", "generic, seed, vllm-0.33, ours, none"],
        ),
        (["generate", "x", "--retain", "resend,x"], ["retention is 'x'", "junction"]),
        (["generate", "x", "--exports", "2"], ["--exports", "0, 1, many"]),
        (["generate", "x", "--chunk-ends", "x"], ["--chunk-ends", "floored, free"]),
        (["generate", "x", "--draft-filing", "x"], ["--draft-filing", "token, drop, key, tag, off"]),
        (["generate", "x", "--no-prefix-cache", "--retain", "all"], ["no_prefix_cache", "leave one out"]),
        (["generate", "x", "--kv-tokens", "64", "--max-tokens", "90"], ["need 2 blocks of 64", "has 1"]),
        (["generate", "--turns", "absent.jsonl"], ["No such file", "absent.jsonl"]),
        (["generate", "x", "--turns", "README.md"], ["--turns is a conversation of its own"]),
        (["generate", "--turns", "README.md"], ["README.md line 1 is no turn", '{"user": "text"}']),
        (["generate", "x", "--threads", "0"], ["--threads is 0", "at least 1"]),
        (
            ["generate", "x", "--model", "absent"],
            ["absent is missing", "expected a directory with config.json"],
        ),
        (
            ["generate", "x", "--model", "cli.py"],
            ["cli.py is a file", "expected a directory with config.json"],
        ),
        (["generate", "--prompt-file", "absent.txt"], ["No such file", "absent.txt"]),
        (["eval", "absent.txt"], ["No such file", "absent.txt"]),
        (["eval", "README.md", "--window", "1"], ["--window is 1", "at least 2"]),
        (["inspect", "absent"], ["absent"]),
        (["inspect", TINY, "--tp", "0"], ["--tp is 0", "at least 1"]),
        (["quantize", "absent", "target"], ["absent"]),
        (["quantize", TINY, TINY], ["exists", "name a new directory"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, list) else "",
)
def test_wrong_use(
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[object],
    words: list[str],
) -> None:
    (tmp_path / "cli.py").write_text("a file")
    (tmp_path / "README.md").write_text("some text")
    monkeypatch.chdir(tmp_path)
    assert_refused(run_cli(capsys, *arguments), words)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["README.md", "cli.py"]


@pytest.mark.parametrize("arguments", [("generate", "--prompt-file"), ("eval",)], ids=["generate", "eval"])
def test_a_file_that_is_no_utf8(capsys: Capture, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "latin1.txt").write_bytes("Grüße".encode("latin-1"))
    assert_refused(run_cli(capsys, *arguments, tmp_path / "latin1.txt"), ["not UTF-8 (byte 2)", "convert it"])
