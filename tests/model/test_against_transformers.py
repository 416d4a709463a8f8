"""Three tiny models of different shapes give transformers' logits and tokens, however the prompt is cut.

Contexts lie far above `index_topk`, so selection, tails and pool borders all take part.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.llm import LLM
from engine.sampling import SamplingParams
from tests import driver
from tests.oracles import (
    NUM_VARIANTS,
    tiny_config,
    transformers_greedy,
    transformers_logits,
    write_checkpoint,
)

NUM_TOKENS = 150  # 4 to 18 times index_topk, and no multiple of a chunk, pool or block
NEW_TOKENS = 8
CHUNKS = {"whole": NUM_TOKENS, "chunks-of-64": 64, "chunks-of-7": 7, "chunks-of-3": 3, "token-by-token": 1}

Checkpoint = Callable[[int], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Writes the checkpoint of a variant on first use."""
    root = tmp_path_factory.mktemp("tiny")
    return cache(lambda variant: write_checkpoint(root / str(variant), tiny_config(variant), seed=variant))


def prompt(variant: int) -> list[int]:
    vocab = tiny_config(variant)["text_config"]["vocab_size"]
    return torch.randint(2, vocab, (NUM_TOKENS,), generator=torch.Generator().manual_seed(variant)).tolist()


@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS.keys())
@pytest.mark.parametrize("variant", range(NUM_VARIANTS))
def test_prompt_logits(checkpoint: Checkpoint, variant: int, chunk: int) -> None:
    directory, token_ids = checkpoint(variant), prompt(variant)
    trunk, _ = driver.load_model(directory)
    logits = driver.logits(trunk, token_ids, chunk)
    # Float32 on both sides; a chunk form sums in another order than a recurrence.
    torch.testing.assert_close(logits, transformers_logits(directory, token_ids), atol=1e-3, rtol=0)


@pytest.mark.parametrize("variant", range(NUM_VARIANTS))
def test_greedy_tokens(checkpoint: Checkpoint, variant: int) -> None:
    directory, token_ids = checkpoint(variant), prompt(variant)
    expected = transformers_greedy(directory, token_ids, NEW_TOKENS)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    for chunk in CHUNKS.values():
        llm = LLM(directory, dtype="float32", max_batched_tokens=chunk, block_size=16, kv_tokens=256)
        assert llm.generate([token_ids], params)[0].token_ids == expected
