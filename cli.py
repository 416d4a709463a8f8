"""The command line: finds the subcommand and hands over to engine/commands/NAME.py.

Exit codes: 0 done, 1 the run failed, 2 wrong use or unusable input, 130 interrupted.
"""

import argparse
import ast
import importlib
import os
import sys
from pathlib import Path

COMMANDS_DIRECTORY = Path(__file__).resolve().parent / "engine" / "commands"
COMMANDS = ("generate", "eval", "inspect", "quantize", "bench", "trace", "ablate")
EXAMPLES = """examples:
  python cli.py generate "It is a truth universally acknowledged"
  python cli.py inspect model/embedded"""


def main(arguments: list[str]) -> int:
    """Run one subcommand; its exit code."""
    if not arguments or arguments[0] not in COMMANDS:
        _overview().parse_args(arguments)
        _overview().error(f"give a command: {', '.join(COMMANDS)}")
    name = arguments[0]
    command = importlib.import_module(f"engine.commands.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python cli.py {name}",
        description=_summary(name),
        epilog=command.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    try:
        code = int(command.run(parser.parse_args(arguments[1:])))
        sys.stdout.flush()  # here a reader that has gone is caught, at exit it would not be
        return code
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone, e.g. `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(f"error: {error}", file=sys.stderr)
        return 2


def _overview() -> argparse.ArgumentParser:
    lines = [f"  {name:<9} {_summary(name)}" for name in COMMANDS]
    parser = argparse.ArgumentParser(
        prog="python cli.py",
        usage="python cli.py COMMAND ...   (python cli.py COMMAND --help)",
        description="\n".join(["mini-glm53: serve GLM-5.3, readably.", "", "commands:", *lines]),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    return parser


def _summary(name: str) -> str:
    """First line of the command's docstring, read without importing it (and torch)."""
    source = (COMMANDS_DIRECTORY / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
