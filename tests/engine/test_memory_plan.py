"""Planned bytes are those of the tensors: states, convolution rows, pages, rings, replay rows, companions (bug G2)."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.cache import CacheShape
from engine.llm import EMBEDDED_MODEL, LLM
from engine.memory_plan import bytes_per_token, cache_parts
from engine.sampling import SamplingParams
from model.config import Glm5NextConfig, load_config, parse_config
from scheduler.scheduler import RequestRefused
from tests.oracles import NUM_VARIANTS, tiny_config
from tests.synthetic import real_config

TINY = Path(__file__).parents[1] / "data" / "bf16"
MIB = 1 << 20
SHAPES = [
    CacheShape(1, 16, 1),
    CacheShape(7, 32, 3),
    CacheShape(7, 32, 5, 2, 3),
    CacheShape(4, 16, 3, 2, 2, True),
]


def parts_by_hand(config: Glm5NextConfig, width: int, shape: CacheShape) -> dict[str, int]:
    """Pages and slots of all layers, values of `width` bytes; matrices, rings and recurrence inputs are float32."""
    tokens, head_dim, depth = shape.num_blocks * shape.block_size, config.linear_head_dim, shape.draft_tokens
    pages = (tokens * config.kv_lora_rank + tokens // config.index_kpool * config.index_head_dim) * width
    raw_row = 2 * config.index_head_dim * 4
    matrix = config.linear_num_heads * head_dim * head_dim * 4
    conv_row = 3 * config.linear_num_heads * head_dim * width
    mla, kda = len(config.mla_layers), len(config.kda_layers)
    ring = (config.index_kpool + depth) * raw_row
    slot = kda * (matrix + (config.linear_conv_kernel_dim - 1) * conv_row) + mla * ring
    parts = {"pages": mla * pages, "recurrent slots": shape.num_slots * slot}
    if not depth:
        return parts
    inputs = (1 + depth) * config.linear_num_heads * (3 * head_dim + 1) * 4
    companion = config.hidden_size * 4 + (config.index_kpool + (depth - 1) * shape.own_index) * raw_row
    return parts | {
        "draft pages": pages,
        "replay rows": shape.num_running * kda * (inputs + depth * conv_row),
        "companions": shape.num_slots * companion,
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", range(NUM_VARIANTS))
def test_planned_bytes_are_those_of_every_page_and_slot(variant: int, shape: CacheShape) -> None:
    config = parse_config(tiny_config(variant))
    for dtype in (torch.float32, torch.bfloat16):
        planned = cache_parts(config, replace(shape, dtype=dtype))
        assert planned == parts_by_hand(config, dtype.itemsize, shape)


@pytest.mark.parametrize(("depth", "share"), [(0, True), (3, True), (3, False), (7, True)])
def test_allocated_bytes_are_the_planned_ones(depth: int, share: bool) -> None:
    llm = LLM(TINY, draft_tokens=depth, index_share=share or depth == 0, kv_tokens=128, max_running_requests=3,
              checkpoint_slots=2)  # fmt: skip
    cache, drafter = llm.runner.cache, llm.runner.drafter
    state, rings = cache.recurrent, [layer.index.ring for layer in cache.mla.values()]
    pages = [part for layer in cache.mla.values() for part in (layer.latent, layer.index.pooled)]
    owners = {"pages": pages, "recurrent slots": [state.matrix, state.conv, *rings]}
    if drafter is not None:
        draft = drafter.cache
        owners["draft pages"] = [draft.mla.latent, draft.mla.index.pooled]
        owners["replay rows"] = [state.replay, state.conv_tail]
        owners["companions"] = [draft.hidden, draft.mla.index.ring]
    storages = {name: [part.untyped_storage().nbytes() for part in parts] for name, parts in owners.items()}
    assert {name: sum(sizes) for name, sizes in storages.items()} == llm.cache_parts
    # The views by layer share these storages.
    places = {layer.matrix.untyped_storage().data_ptr() for layer in cache.kda.values()}
    assert places == {state.matrix.untyped_storage().data_ptr()}


@pytest.mark.parametrize(
    ("config", "head_dim", "ratio"),
    [(parse_config(real_config()), 128, 1.09), (load_config(EMBEDDED_MODEL), 64, 1.19)],
    ids=["released", "embedded"],
)
def test_replay_costs_a_tenth_of_a_state_and_not_three_states(
    config: Glm5NextConfig, head_dim: int, ratio: float
) -> None:
    """A running request has one state and 1 + k rows of k, v, g (head_dim each) and beta; 3 + k convolution rows."""
    depth, states = 3, len(config.kda_layers) * config.linear_num_heads
    shape = CacheShape(0, 64, 1, 1, depth, dtype=torch.bfloat16)
    parts = cache_parts(config, shape)
    ring = len(config.mla_layers) * (config.index_kpool + depth) * 2 * config.index_head_dim * 4
    matrix = states * head_dim**2 * 4
    conv_row = 3 * states * head_dim * 2
    replay = matrix * (depth + 1) * (3 * head_dim + 1) / head_dim**2
    assert config.linear_head_dim == head_dim
    assert parts["recurrent slots"] == matrix + 3 * conv_row + ring
    assert parts["replay rows"] == replay + depth * conv_row
    assert round(1 + replay / matrix, 2) == ratio


def test_the_plan_of_the_released_model() -> None:
    """34 KDA layers: 136 MiB of matrices, 5 of convolution rows; 11 MLA layers: 512 + 128 / 4 wide."""
    config = parse_config(real_config())
    ring = 11 * 4 * 2 * 128 * 4
    conv = 34 * 3 * 3 * 64 * 128 * 2
    one_slot = CacheShape(num_blocks=0, block_size=64, num_slots=1, dtype=torch.bfloat16)
    assert cache_parts(config, one_slot)["recurrent slots"] == 136 * MIB + conv + ring
    assert bytes_per_token(config, torch.bfloat16) == 11 * (512 + 128 // 4) * 2
    assert bytes_per_token(config, torch.bfloat16, draft_tokens=3) == 12 * (512 + 128 // 4) * 2


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
