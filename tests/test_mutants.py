"""`mutants.py` and `covered.py`, on a package of one module whose mutants are counted by hand."""

from __future__ import annotations

import ast
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Result, run
from covered import SETTINGS, covered_lines, read_sources
from drawn_mutants import draw, edits
from forked import forked

MEAN = '''\
"""Means of 1 or more values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING or 0 < 1:
    LIMIT = 3

Size: Literal[7]


def mean(values: list[float], least: int = 0) -> float:
    """Return the sum < 1."""
    if len(values) <= least:
        raise ValueError(f"{len(values) + 1} values", 5)
    found = total(values, [])
    print("of", len(values) + 1)
    return found / len(values)


def total(values: list[float], seen: list[float]) -> float:
    for value in values[:LIMIT]:
        seen.append(value)
    return sum(seen)


def countdown(left: int) -> int:
    while left > 0:
        left -= 1
    return left
'''
# Line, kind and text of all that can be drawn: nothing of docstrings, annotations, messages.
EDITS = [
    (7, "comparison", "<="),
    (7, "plus-minus-one", "1"),
    (7, "plus-minus-one", "-1"),
    (7, "plus-minus-one", "2"),
    (7, "plus-minus-one", "0"),
    (8, "plus-minus-one", "4"),
    (8, "plus-minus-one", "2"),
    (13, "plus-minus-one", "1"),
    (13, "plus-minus-one", "-1"),
    (15, "comparison", "<"),
    (16, "deletion", "pass"),
    (17, "swap", "[], values"),
    (24, "deletion", "pass"),
    (29, "comparison", ">="),
    (29, "plus-minus-one", "1"),
    (29, "plus-minus-one", "-1"),
    (30, "deletion", "pass"),
    (30, "plus-minus-one", "2"),
    (30, "plus-minus-one", "0"),
]
TESTS = """\
import subprocess
import sys
from pathlib import Path

import pytest
from fedtools.methods.mean import countdown, mean


def test_only_in_the_checkout():
    assert countdown(1) == 0
    assert (Path(__file__).parent / "unversioned").exists()


def test_countdown():
    assert countdown(2) == 0


def test_red():
    assert mean([1.0]) == 2


@pytest.fixture(scope="module")
def made():
    return mean([2.0, 4.0])


def test_fixture(made):
    pass


def test_other_of_fixture(made):
    assert made == 3


def test_one():
    assert mean([5.0]) == 5


def test_process():
    code = "from fedtools.methods.mean import mean\\ntry:\\n    mean([])\\nexcept ValueError: pass"
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, env={}, check=True)
"""
# Plugins of pytest take longer to start than the tests.
BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """Return a checkout of the package, with its map."""
    folder = tmp_path_factory.mktemp("toy")
    package, tests = folder / "fedtools" / "methods", folder / "tests"
    package.mkdir(parents=True)
    (folder / "fedtools" / "__init__.py").touch()
    (package / "mean.py").write_text(MEAN)
    tests.mkdir()
    (tests / "test_mean.py").write_text(TESTS)
    for name in ("concerned.py", "covered.py", "drawn_mutants.py", "mutants.py"):
        shutil.copy(ROOT / "tests" / name, tests)
    identity = ("-c", "user.name=a", "-c", "user.email=a")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "a")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    (tests / "unversioned").touch()
    assert covered(folder, "run", folder / "map", "-q", "-p", "no:cacheprovider").code == 1
    return folder


def covered(folder: Path, *arguments: str | Path) -> Result:
    return run(sys.executable, folder / "tests" / "covered.py", *arguments, cwd=folder, env=BARE)


def mutants(folder: Path, out: Path, entries: list[dict], *more: str) -> list[dict[str, str]]:
    """Judge changes and return the rows."""
    given = out.with_suffix(".jsonl")
    given.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    words = (given, "--map", folder / "map", "--out", out, "--limit", "4", "--shared", *more)
    run(sys.executable, folder / "tests" / "mutants.py", *words, cwd=folder, env=BARE).ok()
    with open(out, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def change(name: str, old: str, new: str) -> dict[str, str]:
    return {"name": name, "file": "fedtools/methods/mean.py", "old": old, "new": new}


def test_all_that_can_be_drawn(tmp_path):
    path = tmp_path / "mean.py"
    path.write_text(MEAN)
    found = [(one.line, one.kind, one.new.decode().strip()) for one in edits(path)]
    assert sorted(found) == sorted(EDITS)


def test_drawn_ones_are_reproducible_and_change_the_program(toy):
    drawn = draw(toy, 100, 1)
    assert drawn == draw(toy, 100, 1)
    assert drawn[:3] != draw(toy, 3, 2)
    # One of each kind a line.
    assert len({one["name"] for one in drawn}) == len(drawn) == len({one[:2] for one in EDITS})
    for one in drawn:
        assert MEAN.count(one["old"]) == 1
        changed = MEAN.replace(one["old"], one["new"])
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(MEAN))


def test_drawn_ones_of_fedtools_are_valid():
    drawn = draw(ROOT, 60, 59)
    assert len({one["name"] for one in drawn}) == 60
    for one in drawn:
        text = (ROOT / one["file"]).read_text()
        assert text.count(one["old"]) == 1
        ast.parse(text.replace(one["old"], one["new"]))


def test_verdicts(toy, tmp_path):
    out = tmp_path / "result"
    first = change("survived", 'print("of"', 'print("off"')
    (kept,) = mutants(toy, out, [first], "--budget", "0")
    assert kept["verdict"] == "survived the first"
    # All but the red one: a fixture runs the line. The one that starts a process takes longest.
    assert 1 <= int(kept["tests"]) < int(kept["concerned"]) == 6
    entries = [
        first,
        change("by value", "/ len(values)", "* len(values)"),
        change("by a default", "least: int = 0", "least: int = 1"),
        change("by a process", "<= least", "< least"),
        # A test that fails without the change, too, catches nothing.
        change("red", "while left > 0", "while left != 0"),
        change("endless", "left -= 1", "pass"),
        change("unknown", "no such text", ""),
        change("twice", "-> float", ""),
        change("half", "return sum(seen)", "return sum("),
    ]
    once, *rows = mutants(toy, out, entries)
    assert once == kept
    assert {row["name"]: (row["verdict"], row["test"]) for row in rows} == {
        "by value": ("caught", "tests/test_mean.py::test_other_of_fixture"),
        "by a default": ("caught", "tests/test_mean.py::test_one"),
        "by a process": ("caught", "tests/test_mean.py::test_process"),
        "red": ("survived", ""),
        "endless": ("timeout", f"status {signal.SIGXCPU}"),
        "unknown": ("missing", "the old text occurs 0 times in fedtools/methods/mean.py"),
        "twice": ("missing", "the old text occurs 2 times in fedtools/methods/mean.py"),
        "half": ("invalid", "'(' was never closed (<unknown>, line 25)"),
    }
    words = ("--map", toy / "map", "--out", tmp_path / "new", "--survivors", out, "--estimate")
    program = toy / "tests" / "mutants.py"
    told = run(sys.executable, program, out.with_suffix(".jsonl"), *words, cwd=toy).ok().out
    assert [line.split("\t")[-1] for line in told.splitlines()[1:]] == ["survived", "red"]


def test_what_is_no_longer_covered(toy, tmp_path):
    path = toy / "fedtools" / "methods" / "mean.py"
    try:
        # Numbers of lines change; the line that is new was not covered before.
        path.write_text(MEAN.replace("LIMIT = 3", "LIMIT = 3\n    OTHER = 4"))
        fewer = ("-q", "-k", "fixture or countdown", "-p", "no:cacheprovider")
        assert covered(toy, "run", tmp_path / "map", *fewer).code == 0
    finally:
        path.write_text(MEAN)
    done = covered(toy, "lost", toy / "map", tmp_path / "map")
    raised = 'raise ValueError(f"{len(values) + 1} values", 5)'
    assert (done.code, done.out) == (1, f"fedtools/methods/mean.py:17: {raised}\n")
    assert covered(toy, "lost", tmp_path / "map", toy / "map").ok().out == ""
    other = covered(toy, "join", tmp_path / "whole", toy / "map", tmp_path / "map")
    assert other.code == 1
    assert "measured other sources" in other.err


def test_joined_results_are_those_of_the_runs(toy, tmp_path):
    covered(toy, "join", tmp_path / "whole", toy / "map", toy / "map").ok()
    expected, found = (sorted(covered_lines(path)) for path in (toy / "map", tmp_path / "whole"))
    assert found == expected
    assert read_sources(tmp_path / "whole") == read_sources(toy / "map")
    assert covered(toy, "files", toy / "map").ok().out.split()[1:] == ["tests/test_mean.py"]


def test_lines_are_those_of_the_test_that_runs_them(toy):
    ran = {(phase, line) for _, phase, lines in covered_lines(toy / "map") for line in lines}
    tests = {phase.partition("::")[2] for phase, line in ran if line == 16}
    assert tests == {"test_process (call)"}
    tests = {phase.partition("::")[2] for phase, line in ran if line == 19}
    assert tests == {"test_red (call)", "test_fixture (setup)", "test_one (call)"}


def test_forks_are_measured(tmp_path):
    """A fork of the server writes what it ran, under the name of the test that asked for it."""
    settings = tmp_path / "settings"
    settings.write_text(SETTINGS.format(root=ROOT, folder=tmp_path))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = forked({**os.environ, "PATH": path, "COVERAGE_PROCESS_START": str(settings)})
    run("fedtools", "methods", env=environment).ok()
    (data,) = tmp_path.glob("data.*")
    found = {(Path(name).name, phase) for name, phase, _ in covered_lines(data)}
    name = "tests/test_mutants.py::test_forks_are_measured (call)"
    assert ("registry.py", name) in found
    assert json.loads((tmp_path / "seconds.jsonl").read_text())[:2] == [name, "fork"]
