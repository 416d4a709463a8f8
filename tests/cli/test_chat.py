"""A conversation shows what it reuses: `chat` after each turn on stderr, `generate --turns` in each result."""

import io
import json
import re
import sys
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.llm import EMBEDDED_MODEL, LLM
from engine.text import Tokenizer
from model.glm5_next import Glm5Next
from tests.cli.test_bad_input import assert_refused
from tests.cli.test_generate import interrupt_after
from tests.command import Outcome, run_cli
from tests.scripted import TINY, script_tokens

Capture = pytest.CaptureFixture[str]
FIRST = "Emma Woodhouse, handsome, clever, and rich, with a comfortable home"
SECOND = "seemed to unite some of the best blessings of existence"
LINE = re.compile(
    r"\[prompt (\d+), cached (\d+), recomputed (\d+) tokens; first token [\d.]+ s, (?:[\d.]+ tokens/s|-)\]"
)
SHORT = ("--max-tokens", 8, "--temperature", 0, "--ignore-eos", "--block-size", 16)


def chat(capsys: Capture, monkeypatch: pytest.MonkeyPatch, typed: str | bytes, *arguments: object) -> Outcome:
    content = typed if isinstance(typed, bytes) else typed.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    return run_cli(capsys, "chat", *arguments)


def counts(outcome: Outcome) -> list[tuple[int, int, int]]:
    """(prompt, cached, recomputed) after every turn."""
    return [(int(p), int(c), int(r)) for p, c, r in LINE.findall(outcome.err)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.load(EMBEDDED_MODEL)
    assert found is not None
    return found


@pytest.mark.parametrize("form", [(), ("--plain",)], ids=["template", "plain"])
def test_a_turn_reuses_the_turns_before_it(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, form: tuple[str, ...]
) -> None:
    outcome = chat(capsys, monkeypatch, f"{FIRST}\n{SECOND}\n", *form, *SHORT)
    assert outcome.code == 0
    answers = outcome.out.splitlines()
    if form:
        texts = [FIRST, FIRST + answers[0] + SECOND]
    else:
        user, model = "<|user|>", "<|assistant|>"
        texts = [f"[gMASK]<sop>{user}{FIRST}{model}"]
        texts.append(f"{texts[0]}{answers[0]}{user}{SECOND}{model}")
    (first, none, all_of_it), (second, cached, recomputed) = counts(outcome)
    assert [first, second] == [len(tokenizer.encode(text)) for text in texts]
    assert (none, all_of_it) == (0, first)
    assert cached >= (first - 1) // 16 * 16 > 0 and recomputed == second - cached


def test_without_a_cache_nothing_is_reused(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = chat(capsys, monkeypatch, f"{FIRST}\n{SECOND}\n", "--no-prefix-cache", *SHORT)
    assert [cached for _, cached, _ in counts(outcome)] == [0, 0]


@pytest.mark.parametrize("rest", ["", "\n", "\nnever read\n", "\r\n"], ids=["EOF", "empty", "after", "CRLF"])
def test_the_end_of_input_and_an_empty_line_end_the_session(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:
    outcome = chat(capsys, monkeypatch, f"Emma\n{rest}", *SHORT)
    assert outcome.code == 0 and len(counts(outcome)) == len(outcome.out.splitlines()) == 1


def test_no_input_is_no_turn(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat(capsys, monkeypatch, "", *SHORT).out == ""


def test_an_interrupt_keeps_what_was_said(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "step", interrupt_after(3))
    outcome = chat(capsys, monkeypatch, "Emma\nnever read\n", *SHORT)
    assert outcome.code == 130 and "Traceback" not in outcome.err
    assert outcome.out.endswith("\n") and outcome.out.strip() and len(counts(outcome)) == 1


def test_a_turn_beyond_the_context_is_refused_and_forgotten(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """The second turn does not fit into the cache; the third stands as if it had not been said."""
    full = ("--kv-tokens", 64)
    outcome = chat(capsys, monkeypatch, f"Emma\n{FIRST * 4}\nAnne\n", "--plain", *SHORT, *full)
    answers = outcome.out.splitlines()
    assert outcome.code == 1 and "error: " in outcome.err and "the cache has 4" in outcome.err
    assert counts(outcome)[1][0] == len(tokenizer.encode(f"Emma{answers[0]}Anne"))


def test_a_failed_turn_is_reported_and_forgotten(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    original, left = Glm5Next.logits, [1]

    def broken_once(self: Glm5Next, hidden: Tensor) -> Tensor:
        return original(self, hidden) * (torch.nan if left and left.pop() else 1.0)

    monkeypatch.setattr(Glm5Next, "logits", broken_once)
    outcome = chat(capsys, monkeypatch, "Emma\nAnne\n", "--plain", *SHORT)
    assert outcome.code == 1 and "error: the largest logit is nan" in outcome.err
    assert [prompt for prompt, _, _ in counts(outcome)] == [len(tokenizer.encode("Anne"))]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plain", "--system", "x"], ["--system acts in the template"]),
        (["--model", TINY], ["tokenizer.json"]),
        (["--block-size", "24"], ["block size is 24", "multiple of 16"]),
    ],
    ids=["system", "no tokenizer", "block"],
)
def test_wrong_use(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: list[object], words: list[str]
) -> None:
    assert_refused(chat(capsys, monkeypatch, "Emma\n", *arguments), words)


def test_input_that_is_no_utf8(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(chat(capsys, monkeypatch, b"Gr\xfc\xdfe\n", *SHORT), ["standard input is not UTF-8"])


def test_a_model_without_a_template_takes_plain_text(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    copytree(EMBEDDED_MODEL, directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    refused = chat(capsys, monkeypatch, "Emma\n", "--model", directory, *SHORT)
    assert refused.code == 2 and "chat_template" in refused.err and "plain" in refused.err
    assert chat(capsys, monkeypatch, "Emma\n", "--model", directory, "--plain", *SHORT).code == 0


class TestTurns:
    """`generate --turns`: the same without a person."""

    @staticmethod
    def file(directory: Path, *turns: str) -> Path:
        path = directory / "turns.jsonl"
        lines = [json.dumps({"user": turn}, ensure_ascii=False) + "\n" for turn in turns]
        path.write_text("".join(lines), encoding="utf-8")
        return path

    @staticmethod
    def results(capsys: Capture, path: Path, *arguments: object) -> list[dict[str, Any]]:
        outcome = run_cli(capsys, "generate", "--turns", path, "--json", *arguments)
        assert outcome.code == 0, outcome.err
        found: list[dict[str, Any]] = outcome.document["results"]
        return found

    @pytest.mark.parametrize("form", [(), ("--chat",)], ids=["plain", "template"])
    def test_one_result_per_turn_and_each_answer_in_the_history(
        self, capsys: Capture, tmp_path: Path, tokenizer: Tokenizer, form: tuple[str, ...]
    ) -> None:
        first, second = self.results(capsys, self.file(tmp_path, FIRST, SECOND), *form, *SHORT)
        history = FIRST + first["text"] + SECOND
        if form:
            history = f"[gMASK]<sop><|user|>{FIRST}<|assistant|>{first['text']}<|user|>{SECOND}<|assistant|>"
        assert second["prompt_tokens"] == len(tokenizer.encode(history))
        assert first["cached_tokens"] == 0
        assert second["cached_tokens"] >= (first["prompt_tokens"] - 1) // 16 * 16 > 0

    @pytest.mark.parametrize("policy", ["generic", "seed", "vllm-0.33", "ours", "none"])
    def test_answers_do_not_depend_on_the_policy(self, capsys: Capture, tmp_path: Path, policy: str) -> None:
        path, float32 = self.file(tmp_path, FIRST, SECOND), ("--dtype", "float32", *SHORT)
        expected = self.results(capsys, path, "--no-prefix-cache", *float32)
        # Filed by its token, a draft row costs no policy the one block that it could hit.
        found = self.results(capsys, path, "--policy", policy, "--draft-filing", "token", *float32)
        assert [r["token_ids"] for r in found] == [r["token_ids"] for r in expected]
        assert [r["cached_tokens"] > 0 for r in found] == [False, policy != "none"]

    def test_separators_inside_a_turn_do_not_end_it(
        self, capsys: Capture, tmp_path: Path, tokenizer: Tokenizer
    ) -> None:
        turn = "Emma\u2028said\u0085so"
        (result,) = self.results(capsys, self.file(tmp_path, turn), *SHORT)
        assert result["prompt_tokens"] == len(tokenizer.encode(turn))

    def test_reasoning_goes_back_to_the_template(
        self, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
    ) -> None:
        from tests.glm_tokenizer import TEMPLATE

        copytree(EMBEDDED_MODEL, tmp_path / "model")
        copyfile(TEMPLATE, tmp_path / "model" / "chat_template.jinja")
        script_tokens(monkeypatch, [*tokenizer.encode("abc</think>def"), 0] * 2)
        found = self.results(
            capsys,
            self.file(tmp_path, "Who?", "Why?"),
            "--chat",
            "--model",
            tmp_path / "model",
            "--draft-tokens",
            0,
        )
        assert [(r["reasoning"], r["text"]) for r in found] == [("abc", "def")] * 2

    @pytest.mark.parametrize(
        ("content", "number"),
        [
            ("", 1),
            ('{"user": "x"}\n\n', 2),
            ('{"user": ""}', 1),
            ('["x"]', 1),
            ('{"user": "x"}\n{"user": 5}', 2),
        ],
    )
    def test_a_line_that_is_no_turn(self, capsys: Capture, tmp_path: Path, content: str, number: int) -> None:
        (tmp_path / "turns.jsonl").write_text(content)
        outcome = run_cli(capsys, "generate", "--turns", tmp_path / "turns.jsonl")
        assert_refused(outcome, [f"line {number} is no turn", '{"user": "text"}'])

    def test_random_weights_have_no_conversation(self, capsys: Capture, tmp_path: Path) -> None:
        outcome = run_cli(capsys, "generate", "--random-weights", "--turns", self.file(tmp_path, "x"))
        assert_refused(outcome, ["--random-weights takes --prompt-ids only"])


@pytest.mark.parametrize(
    "options",
    [
        "--policy generic --exports 0 --draft-filing drop --kv-tokens 256 --max-batched-tokens 20",
        "--policy seed --exports 1 --draft-filing off --state-dtype bfloat16",
        "--policy vllm-0.33 --exports many --draft-filing key --checkpoint-slots 0",
        "--policy ours --retain resend,extend --chunk-ends floored --draft-filing tag --mixed-prefill-tokens 0",
        "--policy ours --retain none --chunk-ends free --draft-filing token",
        "--policy none",
        "--no-prefix-cache",
    ],
)
def test_generate_takes_every_policy_option(capsys: Capture, options: str) -> None:
    outcome = run_cli(capsys, "generate", FIRST, *SHORT, "--json", *options.split())
    assert outcome.code == 0, outcome.err
    assert len(outcome.document["results"][0]["token_ids"]) == 8
