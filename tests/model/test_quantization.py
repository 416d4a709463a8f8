"""A quantization_config is understood in every known spelling, and must agree with the tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.checkpoint import read_checkpoint
from model.config import ConfigError, read_json
from model.quantization import Declaration, parse_quantization
from model.shards import WeightError
from tests.oracles import copy_checkpoint

DATA = Path(__file__).parents[1] / "data"
M = "model.language_model."
EXPERT = "layers.5.mlp.experts.7.up_proj"
KDA_GATE = "layers.0.self_attn.f_a_proj"


def declare(tmp_path: Path, **quantization_config: Any) -> Declaration:
    return parse_quantization(tmp_path, {"quantization_config": quantization_config})


@pytest.mark.parametrize(
    "entry",
    [
        "model.language_model.layers.5.mlp.experts.7.up_proj",
        "language_model.model.layers.5.mlp.experts",
        "model.layers.5.mlp.experts.gate_up_proj",
        "layers.5.mlp.experts.7",
        "*.mlp.experts*",
        "model.language_model.layers.5.mlp*",
        r"re:.*layers\.(3|5)\.mlp\.experts\.\d+\.(gate|up)_proj$",
    ],
)
def test_an_entry_covers_a_module_by_name_container_glob_or_expression(tmp_path: Path, entry: str) -> None:
    declaration = declare(tmp_path, quant_method="modelopt", quant_algo="NVFP4", ignore=[entry])
    assert declaration.format_of(EXPERT) == "plain"
    assert declaration.format_of("layers.6.mlp.experts.7.down_proj") == (
        "plain" if entry == "*.mlp.experts*" else "nvfp4"
    )


@pytest.mark.parametrize(
    "entry", [f"{M}layers.5.mlp.experts.7.up_proj", r"re:.*experts\.(7|9)\.up_proj", "*.experts.[79].*"]
)
def test_an_entry_for_some_experts_leaves_the_others(tmp_path: Path, entry: str) -> None:
    declaration = declare(tmp_path, quant_method="modelopt", quant_algo="NVFP4", ignore=[entry])
    assert declaration.format_of(EXPERT) == "plain"
    assert declaration.format_of("layers.5.mlp.experts.6.up_proj") == "nvfp4"


def test_the_router_is_not_its_neighbour_gate_proj(tmp_path: Path) -> None:
    declaration = declare(tmp_path, quant_method="fp8", modules_to_not_convert=["mlp.gate", "lm_head"])
    assert declaration.format_of("layers.0.mlp.gate_proj") == "fp8_block"
    assert declaration.format_of("layers.3.mlp.gate") == declaration.format_of("lm_head") == "plain"


def test_lists_may_use_the_module_tree_of_transformers(tmp_path: Path) -> None:
    """There the decay projections sit below `forget_gate`."""
    entry = f"{M}layers.0.self_attn.forget_gate.f_a_proj"
    declaration = declare(tmp_path, quant_method="fp8", modules_to_not_convert=[entry])
    assert declaration.format_of(KDA_GATE) == "plain"
    assert declaration.format_of("layers.0.self_attn.g_a_proj") == "fp8_block"


@pytest.mark.parametrize("key", ["layers.5.mlp.experts", EXPERT, f"{M}layers.5.mlp.experts.7"])
def test_mixed_precision_keys_name_a_container_a_module_or_a_prefix(tmp_path: Path, key: str) -> None:
    layers = {key: {"quant_algo": "NVFP4"}, "layers.45.mlp.experts": {"quant_algo": "MXFP8"}}
    declaration = declare(
        tmp_path, quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers
    )
    assert declaration.format_of(EXPERT) == "nvfp4"
    assert declaration.format_of("layers.45.mlp.experts.0.up_proj") == "mxfp8"
    assert declaration.format_of(KDA_GATE) == "plain"


def test_mixed_precision_without_a_list_declares_nothing(tmp_path: Path) -> None:
    declaration = declare(tmp_path, quant_method="modelopt", quant_algo="MIXED_PRECISION", ignore=["lm_head"])
    assert declaration.format_of(EXPERT) is None
    assert declaration.format_of("lm_head") == "plain"


def test_a_lone_hf_quant_config_is_read(tmp_path: Path) -> None:
    quantization = {"quant_algo": "NVFP4", "exclude_modules": ["*.self_attn*"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    declaration = parse_quantization(tmp_path, {})
    assert (declaration.format_of(EXPERT), declaration.format_of(KDA_GATE)) == ("nvfp4", "plain")


def test_no_declaration_means_plain(tmp_path: Path) -> None:
    assert parse_quantization(tmp_path, {}).format_of(EXPERT) == "plain"


@pytest.mark.parametrize(
    ("declared", "name"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "INT4_AWQ"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"format": "marlin-24"}}},
            "marlin-24",
        ),
    ],
)
def test_what_is_unknown_is_refused_by_name(tmp_path: Path, declared: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        declare(tmp_path, **declared)


def resolve(tmp_path: Path, source: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Read a copy of a data directory whose raw config `edit` changed."""
    directory = copy_checkpoint(DATA / source, tmp_path / "copy", lambda tensors: tensors)
    raw = read_json(directory / "config.json")
    edit(raw)
    (directory / "config.json").write_text(json.dumps(raw))
    read_checkpoint(directory)


def test_quantised_tensors_under_a_config_that_ignores_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"tensors say nvfp4, quantization_config says plain"):
        resolve(tmp_path, "modelopt", lambda raw: raw["quantization_config"]["ignore"].append("*.layers.4*"))


def test_plain_tensors_under_a_config_that_declares_them_are_refused(tmp_path: Path) -> None:
    def edit(raw: dict[str, Any]) -> None:
        raw["quantization_config"]["ignore"].remove("*.mlp.shared_experts*")

    with pytest.raises(
        WeightError, match=r"shared_experts.*tensors say plain, quantization_config says nvfp4"
    ):
        resolve(tmp_path, "modelopt", edit)


def test_quantised_tensors_without_any_declaration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="quantization_config says plain"):
        resolve(tmp_path, "ct", lambda raw: raw.pop("quantization_config"))


def test_the_mtp_layer_need_not_be_listed(tmp_path: Path) -> None:
    """Field bug A5: a BF16 MTP layer that no `ignore` entry names."""

    def plain_mtp(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in [name for name in tensors if name.startswith(f"{M}layers.8.mlp.experts.")]:
            if name.endswith(".weight"):
                tensors[name] = torch.zeros(64, 64, dtype=torch.bfloat16)
            else:
                del tensors[name]
        return tensors

    directory = copy_checkpoint(DATA / "modelopt", tmp_path / "copy", plain_mtp)
    checkpoint = read_checkpoint(directory)
    assert checkpoint.has_mtp and not checkpoint.mtp_problems
    assert checkpoint.parameters["layers.8.mlp.experts.0.up_proj.weight"].format == "plain"
