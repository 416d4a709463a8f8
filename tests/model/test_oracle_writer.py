"""The oracle is right: transformers reproduces the stored references, and reads what we write."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Glm5NextForConditionalGeneration

from model.config import parse_config
from tests.oracles import (
    NUM_VARIANTS,
    checkpoint_shapes,
    copy_checkpoint,
    read_tensors,
    tiny_config,
    transformers_greedy,
    transformers_logits,
    write_checkpoint,
)

BF16 = Path(__file__).parents[1] / "data" / "bf16"


def test_transformers_reproduces_the_stored_references() -> None:
    stored, facts = load_file(BF16 / "ref.safetensors"), json.loads((BF16 / "ref.json").read_text())
    for number, prompt in enumerate(facts["prompts"]):
        logits = transformers_logits(BF16, prompt)
        # Both are float32 on a CPU; another BLAS may sum in another order.
        torch.testing.assert_close(logits, stored[f"p{number}.logits"], atol=1e-3, rtol=0)
    for number in (0, 3, 7):
        assert transformers_greedy(BF16, facts["prompts"][number], 8) == facts["greedy"][number]


def test_names_and_shapes_equal_a_released_layout() -> None:
    text = json.loads((BF16 / "config.json").read_text())["text_config"]
    stored = read_tensors(BF16)
    visible = {name: tuple(t.shape) for name, t in stored.items() if not name.startswith("model.visual.")}
    assert dict(checkpoint_shapes(text)) == visible


@pytest.mark.parametrize("variant", range(NUM_VARIANTS))
def test_a_written_checkpoint_is_complete_and_lively(tmp_path: Path, variant: int) -> None:
    raw = tiny_config(variant)
    parse_config(raw)
    directory = write_checkpoint(tmp_path / "model", raw, seed=variant)
    ids = torch.randint(
        2, raw["text_config"]["vocab_size"], (96,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    logits = transformers_logits(directory, ids)
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 5
    # Order matters (KDA is the only source of it), and so does what precedes the last pool.
    assert (transformers_logits(directory, ids[::-1])[0] - logits[-1]).abs().max() > 0.1
    assert len(set(logits.argmax(-1).tolist())) > 20


def test_transformers_accepts_every_tensor_but_the_mtp_layer(tmp_path: Path) -> None:
    raw = tiny_config(0)
    directory = write_checkpoint(tmp_path / "model", raw, seed=0)
    _, report = Glm5NextForConditionalGeneration.from_pretrained(directory, output_loading_info=True)
    mtp = f"model.language_model.layers.{raw['text_config']['num_hidden_layers']}."
    assert all(name.startswith(mtp) for name in report["unexpected_keys"])
    assert all(name.startswith("model.visual.") for name in report["missing_keys"])
    assert not report["mismatched_keys"]


def test_a_copy_holds_the_edited_tensors_and_every_other_file(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", tiny_config(0), seed=0, mtp=False)
    renamed = copy_checkpoint(source, tmp_path / "copy", lambda old: {f"x.{name}": old[name] for name in old})
    before, after = read_tensors(source), read_tensors(renamed)
    assert list(after) and set(after) == {f"x.{name}" for name in before}
    assert all(torch.equal(after[f"x.{name}"], tensor) for name, tensor in before.items())
    assert (renamed / "config.json").read_bytes() == (source / "config.json").read_bytes()
