"""Failures that users of other engines saw when drafts are verified: stops inside an accepted run, the context limit,
a cancelled verification, and outputs that depend on the depth."""

from collections.abc import Sequence
from functools import lru_cache

import pytest

from engine.llm import EMBEDDED_MODEL, LLM
from engine.sampling import SamplingParams
from tests import driver
from tests.scripted import script_run, tiny_engine, tiny_with_tokenizer

PROMPT, EOS = [5, 6, 7], 0
NUMBERS = list(range(10, 40))


def num_drafts_by_step(llm: LLM) -> list[int]:
    """Run the one request that is queued; how many drafts each step after its prompt verified."""
    counts = []
    while llm.has_work:
        plan = llm.scheduler.schedule()
        counts += [chunk.num_drafts for chunk in plan.chunks if chunk.decodes]
        llm.scheduler.commit(plan, llm.runner.execute(plan))
    return counts


def test_d5_one_of_three_ends_and_another_takes_its_place() -> None:
    """The middle one ends at step 5, another enters at step 6: no row is taken for a request."""
    llm = tiny_engine(budget=64)
    prompts = [driver_ids(n) for n in (25, 4, 9, 14)]
    limits = [24, 5, 24, 9]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in limits]
    ids = [llm.add_request(p, own) for p, own in zip(prompts[:3], params[:3], strict=True)]
    while llm.result(ids[1]).finish_reason is None:
        llm.step()
    assert len(llm.scheduler.running) == 2
    ids.append(llm.add_request(prompts[3], params[3]))
    while llm.has_work:
        llm.step()
    assert llm.statistics.verify_steps
    alone = [driver.greedy(llm.model, p, n) for p, n in zip(prompts, limits, strict=True)]
    assert [llm.result(i).token_ids for i in ids] == alone


def driver_ids(count: int) -> list[int]:
    return [(37 * i + 11 * count) % 251 + 3 for i in range(count)]


@pytest.mark.parametrize(
    ("limit", "expected", "reason"),
    [(5, [10, 11], "stop"), (2, [10, 11], "length"), (3, [10, 11], "stop"), (1, [10], "length")],
)
def test_e4_a_stop_inside_an_accepted_run(
    limit: int, expected: list[int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, said = tiny_engine(), [10, 11, EOS, *NUMBERS]
    assert EOS in llm.stop_ids
    script_run(monkeypatch, llm, len(PROMPT), said, said)
    deltas = list(llm.stream([PROMPT], SamplingParams(max_tokens=limit)))
    assert [token for delta in deltas for token in delta.token_ids] == expected
    assert [delta.finish_reason for delta in deltas] == [None] * len(expected) + [reason]
    assert sum(llm.statistics.accepted) == {5: 3, 3: 1}.get(limit, 0)


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_e4_a_draft_that_is_a_stop_id_has_to_be_verified(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, drafted = tiny_engine(), list(NUMBERS)
    drafted[wrong] = EOS
    script_run(monkeypatch, llm, len(PROMPT), NUMBERS, drafted)
    result = llm.generate([PROMPT], SamplingParams(max_tokens=8))[0]
    assert (result.token_ids, result.finish_reason) == (NUMBERS[:8], "length")


@pytest.mark.parametrize("limit", range(1, 10))
def test_e4_no_token_beyond_the_limit_in_runs_of_four(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_engine()
    script_run(monkeypatch, llm, len(PROMPT), NUMBERS, NUMBERS)
    result = llm.generate([PROMPT], SamplingParams(max_tokens=limit, logprobs=0))[0]
    assert (result.token_ids, result.finish_reason) == (NUMBERS[:limit], "length")
    assert result.log_probs is not None and [one.token for one in result.log_probs] == NUMBERS[:limit]


@pytest.mark.parametrize(
    ("stop", "shown", "num_tokens"), [("DEF", "abc", 6), ("bc", "a", 3), ("zD", "abcDEFxyz", 9)]
)
def test_f3_a_stop_string_across_and_inside_runs(
    stop: str,
    shown: str,
    num_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Tokens of a run behind the string are dropped; deltas come token by token and in order."""
    llm = tiny_engine(tiny_with_tokenizer(tmp_path_factory.mktemp("text") / "model"))
    ids = llm.encode("abcDEFxyz")
    script_run(monkeypatch, llm, len(PROMPT), [*ids, *NUMBERS], [*ids, *NUMBERS])
    deltas = list(llm.stream([PROMPT], SamplingParams(max_tokens=9, stop=(stop,), ignore_eos=True)))
    assert "".join(delta.text for delta in deltas) == shown
    assert [token for delta in deltas for token in delta.token_ids] == ids[:num_tokens]
    assert llm.statistics.mean_accepted_length is not None and llm.statistics.mean_accepted_length > 2


def test_f2_a_character_of_several_tokens_in_one_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    llm = tiny_engine(tiny_with_tokenizer(tmp_path_factory.mktemp("text") / "model"))
    text = "a\N{GRINNING FACE}\N{LATIN SMALL LETTER E WITH ACUTE}b"
    ids = llm.encode(text)
    script_run(monkeypatch, llm, len(PROMPT), [*ids, *NUMBERS], [*ids, *NUMBERS])
    deltas = list(llm.stream([PROMPT], SamplingParams(max_tokens=len(ids), ignore_eos=True)))
    assert "".join(delta.text for delta in deltas) == text and len(ids) == 8
    assert not any("\ufffd" in delta.text for delta in deltas)


@pytest.mark.parametrize("limit", [61, 64])
def test_e8_drafts_shrink_at_the_context_limit(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool ends with the context, so that an index beyond it would raise; every draft is refused, or none."""
    for length in range(57, limit):
        for drafted, accepted in ((NUMBERS[1:], False), (NUMBERS, True)):
            llm, count = tiny_engine(budget=64, kv_tokens=64), limit - length
            monkeypatch.setattr(llm.scheduler, "context_limit", limit)
            script_run(monkeypatch, llm, length, NUMBERS, drafted)
            request_id = llm.add_request([9] * length, SamplingParams())
            request = llm._outputs[request_id].request
            shrinking = [min(3, count - 2 - step) for step in range(count - 1)]
            assert num_drafts_by_step(llm) == (shrinking if not accepted else in_runs(count - 1))
            assert request.output == NUMBERS[:count]


def in_runs(left: int) -> list[int]:
    """Drafts of every step until `left` tokens are there, if all are accepted."""
    counts = []
    while left:
        counts.append(min(3, left - 1))
        left -= counts[-1] + 1
    return counts


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_g1_cancelled_during_a_verification(steps: int) -> None:
    llm = tiny_engine(budget=64)
    cancelled, other = (llm.add_request(driver_ids(n), greedy(12)) for n in (40, 20))
    for _ in range(steps):
        llm.step()
    plan = llm.scheduler.schedule()
    assert all(chunk.num_drafts for chunk in plan.chunks)
    result = llm.runner.execute(plan)
    kept = list(llm.result(cancelled).token_ids)
    llm.cancel(cancelled)
    for advance in llm.scheduler.commit(plan, result):
        assert advance.request.request_id == other
        list(llm._deliver(advance, result))
    while llm.has_work:
        llm.step()
    assert llm.result(cancelled).token_ids == kept
    assert llm.result(other).token_ids == driver.greedy(llm.model, driver_ids(20), 12)
    blocks = llm.scheduler.blocks
    blocks.check(())
    assert all(
        pool.num_available == pool.size for pool in (*blocks.groups, blocks.slots, blocks.companions) if pool
    )
    assert llm.generate([driver_ids(40)], greedy(12))[0].token_ids == driver.greedy(
        llm.model, driver_ids(40), 12
    )


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch() -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, top_p=0.9, seed=3)
    prompts = [driver_ids(n) for n in (30, 7, 19)]
    batch = [result.token_ids for result in tiny_engine(budget=64).generate(prompts, params)]
    alone = tiny_engine(budget=64)
    assert batch == [alone.generate([prompt], params)[0].token_ids for prompt in prompts]
    assert alone.statistics.verify_steps


@lru_cache
def without_drafts() -> Sequence[int]:
    return embedded(0).generate(["Once upon a time"], greedy(16))[0].token_ids


def embedded(draft_tokens: int) -> LLM:
    return LLM(
        EMBEDDED_MODEL, dtype="float32", kv_tokens=256, max_running_requests=1, draft_tokens=draft_tokens
    )


@pytest.mark.parametrize("draft_tokens", range(1, 8))
def test_every_depth_says_the_same(draft_tokens: int) -> None:
    llm = embedded(draft_tokens)
    assert llm.generate(["Once upon a time"], greedy(16))[0].token_ids == without_drafts()
    assert llm.statistics.verify_steps
