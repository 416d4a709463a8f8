"""What a request gets does not depend on batch mates, chunks, slot or history; its end frees everything."""

import json
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine.llm import LLM
from engine.output import Delta, Result
from engine.sampling import SamplingParams
from scheduler.scheduler import RequestRefused
from tests import driver
from tests.scripted import script_tokens, tiny_engine, tiny_with_tokenizer

# Unequal lengths, two of them over the budget of 16, one past the 16 tokens that the indexer selects.
PROMPTS = [[5, 9, 200, 33, 7], [(7 * i) % 251 for i in range(21)], [(11 * i + 3) % 256 for i in range(40)]]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, top_p=0.95, seed=7)


def assert_idle(llm: LLM) -> None:
    blocks = llm.scheduler.blocks
    assert not llm.has_work
    blocks.check(())
    assert (blocks.groups[0].num_available, blocks.slots.num_available) == (
        blocks.num_blocks,
        blocks.slots.size,
    )


@pytest.fixture(scope="module")
def shared() -> LLM:
    return tiny_engine()


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The module's engine; a test that leaves anything behind in it fails."""
    yield shared
    assert_idle(shared)


@pytest.fixture(scope="module")
def text_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """With a byte tokenizer, and stop ids from three sources."""
    directory = tiny_with_tokenizer(tmp_path_factory.mktemp("text") / "model")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [154827, 154829]}))
    return tiny_engine(directory, draft_tokens=0)  # some of the ids have no embedding


def tokens(results: list[Result]) -> list[list[int]]:
    assert all(result.finish_reason == "length" for result in results)
    return [result.token_ids for result in results]


def run(llm: LLM) -> list[Delta]:
    deltas = []
    while llm.has_work:
        deltas += llm.step()
    return deltas


class TestBatch:
    """Field bugs D1, D5 and the last rows of F1."""

    @pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
    def test_a_batch_gives_what_each_request_gets_alone(self, llm: LLM, params: SamplingParams) -> None:
        batch = tokens(llm.generate(PROMPTS, params))
        alone = tiny_engine(budget=64)
        assert batch == [tokens(alone.generate([prompt], params))[0] for prompt in PROMPTS]
        assert len({tuple(output) for output in batch}) == 3

    def test_the_engine_seed_gives_each_request_a_stream_of_its_own(self) -> None:
        params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0)
        first, again, other = (
            tokens(tiny_engine(seed=s).generate([PROMPTS[0]] * 2, params)) for s in (5, 5, 6)
        )
        assert first == again
        assert first != other and first[0] != first[1]

    def test_the_stream_of_the_last_seed_is_followed_by_that_of_the_first(self) -> None:
        params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0)
        last, first = (tiny_engine(seed=s).generate([PROMPTS[0]] * 2, params) for s in (2**32 - 1, 0))
        assert last[1].token_ids == first[0].token_ids

    @pytest.mark.parametrize("length", [1, 16, 32, 33])
    def test_a_prompt_sent_twice_is_answered_twice(self, llm: LLM, length: int) -> None:
        prompt = PROMPTS[2][:length]
        assert llm.generate([prompt], GREEDY)[0].token_ids == llm.generate([prompt], GREEDY)[0].token_ids

    def test_a_one_token_prompt_does_not_continue_the_text_of_the_slot_before(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        used, fresh = tiny_engine(slots=1), tiny_engine(slots=1)
        used.generate([PROMPTS[1]], GREEDY)
        rows: list[Tensor] = []
        for engine in (used, fresh):
            monkeypatch.setattr(engine.model, "logits", recording(engine.model.logits, rows))
            engine.generate([[77]], SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(rows) == 4
        assert torch.equal(torch.cat(rows[:2]), torch.cat(rows[2:]))

    def test_a_request_that_takes_over_a_slot_in_the_middle(self, llm: LLM) -> None:
        """The middle one of three ends, another enters in the step after; each equals its solo run (bug D5)."""
        prompts = [PROMPTS[0], [8, 8, 4], [101, 3, 50, 2], [60, 61]]
        limits = [24, 5, 24, 8]
        alone = [llm.generate([p], limited(n))[0].token_ids for p, n in zip(prompts, limits, strict=True)]
        ids = [llm.add_request(p, limited(n)) for p, n in zip(prompts[:3], limits[:3], strict=True)]
        ended = [delta for delta in llm.step() if delta.finish_reason]
        slots = [request.recurrent_slot for request in llm.scheduler.running]
        while not ended:
            ended = [delta for delta in llm.step() if delta.finish_reason]
        assert [delta.request_id for delta in ended] == [ids[1]]
        ids.append(llm.add_request(prompts[3], limited(limits[3])))
        llm.step()
        newest = llm.scheduler.running[-1]
        assert (newest.request_id, newest.recurrent_slot) == (ids[3], slots[1])
        run(llm)
        assert [llm.result(i).token_ids for i in ids] == alone

    def test_a_row_without_a_choice_fails_alone(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = tokens(llm.generate(PROMPTS, GREEDY))
        original, calls = llm.model.logits, 0

        def broken(hidden: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            logits = original(hidden).clone()
            if calls == 8:
                assert len(logits) == 3
                logits[1] = torch.nan
            return logits

        monkeypatch.setattr(llm.model, "logits", broken)
        results = llm.generate(PROMPTS, GREEDY)
        assert [result.finish_reason for result in results] == ["length", "error", "length"]
        assert results[1].message is not None and "nan" in results[1].message
        kept = results[1].token_ids
        assert kept and kept == expected[1][: len(kept)]
        assert [results[0].token_ids, results[2].token_ids] == [expected[0], expected[2]]

    def test_rows_without_a_choice_may_be_all_of_a_step(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = llm.model.logits
        monkeypatch.setattr(llm.model, "logits", lambda hidden: original(hidden) * torch.nan)
        results = llm.generate(PROMPTS, GREEDY)
        assert [result.finish_reason for result in results] == ["error"] * len(PROMPTS)


def limited(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def recording(logits: Callable[[Tensor], Tensor], rows: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def recorded(hidden: Tensor) -> Tensor:
        rows.append(logits(hidden))
        return rows[-1]

    return recorded


class TestScore:
    """Teacher forcing: log-probabilities of known tokens."""

    @pytest.mark.parametrize("budget", [1, 7, 64])
    def test_scores_are_the_models_log_probabilities(self, llm: LLM, budget: int) -> None:
        scores = tiny_engine(budget=budget).score([*PROMPTS, [9]])
        for prompt, score in zip(PROMPTS, scores, strict=False):
            wanted = torch.tensor(prompt[1:]).unsqueeze(1)
            expected = driver.logits(llm.model, prompt)[:-1].log_softmax(-1).gather(1, wanted)[:, 0]
            # float32 with other chunk borders: sums of another order, amplified over 8 layers.
            torch.testing.assert_close(torch.tensor(score), expected, atol=1e-3, rtol=0)
        assert scores[3] == []

    def test_a_prompt_as_long_as_the_context_can_be_scored(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(llm.scheduler, "context_limit", 40)
        assert len(llm.score([PROMPTS[2]])[0]) == 39


@pytest.mark.parametrize("limit", [61, 64])
def test_generation_ends_exactly_at_the_context_limit(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field bug E8: the pool ends with the context, and an index beyond it would raise."""
    llm = tiny_engine(budget=64, kv_tokens=64)
    monkeypatch.setattr(llm.scheduler, "context_limit", limit)
    for length in range(57, limit):
        result = llm.generate([[(5 * i) % 256 for i in range(length)]], SamplingParams(ignore_eos=True))[0]
        assert (result.finish_reason, length + len(result.token_ids)) == ("length", limit)
    with pytest.raises(RequestRefused, match=f"{limit} tokens, the context holds {limit}"):
        llm.generate([[5] * limit], SamplingParams())
    assert_idle(llm)


class TestStops:
    """Field bug F4, and stop strings through the engine."""

    def test_stop_ids_are_the_union_of_all_files(self, text_llm: LLM) -> None:
        assert text_llm.stop_ids == (0, 1, 2, 154820, 154827, 154829)

    @pytest.mark.parametrize("stop_id", [0, 2, 154820, 154827, 154829])
    def test_each_of_them_ends_the_turn_unprinted(
        self, text_llm: LLM, stop_id: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script_tokens(monkeypatch, [70, 71, stop_id])
        result = text_llm.generate([[5, 6]], SamplingParams(max_tokens=8))[0]
        assert (result.token_ids, result.finish_reason) == ([70, 71], "stop")
        assert text_llm.tokenizer is not None and result.text == text_llm.tokenizer.decode([70, 71])

    @pytest.mark.parametrize("stop_id", [0, 154829])
    def test_all_of_them_can_be_ignored(
        self, text_llm: LLM, stop_id: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script_tokens(monkeypatch, [70, 71, stop_id])
        result = text_llm.generate([[5, 6]], limited(3))[0]
        assert (result.token_ids, result.finish_reason) == ([70, 71, stop_id], "length")

    @pytest.mark.parametrize("max_tokens", [20, 6], ids=["room left", "completed by the last token"])
    def test_text_ends_before_a_stop_string_and_ids_with_it(
        self, text_llm: LLM, max_tokens: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ids = text_llm.encode("abcDEFxyz")
        script_tokens(monkeypatch, ids)
        params = SamplingParams(max_tokens=max_tokens, stop=("XX", "DEF"), ignore_eos=True)
        result = text_llm.generate(["hello"], params)[0]
        assert (result.text, result.token_ids, result.finish_reason) == ("abc", ids[:6], "stop")
        assert_idle(text_llm)

    def test_stop_strings_without_a_tokenizer_are_refused(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match=r"stop strings need a tokenizer.*no tokenizer\.json"):
            llm.generate([[5]], SamplingParams(stop=("x",)))


class TestStream:
    """The stream says what generate says, and can be left."""

    def test_joined_deltas_are_the_text(self, text_llm: LLM) -> None:
        expected = text_llm.generate(PROMPTS, GREEDY)
        deltas = list(text_llm.stream(PROMPTS, GREEDY))
        first = min(delta.request_id for delta in deltas)
        for index, result in enumerate(expected):
            mine = [delta for delta in deltas if delta.request_id == first + index]
            assert "".join(delta.text for delta in mine) == result.text
            assert [token for delta in mine for token in delta.token_ids] == result.token_ids
            assert [delta.finish_reason for delta in mine] == [None] * 12 + ["length"]

    def test_leaving_early_cancels_what_runs_and_what_waits(self, llm: LLM) -> None:
        stream = llm.stream([*PROMPTS, *PROMPTS], GREEDY)
        next(stream)
        assert llm.scheduler.running and llm.scheduler.waiting
        stream.close()  # type: ignore[attr-defined]


class TestCancel:
    """Field bug G1 through the engine."""

    @pytest.mark.parametrize("steps", [0, 1, 3, 5], ids=["waiting", "chunk 1 of 3", "last chunk", "decode"])
    def test_one_last_delta_and_no_token_after_it(self, llm: LLM, steps: int) -> None:
        expected = llm.generate([PROMPTS[2], PROMPTS[0]], GREEDY)
        llm.scheduler.blocks.reset_cache(())
        request_id, mate = llm.add_request(PROMPTS[2], GREEDY), llm.add_request(PROMPTS[0], GREEDY)
        for _ in range(steps):
            llm.step()
        kept = list(llm.result(request_id).token_ids)
        last = llm.cancel(request_id)
        assert last == Delta(request_id, finish_reason="cancelled")
        assert llm.cancel(request_id) is None
        assert {delta.request_id for delta in run(llm)} == {mate}
        result = llm.result(request_id)
        assert (result.finish_reason, result.token_ids) == ("cancelled", kept)
        assert kept == expected[0].token_ids[: len(kept)] and len(kept) == max(steps - 2, 0)
        assert llm.result(mate).token_ids == expected[1].token_ids

    def test_after_the_end_nothing_changes(self, llm: LLM) -> None:
        request_id = llm.add_request(PROMPTS[0], GREEDY)
        run(llm)
        assert llm.cancel(request_id) is None
        assert llm.result(request_id).finish_reason == "length"
        llm.forget([request_id])


class TestRefusals:
    """What can't be served is refused before any work, and leaves nothing behind."""

    @pytest.mark.parametrize(
        ("prompt", "words"),
        [
            ([], ["empty", "at least one token"]),
            ([5, 256], ["token id 256", "0 to 255"]),
            ([-1], ["token id -1", "0 to 255"]),
            ([5] * 4096, ["4096 tokens", "holds 4096", "shorten"]),
            ("text", ["no tokenizer.json", "token ids"]),
        ],
        ids=["empty", "id too large", "negative id", "too long", "text"],
    )
    def test_a_refused_prompt_takes_its_batch_mates_with_it(
        self, llm: LLM, prompt: list[int] | str, words: list[str]
    ) -> None:
        for call in (llm.score, lambda prompts: list(llm.stream(prompts)), llm.generate):
            with pytest.raises(ValueError) as refusal:
                call([PROMPTS[0], prompt])
            assert_idle(llm)
        assert all(word in str(refusal.value) for word in words)

    def test_text_with_an_id_outside_the_vocabulary_is_refused_like_ids(self, text_llm: LLM) -> None:
        """The tiny model has 256 ids, its tokenizer also `<think>`."""
        for prompt in ("a<think>", [97, 154841]):
            with pytest.raises(
                ValueError, match=r"token id 154841 is outside the vocabulary; expected 0 to 255"
            ):
                text_llm.generate([prompt], GREEDY)
        assert_idle(text_llm)

    def test_a_step_without_requests_does_nothing(self, llm: LLM) -> None:
        assert llm.step() == []


def test_results_carry_times_and_counts(llm: LLM) -> None:
    long, short = llm.generate(PROMPTS[:1], GREEDY)[0], llm.generate(PROMPTS[:1], limited(1))[0]
    assert (long.prompt_tokens, long.cached_tokens, long.text, long.message) == (5, 0, None, None)
    assert long.ttft_s is not None and long.ttft_s > 0
    assert long.decode_tokens_per_s is not None and long.decode_tokens_per_s > 0
    assert short.ttft_s is not None and short.decode_tokens_per_s is None


class TestWrongPrompts:
    def test_a_lone_string_is_no_list_of_prompts(self) -> None:
        with pytest.raises(ValueError, match="expected a list of prompts"):
            tiny_engine().generate("Hello")

    @pytest.mark.parametrize("token", [1.5, True, None, "1"])
    def test_ids_are_integers(self, token: object) -> None:
        with pytest.raises(ValueError, match="expected text, or integer token ids"):
            tiny_engine().generate([[1, token]])  # type: ignore[list-item]
