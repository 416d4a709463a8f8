"""The tiny model in an engine, as it is or made to say what the test wants: real forwards, written logits."""

from collections.abc import Iterable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from torch import Tensor

from engine.llm import LLM
from model.glm5_next import Glm5Next
from tests import driver
from tests.glm_tokenizer import write_tokenizer

TINY = Path(__file__).parent / "data" / "bf16"
VOCAB = (
    154880  # the released vocabulary: stop ids of the test tokenizer lie in it, the tiny model's is smaller
)


def tiny_engine(
    directory: Path = TINY, *, budget: int = 16, kv_tokens: int = 512, slots: int = 3, seed: int = 0
) -> LLM:
    """A float32 engine over caches full of NaN: reading what was never written shows."""
    llm = LLM(directory, dtype="float32", block_size=16, max_batched_tokens=budget, kv_tokens=kv_tokens,
              max_running_requests=slots, seed=seed)  # fmt: skip
    driver.poison(llm.runner.cache.kda, torch.nan)
    driver.poison(llm.runner.cache.mla, torch.nan)
    return llm


def script_tokens(monkeypatch: pytest.MonkeyPatch, tokens: Iterable[int]) -> None:
    """Every forward that samples chooses the next of `tokens` in each row, at any temperature."""
    left = iter(tokens)

    def logits(self: Glm5Next, hidden: Tensor) -> Tensor:
        scripted = torch.full((len(hidden), VOCAB), -torch.inf)
        scripted[:, next(left)] = 0
        return scripted

    monkeypatch.setattr(Glm5Next, "logits", logits)


def tiny_with_tokenizer(directory: Path) -> Path:
    """The tiny model with a byte tokenizer and the reasoning template; returns the directory."""
    copytree(TINY, directory)
    write_tokenizer(directory)
    return directory
