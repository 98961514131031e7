"""Measure which tests run which lines of fedtools, also in the processes that they start.

    python3 tests/covered.py run covered.sqlite [PYTEST ARGUMENT...]
    python3 tests/covered.py join covered.sqlite part.sqlite...
    python3 tests/covered.py lost before.sqlite after.sqlite
    python3 tests/covered.py files covered.sqlite

Each process measures itself under the name of the test that started it: the processes of pytest by
the hooks below, all others by coverage.py's .pth file and `fork_server.py`. The result of `run` is
coverage.py's data file, with two more tables: the processor time of each test, and the sources that
were run. `join` makes one of the results of several runs. `lost` prints, as FILE:LINE, the lines
that the first run covered and the second did not, and exits with 1 if there are any; lines are
matched by their text, since their numbers change. `files` prints the processor time of each file of
tests, with the measurement's own.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import functools
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parent.parent
PASSED = ("PYTEST_CURRENT_TEST", "COVERAGE_PROCESS_START")
# Processes end, and fork, past the interpreter's own exit.
SETTINGS = """\
[run]
source = {root}/fedtools
data_file = {folder}/data
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
patch = _exit, fork
"""
TABLES = """\
CREATE TABLE seconds (phase TEXT, outcome TEXT, seconds REAL);
CREATE TABLE source (path TEXT, text TEXT);
"""
# The processor time at which the current phase of a test began.
_begun: dict[str, float] = {}


def pytest_configure() -> None:
    """Name the current test to all processes, whenever their environment was made."""
    begin = subprocess.Popen.__init__

    @functools.wraps(begin)
    def named(self, *arguments, env=None, **options) -> None:
        if env is not None:
            env = {**env, **{name: os.environ[name] for name in PASSED if name in os.environ}}
        begin(self, *arguments, env=env, **options)

    subprocess.Popen.__init__ = named


def _name_phase(item: pytest.Item, phase: str) -> None:
    """Name what is measured from now on like `PYTEST_CURRENT_TEST`, in forks as well."""
    import coverage

    _begun[item.nodeid] = _spent()
    if running := coverage.Coverage.current():
        name = f"{item.nodeid} ({phase})"
        running.switch_context(name)
        running.set_option("run:context", name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    _name_phase(item, "setup")


def pytest_runtest_call(item: pytest.Item) -> None:
    _name_phase(item, "call")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    _name_phase(item, "teardown")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the processor time of a test; pytest's first process runs none if it has others."""
    if report.nodeid in _begun:
        spent = _spent() - _begun[report.nodeid]
        _record(f"{report.nodeid} ({report.when})", report.outcome, spent)


def measure_fork() -> None:
    """Measure this process, which is a fork of `fork_server.py`, if its test is measured."""
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        coverage.process_startup(force=True)
        phase = os.environ.get("PYTEST_CURRENT_TEST", "")
        atexit.register(lambda: _record(phase, "fork", _spent()))


def _spent() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def _record(phase: str, outcome: str, seconds: float) -> None:
    path = Path(os.environ["COVERAGE_PROCESS_START"]).with_name("seconds.jsonl")
    with open(path, "a") as file:
        file.write(json.dumps((phase, outcome, seconds)) + "\n")


def measure(out: Path, arguments: list[str]) -> int:
    """Run pytest, write its coverage to a new file, and return its exit status."""
    with tempfile.TemporaryDirectory(prefix="covered.", dir=out.parent) as name:
        folder = Path(name)
        settings = folder / "coveragerc"
        settings.write_text(SETTINGS.format(root=ROOT, folder=folder))
        environment = os.environ | {"COVERAGE_PROCESS_START": str(settings)}
        environment.pop("PYTEST_CURRENT_TEST", None)
        command = [sys.executable, "-m", "pytest", "-p", "tests.covered", *arguments]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if not (folder / "seconds.jsonl").exists():
            sys.exit(f"covered.py: pytest ran no test (exit status {code}): {out} is not written")
        lines = (folder / "seconds.jsonl").read_text().splitlines()
        paths = sorted((ROOT / "fedtools").rglob("*.py"))
        sources = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
        _write(out, [folder], list(map(json.loads, lines)), sources)
    return code


def join(out: Path, parts: list[Path]) -> None:
    """Write the results of several runs as one, of the sources of the first."""
    seconds = [row for part in parts for row in _read(part, "SELECT * FROM seconds")]
    sources = dict(_read(parts[0], "SELECT * FROM source"))
    for part in parts:
        if dict(_read(part, "SELECT * FROM source")) != sources:
            sys.exit(f"{part}: measured other sources than {parts[0]}")
    _write(out, parts, seconds, sources)


def _write(out: Path, found: list[Path], seconds: list[tuple], sources: dict[str, str]) -> None:
    """Write a result, of files and folders of coverage.py's data."""
    with tempfile.TemporaryDirectory(prefix="joined.", dir=out.parent) as name:
        # Their names in a folder are this one's, with more behind it.
        joined = Path(name) / "data"
        command = [sys.executable, "-m", "coverage", "combine", "-q", "--keep"]
        subprocess.run([*command, f"--data-file={joined}", *found], check=True)
        with contextlib.closing(sqlite3.connect(joined)) as data, data:
            data.executescript(TABLES)
            data.executemany("INSERT INTO seconds VALUES (?, ?, ?)", seconds)
            data.executemany("INSERT INTO source VALUES (?, ?)", sources.items())
        joined.rename(out)


def covered_lines(path: Path) -> Iterator[tuple[str, str, set[int]]]:
    """Yield files of fedtools, phases of tests, as `test (phase)`, and the lines that they ran."""
    from coverage.numbits import numbits_to_nums

    select = (
        "SELECT file.path, context.context, numbits FROM line_bits "
        "JOIN file ON file.id = file_id JOIN context ON context.id = context_id"
    )
    for name, phase, bits in _read(path, select):
        # Wherever the checkout was.
        yield name[name.rindex("/fedtools/") + 1 :], phase, set(numbits_to_nums(bits))


def read_sources(path: Path) -> dict[str, list[str]]:
    """Return the lines of the sources that a run measured."""
    return {name: text.splitlines() for name, text in _read(path, "SELECT * FROM source")}


def read_seconds(path: Path) -> tuple[dict[str, float], set[str]]:
    """Return the processor time of each test, and the tests that did not pass."""
    seconds: Counter[str] = Counter()
    others = set()
    for phase, outcome, spent in _read(path, "SELECT * FROM seconds"):
        test = phase.rpartition(" (")[0]
        seconds[test] += spent
        if outcome not in ("passed", "fork"):
            others.add(test)
    return seconds, others


def _read(path: Path, select: str) -> list[tuple]:
    uri = f"{path.resolve().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as data:
            return data.execute(select).fetchall()
    except sqlite3.Error as error:
        sys.exit(f"{path}: no result of `covered.py run`: {error}")


def lost_lines(before: Path, after: Path) -> Iterator[tuple[str, int]]:
    """Yield files and lines of the later sources that only the earlier run covered."""
    ran: list[dict[str, set[int]]] = [defaultdict(set), defaultdict(set)]
    for path, covered in zip((before, after), ran, strict=True):
        for name, _, lines in covered_lines(path):
            covered[name] |= lines
    then, now = read_sources(before), read_sources(after)
    for name in sorted(set(then) & set(now)):
        blocks = difflib.SequenceMatcher(None, then[name], now[name], autojunk=False)
        for old, new, size in blocks.get_matching_blocks():
            for place in range(1, size + 1):
                if old + place in ran[0][name] and new + place not in ran[1][name]:
                    yield name, new + place


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run tests and write what they cover")
    run.add_argument("out", type=Path, help="a new file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of pytest")
    whole = commands.add_parser("join", help="write one result of those of several runs")
    whole.add_argument("out", type=Path, help="a new file")
    whole.add_argument("parts", type=Path, nargs="+")
    lost = commands.add_parser("lost", help="print what is no longer covered")
    lost.add_argument("before", type=Path)
    lost.add_argument("after", type=Path)
    files = commands.add_parser("files", help="print the processor time of each file of tests")
    files.add_argument("data", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        return measure(given.out.resolve(), given.arguments)
    if given.command == "join":
        join(given.out.resolve(), given.parts)
    elif given.command == "files":
        print_files(given.data)
    else:
        return print_lost(given.before, given.after)
    return 0


def print_files(data: Path) -> None:
    spent: Counter[str] = Counter()
    for test, seconds in read_seconds(data)[0].items():
        spent[test.partition("::")[0]] += seconds
    for name, seconds in spent.most_common():
        print(f"{seconds:8.1f} {name}")


def print_lost(before: Path, after: Path) -> int:
    """Print lines that are no longer covered, and return whether there are any."""
    sources, code = read_sources(after), 0
    for name, line in lost_lines(before, after):
        print(f"{name}:{line}: {sources[name][line - 1].strip()}")
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
