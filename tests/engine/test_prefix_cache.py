"""A hit, a chunk boundary and a resume are one operation: whatever is cached, the greedy tokens stay the same.

Caches start full of NaN and the books are checked after every step, so reading what nobody wrote, writing what
others may read, and losing a place all show.
"""

from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from torch import Tensor

from engine.llm import EMBEDDED_MODEL, LLM
from engine.sampling import SamplingParams
from scheduler.request import Request
from tests import driver
from tests.scripted import TINY

POLICIES = ("generic", "seed", "vllm-0.33", "ours", "none")
# Several chunks under every budget, far above index_topk (16 tokens), no multiple of block, pool or chunk grid.
LENGTHS = (131, 77, 50)
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPTS = [torch.randint(3, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


def engine(policy: str = "ours", budget: int = 4096, **options: object) -> LLM:
    settings = {"block_size": 16, "kv_tokens": 2048, "max_running_requests": 4} | options
    llm = LLM(TINY, dtype="float32", debug=True, policy=policy, max_batched_tokens=budget, seed=0, **settings)
    driver.poison(llm.runner.cache.kda, torch.nan)
    driver.poison(llm.runner.cache.mla, torch.nan)
    return llm


@pytest.fixture(scope="module")
def expected() -> Callable[[list[int]], list[int]]:
    """Greedy tokens of a prompt alone, whole, without any cache."""
    plain = engine("none")
    known: dict[tuple[int, ...], list[int]] = {}

    def tokens(prompt: list[int]) -> list[int]:
        if tuple(prompt) not in known:
            known[tuple(prompt)] = plain.generate([prompt], GREEDY)[0].token_ids
        return known[tuple(prompt)]

    return tokens


@pytest.mark.parametrize("retain", ["resend", "all", "chunk-ends", "progress,decode", "resend,crossed"])
def test_retentions_exports_and_chunk_ends(retain: str, expected: Callable[[list[int]], list[int]]) -> None:
    for exports, chunk_ends in (("0", "floored"), ("1", "free"), ("many", "floored")):
        llm = engine(budget=50, retain=retain, exports=exports, chunk_ends=chunk_ends)
        for prompt in (PROMPTS[0], PROMPTS[0], [*PROMPTS[0], *PROMPTS[1]]):
            assert llm.generate([prompt], GREEDY)[0].token_ids == expected(prompt)


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_at_every_step(policy: str, expected: Callable[[list[int]], list[int]]) -> None:
    llm = engine(policy, budget=32)
    request_ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    turn = cycle(range(len(PROMPTS)))
    for _ in range(24):  # then it may finish: `none` keeps nothing of an interrupted prefill
        llm.step()
        running = llm.scheduler.running
        if running and next(turn):
            llm.scheduler.preempt(running[next(turn) % len(running)])
    while llm.has_work:
        llm.step()
    assert llm.scheduler.num_preemptions > 4
    assert [llm.result(i).token_ids for i in request_ids] == [expected(prompt) for prompt in PROMPTS]


def test_pages_run_out_and_the_youngest_waits(expected: Callable[[list[int]], list[int]]) -> None:
    llm = engine(budget=64, kv_tokens=160, checkpoint_slots=2)
    results = llm.generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in results] == [expected(prompt) for prompt in PROMPTS]


def test_cache_reset_in_flight(expected: Callable[[list[int]], list[int]]) -> None:
    llm = engine(budget=32)
    request_ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    while llm.has_work:
        llm.step()
        llm.scheduler.blocks.reset_cache(llm.scheduler.running)
    assert [llm.result(i).token_ids for i in request_ids] == [expected(prompt) for prompt in PROMPTS]


def snapshot(llm: LLM, slot: int) -> list[Tensor]:
    return [part[slot].clone() for s in llm.runner.cache.kda.values() for part in (s.matrix, s.conv)]


def test_a_published_state_is_that_of_a_forward_that_ends_there() -> None:
    # Bitwise: exports lie on the kernel's own 16-token grid, so both forwards do the same arithmetic.
    exporting, ending = engine(retain="all"), engine(retain="all", budget=48)
    for llm in (exporting, ending):
        llm.generate([PROMPTS[0][:97]], SamplingParams(max_tokens=1, ignore_eos=True))
    blocks = [llm.scheduler.blocks for llm in (exporting, ending)]
    probe = Request(-1, PROMPTS[0][:97], 1)
    assert blocks[0].checkpoints(probe) == [16, 32, 48, 64, 80, 96]
    keys = probe.keys
    assert keys is not None
    for position in (48, 96):
        slots = [b.slots.find(keys.at(position)) for b in blocks]
        assert None not in slots
        first, second = (
            snapshot(llm, slot or 0) for llm, slot in zip((exporting, ending), slots, strict=True)
        )
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)  # other rows per matrix product
    before = {p: snapshot(exporting, blocks[0].slots.find(keys.at(p)) or 0) for p in (16, 64, 96)}
    for prompt in (PROMPTS[0], [*PROMPTS[0][:70], *PROMPTS[1]], PROMPTS[2]):
        exporting.generate([prompt], GREEDY)
    for position, parts in before.items():
        slot = blocks[0].slots.find(keys.at(position))
        assert slot is not None
        assert all(torch.equal(a, b) for a, b in zip(parts, snapshot(exporting, slot), strict=True))


def test_the_embedded_model_hits_and_agrees() -> None:
    cached, plain = (
        LLM(EMBEDDED_MODEL, dtype="float32", kv_tokens=8192, no_prefix_cache=off, debug=True)
        for off in (False, True)
    )
    text = "It is a truth universally acknowledged, that a single man in possession of a good fortune, " * 24
    first = cached.generate([text], GREEDY)[0]
    warm = cached.generate([text, text + "must be in want of a wife."], GREEDY)
    assert [r.cached_tokens for r in warm] == [(first.prompt_tokens - 1) // 64 * 64] * 2
    wanted = plain.generate([text, text + "must be in want of a wife."], GREEDY)
    assert [r.token_ids for r in warm] == [r.token_ids for r in wanted]


def test_states_in_bfloat16_halve_a_slot_and_still_hit() -> None:
    llm = engine(state_dtype="bfloat16")
    results = [llm.generate([PROMPTS[0]], GREEDY)[0] for _ in range(2)]
    assert llm.runner.cache.kda[0].matrix.dtype == torch.bfloat16
    assert results[1].cached_tokens == 128 and len(results[1].token_ids) == GREEDY.max_tokens
