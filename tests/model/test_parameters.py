"""The parameter table lists every released tensor and no other, and adds up to the published counts."""

import math
from collections import Counter
from pathlib import Path

import pytest

from model.config import load_config, parse_config
from model.parameters import parameter_specs
from tests import oracles
from tests.synthetic import real_config

PREFIX = "model.language_model."


@pytest.mark.parametrize("variant", range(oracles.NUM_VARIANTS))
@pytest.mark.parametrize("mtp", [True, False])
def test_names_and_shapes_equal_an_independent_list(variant: int, mtp: bool) -> None:
    raw = oracles.tiny_config(variant)
    specs = parameter_specs(parse_config(raw), with_mtp=mtp)
    ours = Counter((spec.name, spec.shape) for spec in specs)
    theirs = oracles.checkpoint_shapes(raw["text_config"], mtp)
    assert ours == Counter((name.removeprefix(PREFIX), shape) for name, shape in theirs)


def test_names_equal_those_of_a_checkpoint_directory() -> None:
    directory = Path(__file__).parents[1] / "data" / "bf16"
    stored = oracles.read_tensors(directory)
    specs = parameter_specs(load_config(directory))
    shapes = {name.removeprefix(PREFIX): tuple(tensor.shape) for name, tensor in stored.items()}
    text = {name: shape for name, shape in shapes.items() if not name.startswith("model.visual.")}
    assert {spec.name: spec.shape for spec in specs} == text


def test_the_first_layers_alone_keep_embedding_norm_head_and_mtp() -> None:
    config = parse_config(oracles.tiny_config(0))
    few = parameter_specs(config.first_layers(2))
    assert {spec.layer for spec in few} == {None, 0, 1, config.num_hidden_layers}
    every = set(parameter_specs(config))
    assert every.issuperset(few)


def test_linear_and_float32_roles() -> None:
    kinds = {spec.name: spec.kind for spec in parameter_specs(parse_config(oracles.tiny_config(0)))}
    for name in (
        "hc_attn_fn",
        "hc_ffn_base",
        "hc_attn_scale",
        "self_attn.A_log",
        "self_attn.q_conv1d.weight",
    ):
        assert kinds[f"layers.0.{name}"] == "float32"
    assert kinds["layers.1.self_attn.indexer.index_kpool_compress_ape"] == "float32"
    assert kinds["layers.1.self_attn.indexer.index_kpool_compress_gate"] == "linear"
    assert kinds["layers.1.mlp.gate.e_score_correction_bias"] == "float32"
    assert kinds["layers.1.mlp.gate.weight"] == kinds["embed_tokens.weight"] == "linear"


def test_parameter_counts_of_the_real_model() -> None:
    counts: Counter[str] = Counter()
    for spec in parameter_specs(parse_config(real_config())):
        counts[spec.role] += math.prod(spec.shape)
    assert counts == {
        "embedding": 634_388_480,
        "head": 634_388_480,
        "norms": 91 * 4096,
        "mhc": 35_391_870,
        "kda": 4_682_897_792,
        "mla": 1_291_868_160,
        "indexers": 82_190_592,
        "routers": 49_557_312,
        "dense mlp": 452_984_832,
        "shared experts": 1_056_964_608,
        "routed experts": 304_405_807_104,
        "mtp experts": 7_247_757_312,
        "mtp attention": 124_914_432,
        "mtp shared and router": 26_345_760,
        "mtp eh_proj and norms": 33_574_912,
    }
    vision = 563_627_008
    assert sum(counts.values()) + vision == 321_323_031_390
