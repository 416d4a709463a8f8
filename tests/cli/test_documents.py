"""What the documents show is what the commands print: every output, figure and picture is made again."""

import re
import shlex
from pathlib import Path

import pytest

import cli
from tests.command import run_cli

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
WALK = (ROOT / "docs" / "checkpoint-policy.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```\n\$ python cli\.py (.*)\n((?:(?!```).*\n)*)```$", WALK, re.MULTILINE)
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
NUMBER = r"(?<![\w.,-])\d[\d,]*\d(?![\w.]*\d)"  # of at least two digits, in no name or version
# Round numbers of the introduction, the weight of a state in tokens, 32,256 / 512, the answer's length, and arguments.
EXPLAINED = {"1,000", "700", "5,500", "63", "600", "512,513", "4000"}


def test_the_walk_through_shows_commands_and_pictures() -> None:
    assert len(SHOWN) == WALK.count("$ python") >= 8
    assert re.findall(r"\]\((pictures/.*?)\)", WALK) == [
        f"pictures/{name}.svg" for name in ("generic", "seed", "vllm-0.33", "ours")
    ]


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_command_prints_what_is_shown_below_it(capsys: Capture, command: str, printed: str) -> None:
    assert run_cli(capsys, *shlex.split(command)).out == printed


def test_every_figure_in_the_prose_is_printed_by_a_command() -> None:
    prose = re.sub(r"^```\n.*?^```$", "", WALK, flags=re.MULTILINE | re.DOTALL)
    printed = set(re.findall(NUMBER, "".join(output for _, output in SHOWN)))
    assert set(re.findall(NUMBER, prose)) - printed == EXPLAINED


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_what_trace_draws(capsys: Capture, tmp_path: Path, picture: Path) -> None:
    drawn = tmp_path / picture.name
    run_cli(capsys, "trace", "--lengths", 32320, "--policy", picture.stem, "--svg", drawn)
    assert drawn.read_text(encoding="utf-8") == picture.read_text(encoding="utf-8")


def test_the_readme_names_every_command_and_only_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in cli.COMMANDS:
        assert f"python cli.py {name}" in readme
    for path in re.findall(r"`((?:docs|engine|model|scheduler|tests)/[\w/.-]+)`", readme):
        assert (ROOT / path).exists(), path
