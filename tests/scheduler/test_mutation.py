"""Of all small changes to the heart (strings excepted) these tests notice at least 90 %, and the rest are explained.

`pip install -r requirements-mutation.txt`, then `pytest -m slow -s tests/scheduler/test_mutation.py`. The tool runs,
for each mutant, the tests that reach the changed function, fastest first, up to the first failure. What survives is
printed as a line for `mutation_survivors.txt`, where it needs a reason.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SURVIVORS = Path(__file__).with_name("mutation_survivors.txt")
KILLED = {1, 3, -11, -24, 24, 36, 152, 255}  # a failed test, a broken run, a run without end

# `mutmut run` without its changes to string literals: messages and reasons are not behaviour.
RUN = """
from mutmut.__main__ import cli
from mutmut.mutation import mutators
operators = mutators.mutation_operators
operators[:] = [pair for pair in operators if pair[1] is not mutators.operator_string]
cli(["run", "--max-children", "2"])
"""


def results(tree: Path) -> dict[str, int]:
    """Exit code of the tests by mutant."""
    metas = [json.loads(meta.read_text()) for meta in (tree / "mutants/scheduler").glob("*.meta")]
    return {name: code for meta in metas for name, code in meta["exit_code_by_key"].items()}


def described(name: str) -> str:
    """`module.Class.function: old code => new code` of a mutant, from the diff of its function."""
    from mutmut.mutation.diff_apply import find_mutant, get_diff_for_mutant

    lines = get_diff_for_mutant(name, path=find_mutant(name).path).splitlines()[2:]
    old, new = (" ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")
    where = name.removeprefix("scheduler.").partition("__mutmut")[0].replace(".x_", ".")
    return f"{where.replace('.xǁ', '.').replace('ǁ', '.')}: {old} => {new}"


def explained() -> set[str]:
    """The mutants that may survive."""
    lines = SURVIVORS.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


@pytest.mark.slow
def test_small_changes_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mutmut", reason="needs requirements-mutation.txt")
    for part in ("scheduler", "tests/scheduler"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, check=True)
    codes = results(tmp_path)
    alive = sorted(name for name, code in codes.items() if code not in KILLED)
    rate = 1 - len(alive) / len(codes)
    print(f"\n{len(codes)} mutants, {rate:.1%} killed, {len(alive)} survivors")
    monkeypatch.chdir(tmp_path)
    survivors = {described(name) for name in alive}
    unexplained = sorted(survivors - explained())
    print(*unexplained, sep="\n")
    assert rate >= 0.9
    assert not unexplained
