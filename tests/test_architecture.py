"""The rooms keep their walls: who may import whom, how long a file may be, and what a repository may say."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("engine", "model", "scheduler")
SOURCES = sorted([ROOT / "cli.py", *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))])
# Beside the standard library; `engine` also may use what reads text.
ALLOWED = {
    "scheduler": {"scheduler"},
    "model": {"model", "torch", "safetensors"},
    "engine": {*ROOMS, "torch", "safetensors", "transformers"},
    "cli.py": set[str](),
}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    """Names that a file imports when it runs, `from a import b` as "a.b"; imports for types are left out."""

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{relative(path)}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    return walk(ast.parse(path.read_text(encoding="utf-8")))


def imported_files(path: Path) -> set[Path]:
    """Our own files among the imports; a package's own file counts when something in it is imported."""
    found = set()
    for name in imports(path):
        for module in (name, name.rpartition(".")[0]):
            place = ROOT.joinpath(*module.split("."))
            found |= {file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    allowed = ALLOWED[path.relative_to(ROOT).parts[0]] | set(sys.stdlib_module_names)
    assert {name.partition(".")[0] for name in imports(path)} <= allowed


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {path: imported_files(path) for path in SOURCES}
    assert sum(map(len, graph.values())) > len(SOURCES)
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("module", sorted(path.stem for path in (ROOT / "scheduler").glob("[a-z]*.py")))
def test_the_scheduler_imports_without_torch(module: str) -> None:
    code = f"import sys, scheduler.{module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    outcome = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert not {"torch", "numpy", "model", "engine"} & set(outcome.stdout.split())


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_and_functions_stay_short(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None and node.end_lineno - node.lineno < 80, node.name


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """Files under version control."""
    # The owner of a checkout may be another user than the one who tests it.
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    try:
        listing = subprocess.run(git, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listing.split("\0") if name and (path := ROOT / name).exists()]


def test_tracked_files_are_small_together(tracked: list[Path]) -> None:
    assert sum(path.stat().st_size for path in tracked) < 30_000_000


def test_no_tracked_text_names_a_place_on_some_machine(tracked: list[Path]) -> None:
    machine = re.compile(r"(?<![\w.:/-])/(root|home|work|Users|mnt|opt|srv|data)/|\.\./(shared)\b|/(shared)/")
    for path in tracked:
        if path.suffix not in (".safetensors", ".png"):
            found = machine.search(path.read_text(encoding="utf-8"))
            assert found is None, f"{relative(path)}: {found}"
