"""`generate` takes prompts from everywhere, prints answers alone on stdout, and its JSON says all of it."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.commands.generate import as_json
from engine.llm import EMBEDDED_MODEL, LLM
from engine.output import Delta, Result
from engine.sampling import SamplingParams
from engine.text import Tokenizer
from model.glm5_next import Glm5Next
from scheduler.plan import TokenLogProbs
from tests.command import Outcome, run_cli
from tests.glm_tokenizer import TEMPLATE
from tests.scripted import TINY, script_tokens

Capture = pytest.CaptureFixture[str]
GREEDY = ("--temperature", 0, "--max-tokens", 6)
KEYS = {
    "prompt_tokens", "cached_tokens", "token_ids", "text", "finish_reason", "ttft_s", "decode_tokens_per_s",
}  # fmt: skip


def generate(capsys: Capture, *arguments: object) -> Outcome:
    return run_cli(capsys, "generate", *arguments)


def results(outcome: Outcome) -> list[dict[str, Any]]:
    assert outcome.code == 0, outcome.err
    found: list[dict[str, Any]] = outcome.document["results"]
    return found


def tokenizer_of(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model under a template whose prompts end inside `<think>`."""
    directory = tmp_path_factory.mktemp("thinking") / "model"
    copytree(EMBEDDED_MODEL, directory)
    copyfile(TEMPLATE, directory / "chat_template.jinja")
    return directory


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], SamplingParams]]:
    """Prompt ids and parameters of every request that the engine is given."""
    seen: list[tuple[list[int], SamplingParams]] = []
    original = LLM.add_request

    def add_request(self: LLM, prompt: Any, params: SamplingParams, **options: Any) -> int:
        seen.append((self.encode(prompt), params))
        return original(self, prompt, params, **options)

    monkeypatch.setattr(LLM, "add_request", add_request)
    return seen


class TestPrompts:
    """Where prompts come from, and in which order they are answered."""

    def test_several_are_printed_one_after_the_other(self, capsys: Capture, tmp_path: Path) -> None:
        (tmp_path / "prompt.txt").write_text("Grüße from Bath", encoding="utf-8")
        prompts = ("Mr. Darcy, who was at the window, said", "Emma", "--prompt-file", tmp_path / "prompt.txt")
        documents = results(generate(capsys, *prompts, *GREEDY, "--json"))
        assert [r["prompt_tokens"] for r in documents] == [
            len(tokenizer_of(EMBEDDED_MODEL).encode(text))
            for text in (prompts[0], prompts[1], "Grüße from Bath")
        ]
        text = generate(capsys, *prompts, *GREEDY)
        assert text.out == "".join(r["text"] + "\n" for r in documents)
        assert text.err.count("new 6, first token") == 3

    def test_stdin_when_there_is_no_other(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = generate(capsys, "Grüße", *GREEDY).out
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße".encode())))
        assert generate(capsys, *GREEDY).out == expected

    def test_token_ids_need_no_tokenizer_and_give_no_text(self, capsys: Capture) -> None:
        ids = ("--model", TINY, "--prompt-ids", "5,6, 7", "--prompt-ids", "8", *GREEDY)
        documents = results(generate(capsys, *ids, "--json"))
        assert [(r["prompt_tokens"], r["text"]) for r in documents] == [(3, None), (1, None)]
        printed = [" ".join(map(str, r["token_ids"])) + " \n" for r in documents]
        assert generate(capsys, *ids).out == "".join(printed)

    def test_the_preamble_stands_once_in_chats_and_nowhere_else(
        self,
        capsys: Capture,
        thinking_model: Path,
        tmp_path: Path,
        asked: list[tuple[list[int], SamplingParams]],
    ) -> None:
        """Field bug F7, on every path a prompt can take."""
        (tmp_path / "prompt.txt").write_text("hello")
        short = ("--model", thinking_model, "--max-tokens", 1, "--json")
        generate(capsys, "hello", "--chat", *short)
        generate(capsys, "--prompt-file", tmp_path / "prompt.txt", "--chat", *short)
        generate(capsys, "hello", "--prompt-file", tmp_path / "prompt.txt", "--prompt-ids", "70", *short)
        tokenizer = tokenizer_of(thinking_model)
        preamble = [tokenizer.token_id("[gMASK]"), tokenizer.token_id("<sop>")]
        chats, raw = [ids for ids, _ in asked[:2]], [ids for ids, _ in asked[2:]]
        assert all(ids[:2] == preamble and not set(preamble) & set(ids[2:]) for ids in chats)
        assert chats[0] == chats[1]
        assert raw == [tokenizer.encode("hello")] * 2 + [[70]]

    def test_system_and_effort_reach_the_template(
        self, capsys: Capture, thinking_model: Path, asked: list[tuple[list[int], SamplingParams]]
    ) -> None:
        chat = ("Who?", "--chat", "--system", "Be brief.", "--reasoning-effort", "low")
        generate(capsys, *chat, "--model", thinking_model, "--max-tokens", 1)
        text = tokenizer_of(thinking_model).decode(asked[0][0])
        assert text == (
            "[gMASK]<sop><|system|>Reasoning Effort: Low<|system|>Be brief.<|user|>Who?<|assistant|><think>"
        )


class TestParameters:
    """Defaults, flags and seeds."""

    def test_defaults_are_the_generation_configs_else_greedy(
        self, capsys: Capture, asked: list[tuple[list[int], SamplingParams]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(LLM, "step", interrupt_after(0))
        generate(capsys, "Emma", "--json")
        generate(capsys, "--prompt-ids", "5", "--model", TINY, "--json")
        declared = json.loads((EMBEDDED_MODEL / "generation_config.json").read_text())
        sampled = SamplingParams(256, temperature=declared["temperature"], top_p=declared["top_p"])
        assert [params for _, params in asked] == [sampled, SamplingParams(256)]

    def test_every_flag_arrives(
        self, capsys: Capture, asked: list[tuple[list[int], SamplingParams]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(LLM, "step", interrupt_after(0))
        flags = "--max-tokens 3 --temperature 0.7 --top-p 0.9 --top-k 8 --min-p 0.1 --stop a --stop b"
        generate(capsys, "Emma", *flags.split(), "--ignore-eos", "--logprobs", 5, "--json")
        expected = SamplingParams(3, 0.7, 0.9, 8, 0.1, stop=("a", "b"), ignore_eos=True, logprobs=5)
        assert asked[0][1] == expected

    def test_the_reported_seed_repeats_the_answer(self, capsys: Capture) -> None:
        first = generate(capsys, "Emma", "--max-tokens", 12, "--json")
        seed = first.document["seed"]
        again = generate(capsys, "Emma", "--max-tokens", 12, "--seed", seed, "--json")
        other = generate(capsys, "Emma", "--max-tokens", 12, "--json")
        assert again.document["seed"] == seed != other.document["seed"]
        assert results(first)[0]["token_ids"] == results(again)[0]["token_ids"]
        assert f"seed {seed}" in generate(capsys, "Emma", "--max-tokens", 1, "--seed", seed).err


def test_the_document_has_the_promised_keys(capsys: Capture) -> None:
    outcome = generate(capsys, "Emma", *GREEDY, "--json")
    assert set(outcome.document) == {"model", "seed", "speculation", "results"}
    assert outcome.document["model"] == str(EMBEDDED_MODEL)
    (result,) = results(outcome)
    assert set(result) == KEYS
    assert (result["finish_reason"], result["cached_tokens"]) == ("length", 0)
    assert result["text"] == tokenizer_of(EMBEDDED_MODEL).decode(result["token_ids"])
    assert result["ttft_s"] > 0 and result["decode_tokens_per_s"] > 0


def test_log_probs_stand_in_the_document_if_asked_for() -> None:
    listed = Result(1, token_ids=[7], log_probs=[TokenLogProbs(7, -0.5, ((7, -0.5), (3, -1.5)))])
    document = json.loads(json.dumps(as_json(listed)))
    assert document["log_probs"] == [{"token": 7, "log_prob": -0.5, "top": [[7, -0.5], [3, -1.5]]}]
    assert as_json(Result(1, log_probs=[]))["log_probs"] == []
    assert set(as_json(Result(1, text=""))) == KEYS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--logprobs", 2), "--logprobs is printed by --json only"),
        (("--logprobs", 21, "--json"), "from 0 to 20"),
    ],
)
def test_log_probs_that_could_not_be_shown_are_refused(
    capsys: Capture, options: tuple[object, ...], message: str
) -> None:
    outcome = generate(capsys, "Emma", *options)
    assert outcome.code == 2 and message in outcome.err


class TestReasoning:
    """A chat prompt that ends inside `<think>`: scratchpad to stderr, answer to stdout (field bug F5)."""

    @pytest.fixture
    def chat(self, thinking_model: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
        script_tokens(monkeypatch, [*tokenizer_of(thinking_model).encode("abc</think>def"), 0])
        return ("Who?", "--chat", "--model", thinking_model, "--draft-tokens", 0)

    def test_json(self, capsys: Capture, chat: tuple[object, ...]) -> None:
        (result,) = results(generate(capsys, *chat, "--json"))
        assert set(result) == {*KEYS, "reasoning"}
        assert (result["reasoning"], result["text"], result["finish_reason"]) == ("abc", "def", "stop")

    def test_text(self, capsys: Capture, chat: tuple[object, ...]) -> None:
        outcome = generate(capsys, *chat)
        assert outcome.out == "def\n" and "\nabc" in outcome.err

    def test_cut_inside(self, capsys: Capture, chat: tuple[object, ...]) -> None:
        outcome = generate(capsys, *chat, "--max-tokens", 1)
        assert outcome.out == "\n" and "length; cut inside <think>, no answer" in outcome.err

    def test_a_plain_prompt_is_never_split(
        self, capsys: Capture, thinking_model: Path, chat: tuple[object, ...]
    ) -> None:
        prompt = "Who?<|assistant|><think>"
        (result,) = results(generate(capsys, prompt, *chat[2:], "--json"))
        assert set(result) == KEYS and result["text"] == "abc</think>def"


def test_text_ends_before_a_stop_string(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    script_tokens(monkeypatch, tokenizer_of(EMBEDDED_MODEL).encode("abcDEFxyz"))
    assert generate(capsys, "Emma", "--stop", "DEF", "--draft-tokens", 0).out == "abc\n"


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_a_failed_request_leaves_the_others_and_exit_code_1(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    original = Glm5Next.logits

    def broken(self: Glm5Next, hidden: Tensor) -> Tensor:
        logits = original(self, hidden).clone()
        if len(logits) == 2:
            logits[0] = torch.nan
        return logits

    monkeypatch.setattr(Glm5Next, "logits", broken)
    outcome = generate(capsys, "Emma", "Anne", *GREEDY, *["--json"] * as_json)
    assert outcome.code == 1
    if not as_json:
        assert outcome.out.startswith("\n") and "error: the largest logit is nan" in outcome.err
        return
    failed, good = outcome.document["results"]
    assert (failed["finish_reason"], good["finish_reason"], len(good["token_ids"])) == ("error", "length", 6)
    assert "largest logit is nan" in failed["message"] and "message" not in good


class TestInterrupt:
    """Ctrl-C keeps what was generated."""

    def test_json(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(LLM, "step", interrupt_after(4))
        outcome = generate(capsys, "Emma", "Anne", "--draft-tokens", 0, "--ignore-eos", "--json")
        assert outcome.code == 130
        for result in outcome.document["results"]:
            assert (result["finish_reason"], len(result["token_ids"])) == ("cancelled", 4)
            assert result["text"]

    @pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
    def test_a_real_signal_in_the_middle_of_an_answer(self) -> None:
        command = [sys.executable, "cli.py", "generate", "Emma", "--max-tokens", "20000", "--ignore-eos"]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            # A shell may have started us with SIGINT ignored, which a child inherits.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert process.stdout is not None
        begun = process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert len(begun) == 8 and rest.endswith(b"\n")
        assert b"cancelled, seed" in errors and b"Traceback" not in errors


def interrupt_after(steps: int) -> Any:
    """`LLM.step` that is interrupted once, in place of step number `steps` + 1."""
    original, left = LLM.step, steps

    def step(self: LLM) -> list[Delta]:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return original(self)

    return step


class TestRandomWeights:
    """A directory with only config.json runs."""

    @pytest.fixture
    def bare(self, tmp_path: Path) -> Path:
        copyfile(TINY / "config.json", tmp_path / "config.json")
        return tmp_path

    @pytest.mark.parametrize("layers", [(), ("--num-layers", 2)], ids=["whole", "two layers"])
    def test_seeded(self, capsys: Capture, bare: Path, layers: tuple[object, ...]) -> None:
        options = (
            "--random-weights",
            "--model",
            bare,
            "--prompt-ids",
            "5,6,7",
            "--ignore-eos",
            *GREEDY,
            *layers,
        )
        first, again, other = (
            results(generate(capsys, *options, "--seed", seed, "--json"))[0]["token_ids"]
            for seed in (1, 1, 2)
        )
        assert len(first) == 6 and first == again != other
