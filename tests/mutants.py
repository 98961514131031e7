"""Change fedtools silently, one place at a time, and run the tests that concern it.

    tests/mutants.py --draw 60 --seed 59 > drawn.jsonl
    tests/mutants.py drawn.jsonl --map covered.sqlite --out result.tsv

A line of the JSONL file is a change: its name, file, old text, which occurs once, and new text. The
map is the result of `covered.py run` for the same sources. A change concerns the tests that run its
lines, or other lines of its file if these run once a process; where a fixture does, all tests of
the file with the fixture. They run in a copy of the last commit, file by file, the cheapest first,
up to the first that fails, which must pass without the change.

A row of the result has a verdict: caught; timeout (a process ran longer than the limit); survived;
`survived the first`, where more tests are concerned than the budget allows; missing, where the old
text does not occur once; invalid, where the new one is no Python; error. A run that was stopped
goes on where it was: rows that are there stay. `--survivors` looks up at one commit what survived
at another.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import difflib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import import_module
from importlib.metadata import entry_points
from multiprocessing import get_context
from pathlib import Path

import pytest
from concerned import Map, OutdatedMap
from drawn_mutants import draw

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("name", "verdict", "test", "tests", "concerned", "seconds")
# What most tests import.
SHARED = ("hypothesis", "scipy.stats", "torch", "typer")


class Unusable(Exception):
    """An error about a file that was given."""


@dataclass(frozen=True)
class Mutant:
    """A change of one file of fedtools."""

    name: str
    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        if (count := text.count(self.old)) != 1:
            raise Unusable(f"the old text occurs {count} times in {self.file}")
        return text.replace(self.old, self.new)

    def changed(self, text: str) -> range:
        """Return the lines of a text that change, or those around what is inserted."""
        old, new = self.old.split("\n"), self.new.split("\n")
        codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        changed = [code for code in codes if code[0] != "equal"]
        before = text[: text.index(self.old)].count("\n")
        first, last = before + changed[0][1] + 1, before + changed[-1][2]
        return range(first, last + 1) if last >= first else range(max(last, 1), first + 1)


def read_mutants(path: Path) -> list[Mutant]:
    """Read a JSONL file of changes."""
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            found.append(Mutant(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise Unusable(f"{path}:{number}: no name, file, old, new: {error}") from None
    if len({one.name for one in found}) < len(found):
        raise Unusable(f"{path}: two changes have the same name")
    return found


class Chosen:
    """A plugin of pytest that runs given tests in the given order and writes which fail."""

    def __init__(self, tests: list[str], said: Path):
        self._places = {test: place for place, test in enumerate(tests)}
        self._said = said

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._places]
        items.sort(key=lambda item: self._places[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._write(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(report)

    def _write(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed:
            self._said.write_text(report.nodeid)


class Copy:
    """A copy of the checkout in which mutants are tried.

    Args:
        folder: where it is made.
        limit: of a process's processor time, in seconds.
        shared: modules that are imported once for all runs, besides pytest's plugins.
    """

    def __init__(self, folder: Path, limit: int, shared: list[str]):
        self._root, self._limit = folder / "checkout", limit
        self._passes: dict[str, bool] = {}
        self._writes = 0
        command = ["git", "clone", "-q", "--shared", str(ROOT), str(self._root)]
        subprocess.run(command, check=True)
        if (ROOT / ".venv").exists():
            (self._root / ".venv").symlink_to(ROOT / ".venv")
        for name in shared:
            import_module(name)
        for plugin in entry_points(group="pytest11"):
            plugin.load()

    def judge(self, mutant: Mutant, tests: list[str]) -> tuple[str, str, float]:
        """Return a verdict on a mutant, what it is due to, and the processor time that it took."""
        path = self._root / mutant.file
        text = path.read_text("utf-8")
        begun, usable = _children(), tests
        while True:
            self._write(path, mutant.apply(text))
            verdict, test = self._run(usable)
            self._write(path, text)
            # A failing collection names a file.
            cause = [one for one in usable if one == test or one.startswith(f"{test}::")]
            if verdict == "caught" and not cause:
                verdict = "error"
            if verdict != "caught" or self._passed(cause[0]):
                return verdict, test, _children() - begun
            usable = [one for one in usable if one != cause[0]]

    def _passed(self, test: str) -> bool:
        """Return whether a test passes without a mutant."""
        if test not in self._passes:
            self._passes[test] = self._run([test])[0] == "survived"
        return self._passes[test]

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, "utf-8")
        # Python takes a compiled file for current if seconds and size are those of the source.
        self._writes += 1
        os.utime(path, (self._writes * 10,) * 2)

    def _run(self, tests: list[str]) -> tuple[str, str]:
        if not tests:
            return "survived", ""
        folder = Path(tempfile.mkdtemp(prefix="mutant."))
        try:
            child = os.fork()
            if not child:
                self._become(tests, folder)
            status = _wait(child, time.monotonic() + 20 * self._limit)
            said = folder / "said"
            if status is None or os.WIFSIGNALED(status):
                return "timeout", f"status {status}"
            if said.exists():
                return "caught", said.read_text()
            if status == 0:
                return "survived", ""
            log = (folder / "log").read_text(errors="replace").strip()
            return "error", log.rpartition("\n")[2]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _become(self, tests: list[str], folder: Path) -> None:
        """Run tests in this process, to its end."""
        code = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (self._limit, self._limit + 5))
            for number in (1, 2):
                os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            os.environ |= {"TMPDIR": str(folder), "PYTHONPATH": str(self._root)}
            tempfile.tempdir = None
            os.chdir(self._root)
            sys.path[0] = str(self._root)
            files = dict.fromkeys(test.partition("::")[0] for test in tests)
            options = ("-x", "-q", "-p", "no:cacheprovider")
            code = pytest.main([*options, *files], plugins=[Chosen(tests, folder / "said")])
        finally:
            os._exit(code)


def _children() -> float:
    return sum(os.times()[2:4])


def _wait(child: int, deadline: float) -> int | None:
    """Return the status of a child, or kill it, with its group, at a deadline."""
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@dataclass
class Task:
    """A mutant and the tests that it concerns; as many of them run as the budget allows."""

    mutant: Mutant
    concerned: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    # A verdict without a test, and its reason.
    problem: tuple[str, str] | None = None


def plan(mutants: list[Mutant], covered: Map, budget: float) -> Iterator[Task]:
    """Choose the tests of mutants."""
    for mutant in mutants:
        try:
            text = (ROOT / mutant.file).read_text("utf-8")
            ast.parse(mutant.apply(text))
        except (OSError, Unusable) as error:
            yield Task(mutant, problem=("missing", str(error)))
            continue
        except SyntaxError as error:
            yield Task(mutant, problem=("invalid", str(error)))
            continue
        concerned = covered.concerned(mutant.file, text, mutant.changed(text))
        yield Task(mutant, concerned, covered.within(concerned, budget))


def begin_worker(folder: Path, limit: int, shared: list[str]) -> None:
    global _copy
    _copy = Copy(Path(tempfile.mkdtemp(dir=folder)), limit, shared)


def work(task: Task) -> dict[str, object]:
    """Return a row of the result."""
    numbers = {"tests": len(task.tests), "concerned": len(task.concerned)}
    row = {"name": task.mutant.name, **numbers, "seconds": "0"}
    if task.problem:
        return row | dict(zip(("verdict", "test"), task.problem, strict=True))
    verdict, test, seconds = _copy.judge(task.mutant, task.tests)
    if verdict == "survived" and len(task.tests) < len(task.concerned):
        verdict = "survived the first"
    return row | {"verdict": verdict, "test": test, "seconds": f"{seconds:.1f}"}


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def judge_all(tasks: list[Task], out: Path, jobs: int, *copied: int | list[str]) -> None:
    """Append a row for each mutant, as soon as it is judged in a copy for each job."""
    begun = out.exists()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants.")))
        file = stack.enter_context(open(out, "a", newline="", encoding="utf-8", buffering=1))
        options = {"delimiter": "\t", "lineterminator": "\n"}
        writer = csv.DictWriter(file, COLUMNS, **options)
        if not begun:
            writer.writeheader()
        workers = ProcessPoolExecutor(jobs, get_context("fork"), begin_worker, (folder, *copied))
        with workers as pool:
            for done in as_completed([pool.submit(work, task) for task in tasks]):
                row = done.result()
                writer.writerow(row)
                print(f"{row['verdict']}: {row['name']}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("mutants", type=Path, nargs="?", help="a JSONL file of changes")
    parser.add_argument("--draw", type=int, metavar="N", help="print N changes, and do no more")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--map", type=Path, help="a file of covered.py")
    parser.add_argument("--out", type=Path, help="the result, a TSV file")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names, with * and ?")
    parser.add_argument("--survivors", type=Path, help="only those that survived in this result")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--budget", type=float, default=150, help="for a change's tests, seconds")
    parser.add_argument("--limit", type=int, default=300, help="of a process, seconds")
    parser.add_argument("--shared", nargs="*", default=SHARED, help="modules to import once")
    parser.add_argument("--estimate", action="store_true", help="print the costs, and do no more")
    given = parser.parse_args()
    if given.draw is None and not (given.mutants and given.map and given.out):
        parser.error("give --draw N, or a JSONL file, --map and --out")
    return given


def main() -> None:
    given = parse()
    if given.draw is not None:
        for entry in draw(ROOT, given.draw, given.seed):
            print(json.dumps(entry, ensure_ascii=False))
        return
    mutants = read_mutants(given.mutants)
    if given.only:
        mutants = [one for one in mutants if any(fnmatch(one.name, name) for name in given.only)]
    if given.survivors:
        rows = read_rows(given.survivors)
        names = {row["name"] for row in rows if row["verdict"].startswith("survived")}
        mutants = [one for one in mutants if one.name in names]
    done = {row["name"] for row in read_rows(given.out)}
    covered = Map(given.map)
    tasks = list(plan([one for one in mutants if one.name not in done], covered, given.budget))
    costs = [sum(covered.seconds.get(test, 0) for test in task.tests) for task in tasks]
    print(f"{len(tasks)} changes, {sum(costs):.0f} s of tests if all survive", flush=True)
    if given.estimate:
        for task, cost in zip(tasks, costs, strict=True):
            print(f"{cost:.0f}\t{len(task.tests)}/{len(task.concerned)}\t{task.mutant.name}")
        return
    command = ["git", "status", "--porcelain", "--untracked-files=no"]
    if tasks and subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout:
        raise Unusable(f"{ROOT} differs from its last commit, which is what would be changed")
    # Threads would not survive the forks.
    os.environ |= {"OMP_NUM_THREADS": "1"}
    judge_all(tasks, given.out, given.jobs, given.limit, given.shared)


if __name__ == "__main__":
    try:
        main()
    except (Unusable, OutdatedMap) as error:
        sys.exit(f"mutants.py: {error}")
