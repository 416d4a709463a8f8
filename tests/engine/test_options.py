"""An engine option out of range is refused by name, with what was found and what is expected."""

from pathlib import Path
from typing import Any

import pytest

from engine.llm import LLM
from engine.options import EngineOptions

TINY = Path(__file__).parents[1] / "data" / "bf16"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float16"}, ["dtype", "'float16'", "bfloat16, float32"]),
        ({"device": "tpu"}, ["device", "'tpu'", "cpu or cuda"]),
        ({"max_batched_tokens": 0}, ["max_batched_tokens", "0", "at least 1"]),
        ({"max_running_requests": -1}, ["max_running_requests", "-1", "at least 1"]),
        ({"kv_tokens": 0}, ["kv_tokens", "0", "at least 1"]),
        ({"num_layers": 2}, ["num_layers", "random weights only"]),
        ({"seed": -1}, ["seed", "-1", "from 0 to 2**32 - 1"]),
        ({"seed": 2**32}, ["seed", "4294967296", "from 0 to 2**32 - 1"]),
        ({"num_layers": 0, "random_weights": True}, ["num_layers", "0", "at least 1"]),
    ],
    ids=lambda value: "-".join(map(str, value.items())) if isinstance(value, dict) else "",
)
def test_out_of_range(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        EngineOptions(**options)
    assert all(word in str(refusal.value) for word in words)


@pytest.mark.parametrize("size", [0, 24])
def test_a_block_off_the_export_grid_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"block size is {size}, expected a multiple of 16"):
        LLM(TINY, block_size=size)


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="blocksize"):
        LLM(TINY, blocksize=16)


def test_more_layers_than_the_model_has_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"9 layers asked for, the model has 8"):
        LLM(TINY, random_weights=True, num_layers=9)
