"""What drafts brought is told as it was: by position, per command or per turn, beside a check of the draft layer."""

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import llm as llm_module
from engine.commands.generate import report_drafts
from engine.llm import EMBEDDED_MODEL
from engine.output import SpeculationStatistics
from engine.speculation import Drafter
from model.glm5_next import Glm5Next
from tests.cli.test_bad_input import assert_refused
from tests.command import run_cli
from tests.oracles import copy_checkpoint
from tests.scripted import TINY

Capture = pytest.CaptureFixture[str]
SMALL_CACHE = ("--kv-tokens", 1024)


@pytest.fixture
def constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trunk and draft layer agree on one token forever, so that every draft is accepted."""

    def logits(self: Glm5Next, hidden: Tensor) -> Tensor:
        found = torch.zeros(len(hidden), self.config.vocab_size)
        found[:, 70] = 1
        return found

    monkeypatch.setattr(Glm5Next, "logits", logits)


def speculation(capsys: Capture, *arguments: object) -> dict[str, Any]:
    greedy = ("--temperature", 0, "--json", *SMALL_CACHE)
    outcome = run_cli(capsys, "generate", *arguments, *greedy)
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = outcome.document["speculation"]
    return found


class TestCounts:
    """`speculation` in the document: verify steps of all results, by position, before anything is cut."""

    def test_the_last_steps_draft_less(self, capsys: Capture, constant: None) -> None:
        """Eight tokens: one of the prompt's step, then 3 drafts and one more, then 2 drafts and one more."""
        assert speculation(capsys, "Emma", "--max-tokens", 8) == {
            "depth": 3,
            "verify_steps": 2,
            "proposed": [2, 2, 1],
            "accepted": [2, 2, 1],
            "mean_accepted_length": 3.5,
        }

    def test_results_are_summed_up(self, capsys: Capture, constant: None) -> None:
        found = speculation(capsys, "Emma", "Anne", "--max-tokens", 8)
        assert (found["verify_steps"], found["proposed"], found["mean_accepted_length"]) == (
            4,
            [4, 4, 2],
            3.5,
        )

    def test_a_stop_inside_an_accepted_run_cuts_no_count(
        self, capsys: Capture, constant: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second token completes the stop string; the step that brought it accepted three drafts."""
        found = speculation(
            capsys, "Emma", "--max-tokens", 8, "--stop", llm_module.LLM().tokenizer.decode([70, 70])
        )  # type: ignore[union-attr]
        assert (found["verify_steps"], found["accepted"]) == (1, [1, 1, 1])

    def test_refused_drafts(self, capsys: Capture) -> None:
        """Real drafts: whoever accepts position i has accepted those before; tokens add up."""
        found = speculation(capsys, "Emma Woodhouse, handsome", "--max-tokens", 30, "--ignore-eos")
        accepted, proposed = found["accepted"], found["proposed"]
        assert sorted(accepted, reverse=True) == accepted and accepted < proposed
        assert found["mean_accepted_length"] == 1 + sum(accepted) / found["verify_steps"]
        assert 28 <= found["verify_steps"] + sum(accepted) <= 29  # a last step may be without drafts

    def test_depth_0(self, capsys: Capture) -> None:
        found = speculation(capsys, "Emma", "--max-tokens", 4, "--draft-tokens", 0)
        assert list(found.values()) == [0, 0, [], [], None]


class TestSummary:
    """The same for people, on stderr."""

    LINE = "drafts: verify steps 2, accepted 1.00 1.00 1.00 by position, 3.50 tokens per step\n"

    def test_generate(self, capsys: Capture, constant: None) -> None:
        answer = ("generate", "Emma", "--max-tokens", 8, "--temperature", 0, *SMALL_CACHE)
        assert run_cli(capsys, *answer).err.endswith(self.LINE)
        assert "drafts:" not in run_cli(capsys, *answer, "--draft-tokens", 0).err

    def test_chat_counts_every_turn_by_itself(
        self, capsys: Capture, constant: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Emma\nAnne\n")))
        outcome = run_cli(capsys, "chat", "--plain", "--max-tokens", 8, "--temperature", 0, *SMALL_CACHE)
        assert outcome.err.count(self.LINE) == 2

    @pytest.mark.parametrize(
        ("steps", "accepted", "warned"), [(50, 9, True), (50, 10, False), (49, 0, False)]
    )
    def test_acceptance_near_zero_is_reported(
        self, capsys: Capture, steps: int, accepted: int, warned: bool
    ) -> None:
        """Field bug E2: a draft layer that is fed the wrong thing runs without an error."""
        statistics = SpeculationStatistics(1)
        for step in range(steps):
            statistics.add_step(1, int(step < accepted))
        report_drafts(statistics)
        err = capsys.readouterr().err
        assert ("check that the MTP layer" in err) == warned and err.count("\n") == 1 + warned


def test_the_cache_is_itemised_once(capsys: Capture) -> None:
    """Field bug G2: what drafts need beside pages and states is counted, and gone without drafts."""
    err = run_cli(capsys, "generate", "Emma", "Anne", "--max-tokens", 1, *SMALL_CACHE).err
    (line,) = [line for line in err.splitlines() if line.startswith("cache: ")]
    size = r" [\d,]+\.\d MB"
    names = ("pages", "recurrent slots", "draft pages", "replay rows", "companions")
    assert re.fullmatch("cache: " + ", ".join(name + size for name in names), line)
    without = run_cli(capsys, "generate", "Emma", "--max-tokens", 1, "--draft-tokens", 0, *SMALL_CACHE).err
    assert re.search(f"cache: pages{size}, recurrent slots{size}\n", without)


@pytest.mark.parametrize(("flag", "shared"), [((), True), (("--no-index-share",), False)])
def test_index_sharing_can_be_switched_off(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, flag: tuple[str, ...], shared: bool
) -> None:
    made: list[Drafter] = []
    monkeypatch.setattr(llm_module, "Drafter", lambda *args: made.append(Drafter(*args)) or made[-1])  # type: ignore[func-returns-value]
    run_cli(capsys, "generate", "Emma", "--max-tokens", 1, *SMALL_CACHE, *flag)
    assert [drafter.index_share for drafter in made] == [shared]


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft-tokens", "8"], ["draft_tokens is 8", "expected 0 to 7"]),
        (["--draft-tokens", "-1"], ["draft_tokens is -1", "expected 0 to 7"]),
        (["--draft-tokens", "x"], ["--draft-tokens", "'x'"]),
        (
            ["--no-index-share", "--draft-tokens", "0"],
            ["--no-index-share", "draft_tokens is 0", "leave it out"],
        ),
    ],
    ids=["8", "-1", "x", "no index share"],
)
def test_values_that_do_not_act_are_refused(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Emma\n")))
    assert_refused(run_cli(capsys, command, *arguments), words)


def test_drafts_without_a_draft_layer_are_refused(capsys: Capture, tmp_path: Path) -> None:
    def without_draft_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        last = max(name.split(".")[3] for name in tensors if ".layers." in name)
        return {name: tensor for name, tensor in tensors.items() if f".layers.{last}." not in name}

    model = copy_checkpoint(TINY, tmp_path / "model", without_draft_layer)
    ids = ("generate", "--prompt-ids", "5", "--model", model, "--max-tokens", 2, "--json", *SMALL_CACHE)
    assert run_cli(capsys, *ids).document["speculation"]["depth"] == 0
    assert_refused(run_cli(capsys, *ids, "--draft-tokens", 1), ["MTP", "draft"])


def test_the_embedded_model_drafts_by_default(capsys: Capture) -> None:
    err = run_cli(capsys, "generate", "Emma", "--max-tokens", 1, *SMALL_CACHE, "--model", EMBEDDED_MODEL).err
    assert "MTP layer: drafts per step: 3" in err
