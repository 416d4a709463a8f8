"""`bench --scheduler` times plans, commits and lookups as contexts and cache grow; it needs no model and no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.commands import bench_scheduler
from tests.cli.test_bad_input import assert_refused
from tests.command import run_cli

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
TIMES = ("decode_s", "chunk_s", "lookup_hashing_s", "lookup_s")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the contexts and a few decodes."""
    monkeypatch.setattr(bench_scheduler, "LONG_TOKENS", 1_000)
    monkeypatch.setattr(bench_scheduler, "CONTEXT_TOKENS", 100)
    monkeypatch.setattr(bench_scheduler, "NUM_DECODES", 8)


def test_contexts_and_cache_grow_tenfold_twice(capsys: Capture) -> None:
    document = run_cli(capsys, "bench", "--scheduler", "--repeat", 2, "--json").document
    assert document["repeat"] == 2
    scales = document["scales"]
    assert [scale["long_tokens"] for scale in scales] == [1_000, 10_000, 100_000]
    assert [scale["context_tokens"] for scale in scales] == [100, 1_000, 10_000]
    pages = [scale["cached_pages"] for scale in scales]
    # The long prompt with the chunks behind it, 8 contexts, and what those generate.
    assert all(
        p * 64 >= s["long_tokens"] + 8 * s["context_tokens"] for p, s in zip(pages, scales, strict=True)
    )
    assert pages == sorted(pages)
    assert all(scale[name] > 0 for scale in scales for name in TIMES)
    # Hashing a hundred times as many tokens cannot cost the same: what is timed is what the row says.
    assert scales[2]["lookup_hashing_s"] > 10 * scales[0]["lookup_hashing_s"]


def test_the_table(capsys: Capture) -> None:
    lines = run_cli(capsys, "bench", "--scheduler", "--repeat", 1).out.splitlines()
    assert lines[0].split() == ["1x", "10x", "100x"]
    assert lines[1].split() == ["long", "tokens", "1,000", "10,000", "100,000"]
    assert [line.count(" ms") for line in lines] == [0] * 4 + [3] * 4


class TestWhatIsTimed:
    """The steps are those the rows name."""

    @pytest.fixture
    def bench(self) -> bench_scheduler.SchedulerBench:
        return bench_scheduler.SchedulerBench(5_000, 1_000, rounds=2)

    def test_chunks_of_the_long_prompt(self, bench: bench_scheduler.SchedulerBench) -> None:
        (request,) = bench.scheduler.running
        before = request.num_computed_tokens
        bench.step()
        assert before >= 4_992 and request.num_computed_tokens - before == bench_scheduler.BUDGET

    def test_lookups_hit_the_prompt(self, bench: bench_scheduler.SchedulerBench) -> None:
        bench.drain()
        hashing, known = bench.lookup()
        assert hashing > known > 0

    def test_decodes_of_all_at_once(self, bench: bench_scheduler.SchedulerBench) -> None:
        bench.drain()
        bench.start_decodes()
        for _ in range(2 * bench_scheduler.STEPS_PER_ROUND):
            before = [len(request.output) for request in bench.scheduler.running]
            bench.step()
            assert [len(request.output) for request in bench.scheduler.running] == [n + 1 for n in before]
        assert len(bench.scheduler.running) == 8


def test_no_torch_is_imported() -> None:
    code = (
        "import sys, engine.commands.bench, engine.commands.bench_scheduler; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prefill", "5"], ["--prefill", "no place beside --scheduler"]),
        (["--no-peer"], ["--no-peer", "no place beside --scheduler"]),
        (["--model", "x"], ["--model"]),
        (["--repeat", "0"], ["--repeat is 0", "at least 1"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_nonsense_is_refused(capsys: Capture, arguments: list[str], words: list[str]) -> None:
    assert_refused(run_cli(capsys, "bench", "--scheduler", *arguments), words)
