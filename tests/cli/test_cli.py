"""The command line explains itself without loading anything, and what it shows as an example is accepted."""

import argparse
import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import cli
from tests.command import Outcome, run_cli

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_the_overview_lists_every_command_without_torch() -> None:
    code = "import sys, cli\ntry: cli.main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    outcome = python("-c", code)
    assert outcome.returncode == 0, outcome.stderr
    for name in cli.COMMANDS:
        summary = next(line for line in outcome.stdout.splitlines() if line.startswith(f"  {name} "))
        assert summary.endswith(".") and len(summary.split()) > 3


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_shows_two_commands_that_parse(capsys: Capture, name: str) -> None:
    outcome = run_cli(capsys, name, "--help")
    assert outcome.code == 0 and outcome.err == ""
    command = importlib.import_module(f"engine.commands.{name}")
    assert outcome.out.rstrip().endswith(command.EXAMPLES)
    examples = command.EXAMPLES.splitlines()[1:]
    assert len(examples) == 2
    for example in examples:
        assert_parses(example)


def test_the_overviews_examples_parse() -> None:
    for example in cli.EXAMPLES.splitlines()[1:]:
        assert_parses(example)


def assert_parses(example: str) -> None:
    program, script, name, *arguments = shlex.split(example)
    assert (program, script) == ("python", "cli.py") and name in cli.COMMANDS
    parser = argparse.ArgumentParser()
    importlib.import_module(f"engine.commands.{name}").add_arguments(parser)
    parser.parse_args(arguments)


@pytest.mark.parametrize("arguments", [(), ("serve",), ("--model", "x")])
def test_without_a_known_command_the_commands_are_named(capsys: Capture, arguments: tuple[str, ...]) -> None:
    outcome = run_cli(capsys, *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert all(name in outcome.err for name in cli.COMMANDS)


def test_an_interrupt_outside_a_generation_is_no_traceback(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.commands.generate.read_prompts", interrupted)
    assert run_cli(capsys, "generate", "Emma") == Outcome(130, "", "")


def test_the_script_answers_on_stdout_alone() -> None:
    outcome = python("cli.py", "generate", "Emma", "--max-tokens", "2", "--temperature", "0")
    assert outcome.returncode == 0
    assert len(outcome.stdout.splitlines()) == 1 and outcome.stdout.strip()
    loaded, cache, reported = outcome.stderr.splitlines()
    assert loaded == "stop ids 0, 4, 6; MTP layer: drafts per step: 3"
    assert cache.startswith("cache: ") and reported.startswith("prompt ")


@pytest.mark.skipif(os.name != "posix", reason="closes a pipe")
def test_a_reader_that_went_away_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "cli.py", "inspect", "model/embedded"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    outcome = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=buffered, timeout=120
    )
    os.close(writer)
    assert outcome.returncode == 1 and outcome.stderr == ""
