"""`bench` compares equal work: same weights, same fresh prompts, alternating, against the faster peer."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.commands import bench
from tests.oracles import read_tensors, tiny_config, transformers_logits, write_checkpoint

DATA = Path(__file__).parents[1] / "data"


class ScriptedEngine:
    """Answers with a fixed speed and notes what it was asked, in a log shared by all."""

    def __init__(self, name: str, speed: float, log: list[tuple[str, tuple[int, ...]]]) -> None:
        self.name, self.speed, self.log = name, speed, log

    def prefill(self, token_ids: list[int]) -> float:
        self.log.append((self.name, tuple(token_ids)))
        return self.speed

    def decode(self, token_ids: list[int], num_tokens: int) -> float:
        return self.prefill(token_ids) * num_tokens


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


def test_rounds_alternate_on_equal_prompts_and_the_faster_peer_is_taken() -> None:
    log: list[tuple[str, tuple[int, ...]]] = []
    peers: dict[str, bench.Engine] = {
        name: ScriptedEngine(name, speed, log) for name, speed in (("bfloat16", 10.0), ("float32", 20.0))
    }
    work = bench.Workload(prefill_tokens=8, context_tokens=4, decode_tokens=2, vocab_size=100)
    result = bench.compare(ScriptedEngine("ours", 50.0, log), peers, 3, work.prefill)
    assert result["medians"] == {"ours bfloat16": 50.0, "transformers float32": 20.0}
    assert result["ratio"] == 2.5
    rounds = log[3:]  # after one reading of every side
    assert [name for name, _ in rounds] == ["ours", "float32"] * 3
    prompts = [prompt for _, prompt in rounds]
    assert prompts[0::2] == prompts[1::2] and len(set(prompts)) == 3
    assert all(len(prompt) == 8 for prompt in prompts)


def test_without_a_peer_there_is_no_ratio() -> None:
    work = bench.Workload(prefill_tokens=8, context_tokens=4, decode_tokens=2, vocab_size=100)
    result = bench.compare(ScriptedEngine("ours", 5.0, []), {}, 2, work.decode)
    assert result["medians"] == {"ours bfloat16": 10.0} and result["ratio"] is None


def test_the_expanded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    bench.write_bf16(DATA / "bf16", tmp_path)
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
    bench.write_bf16(DATA / form, tmp_path)
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
        assert report[quantity]["ratio"] > 0 and len(report[quantity]["medians"]) == 2
    assert bench.run(parse([*small, "--no-peer"])) == 0
    text = capsys.readouterr().out
    assert "prefill of 40" in text and "decode of 3 after 9" in text and "ours bfloat16" in text


@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_a_count_below_one_is_refused(value: str) -> None:
    with pytest.raises(SystemExit) as refusal:
        parse(["--repeat", value])
    assert refusal.value.code == 2
