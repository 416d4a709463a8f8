"""Planned bytes hold every state: recurrent matrices, convolution rows, pages, index rings (bug G2)."""

from pathlib import Path

import pytest
import torch

from engine.cache import CacheShape
from engine.llm import LLM
from engine.memory_plan import bytes_per_token, cache_bytes
from engine.sampling import SamplingParams
from model.config import Glm5NextConfig, parse_config
from scheduler.scheduler import RequestRefused
from tests.oracles import NUM_VARIANTS, tiny_config
from tests.synthetic import real_config

TINY = Path(__file__).parents[1] / "data" / "bf16"
MIB = 1 << 20


def bytes_by_hand(config: Glm5NextConfig, width: int, shape: CacheShape) -> int:
    """Pages and slots of all layers, values of `width` bytes; matrices and rings are float32."""
    tokens, head_dim = shape.num_blocks * shape.block_size, config.linear_head_dim
    pages = tokens * config.kv_lora_rank + tokens // config.index_kpool * config.index_head_dim
    ring = shape.ring_rows * 2 * config.index_head_dim * 4
    matrix = config.linear_num_heads * head_dim * head_dim * 4
    conv = (config.linear_conv_kernel_dim - 1) * 3 * config.linear_num_heads * head_dim * width
    mla, kda = len(config.mla_layers), len(config.kda_layers)
    return mla * (pages * width + shape.num_slots * ring) + kda * shape.num_slots * (matrix + conv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("variant", range(NUM_VARIANTS))
def test_planned_bytes_are_those_of_every_page_and_slot(variant: int, dtype: torch.dtype) -> None:
    config = parse_config(tiny_config(variant))
    for shape in (CacheShape(1, 16, 1, config.index_kpool), CacheShape(7, 32, 3, 2 * config.index_kpool)):
        assert cache_bytes(config, dtype, shape) == bytes_by_hand(config, dtype.itemsize, shape)


def test_the_plan_of_the_released_model() -> None:
    """34 KDA layers: 136 MiB of matrices, 5 of convolution rows; 11 MLA layers: 512 + 128 / 4 wide."""
    config = parse_config(real_config())
    ring = 11 * 4 * 2 * 128 * 4
    conv = 34 * 3 * 3 * 64 * 128 * 2
    one_slot = CacheShape(num_blocks=0, block_size=64, num_slots=1, ring_rows=4)
    assert cache_bytes(config, torch.bfloat16, one_slot) == 136 * MIB + conv + ring
    assert bytes_per_token(config, torch.bfloat16) == 11 * (512 + 128 // 4) * 2


def test_a_cache_that_does_not_fit_is_refused_with_its_bytes() -> None:
    with pytest.raises(
        ValueError, match=r"cache \(\d+ blocks, 48 slots\) needs [\d,]+ bytes, [\d,]+ are free"
    ):
        LLM(TINY, kv_tokens=1 << 50)


def test_a_pool_for_exactly_one_request_serves_one_after_the_other() -> None:
    llm = LLM(TINY, block_size=16, kv_tokens=48, seed=0)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    results = llm.generate([[3] * 40, [4] * 40], params)
    assert [len(result.token_ids) for result in results] == [8, 8]
    with pytest.raises(RequestRefused, match="50 tokens need 4 blocks of 16, the cache has 3"):
        llm.generate([[3] * 42], params)
