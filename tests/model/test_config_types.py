"""A config.json value of a wrong JSON type is refused like any other bad value, never a traceback."""

import json
from pathlib import Path

import pytest

from model.checkpoint import read_checkpoint
from model.config import ConfigError, load_config
from tests.driver import DATA


@pytest.mark.parametrize(
    ("field", "value"), [("layer_types", 3), ("linear_attn_config", "x"), ("mlp_layer_types", 1.5)]
)
def test_wrong_json_type_is_a_config_error(tmp_path: Path, field: str, value: object) -> None:
    raw = json.loads((DATA / "bf16" / "config.json").read_text())
    raw["text_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("quantization_config", 7), ("eos_token_id", "x"), ("eos_token_id", [0, "q"])]
)
def test_top_level_values_of_a_wrong_type(tmp_path: Path, field: str, value: object) -> None:
    for file in (DATA / "bf16").iterdir():
        (tmp_path / file.name).symlink_to(file)
    raw = json.loads((DATA / "bf16" / "config.json").read_text())
    raw["text_config"].pop("eos_token_id", None)
    raw[field] = value
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=field):
        read_checkpoint(tmp_path)


def test_text_config_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "glm5_next", "text_config": [1]}')
    with pytest.raises(ConfigError, match="wrong JSON type"):
        load_config(tmp_path)


def written(tmp_path: Path, outer: dict[str, object], inner: dict[str, object]) -> Path:
    raw = json.loads((DATA / "bf16" / "config.json").read_text())
    raw["text_config"] |= inner
    (tmp_path / "config.json").write_text(json.dumps(raw | outer))
    return tmp_path


def test_stop_ids_of_both_places_count(tmp_path: Path) -> None:
    directory = written(tmp_path, {"eos_token_id": [7, 8, 9]}, {"eos_token_id": 7})
    assert load_config(directory).eos_token_ids == (7, 8, 9)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
        ({}, {"index_topk_freq": 4}),
        ({}, {"index_topk_pattern": "FSSS"}),
        ({}, {"qk_head_dim": 77}),
    ],
)
def test_what_is_not_implemented_is_refused_wherever_it_stands(
    tmp_path: Path, outer: dict[str, object], inner: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(outer | inner))):
        load_config(written(tmp_path, outer, inner))
