"""`trace` says what the scheduler does with prompts, as table, document and picture; lengths need no model."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.text import Tokenizer
from scheduler.checkpoint_policy import DECLARED_DRAFT_ARCHITECTURE
from tests.cli.test_bad_input import assert_refused
from tests.command import run_cli

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "model" / "embedded"
REQUEST_KEYS = [
    "prompt", "cached", "forwards", "chunks", "exports", "published", "resend_hit", "extend_hit", "checkpoints_held",
]  # fmt: skip
CHUNK_KEYS = ["request", "start", "end", "write_from", "exports", "publishes", "reason"]


def trace(capsys: Capture, *arguments: object) -> dict[str, Any]:
    outcome = run_cli(capsys, "trace", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    return outcome.document


def requests(capsys: Capture, *arguments: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = trace(capsys, *arguments)["requests"]
    return found


def test_the_document_has_the_promised_keys_and_no_others(capsys: Capture) -> None:
    document = trace(capsys, "--lengths", "700,3000", "--policy", "seed")
    assert list(document) == ["policy", "block", "budget", "requests", "steps"]
    assert (document["policy"], document["block"], document["budget"]) == ("seed", 512, 4096)
    for request in document["requests"]:
        assert list(request) == REQUEST_KEYS
    for number, step in enumerate(document["steps"], start=1):
        assert list(step) == ["step", "chunks", "decodes", "unused"]
        assert step["step"] == number and step["decodes"] == 0
        assert [list(chunk) for chunk in step["chunks"]] == [CHUNK_KEYS] * len(step["chunks"])
        assert step["unused"] + sum(c["end"] - c["start"] for c in step["chunks"]) == 4096


def test_32320_tokens(capsys: Capture) -> None:
    (request,) = requests(capsys, "--lengths", 32320)
    assert request == {
        "prompt": 32320, "cached": 0, "forwards": 8, "chunks": [4096] * 7 + [3648], "exports": [[]] * 7 + [[32256]],
        "published": [32256, 32320], "resend_hit": 32256, "extend_hit": 32320, "checkpoints_held": 2,
    }  # fmt: skip


def test_lengths_need_no_torch_and_a_million_tokens_are_instant() -> None:
    """Process time, so that a busy machine does not decide: measured 0.9 s, of which most is hashing."""
    code = (
        "import sys, time, cli; cli.main(['trace', '--lengths', '1000000', '--json', '--svg', sys.argv[1]]);"
        "print(time.process_time(), 'torch' in sys.modules, file=sys.stderr)"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", code, "/dev/null"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    seconds, torch_imported = outcome.stderr.split()
    assert torch_imported == "False" and float(seconds) < 5


class TestSeparateAndCached:
    """Prompts compete, unless each is alone; an external store may bring their beginning."""

    def test_together_they_share_steps(self, capsys: Capture) -> None:
        steps = trace(capsys, "--lengths", "2002,2002,2002")["steps"]
        assert [[c["end"] - c["start"] for c in step["chunks"]] for step in steps] == [
            [2002, 2002, 80],
            [1922],
        ]
        assert [step["unused"] for step in steps] == [12, 2174]

    def test_separate(self, capsys: Capture) -> None:
        document = trace(capsys, "--lengths", "2002,2002,5000", "--separate")
        chunks = [request["chunks"] for request in document["requests"]]
        assert chunks == [[2002], [2002], [4096, 904]]
        assert [step["chunks"][0]["request"] for step in document["steps"]] == [0, 1, 2, 2]
        assert [step["step"] for step in document["steps"]] == [1, 2, 3, 4]

    @pytest.mark.parametrize(
        ("policy", "chunks", "published"),
        [
            ("generic", [484, 2560, 576], [29184, 31744]),
            ("seed", [484, 3136], [29184, 32256]),
            ("vllm-0.33", [484, 3136], [32256]),
            ("ours", [3556, 64], [32256, 32320]),
        ],
    )
    def test_cached(self, capsys: Capture, policy: str, chunks: list[int], published: list[int]) -> None:
        (request,) = requests(capsys, "--lengths", 32320, "--cached", 28700, "--policy", policy)
        assert (request["cached"], request["chunks"], request["published"]) == (28700, chunks, published)


class TestOverrides:
    """Every value of a policy can be set by itself."""

    @pytest.mark.parametrize(
        ("arguments", "chunks", "published"),
        [
            (["--retain", "resend"], [3000], [2944]),
            (["--retain", "resend, extend"], [3000], [2944]),
            (["--retain", "none"], [3000], []),
            (["--no-prefix-cache"], [3000], []),
            (["--exports", "0"], [2944, 56], [2944]),
            (["--exports", "0", "--policy", "vllm-0.33"], [2560, 440], [2560]),
            (["--draft-filing", "drop", "--retain", "resend"], [3000], [2880]),
            (["--block-size", "512"], [3000], [2560]),
            (["--policy", "generic"], [2048, 952], [2048]),
            (["--policy", "generic", "--draft-tokens", "0"], [2560, 440], [2560]),
            (["--policy", "seed"], [3000], [2560]),
            (["--policy", "seed", "--draft-tokens", "0"], [3000], [2560]),
            (["--policy", "seed", "--draft-architecture", "Other"], [2048, 952], [2048]),
            (["--policy", "seed", "--exports", "0"], [2048, 952], [2048]),
            (["--max-batched-tokens", "1000"], [992, 992, 992, 24], [2944]),
            (["--max-batched-tokens", "1000", "--chunk-ends", "floored"], [960, 960, 960, 120], [2944]),
        ],
        ids=lambda value: " ".join(value) if value and isinstance(value[0], str) else "",
    )
    def test_chunks_and_published(
        self, capsys: Capture, arguments: list[str], chunks: list[int], published: list[int]
    ) -> None:
        (request,) = requests(capsys, "--lengths", 3000, *arguments)
        assert (request["chunks"], request["published"]) == (chunks, published)

    def test_slots_and_pages_are_limits(self, capsys: Capture) -> None:
        few = run_cli(capsys, "trace", "--lengths", 3000, "--checkpoint-slots", 0).out
        assert "no slot for 2,944: 1 of 1 in use" in few and "holds 0 checkpoints" in few
        narrow = requests(capsys, "--lengths", "700,700", "--kv-tokens", 1024)
        assert [request["resend_hit"] for request in narrow] == [640, 640]


class TestTable:
    """The table says why a chunk ends where it does, and who waits for what."""

    def test_reasons(self, capsys: Capture) -> None:
        out = run_cli(capsys, "trace", "--lengths", 32320, "--policy", "generic").out
        assert "stopped at 31,744: retained, kernel exports 0" in out and "end of prompt" in out
        assert "exports 2,560; publishes 2,560; tail joined" in (
            run_cli(capsys, "trace", "--lengths", 3000, "--policy", "seed").out
        )

    def test_waits(self, capsys: Capture) -> None:
        seed = run_cli(capsys, "trace", "--lengths", "2002,2002,2002", "--policy", "seed").out
        waiting = (
            "    1       2 waits: 92 tokens are less than one step of 512 (92 tokens of the step unused)"
        )
        assert waiting in seed.splitlines()
        slots = run_cli(
            capsys, "trace", "--lengths", "700,800,900", "--checkpoint-slots", 0, "--kv-tokens", 1600
        )
        assert "waits" in slots.out and slots.out.count("resend hits") == 3

    def test_a_line_per_request(self, capsys: Capture) -> None:
        last = run_cli(capsys, "trace", "--lengths", 32320).out.splitlines()[-1]
        assert last == (
            "request 0: 32,320 tokens, 0 cached, 8 forwards; holds 2 checkpoints (newest: 32,256, 32,320);"
            " a resend hits 32,256, a longer prompt 32,320"
        )


class TestTextPrompts:
    """Text goes through a model's tokenizer, and, as generate runs it, with a drafter."""

    TEXT = " ".join(["It is a truth universally acknowledged"] * 30)

    def test_lengths_are_the_tokenizers(self, capsys: Capture) -> None:
        tokenizer = Tokenizer.load(EMBEDDED)
        assert tokenizer is not None
        found = requests(capsys, self.TEXT, "Emma")
        assert [r["prompt"] for r in found] == [len(tokenizer.encode(t)) for t in (self.TEXT, "Emma")]
        assert found == requests(capsys, self.TEXT, "Emma", "--model", EMBEDDED)

    def test_the_drafter_can_be_left_out(self, capsys: Capture) -> None:
        small = (self.TEXT, "--policy", "generic", "--block-size", 16)
        (drafting,), (without,) = requests(capsys, *small), requests(capsys, *small, "--draft-tokens", 0)
        assert drafting == requests(capsys, *small, "--draft-tokens", 3)[0]
        assert without["resend_hit"] == drafting["resend_hit"] + 16

    def test_tokens_run_without_writing_are_marked(self, capsys: Capture, tmp_path: Path) -> None:
        """The second prompt arrives in the first one's last step and finds its pages, but no state in them."""
        arguments = (self.TEXT, self.TEXT[:400] + " but Emma", "--max-batched-tokens", 32)
        table = run_cli(capsys, "trace", *arguments, "--svg", tmp_path / "trace.svg")
        assert "runs 32 without writing" in table.out
        chunks = [c for s in trace(capsys, *arguments)["steps"] for c in s["chunks"] if c["request"]]
        assert chunks[0]["write_from"] > chunks[0]["end"]
        assert 'fill="url(#replay)"' in (tmp_path / "trace.svg").read_text().split("numbers: the step")[1]


class TestPicture:
    """One lane per request, and for each thing that happened a mark of its own shape, in greys."""

    @pytest.fixture
    def svg(self, capsys: Capture, tmp_path: Path) -> str:
        path = tmp_path / "trace.svg"
        lengths = ("--lengths", "2002,5000", "--cached", 96)
        assert run_cli(capsys, "trace", *lengths, "--svg", path).code == 0
        return path.read_text(encoding="utf-8")

    def test_lanes_and_bars(self, svg: str) -> None:
        assert "2,002 tokens</text>" in svg and "5,000 tokens</text>" in svg
        bars = re.findall(r'<rect x="[\d.]+" y="(\d+)" height="22" width="[\d.]+" fill="#', svg)
        assert bars == ["88", "160", "160"]

    def test_marks(self, svg: str) -> None:
        drawn = svg.split("numbers: the step")[1]  # below the legend
        assert drawn.count("l-4 -7h8z") == drawn.count("l4 5l-4 5l-4 -5z") + 1 == 3  # one export is rolling
        assert drawn.count('r="3"/>') == 2  # both resumed at 96
        assert drawn.count('fill="none"') == 4  # resend and longer prompt, of each

    def test_only_greys(self, svg: str) -> None:
        colours = set(re.findall(r"#([0-9a-f]{3}(?:[0-9a-f]{3})?)\b", svg))
        assert len(colours) > 3
        for colour in colours:
            size = len(colour) // 3
            assert len({colour[i : i + size] for i in range(0, len(colour), size)}) == 1, colour

    def test_the_grid_of_a_long_prompt_is_thinned(self, capsys: Capture, tmp_path: Path) -> None:
        run_cli(capsys, "trace", "--lengths", 1_000_000, "--svg", tmp_path / "long.svg")
        svg = (tmp_path / "long.svg").read_text(encoding="utf-8")
        assert svg.count('stroke="#ddd"') <= 129 and "a line every 7,872 tokens" in svg


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["text or as --lengths"]),
        (["Emma", "--lengths", "5"], ["text or as --lengths"]),
        ([""], ["prompt is empty"]),
        (["Emma", "--model", "absent"], ["absent has no tokenizer.json", "--lengths"]),
        (["--lengths", "5", "--model", EMBEDDED], ["--lengths need no model"]),
        (["--lengths", "5,x"], ["--lengths is '5,x'", "for instance"]),
        (["--lengths", "0"], ["--lengths is '0'"]),
        (["--lengths", "²"], ["--lengths is '²'"]),
        (["--lengths", "500,300", "--cached", "300"], ["--cached is 300", "300 tokens", "at least the last"]),
        (["--lengths", "5", "--cached", "-1"], ["--cached", "at least 0"]),
        (
            ["--lengths", "3000", "--kv-tokens", "1000"],
            ["3001 tokens need 47 blocks", "has 15", "larger cache"],
        ),
        (["--lengths", "5", "--kv-tokens", "0"], ["--kv-tokens", "at least 1"]),
        (["--lengths", "5", "--checkpoint-slots", "-1"], ["--checkpoint-slots", "at least 0"]),
        (["--lengths", "5", "--max-batched-tokens", "0"], ["--max-batched-tokens", "at least 1"]),
        (["--lengths", "5", "--mixed-prefill-tokens", "-1"], ["--mixed-prefill-tokens", "at least 0"]),
        (["--lengths", "5", "--draft-tokens", "-1"], ["--draft-tokens", "0 to 7"]),
        (["--lengths", "5", "--draft-tokens", "x"], ["--draft-tokens", "'x'"]),
        (["--lengths", "5", "--block-size", "24"], ["block size is 24", "multiple of 16"]),
        (["--lengths", "5", "--policy", "ourss"], ["--policy", "'ourss'", "vllm-0.33"]),
        (["--lengths", "5", "--retain", "resend,x"], ["retention is 'x'", "junction"]),
        (["--lengths", "5", "--retain", "resend,none"], ["retention is 'none'"]),
        (["--lengths", "5", "--exports", "2"], ["--exports", "many"]),
        (["--lengths", "5", "--chunk-ends", "open"], ["--chunk-ends", "floored"]),
        (["--lengths", "5", "--draft-filing", "hidden-position"], ["--draft-filing", "drop, key, tag, off"]),
        (["--lengths", "5", "--draft-architecture", "Other"], ["'token' needs a drafter", "use drop"]),
        (["--lengths", "5", "--no-prefix-cache", "--retain", "resend"], ["no_prefix_cache", "leave one out"]),
        (["--lengths", "5", "--svg", "absent/x.svg"], ["absent/x.svg"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, list) else "",
)
def test_nonsense_is_refused(capsys: Capture, arguments: list[object], words: list[str]) -> None:
    assert_refused(run_cli(capsys, "trace", *arguments), words)


def test_the_assumed_drafter_is_the_checkpoints(capsys: Capture) -> None:
    named = ("--policy", "seed", "--draft-architecture", DECLARED_DRAFT_ARCHITECTURE, "--draft-tokens", 3)
    assert trace(capsys, "--lengths", 3000, *named) == trace(capsys, "--lengths", 3000, "--policy", "seed")
