"""A step's result belongs to the rows of its plan, and what the runner keeps of a request ends with it."""

import pytest
import torch

from engine import runner
from engine.llm import LLM
from engine.sampling import SamplingParams
from scheduler.plan import ScheduledChunk, StepPlan
from tests import driver
from tests.scripted import tiny_engine

PROMPT = [5, 9, 200, 33, 7, 81, 150]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_engine()


def chunk(request_id: int, tokens: list[int], start: int = 0, *, samples: bool = True) -> ScheduledChunk:
    """A chunk of a request that owns the pages, the slot and the companion of its number."""
    return ScheduledChunk(
        request_id=request_id, token_ids=tuple(tokens), start=start, write_from=0, admitted=start == 0,
        new_blocks=((request_id,) if start == 0 else (),) * 2, recurrent_slot=request_id, restore_from=None,
        exports=(), publishes=(), rolling=None, samples=samples, decodes=False, reason="", limit=64,
        draft_start=start, companion_slot=request_id,
    )  # fmt: skip


def test_only_sampling_chunks_get_tokens_each_from_its_last_row(llm: LLM) -> None:
    for request_id in range(3):
        llm.runner.add(request_id, SamplingParams(), seed=0)
    chunks = (chunk(2, PROMPT), chunk(0, PROMPT[:4], samples=False), chunk(1, PROMPT[:5]))
    result = llm.runner.execute(StepPlan(chunks))
    logits = driver.logits(llm.model, PROMPT)
    assert result.tokens == {2: (int(logits[6].argmax()),), 1: (int(logits[4].argmax()),)}
    result = llm.runner.execute(StepPlan((chunk(0, PROMPT[4:], start=4),), released=(1, 2)))
    assert result.tokens == {0: (int(logits[6].argmax()),)}


@pytest.mark.parametrize("rows", [1, 3, 256])
def test_scores_do_not_depend_on_how_many_logit_rows_are_held(
    llm: LLM, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LOGIT_ROWS", rows)
    expected = driver.logits(llm.model, PROMPT)[:-1].log_softmax(-1)
    expected = expected.gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1)).squeeze(1)
    # float32; a product over other rows may round its sums differently.
    torch.testing.assert_close(torch.tensor(llm.score([PROMPT])[0]), expected, atol=1e-5, rtol=0)


def test_nothing_of_an_ended_request_is_kept(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for _ in range(5):
        llm.generate([PROMPT, PROMPT[:3]], params)
    llm.generate([PROMPT], params)
    assert len(llm.runner._requests) == 1  # until the next plan names it
