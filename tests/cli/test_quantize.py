"""`quantize` writes ModelOpt's bytes for the routed experts, keeps everything else, and is all or nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import cli
from engine.commands.quantize import quantize
from model import nvfp4
from model.config import load_config, read_json
from model.weights import load_weights
from tests.oracles import copy_checkpoint, read_tensors, tiny_config, write_checkpoint

DATA = Path(__file__).parents[1] / "data"
M = "model.language_model."
VECTORS = load_file(DATA / "nvfp4_vectors.safetensors")
SUFFIXES = ("weight", "weight_scale", "weight_scale_2")
EXTRA_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A BF16 checkpoint whose expert matrices have the shape of a reference matrix, which it holds twice."""
    raw = tiny_config(0)
    rows, columns = VECTORS["normal_bf16.input"].shape
    raw["text_config"] |= {"hidden_size": columns, "moe_intermediate_size": rows}
    plain = write_checkpoint(tmp_path / "plain", raw, seed=3)

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for layer in (4, 5):  # the last of the trunk, and the MTP layer
            tensors[f"{M}layers.{layer}.mlp.experts.1.up_proj.weight"] = VECTORS["normal_bf16.input"].clone()
        return tensors

    directory = copy_checkpoint(plain, tmp_path / "source", edit)
    for name in EXTRA_FILES:
        (directory / name).write_text(f"content of {name}")
    return directory


def test_experts_have_modelopts_bytes_and_the_rest_is_unchanged(source: Path, tmp_path: Path) -> None:
    assert cli.main(["quantize", str(source), str(tmp_path / "target")]) == 0
    before, after = read_tensors(source), read_tensors(tmp_path / "target")
    for layer in (4, 5):
        prefix = f"{M}layers.{layer}.mlp.experts.1.up_proj."
        for suffix in SUFFIXES:
            written = after[prefix + suffix]
            written = written.view(torch.uint8) if suffix == "weight_scale" else written
            assert torch.equal(written, VECTORS[f"normal_bf16.modelopt.{suffix}"])
    experts = {name for name in before if ".experts." in name}
    assert len(experts) == (4 + 1) * 6 * 3
    expected = before.keys() | {f"{name.removesuffix('weight')}{s}" for name in experts for s in SUFFIXES}
    assert after.keys() == expected
    for name in before.keys() - experts:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name]), name


def test_the_result_loads_as_nvfp4_in_trunk_and_mtp_layer(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "target")
    config = load_config(tmp_path / "target")
    cpu = torch.device("cpu")
    tree = load_weights(tmp_path / "target", config, linear_dtype=torch.float32, device=cpu)
    before = read_tensors(source)
    for layer in (1, 5):
        stack = tree.at(f"layers.{layer}.mlp").experts("down_proj").expand(torch.float32)
        for expert in range(6):
            weight = before[f"{M}layers.{layer}.mlp.experts.{expert}.down_proj.weight"]
            assert torch.equal(stack[expert], nvfp4.dequantize(*nvfp4.quantize(weight)))


def test_configs_declare_the_format_and_companion_files_are_copied(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    quantize(source, target)
    declared = read_json(target / "config.json")["quantization_config"]
    assert (declared["quant_method"], declared["quant_algo"]) == ("modelopt", "NVFP4")
    quantization = read_json(target / "hf_quant_config.json")["quantization"]
    assert (quantization["quant_algo"], quantization["group_size"]) == ("NVFP4", 16)
    assert quantization["exclude_modules"] == declared["ignore"]
    for name in EXTRA_FILES:
        assert (target / name).read_text() == f"content of {name}"
    assert {path.suffix for path in target.iterdir()} == {".json", ".jinja", ".safetensors"}


def test_shards_stay_below_their_limit_and_the_index_finds_everything(source: Path, tmp_path: Path) -> None:
    limit, target = 200_000, tmp_path / "target"
    quantize(source, target, max_shard_bytes=limit)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    shards = sorted(target.glob("*.safetensors"))
    assert len(shards) > 3
    assert [shard.name for shard in shards] == sorted(set(index["weight_map"].values()))
    contents = {shard.name: load_file(shard) for shard in shards}
    assert index["weight_map"] == {name: file for file, tensors in contents.items() for name in tensors}
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in contents.values()]
    assert max(sizes) <= limit and index["metadata"]["total_size"] == sum(sizes)


def test_an_fp8_checkpoint_becomes_nvfp4_experts_over_bf16(source: Path, tmp_path: Path) -> None:
    stems = [f"{M}layers.0.mlp.gate_proj", f"{M}layers.2.mlp.experts.0.gate_proj"]

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in [name for name in tensors if name.endswith(".weight") and ("experts." in name)]:
            rows, columns = tensors[name].shape
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = torch.full((-(-rows // 128), -(-columns // 128)), 0.5)
        return tensors

    fp8 = copy_checkpoint(source, tmp_path / "fp8", edit)
    raw = read_json(fp8 / "config.json")
    kept = ["*.self_attn*", "lm_head", "*.layers.0.mlp*"]
    raw["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": kept}
    (fp8 / "config.json").write_text(json.dumps(raw))
    quantize(fp8, tmp_path / "target")
    after, halved = read_tensors(tmp_path / "target"), read_tensors(fp8)
    assert after[f"{stems[0]}.weight"].dtype == torch.bfloat16
    codes, *_ = nvfp4.quantize(halved[f"{stems[1]}.weight"].float() * 0.5)
    assert torch.equal(after[f"{stems[1]}.weight"], codes)
    shared = f"{M}layers.2.mlp.shared_experts.up_proj.weight"
    assert torch.equal(after[shared], (halved[shared].float() * 0.5).bfloat16())
    assert not any(name.endswith("scale_inv") for name in after)


def test_the_vision_tower_is_carried_along(tmp_path: Path) -> None:
    quantize(DATA / "bf16", tmp_path / "target")
    before, after = read_tensors(DATA / "bf16"), read_tensors(tmp_path / "target")
    vision = [name for name in before if name.startswith("model.visual.")]
    assert vision and all(torch.equal(after[name], before[name]) for name in vision)


def spoil_last_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors[f"{M}layers.5.mlp.experts.5.down_proj.weight"][0, 0] = torch.nan
    return tensors


def test_a_failure_leaves_nothing_behind(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoiled = copy_checkpoint(source, tmp_path / "spoiled", spoil_last_expert)
    before = set(tmp_path.iterdir())
    assert cli.main(["quantize", str(spoiled), str(tmp_path / "target")]) == 2
    assert "layers.5.mlp.experts.5.down_proj" in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == before


def test_an_interrupt_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = nvfp4.quantize, iter(range(20))

    def interrupted(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return original(weight)

    monkeypatch.setattr(nvfp4, "quantize", interrupted)
    before = set(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "target", max_shard_bytes=50_000)
    assert set(tmp_path.iterdir()) == before


def existing(tmp_path: Path) -> list[str]:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "precious").write_text("kept")
    return [str(DATA / "bf16"), str(tmp_path / "there")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (existing, "exists"),
        (lambda tmp_path: [str(tmp_path / "none"), str(tmp_path / "new")], "does not exist"),
        (lambda tmp_path: [str(DATA / "bf16"), str(tmp_path / "no" / "new")], "No such file"),
        (lambda tmp_path: [str(DATA / "modelopt"), str(tmp_path / "new")], "NVFP4 already"),
    ],
    ids=["target exists", "no source", "no parent", "quantised already"],
)
def test_bad_arguments_are_wrong_use_and_change_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: Callable[[Path], list[Any]],
    message: str,
) -> None:
    given = arguments(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert cli.main(["quantize", *given]) == 2
    assert message in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
