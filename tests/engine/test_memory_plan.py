"""Planned bytes are allocated bytes: recurrent state, convolution rows, pages, index rings (bug G2)."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.cache import allocate_trunk
from engine.llm import LLM
from engine.memory_plan import CacheShape, bytes_per_slot, bytes_per_token, cache_bytes
from engine.sampling import SamplingParams
from model.config import parse_config
from scheduler.scheduler import RequestRefused
from tests.oracles import NUM_VARIANTS, tiny_config
from tests.synthetic import real_config

TINY = Path(__file__).parents[1] / "data" / "bf16"
MIB = 1 << 20


def allocated_bytes(owner: object) -> int:
    """Bytes of all tensors below an object of dataclasses and dicts."""
    if isinstance(owner, Tensor):
        return owner.nbytes
    children = owner.values() if isinstance(owner, dict) else vars(owner).values()
    return sum(allocated_bytes(child) for child in children)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("variant", range(NUM_VARIANTS))
def test_planned_bytes_are_allocated_bytes(variant: int, dtype: torch.dtype) -> None:
    config = parse_config(tiny_config(variant))
    for shape in (CacheShape(1, 16, 1, config.index_kpool), CacheShape(7, 32, 3, 2 * config.index_kpool)):
        cache = allocate_trunk(config, shape, dtype, torch.device("cpu"))
        assert cache_bytes(config, dtype, shape) == allocated_bytes(cache)


def test_the_plan_of_the_released_model() -> None:
    """34 KDA layers: 136 MiB of matrices, 5 of convolution rows; 11 MLA layers: 512 + 128 / 4 wide."""
    config = parse_config(real_config())
    ring = 11 * 4 * 2 * 128 * 4
    conv = 34 * 3 * 3 * 64 * 128 * 2
    assert bytes_per_slot(config, torch.bfloat16, ring_rows=4) == 136 * MIB + conv + ring
    assert bytes_per_token(config, torch.bfloat16) == 11 * (512 + 128 // 4) * 2


def test_a_cache_that_does_not_fit_is_refused_with_its_bytes() -> None:
    with pytest.raises(
        ValueError, match=r"cache \(\d+ blocks, 16 slots\) needs [\d,]+ bytes, [\d,]+ are free"
    ):
        LLM(TINY, kv_tokens=1 << 50)


def test_a_pool_for_exactly_one_request_serves_one_after_the_other() -> None:
    llm = LLM(TINY, block_size=16, kv_tokens=48, seed=0)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    results = llm.generate([[3] * 40, [4] * 40], params)
    assert [len(result.token_ids) for result in results] == [8, 8]
    with pytest.raises(RequestRefused, match="50 tokens need 4 blocks of 16, the cache has 3"):
        llm.generate([[3] * 42], params)
