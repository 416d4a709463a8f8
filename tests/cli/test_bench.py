"""`bench` compares equal work: same weights, same fresh prompts, in turns, against the better median of the peers."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.commands import bench, bench_model
from tests.command import run_cli
from tests.oracles import read_tensors, tiny_config, transformers_logits, write_checkpoint

DATA = Path(__file__).parents[1] / "data"


class ScriptedEngine:
    """Answers with the next of its speeds and notes what it was asked, in a log shared by all."""

    def __init__(self, name: str, speeds: list[float], log: "Log") -> None:
        self.name, self.speeds, self.log = name, iter(speeds), log

    def decode(self, token_ids: list[int], num_tokens: int) -> float:
        self.log.append((self.name, tuple(token_ids)))
        return next(self.speeds) * num_tokens


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


PROMPTS = [[1, 2], [3, 4], [5, 6], [7, 8]]
Log = list[tuple[str, tuple[int, ...]]]


def compare(speeds: dict[str, list[float]], log: Log) -> dict[str, Any]:
    sides = {name: ScriptedEngine(name, values, log) for name, values in speeds.items()}
    return bench_model.compare(sides, PROMPTS, lambda side, ids: side.decode(ids, 1))  # type: ignore[arg-type]


def test_all_sides_take_turns_on_equal_prompts_after_one_reading_of_each() -> None:
    log: Log = []
    compare({"ours": [1.0] * 4, "bfloat16": [1.0] * 4, "float32": [1.0] * 4}, log)
    assert log == [(name, tuple(ids)) for ids in PROMPTS for name in ("ours", "bfloat16", "float32")]


def test_the_peer_of_the_better_median_counts_whatever_its_first_reading_was() -> None:
    speeds = {"ours": [9.0, 50, 50, 50], "bfloat16": [15.0, 30, 5, 5], "float32": [10.0, 1, 20, 20]}
    result = compare(speeds, [])
    assert result["tokens_per_s"] == {name: values[1:] for name, values in speeds.items()}
    assert result["medians"] == {"ours": 50, "bfloat16": 5, "float32": 20}
    assert result["ratio"] == 2.5


def test_a_peer_that_starts_far_behind_the_other_runs_no_rounds() -> None:
    log: Log = []
    result = compare({"ours": [1.0] * 4, "bfloat16": [4.0], "float32": [10.0] * 4}, log)
    assert result["medians"] == {"ours": 1, "float32": 10} and result["ratio"] == 0.1
    assert [name for name, _ in log[3:]] == ["ours", "float32"] * 3


def test_without_a_peer_there_is_no_ratio() -> None:
    result = compare({"ours": [10.0] * 4}, [])
    assert result["medians"] == {"ours": 10.0} and result["ratio"] is None


def test_the_expanded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    bench_model.write_bf16(DATA / "bf16", tmp_path)
    facts, stored = (
        json.loads((DATA / "bf16" / "ref.json").read_text()),
        load_file(DATA / "bf16" / "ref.safetensors"),
    )
    # float32 on a CPU on both sides; another BLAS may sum in another order.
    torch.testing.assert_close(
        transformers_logits(tmp_path, facts["prompts"][6]), stored["p6.logits"], atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("form", ["modelopt", "ct"])
def test_quantised_experts_are_expanded_by_their_own_scales(tmp_path: Path, form: str) -> None:
    bench_model.write_bf16(DATA / form, tmp_path)
    assert not any(name.endswith(("_scale_2", "global_scale", "packed")) for name in read_tensors(tmp_path))
    facts, stored = (
        json.loads((DATA / form / "ref.json").read_text()),
        load_file(DATA / form / "ref.safetensors"),
    )
    logits = transformers_logits(tmp_path, facts["prompts"][3])
    # The reference multiplied in float32; rounding the expanded experts to bf16 moves weights by up to 2**-9.
    torch.testing.assert_close(logits, stored["p3.logits"], atol=0.1, rtol=0)


def test_the_command_prints_one_document_or_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_checkpoint(tmp_path / "model", tiny_config(0), seed=0)
    small = ["--model", str(model), "--prefill", "40", "--decode", "3", "--after", "9", "--repeat", "1"]
    assert bench.run(parse([*small, "--json"])) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == str(model) and report["load_s"] > 0
    for quantity in ("prefill of 40", "decode of 3 after 9"):
        assert report[quantity]["ratio"] > 0 and len(report[quantity]["medians"]) in (2, 3)
        assert report[quantity]["medians"].keys() == report[quantity]["tokens_per_s"].keys()
    assert bench.run(parse([*small, "--no-peer"])) == 0
    text = capsys.readouterr().out
    assert "prefill of 40" in text and "decode of 3 after 9" in text and "ours bfloat16" in text


@pytest.mark.parametrize("value", ["0", "-1", "x"])
@pytest.mark.parametrize("name", ["prefill", "decode", "after", "repeat", "threads"])
def test_a_count_below_one_is_refused(capsys: pytest.CaptureFixture[str], name: str, value: str) -> None:
    outcome = run_cli(capsys, "bench", f"--{name}", value)
    assert (outcome.code, outcome.out) == (2, "") and f"--{name}" in outcome.err and value in outcome.err
