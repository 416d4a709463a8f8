"""`ablate` compares policies cell by cell: every value is an axis, figures are the scheduler's; `--run` measures."""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.llm import EMBEDDED_MODEL, LLM
from scheduler.simulation import Simulation
from scheduler.workloads import WORKLOADS, Rounds, Workload
from tests.cli.test_bad_input import assert_refused
from tests.command import run_cli

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
PRESETS = ("generic", "seed", "vllm-0.33", "ours", "none")
Row = dict[str, Any]


def rows(capsys: Capture, *arguments: object) -> list[Row]:
    outcome = run_cli(capsys, "ablate", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    found: list[Row] = outcome.document  # type: ignore[assignment]
    return found


def column(found: list[Row], name: str) -> dict[str, Any]:
    return {row["policy"]: row[name] for row in found}


class TestWorkloads:
    """Figures of the presets, most of which the worked tables hold as well."""

    def test_cold(self, capsys: Capture) -> None:
        found = rows(capsys, "--workloads", "cold")
        assert column(found, "forwards") == dict(zip(PRESETS, (9, 8, 8, 8, 8), strict=True))
        assert column(found, "checkpoints_held") == dict(zip(PRESETS, (8, 8, 1, 2, 0), strict=True))
        assert set(column(found, "recomputed_tokens").values()) == {32320}
        assert found[0]["first_chunks"] == [4096] * 7 + [3072, 576] and found[0]["smallest_forward"] == 576

    def test_resend(self, capsys: Capture) -> None:
        found = rows(capsys, "--workloads", "resend")
        recomputed = dict(zip(PRESETS, (576, 3648, 64, 64, 32320), strict=True))
        assert column(found, "recomputed_tokens") == recomputed
        # The optimum resumes at 32,304, the last multiple of 16 below the last token.
        assert column(found, "regret") == {name: count / 16 for name, count in recomputed.items()}
        assert column(found, "reused_tokens") == {name: 32320 - count for name, count in recomputed.items()}
        assert column(found, "lost_to_drop") == dict(zip(PRESETS, (512, 512, 0, 0, 0), strict=True))
        assert column(found, "lost_to_missing_state") == dict(zip(PRESETS, (0, 3072, 0, 0, 0), strict=True))
        assert column(found, "of_them_hit") == dict(zip(PRESETS, (1, 1, 1, 1, 0), strict=True))

    def test_next_turn(self, capsys: Capture) -> None:
        """600 generated and 512 new tokens: 33,432, of which a state at 32,896 is the newest below the answer's end."""
        found = rows(capsys, "--workloads", "next-turn")
        assert column(found, "recomputed_tokens") == dict(
            zip(PRESETS, (1688, 1176, 1176, 536, 33432), strict=True)
        )

    @pytest.mark.parametrize(("workload", "prompts"), [("shared-in-turn", 8), ("shared-at-once", 8)])
    def test_shared_prompts(self, capsys: Capture, workload: str, prompts: int) -> None:
        (ours,) = rows(capsys, "--workloads", workload, "--policy", "ours")
        assert ours["prompt_tokens"] == prompts * (8192 + 1024)
        assert 16384 + 8192 <= ours["recomputed_tokens"] < ours["prompt_tokens"]
        assert ours["regret"] == round(ours["recomputed_tokens"] / (8192 + 8 * 1024), 3)

    def test_in_turn_a_shared_prompt_runs_twice_and_is_a_junction_from_then_on(self, capsys: Capture) -> None:
        (ours,) = rows(capsys, "--workloads", "shared-in-turn", "--policy", "ours")
        assert (ours["recomputed_tokens"], ours["lost_to_missing_state"]) == (2 * 9216 + 6 * 1024, 8192)

    def test_pressure(self, capsys: Capture) -> None:
        """Pages for four prompts and 8 slots: what is dropped is dropped by age, nobody starves."""
        for row in rows(capsys, "--workloads", "pressure"):
            assert row["recomputed_tokens"] == 8 * 16384 and row["checkpoints_held"] <= 8
            assert row["policy"] == "none" or row["page_evictions"] == 4 * 16384 // row["block"]
            assert row["checkpoints_published"] == row["checkpoints_held"] + row["state_evictions"]
            # 47 chunks, of which every one ends on a boundary.
            assert row["policy"] != "generic" or row["checkpoints_published"] == row["forwards"] == 47
        limits = ("--kv-tokens", 2 * 16384, "--checkpoint-slots", 0)
        (narrow,) = rows(capsys, "--workloads", "pressure", "--policy", "ours", *limits)
        assert narrow["page_evictions"] == 6 * 16384 // 64

    def test_forks_and_the_branching_pair_run_under_every_preset(self, capsys: Capture) -> None:
        names = "branching-pair,fork-inside,fork-at-boundary"
        found = rows(capsys, "--workloads", names)
        assert len(found) == 3 * len(PRESETS) and all(row["regret"] >= 1 for row in found)
        ours = [row for row in found if row["policy"] == "ours"]
        # The second sight of the boundary is exact; a fork behind a shared half runs it once more, then never.
        assert [row["recomputed_tokens"] for row in ours] == [16, 48384, 48256]


class TestAxes:
    """Presets and single values x block x budget x workload."""

    def test_by_default_every_preset_under_every_workload(self, capsys: Capture) -> None:
        found = rows(capsys)
        assert [(row["policy"], row["workload"]) for row in found] == [
            (policy, workload) for policy in PRESETS for workload in WORKLOADS
        ]
        assert {row["block"] for row in found} == {64, 512} and {row["budget"] for row in found} == {4096}

    def test_every_value_takes_a_list(self, capsys: Capture) -> None:
        axes = ("--policy", "ours,vllm-0.33", "--block-size", "64,512", "--max-batched-tokens", "1000,4096")
        found = rows(capsys, "--workloads", "resend", *axes)
        cells = [(row["policy"], row["block"], row["budget"]) for row in found]
        assert cells == [(p, n, b) for p in ("ours", "vllm-0.33") for n in (64, 512) for b in (1000, 4096)]
        assert [row["recomputed_tokens"] for row in found] == [64] * 8

    def test_single_values_are_named(self, capsys: Capture) -> None:
        values = ("--retain", "resend/resend,extend", "--exports", "0,many", "--draft-filing", "drop,token")
        found = rows(capsys, "--policy", "ours", "--workloads", "cold", *values, "--chunk-ends", "free")
        assert len(found) == 8
        assert found[0]["policy"] == "ours, retain resend, exports 0, chunk ends free, draft filing drop"
        assert [row["forwards"] for row in found] == [9, 9, 8, 8, 10, 9, 8, 8]
        assert [row["checkpoints_held"] for row in found] == [1, 1, 1, 1, 2, 2, 2, 2]

    def test_the_mixed_cap_and_the_drafter_apply(self, capsys: Capture) -> None:
        generic = ("--policy", "generic", "--workloads", "resend")
        (without,) = rows(capsys, *generic, "--draft-tokens", 0)
        assert (without["recomputed_tokens"], without["lost_to_drop"]) == (64, 0)

    @pytest.mark.parametrize(
        ("arguments", "recomputed"),
        [
            ("--policy ours --block-size 64,512 --draft-tokens 3,0", [64] * 4),
            ("--policy seed --draft-filing token --draft-tokens 3", [64]),
            ("--policy seed --draft-tokens 3,0", [3648, 64]),
            ("--policy generic --draft-tokens 3,0", [576, 64]),
            ("--policy vllm-0.33 --draft-tokens 3,0", [64, 64]),
        ],
    )
    def test_what_drafting_costs_a_resend(
        self, capsys: Capture, arguments: str, recomputed: list[int]
    ) -> None:
        """Tokens of 32,320 that run again: a draft row filed by its token costs no policy anything."""
        found = rows(capsys, "--workloads", "resend", *arguments.split())
        assert [row["recomputed_tokens"] for row in found] == recomputed
        assert all(re.search(r", draft tokens [03]$", row["policy"]) for row in found)


def test_tokens_run_again_after_a_preemption_are_counted(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers that outgrow the pages for less than both: without a cache the younger request starts over."""

    def outgrow(simulation: Simulation) -> Rounds:
        yield [simulation.request(range(start, start + 640), new_tokens=200) for start in (0, 1000)]

    monkeypatch.setitem(WORKLOADS, "outgrow", Workload("outgrow", outgrow, kv_tokens=1536))
    (row,) = rows(capsys, "--policy", "none", "--workloads", "outgrow")
    assert row["preemptions"] == 1
    # 1,536 tokens are full when both have run 768, so that 769 are known; the younger replays these.
    assert row["rerun_after_preemption"] == row["recomputed_tokens"] - 1280 == 769


def test_markdown_has_a_row_per_cell_and_names_columns_of_zeros(capsys: Capture) -> None:
    outcome = run_cli(capsys, "ablate", "--workloads", "cold,resend", "--policy", "ours")
    lines = outcome.out.splitlines()
    assert lines[0].startswith("| policy | block | budget | workload | forwards | smallest forward |")
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert lines[3].startswith("| ours | 64 | 4,096 | resend | 1 | 64 | 32,320 | 32,256 | 64 | 4.0 |")
    assert lines[5].startswith("Zero everywhere: ") and "preemptions" in lines[5]


def test_the_arithmetic_needs_no_torch() -> None:
    code = "import sys, cli; cli.main(['ablate', '--workloads', 'cold']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT).returncode == 0


class TestRun:
    """Cold, resend and next turn on the embedded model, under each policy in turn."""

    @pytest.fixture(autouse=True)
    def short_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("engine.commands.ablate_run.ANSWER_TOKENS", 40)
        monkeypatch.setattr("engine.commands.ablate_run.NEXT_TOKENS", 24)

    def test_figures_and_seconds(self, capsys: Capture) -> None:
        """96 tokens at block 32: a resend matches 64; tokens are verified to 135, so a turn matches 128. Two policies
        give a block up, which costs the resend all there is."""
        found = rows(capsys, "--run", "--prompt-tokens", 96, "--rounds", 1, "--block-size", 32)
        figures = {(row["policy"], row["workload"]): row["recomputed_tokens"] for row in found}
        assert figures == {
            (policy, workload): recomputed
            for policy, by_workload in {
                "generic": (96, 96, 64),
                "seed": (96, 96, 64),
                "vllm-0.33": (96, 32, 96),
                "ours": (96, 32, 32),
            }.items()
            for workload, recomputed in zip(("cold", "resend", "next turn"), by_workload, strict=True)
        }
        assert all(len(row["readings"]) == 1 and row["seconds"] > 0 for row in found)
        for row in found:  # answers are drafted, cold and after the hit
            rates = r"-" if row["workload"] == "next turn" else r"[01]\.\d\d( [01]\.\d\d){2}"
            assert re.fullmatch(rates, row["accepted"]), row

    def test_the_depth_is_an_axis(self, capsys: Capture) -> None:
        small = ("--prompt-tokens", 40, "--rounds", 1, "--policy", "ours", "--draft-tokens", "0,1")
        found = {(row["policy"], row["workload"]): row["accepted"] for row in rows(capsys, "--run", *small)}
        assert [found["ours, draft tokens 0", name] for name in ("cold", "resend", "next turn")] == ["-"] * 3
        assert all(
            re.fullmatch(r"[01]\.\d\d", found["ours, draft tokens 1", name]) for name in ("cold", "resend")
        )

    def test_policies_alternate_and_start_cold(
        self, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[tuple[str, int]] = []
        original = LLM.add_request

        def add_request(self: LLM, prompt: Any, *args: Any, **options: Any) -> int:
            cached = self.scheduler.blocks.slots.num_keyed
            asked.append((self.options.policy, cached if len(prompt) == 100 else -1))
            return original(self, prompt, *args, **options)

        monkeypatch.setattr(LLM, "add_request", add_request)
        rows(capsys, "--run", "--prompt-tokens", 100, "--rounds", 2, "--policy", "ours,none")
        rounds = [policy for policy, cached in asked if cached == 0]
        assert rounds == ["ours", *["none"] * 2] * 2  # `none` never has any; ours is empty once a round

    def test_every_block_and_budget_is_a_row_of_its_own(
        self, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reading = {"forwards": 1, "recomputed_tokens": 2, "seconds": 0.5, "acceptance": []}
        monkeypatch.setattr("engine.commands.ablate_run.measure", lambda *_: {"cold": reading})

        def engine(cell: argparse.Namespace, prompt_tokens: int) -> LLM:
            sizes = {name: getattr(cell, name) for name in ("block_size", "max_batched_tokens")}
            return LLM(EMBEDDED_MODEL, kv_tokens=64, **sizes)

        monkeypatch.setattr("engine.commands.ablate_run.engine", engine)
        lists = ("--block-size", "16,64", "--max-batched-tokens", "512,4096")
        rows = run_cli(capsys, "ablate", "--run", "--policy", "ours", *lists, "--json").document
        assert {(row["block"], row["budget"]) for row in rows} == {
            (16, 512),
            (16, 4096),
            (64, 512),
            (64, 4096),
        }

    def test_the_table_leaves_none_out_by_default(
        self, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reading = {"forwards": 1, "recomputed_tokens": 2, "seconds": 0.5, "acceptance": [0.5, 0.25]}
        monkeypatch.setattr("engine.commands.ablate_run.measure", lambda *_: {"cold": reading})
        monkeypatch.setattr("engine.commands.ablate_run.engine", lambda *_: LLM(EMBEDDED_MODEL, kv_tokens=64))
        out = run_cli(capsys, "ablate", "--run").out.splitlines()
        assert (
            out[0]
            == "| policy | block | budget | workload | forwards | recomputed tokens | seconds | accepted |"
        )
        assert [line.split(" | ")[0] for line in out[2:]] == ["| generic", "| seed", "| vllm-0.33", "| ours"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workloads", "cold,warm"], ["workload 'warm' is unknown", "pressure"]),
        (["--policy", "ours,theirs"], ["--policy", "'theirs'", "generic"]),
        (["--block-size", "64,x"], ["--block-size", "'x'", "at least 1"]),
        (["--block-size", "64,24"], ["block size is 24", "multiple of 16"]),
        (["--exports", "0,2"], ["--exports", "'2'"]),
        (["--retain", "resend/x"], ["retention is 'x'"]),
        (["--rounds", "3"], ["--rounds acts with --run only"]),
        (["--prompt-tokens", "3"], ["--prompt-tokens acts with --run only"]),
        (["--run", "--workloads", "cold"], ["--workloads acts without --run only"]),
        (["--run", "--draft-architecture", "x"], ["--draft-architecture acts without --run only"]),
        (["--run", "--draft-tokens", "8"], ["--draft-tokens", "'8'", "0 to 7"]),
        (["--draft-tokens", "0,-1"], ["--draft-tokens", "'-1'", "0 to 7"]),
        (["--run", "--rounds", "0"], ["--rounds", "at least 1"]),
        (["--run", "--prompt-tokens", "70000", "--policy", "none"], ["70000 tokens", "65536", "shorten"]),
        (["--kv-tokens", "1000"], ["need", "larger cache"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, list) else "",
)
def test_nonsense_is_refused(capsys: Capture, arguments: list[object], words: list[str]) -> None:
    assert_refused(run_cli(capsys, "ablate", *arguments), words)
