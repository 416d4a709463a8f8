"""Runs a command line in this process: exit code, stdout and stderr."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

import cli


@dataclass(frozen=True)
class Outcome:
    """What a user sees of a command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Stdout as the one JSON document it must be."""
        document: dict[str, Any] = json.loads(self.out)
        return document


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> Outcome:
    """`python cli.py ARGUMENTS...`"""
    capsys.readouterr()
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    return Outcome(code, *capsys.readouterr())
