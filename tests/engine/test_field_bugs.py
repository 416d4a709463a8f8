"""Failures that users of other engines saw around cached states, with real forwards: none of them may be seen here.

Each output is compared with a greedy run of the bare model, without engine, cache or company.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.llm import LLM
from engine.sampling import SamplingParams
from scheduler.plan import StepPlan, StepResult
from tests import driver
from tests.scripted import tiny_engine
from tests.tiny import token_ids

TEXT, OTHER = token_ids(200, seed=1, vocab_size=256), token_ids(300, seed=2, vocab_size=256)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def assert_answers(llm: LLM, prompts: list[list[int]], max_tokens: int = 3) -> None:
    results = llm.generate(prompts, greedy(max_tokens))
    assert [r.token_ids for r in results] == [driver.greedy(llm.model, p, max_tokens) for p in prompts]


def held(llm: LLM) -> list[int]:
    blocks = llm.scheduler.blocks
    blocks.check(llm.scheduler.running)
    return [pool.size - pool.num_available for pool in (*blocks.groups, blocks.slots)]


def run(llm: LLM) -> None:
    while llm.has_work:
        llm.step()


def test_d2_a_checkpoint_is_labelled_with_the_wrong_token_count() -> None:
    """Three prompts share a budget smaller than each of them; then each is sent again."""
    llm = tiny_engine()
    prompts = [OTHER[begin : begin + length] for begin, length in ((0, 50), (50, 57), (107, 61))]
    assert_answers(llm, prompts)
    for prompt in prompts:
        assert_answers(llm, [prompt])
        assert_answers(llm, [[*prompt, 7, 8]])


def test_d4_phantom_hits_after_eviction() -> None:
    llm = tiny_engine(budget=64, kv_tokens=320)
    for turn in range(3):
        for prompt in (TEXT[:190], [*TEXT[:100], 3], OTHER[turn : turn + 280]):
            assert_answers(llm, [prompt])
    assert llm.scheduler.blocks.groups[0].num_evictions


@pytest.mark.parametrize("limit", [8, 16, 32])
@pytest.mark.parametrize("decoder_first", [False, True])
def test_d6_decoding_next_to_someone_elses_long_prefill(limit: int, decoder_first: bool) -> None:
    llm = tiny_engine(budget=limit)
    asks = [(OTHER[:3], 12), (TEXT[: limit * 5], 2)]
    ids = {}
    for prompt, count in asks if decoder_first else reversed(asks):
        ids[len(prompt)] = llm.add_request(prompt, greedy(count))
        llm.step()
    run(llm)
    for prompt, count in asks:
        assert llm.result(ids[len(prompt)]).token_ids == driver.greedy(llm.model, prompt, count)


@pytest.mark.parametrize("steps", [0, 1, 4, 5, 7])
def test_g1_cancelled_at_an_awkward_moment(steps: int) -> None:
    """While waiting, in and after the first chunk, at the end of prefill, in decode; another shares the prefix."""
    llm = tiny_engine(budget=24)
    llm.generate([TEXT[:33]], greedy(1))
    cancelled, other = (llm.add_request(TEXT[:n], greedy(6)) for n in (90, 60))
    for _ in range(steps):
        llm.step()
    last = llm.cancel(cancelled)
    assert last is not None and last.finish_reason == "cancelled" and llm.cancel(cancelled) is None
    run(llm)
    assert llm.result(other).token_ids == driver.greedy(llm.model, TEXT[:60], 6)
    assert not any(held(llm))
    assert_answers(llm, [TEXT[:90]])


def test_12_padding_rows_write_real_states() -> None:
    """A step changes the running slots, the exports and the new rows of its own requests, and nothing else."""
    llm = tiny_engine(budget=40)
    llm.generate([TEXT[:60], OTHER[:30]], greedy(2))
    for prompt in (TEXT[:90], OTHER[:20], [5]):
        llm.add_request(prompt, greedy(3))
    while llm.has_work:
        before = [tensor.clone() for tensor in tensors(llm)]
        plan = llm.scheduler.schedule()
        slots = {
            slot for c in plan.chunks for slot in (c.recurrent_slot, *(export.slot for export in c.exports))
        }
        owned = {r.request_id: r.tables[0] for r in llm.scheduler.running}
        pages = {owned[c.request_id][p // 16] for c in plan.chunks for p in range(c.write_from, c.end)}
        llm.scheduler.commit(plan, llm.runner.execute(plan))
        for old, new in zip(before, tensors(llm), strict=True):
            own = slots if len(old) == llm.scheduler.blocks.slots.size else pages
            others = [place for place in range(len(old)) if place not in own]
            assert torch.equal(old[others].nan_to_num(), new[others].nan_to_num())


def tensors(llm: LLM) -> list[Tensor]:
    """Everything cached, by place."""
    cache = llm.runner.cache
    states = [tensor for layer in cache.kda.values() for tensor in (layer.matrix, layer.conv)]
    pages = [t for layer in cache.mla.values() for t in (layer.latent, layer.index.pooled, layer.index.ring)]
    return states + pages


def test_a_scored_prompt_that_is_preempted_is_not_scored_twice() -> None:
    """An older request generates, and takes its pages."""
    llm = tiny_engine(budget=8, kv_tokens=160)
    llm.add_request(OTHER[:15], greedy(40))
    llm.step()
    score = llm.score([TEXT[:140]])[0]
    assert llm.scheduler.num_preemptions
    wanted = torch.tensor(TEXT[1:140]).unsqueeze(1)
    expected = driver.logits(llm.model, TEXT[:140])[:-1].log_softmax(-1).gather(1, wanted)[:, 0]
    # float32 with other chunk borders: sums of another order, amplified over 8 layers.
    torch.testing.assert_close(torch.tensor(score), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("steps", [2, 5, 8])
def test_a_forward_that_raises_is_not_applied_twice(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has advanced the running states when it fails; the same tokens run again."""
    llm = tiny_engine(budget=24)
    prompts = [TEXT[:90], OTHER[:40]]
    ids = [llm.add_request(prompt, greedy(6)) for prompt in prompts]
    for _ in range(steps):
        llm.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "execute", failing(llm.runner.execute))
        with pytest.raises(RuntimeError):
            llm.step()
    run(llm)
    assert [llm.result(i).token_ids for i in ids] == [driver.greedy(llm.model, p, 6) for p in prompts]
    assert not any(held(llm))


def failing(execute: Callable[[StepPlan], StepResult]) -> Callable[[StepPlan], StepResult]:
    def execute_and_raise(plan: StepPlan) -> StepResult:
        execute(plan)
        raise RuntimeError("out of memory")

    return execute_and_raise
