"""A result is what its deltas said, joined; times run from the request to the first and last token."""

from pathlib import Path

import pytest

from engine import output
from engine.output import Delta, Output
from engine.sampling import SamplingParams
from engine.text import Tokenizer
from scheduler.plan import TokenLogProbs
from scheduler.request import Request
from tests.glm_tokenizer import write_tokenizer


def output_of(
    tokenizer: Tokenizer | None = None,
    stop: tuple[str, ...] = (),
    thinking: bool = False,
) -> Output:
    return Output(Request(5, [1, 2, 3], max_tokens=99), tokenizer, SamplingParams(stop=stop), thinking)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    return tokenizer


def deliver(out: Output, tokens: list[int]) -> tuple[list[Delta], bool]:
    """Push until a stop string is complete, then finish; the deltas, and whether one was."""
    deltas = []
    for token in tokens:
        delta, stopped = out.push(token)
        deltas.append(delta)
        if stopped:
            return [*deltas, out.finish("stop")], True
    return [*deltas, out.finish("length")], False


@pytest.mark.parametrize(
    ("text", "stop", "thinking", "reasoning", "answer"),
    [
        ("Grüße 🦉", (), False, None, "Grüße 🦉"),
        ("abcDEFxyz", ("DEF",), False, None, "abc"),
        ("abcDEX", ("DEF",), False, None, "abcDEX"),
        ("abcDE", ("DEF",), False, None, "abcDE"),
        ("hm</think>yes", (), True, "hm", "yes"),
        ("hm</thi", (), True, "hm</thi", ""),
        ("hm</think>yesDEF", ("DEF",), True, "hm", "yes"),
        ("hmDEF</think>yes", ("DEF",), True, "hm", ""),
    ],
)
def test_joined_deltas_are_the_result(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], thinking: bool, reasoning: str | None, answer: str
) -> None:
    out = output_of(tokenizer, stop, thinking)
    deltas, _ = deliver(out, tokenizer.encode(text))
    result = out.result
    assert (result.text, result.reasoning, result.prompt_tokens) == (answer, reasoning, 3)
    assert "".join(delta.text for delta in deltas) == answer
    assert "".join(delta.reasoning for delta in deltas) == (reasoning or "")
    assert [token for delta in deltas for token in delta.token_ids] == result.token_ids
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [result.finish_reason]
    assert {delta.request_id for delta in deltas} == {5}


def test_token_ids_reach_to_the_token_that_completed_the_stop(tokenizer: Tokenizer) -> None:
    out, tokens = output_of(tokenizer, ("DEF",)), tokenizer.encode("abcDEFxyz")
    assert deliver(out, tokens)[1]
    assert (out.result.token_ids, out.result.text) == (tokens[:6], "abc")


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    out = output_of()
    deltas, _ = deliver(out, [7, 8])
    assert (out.result.token_ids, out.result.text, out.result.reasoning) == ([7, 8], None, None)
    assert [delta.token_ids for delta in deltas] == [(7,), (8,), ()]


def test_times_count_from_the_request_and_from_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 12.5, 14.0])
    monkeypatch.setattr(output.time, "perf_counter", lambda: next(clock))
    out = output_of()
    assert out.result.ttft_s is None
    out.push(7)
    assert (out.result.ttft_s, out.result.decode_tokens_per_s) == (2.0, None)
    out.push(8)
    out.push(9)
    assert (out.result.ttft_s, out.result.decode_tokens_per_s) == (2.0, 1.0)  # 2 tokens in 2 seconds


def test_a_failure_keeps_what_was_delivered_and_its_message() -> None:
    out = output_of()
    out.push(7)
    assert out.finish("error", "broken").finish_reason == "error"
    assert (out.result.token_ids, out.result.message) == ([7], "broken")


def test_log_probs_are_one_per_delivered_token_where_asked_for(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=("DEF",), logprobs=0)
    out = Output(Request(5, [1], max_tokens=99), tokenizer, params, thinking=False)
    assert out.result.log_probs == []
    entries = [TokenLogProbs(token, -float(i), ()) for i, token in enumerate(tokenizer.encode("abcDEF"))]
    stops = [out.push(entry.token, entry)[1] for entry in entries]
    assert stops.index(True) == len(entries) - 1 and out.result.log_probs == entries
    with pytest.raises(AssertionError, match="without its log-probabilities"):
        out.push(7)


def test_log_probs_nobody_asked_for_are_not_kept() -> None:
    out = output_of()
    out.push(7, TokenLogProbs(7, -1.0, ()))
    assert out.result.log_probs is None
