"""Random weights are seeded by name, come in the declared formats, and fill the model like a checkpoint."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import load_config, read_json
from model.formats import Fp8BlockWeight, Mxfp8Weight, Nvfp4Weight, PlainWeight
from model.random_weights import random_weights, stored_as
from model.weights import WeightTree
from tests.synthetic import write_sparse

DATA = Path(__file__).parents[1] / "data"
FORMATS = [("bf16", PlainWeight, PlainWeight), ("modelopt", Nvfp4Weight, Nvfp4Weight)]
FORMATS.append(("ct", Nvfp4Weight, Fp8BlockWeight))


def build(directory: Path, **options: Any) -> WeightTree:
    config = load_config(directory)
    config = config.first_layers(options.pop("num_layers", config.num_hidden_layers))
    options = {"linear_dtype": torch.bfloat16, "device": torch.device("cpu"), "seed": 1} | options
    return random_weights(directory, config, **options)


def only_config(tmp_path: Path, source: str) -> Path:
    shutil.copyfile(DATA / source / "config.json", tmp_path / "config.json")
    return tmp_path


@pytest.mark.parametrize("headers", [True, False], ids=["headers", "config alone"])
@pytest.mark.parametrize(("source", "trunk", "mtp"), FORMATS)
def test_formats_are_the_declared_ones(
    tmp_path: Path, source: str, trunk: type, mtp: type, headers: bool
) -> None:
    tree = build(DATA / source if headers else only_config(tmp_path, source))
    assert type(tree.at("layers.4.mlp").experts("up_proj")) is trunk
    assert type(tree.at("layers.8.mlp").experts("up_proj")) is mtp
    assert type(tree.linear("layers.8.eh_proj")) is PlainWeight


def test_formats_of_headers_win_over_the_declaration(tmp_path: Path) -> None:
    raw = read_json(DATA / "bf16" / "config.json")
    raw["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    write_sparse(tmp_path, raw, lambda spec: "mxfp8" if spec.role == "mtp experts" else "plain")
    assert type(build(tmp_path).at("layers.8.mlp").experts("up_proj")) is Mxfp8Weight


@pytest.mark.parametrize("source", ["bf16", "modelopt", "ct"])
def test_matrices_keep_the_size_of_their_input(source: str) -> None:
    tree = build(DATA / source)
    for layer in (4, 8):
        expanded = tree.at(f"layers.{layer}.mlp").experts("up_proj").expand(torch.float32)
        # Variance 1 / in = 1 / 64; scales vary by some tens of percent.
        assert 0.09 < expanded.std() < 0.18


def test_gate_and_up_have_tensor_scales_of_their_own() -> None:
    tree = build(DATA / "modelopt").at("layers.4.mlp")
    gate, up = tree.experts("gate_proj"), tree.experts("up_proj")
    assert isinstance(gate, Nvfp4Weight) and isinstance(up, Nvfp4Weight)
    assert len(torch.cat([gate.tensor_scale, up.tensor_scale]).unique()) == 16


def test_values_depend_on_seed_and_name_not_on_the_number_of_layers() -> None:
    name = "layers.1.self_attn.q_proj"
    values = build(DATA / "bf16").linear(name).expand(torch.float32)
    assert torch.equal(build(DATA / "bf16", num_layers=2).linear(name).expand(torch.float32), values)
    assert not torch.equal(build(DATA / "bf16", seed=2).linear(name).expand(torch.float32), values)
    other = build(DATA / "bf16").linear("layers.1.self_attn.k_proj").expand(torch.float32)
    assert not torch.equal(other, values)


def test_the_first_layers_and_the_mtp_layer_are_all_there_is() -> None:
    tree = build(DATA / "bf16", num_layers=2)
    assert tree.has("layers.1.mlp.gate_proj") and tree.has("layers.8.eh_proj") and tree.has("lm_head")
    assert not tree.has("layers.2.mlp.gate_proj")
    assert not build(DATA / "bf16", with_mtp=False).has("layers.8.eh_proj")


def test_a_cut_config_takes_formats_from_the_headers_of_the_whole_model() -> None:
    config = load_config(DATA / "modelopt").first_layers(4)
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    tree = random_weights(DATA / "modelopt", config, linear_dtype=bf16, device=cpu, seed=1)
    assert type(tree.at("layers.3.mlp").experts("up_proj")) is Nvfp4Weight
    assert not tree.has("layers.4.mlp.gate")


def test_resident_bytes_are_those_of_the_weights_taken() -> None:
    tree = build(DATA / "ct")
    promised, taken = tree.resident_bytes, 0
    for name, parameter in tree.parameters.items():
        linear = parameter.spec.kind == "linear"
        parts = tree.linear(parameter.spec.stem).parts() if linear else [tree.tensor(name)]
        taken += sum(part.nbytes for part in parts)
    tree.finish()
    assert taken == promised


def test_a_stored_form_has_the_parts_of_its_format() -> None:
    tree = build(DATA / "bf16")
    spec = tree.parameters["layers.4.mlp.experts.0.up_proj.weight"].spec
    parts = {
        part.name.rpartition(".")[2]: (part.dtype, part.shape) for part in stored_as(spec, "nvfp4").parts
    }
    assert parts == {
        "weight": ("U8", (64, 32)),
        "weight_scale": ("F8_E4M3", (64, 4)),
        "weight_scale_2": ("F32", ()),
    }
