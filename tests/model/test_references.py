"""The model computes what transformers computes: logits, key sets, greedy tokens and drafts of three directories."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from model.batch import Batch
from model.glm5_next import Glm5Next
from model.indexer import Indexer, Selection
from tests import driver

# Two float32 programs with other summation orders differ by up to about 1e-4 in these logits.
TOLERANCE = 1e-3


class Reference:
    """One directory's model and expectations."""

    def __init__(self, directory: Path) -> None:
        self.trunk, self.mtp = driver.load_model(directory)
        self.json: dict[str, Any] = json.loads((directory / "ref.json").read_text())
        self.tensors = load_file(directory / "ref.safetensors")
        self.prompts: list[list[int]] = self.json["prompts"]


@pytest.fixture(scope="module", params=["bf16", "modelopt", "ct"])
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(driver.DATA / request.param)


def test_logits_and_hidden_states(reference: Reference) -> None:
    for index, prompt in enumerate(reference.prompts):
        hidden = driver.hidden_states(reference.trunk, prompt)
        logits = reference.trunk.logits(hidden)
        torch.testing.assert_close(logits, reference.tensors[f"p{index}.logits"], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(hidden, reference.tensors[f"p{index}.hidden"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_a_chunk_border_does_not_change_the_logits(reference: Reference, chunk: int) -> None:
    for index in (3, 7):
        logits = driver.logits(reference.trunk, reference.prompts[index], chunk)
        torch.testing.assert_close(logits, reference.tensors[f"p{index}.logits"], atol=TOLERANCE, rtol=0)


def test_greedy_tokens(reference: Reference) -> None:
    for prompt, expected in zip(reference.prompts, reference.json["greedy"], strict=True):
        assert driver.greedy(reference.trunk, prompt, len(expected)) == expected


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_key_sets(reference: Reference, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    selected: dict[int, list[set[int]]] = {}
    monkeypatch.setattr(Indexer, "select", recording_select(Indexer.select, reference.trunk, selected))
    for index in (6, 7):
        selected.clear()
        prompt = reference.prompts[index]
        driver.hidden_states(reference.trunk, prompt, chunk)
        for layer in reference.trunk.config.mla_layers:
            expected = reference.tensors[f"p{index}.topk{layer}"].reshape(len(prompt), -1)
            assert selected[layer] == [set(row.tolist()) - {-1} for row in expected]


def recording_select(select: Any, trunk: Glm5Next, selected: dict[int, list[set[int]]]) -> Any:
    layers = {id(trunk.layers[i].mixer.indexer): i for i in trunk.config.mla_layers}  # type: ignore[union-attr]

    def recorded(self: Indexer, x: Tensor, latent: Tensor, batch: Batch, cache: Any) -> list[Selection]:
        selections: list[Selection] = select(self, x, latent, batch, cache)
        for segment, selection in zip(batch.segments, selections, strict=True):
            dense = [set(range(segment.start + i + 1)) for i in range(selection.num_dense)]
            sparse = [set(row.tolist()) - {-1} for row in selection.rows]
            selected.setdefault(layers[id(self)], []).extend(dense + sparse)
        return selections

    return recorded


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_mtp_drafts(reference: Reference, share: bool, chunk: int | None) -> None:
    kind = "shared" if share else "own"
    for index, prompt in enumerate(reference.prompts):
        sequencer = driver.Sequencer(reference.trunk, len(prompt) + 4)
        drafter = driver.Drafter(reference.mtp, sequencer)
        for part in driver.chunked(prompt, chunk or len(prompt)):
            drafter.feed(part, sequencer.feed(part))
        drafts, logits = drafter.draft(reference.json["greedy"][index][0], 3, share)
        expected = torch.stack([reference.tensors[f"p{index}.mtp.{kind}{i}"].flatten() for i in range(3)])
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
        assert drafts == reference.json["mtp_drafts"][kind][index]
