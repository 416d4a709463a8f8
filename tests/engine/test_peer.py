"""llama.cpp generates our greedy tokens on the same float32 weights, and accepts as many of the MTP layer's drafts.

`pip install -r requirements-peer.txt`, then `pytest -m slow -s tests/engine/test_peer.py`. Two variables say where:
LLAMA_CPP_SRC            `vendor/llama.cpp` of the unpacked source distribution llama-cpp-python 0.3.36: the converter
                         (`pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36`)
MINI_GLM53_PEER_MODEL    a BF16 checkpoint with the embedded model's tokenizer, such as its original;
                         unset: the embedded model, its experts expanded to float32
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.llm import EMBEDDED_MODEL, LLM
from engine.sampling import SamplingParams
from model.checkpoint import read_checkpoint
from model.shards import shard_reader
from model.weights import WeightTree
from tests import driver, oracles
from tests.engine.divergence import first_difference, margin

PEER = Path(__file__).parents[1] / "peer.py"
PROMPT_TOKENS, NEW_TOKENS = 200, 200  # together more than the 256 tokens that the indexer selects
MARGIN = 1e-3  # either of two logits this close may win: ten times what float32 rounding moves one
RATE = 0.02  # of accepted / proposed: after a token that may differ, a text goes on differently
LLAMA_CPP_SRC, MODEL = os.environ.get("LLAMA_CPP_SRC"), os.environ.get("MINI_GLM53_PEER_MODEL")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("xllamacpp"), reason="needs requirements-peer.txt"),
    pytest.mark.skipif(not LLAMA_CPP_SRC, reason="needs the converter: set LLAMA_CPP_SRC"),
]


def peer(*arguments: object, stdin: str = "") -> str:
    """Stdout of tests/peer.py, in a process of its own."""
    command = [sys.executable, str(PEER), *map(str, arguments)]
    return subprocess.run(command, input=stdin, stdout=subprocess.PIPE, text=True, check=True).stdout


def expanded(source: Path, target: Path) -> Path:
    """A copy of a checkpoint with every quantised matrix in float32. Returns the target."""
    parameters, read = read_checkpoint(source).parameters, shard_reader()
    tree = WeightTree(parameters, read, torch.float32, driver.CPU)
    tensors = {
        stored.parts[0].name: read(stored.parts[0])
        if stored.format == "plain"
        else tree.linear(stored.spec.stem).expand(torch.float32)
        for stored in parameters.values()
    }
    oracles.copy_checkpoint(source, target, lambda _: tensors)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (target / "hf_quant_config.json").unlink()
    return target


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face directory that both programs run."""
    return Path(MODEL) if MODEL else expanded(EMBEDDED_MODEL, tmp_path_factory.mktemp("peer") / "model")


@pytest.fixture(scope="module")
def gguf(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as llama.cpp reads them."""
    target = tmp_path_factory.mktemp("peer") / "model.gguf"
    peer("convert", checkpoint, target)
    return target


def prompts(llm: LLM) -> list[list[int]]:
    """Twenty beginnings of text that the model was not trained on."""
    texts = json.loads((driver.DATA / "heldout.json").read_text(encoding="utf-8"))
    return [llm.encode(text)[:PROMPT_TOKENS] for text in texts]


def wrong_tokens(llm: LLM, prompt: list[int], ours: list[int], theirs: list[int]) -> str | None:
    """What the first difference is, unless our two best tokens are as good as equal there."""
    at = first_difference(theirs, ours)
    if at is None or (gap := margin(llm.model, prompt + ours[:at])) < MARGIN:
        return None
    return f"token {at}: {theirs[at : at + 1]}, expected {ours[at : at + 1]}, argmax margin {gap:.3g}"


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_tokens_and_acceptance_are_those_of_llama_cpp(checkpoint: Path, gguf: Path, depth: int) -> None:
    llm = LLM(checkpoint, dtype="float32", draft_tokens=depth)
    ids = prompts(llm)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    ours = [result.token_ids for result in llm.generate(ids, params)]
    theirs: list[dict[str, Any]] = json.loads(
        peer("complete", gguf, depth, NEW_TOKENS, stdin=json.dumps(ids))
    )
    wrong = [
        (number, difference)
        for number, (prompt, tokens, answer) in enumerate(zip(ids, ours, theirs, strict=True))
        if (difference := wrong_tokens(llm, prompt, tokens, answer["tokens"]))
    ]
    assert not wrong
    if depth:
        counts = [[sum(answer[key] for answer in theirs) for key in ("accepted", "proposed")]]
        counts.append([sum(llm.statistics.accepted), sum(llm.statistics.proposed)])
        peers, own = (accepted / proposed for accepted, proposed in counts)
        print(
            f"\ndepth {depth}: llama.cpp accepts {peers:.4f} of {counts[0][1]}, we {own:.4f} of {counts[1][1]}"
        )
        # Deeper, its passes select index keys anew where ours share the first pass's.
        assert depth > 1 or peers == pytest.approx(own, abs=RATE)
