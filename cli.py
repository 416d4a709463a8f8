"""The command line: finds the subcommand and hands over to engine/commands/NAME.py.

Exit codes: 0 done, 1 the run failed, 2 wrong use or unusable input, 130 interrupted.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

COMMANDS_DIRECTORY = Path(__file__).resolve().parent / "engine" / "commands"
COMMANDS = ("generate", "chat", "eval", "inspect", "quantize", "trace", "ablate", "bench")
EXAMPLES = """examples:
  python cli.py generate "It is a truth universally acknowledged"
  python cli.py inspect model/embedded"""


def main(arguments: list[str]) -> int:
    """Run one subcommand; its exit code."""
    commands = "\n".join(f"  {name:<9} {_summary(name)}" for name in COMMANDS)
    overview = _parser("", f"mini-glm53: serve GLM-5.3, readably.\n\ncommands:\n{commands}", EXAMPLES)
    overview.add_argument("command", choices=COMMANDS, help="python cli.py COMMAND --help says more")
    name = overview.parse_args(arguments[:1]).command
    try:
        command = importlib.import_module(f"engine.commands.{name}")
        parser = _parser(f" {name}", _summary(name), command.EXAMPLES)
        command.add_arguments(parser)
        code = int(command.run(parser.parse_args(arguments[1:])))
        sys.stdout.flush()  # here a reader that has gone is caught, at exit it would not be
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=f"python cli.py{name}", description=description, epilog=epilog, formatter_class=layout
    )


def _summary(name: str) -> str:
    """First line of the command's docstring, read without importing it (and torch)."""
    source = (COMMANDS_DIRECTORY / f"{name}.py").read_text(encoding="utf-8")
    return source.partition("\n")[0].strip('"')


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
