"""The tiny model in an engine, as it is or made to say what the test wants: real forwards, written logits."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.llm import LLM
from model.batch import Batch
from model.glm5_next import Glm5Next
from tests import driver
from tests.glm_tokenizer import write_tokenizer

TINY = Path(__file__).parent / "data" / "bf16"
VOCAB = (
    154880  # the released vocabulary: stop ids of the test tokenizer lie in it, the tiny model's is smaller
)


def tiny_engine(
    directory: Path = TINY, *, budget: int = 16, kv_tokens: int = 512, slots: int = 3, seed: int = 0,
    draft_tokens: int | None = None,
) -> LLM:  # fmt: skip
    """A float32 engine over caches full of NaN: reading what was never written shows."""
    llm = LLM(directory, dtype="float32", block_size=16, max_batched_tokens=budget, kv_tokens=kv_tokens,
              max_running_requests=slots, seed=seed, draft_tokens=draft_tokens)  # fmt: skip
    driver.poison(llm.runner.cache.kda, torch.nan)
    driver.poison(llm.runner.cache.mla, torch.nan)
    if llm.runner.drafter is not None:
        driver.poison({0: llm.runner.drafter.cache}, torch.nan)
    return llm


def script_tokens(monkeypatch: pytest.MonkeyPatch, tokens: Iterable[int]) -> None:
    """Every forward that samples chooses the next of `tokens` in each row, at any temperature."""
    left = iter(tokens)

    def logits(self: Glm5Next, hidden: Tensor) -> Tensor:
        scripted = torch.full((len(hidden), VOCAB), -torch.inf)
        scripted[:, next(left)] = 0
        return scripted

    monkeypatch.setattr(Glm5Next, "logits", logits)


def script_run(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, prompt_length: int, said: Sequence[int], drafted: Sequence[int]
) -> None:
    """A prompt of that length is answered `said`, and the draft layer thinks it is answered `drafted`. Real forwards;
    the first two numbers of a hidden state are the position of the token that it predicts, and whose it is."""
    assert llm.mtp is not None
    forward, read, first_slot = llm.model.forward, llm.mtp.read, llm.mtp.first_slot
    answers = (said, drafted)

    def marked(hidden: Tensor, batch: Batch, shift: int, whose: int) -> Tensor:
        hidden = hidden.clone()
        for segment in batch.segments:
            hidden[segment.rows, 0] = torch.arange(segment.start, segment.end).float() + shift
        hidden[:, 1] = whose
        return hidden

    def read_and_mark(x: Tensor, batch: Batch, *others: Any) -> tuple[Tensor, Any]:
        y, selections = read(x, batch, *others)
        return marked(y, batch, 2 - first_slot, 1), selections

    def logits(hidden: Tensor) -> Tensor:
        scripted = torch.full((len(hidden), VOCAB), -torch.inf)
        for row, (position, whose) in enumerate(hidden[:, :2].int().tolist()):
            scripted[row, answers[whose][position - prompt_length]] = 0
        return scripted

    monkeypatch.setattr(llm.model, "forward", lambda batch, cache: marked(forward(batch, cache), batch, 1, 0))
    monkeypatch.setattr(llm.mtp, "read", read_and_mark)
    monkeypatch.setattr(llm.model, "logits", logits)


def tiny_with_tokenizer(directory: Path) -> Path:
    """The tiny model with a byte tokenizer and the reasoning template; returns the directory."""
    copytree(TINY, directory)
    write_tokenizer(directory)
    return directory
