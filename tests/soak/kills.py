"""Stop federations at any moment, resume by the same command, compare with an uninterrupted one.

Three things stop a command here: a kill -9 of all its processes, or some, at a random moment; its
end right before or after a change of a folder; a disk that is full from its k-th write on, or at
that one alone. In each case, no file may be half-written, and the same command, run again, must
write the same bytes and leave no temporary file. A process that finds another one dead, or the disk
full, must report it in one line.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fork_server
import forks
from faults import CRASHED, Fault
from federations import SCENARIOS, WORLDS, Process, Stage, World

from fedtools.core.errors import UserError
from fedtools.core.tables import format_table

PATIENCE = 30.0


class Bug(Exception):
    """A violation of a property under test."""


def content(path: Path) -> dict[str, bytes]:
    """Return what must be the same: every file's content, except times and paths."""
    found = {}
    for file in path.rglob("*"):
        name = str(file.relative_to(path))
        if file.is_dir() or name.startswith((".locks/", "ranks/")) or "/update." in name:
            continue
        raw = file.read_bytes()
        if file.name == "ledger.tsv":
            rows = [line.split(b"\t") for line in raw.splitlines()]
            at = rows[0].index(b"seconds") if rows else 0
            raw = b"\n".join(b"\t".join([*row[:at], *row[at + 1 :]]) for row in rows)
        # A hash of a ledger with its seconds; the number of jobs; time and versions; what was run.
        own = file.name in (".done", "jobs", "software.yaml", "commands.sh")
        own = own or name.startswith("tensorboard/")
        found[name] = b"" if own else raw
    return found


def check_whole(path: Path) -> None:
    """Check that the reader of every file under its final name accepts it."""
    for file in path.rglob("*"):
        if file.is_file() and file.suffix != ".tmp" and file.parent.name != "ranks":
            try:
                forks.read(file)
            except UserError as error:
                raise Bug(f"half-written: {error}") from None


def check_clean(path: Path) -> None:
    """Check that no temporary file is left."""
    if left := [str(file.relative_to(path)) for file in path.rglob("*.tmp")]:
        raise Bug(f"left over: {' '.join(left)}")


def check_same(path: Path, reference: dict[str, bytes]) -> None:
    """Check that an experiment equals the uninterrupted one."""
    found = content(path)
    if wrong := [n for n in found.keys() | reference.keys() if found.get(n) != reference.get(n)]:
        raise Bug(f"not the same: {' '.join(sorted(wrong)[:10])}")


def check_line(status: int, said: str, *words: str) -> None:
    """Check that a command did its work, or reported in one line why it did not."""
    for mark in ("Traceback", "Exception ignored", "resource_tracker", "Warning"):
        if mark in said:
            raise Bug(f"{mark}: {said[-2000:]}")
    lines = [line for line in said.splitlines() if line.startswith("fedtools: ")]
    if status not in (0, 1) or len(lines) != status or not all(w in said for w in words[:status]):
        raise Bug(f"exit status {status}: {said[-600:]}")


@dataclass
class Running:
    """The processes of a stage, each a group of its own."""

    children: list[int]
    outputs: list
    ended: dict[int, int] = field(default_factory=dict)

    @classmethod
    def start(cls, stage: Stage, world: World, path: Path, fault: Fault | None = None) -> Running:
        """Start all processes."""
        outputs = [tempfile.TemporaryFile() for _ in stage]  # noqa: SIM115
        children = []
        for process, output in zip(stage, outputs, strict=True):
            words = process.words.replace("{}", str(path)).split()
            prepare = fault.install if fault else lambda: None
            number = output.fileno()
            children.append(
                forks.fork([words], world.root, number, env=process.env, prepare=prepare)
            )
        return cls(children, outputs)

    def wait(self, seconds: float) -> bool:
        """Return whether all processes and their children have ended in time."""
        deadline = time.monotonic() + seconds
        while self._alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def _alive(self) -> bool:
        alive = False
        for child in self.children:
            # Orphans become children of this process, see `adopt`.
            with contextlib.suppress(ChildProcessError):
                while (found := os.waitpid(-child, os.WNOHANG))[0]:
                    self.ended[found[0]] = os.waitstatus_to_exitcode(found[1])
                alive = True
        return alive

    def results(self) -> Iterator[tuple[int, str]]:
        """Yield exit status and stderr of each process."""
        for child, output in zip(self.children, self.outputs, strict=True):
            output.seek(0)
            yield self.ended[child], output.read().decode("utf-8", "replace")
            output.close()

    def kill(self, whom: str, dice: random.Random) -> bool:
        """Kill all processes, one of them, or one of their children.

        Returns:
            whether any was alive.
        """
        self._alive()
        alive = [child for child in self.children if child not in self.ended]
        if whom == "all":
            for child in self.children:
                forks.kill(child)
            return bool(alive)
        members = alive if whom == "one" else _workers(alive)
        if members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(members), signal.SIGKILL)
        return bool(members)


def _workers(groups: Sequence[int]) -> list[int]:
    """Return the training processes of some groups."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            group = int((place / "stat").read_text().rpartition(")")[2].split()[2])
            command = (place / "cmdline").read_bytes()
            if group in groups and b"spawn_main" in command:
                found.append(int(place.name))
    return found


def adopt() -> None:
    """Become the parent of orphans: a process without a waiting parent would seem to stay alive."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


@dataclass
class Soak:
    """The whole test.

    Attributes:
        seed: random seed of all choices; moments depend on the clock, so runs differ.
        tables: name -> row -> outcome -> count.
    """

    seed: int
    root: Path
    bugs: int = 0
    tables: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)
    _length: dict[tuple, float] = field(default_factory=dict)
    _references: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def count(self, table: str, row: str, outcome: str) -> None:
        """Count an outcome."""
        self.tables.setdefault(table, {}).setdefault(row, Counter())[outcome] += 1

    def tell(self, table: str, row: str, what: str, bug: Bug) -> None:
        """Record a bug, and print it."""
        self.bugs += 1
        self.count(table, row, "bug")
        print(f"--seed {self.seed}: {row}, {what}: {bug}", flush=True)

    def reference(self, name: str, world: World) -> dict[str, bytes]:
        """Return the uninterrupted results of a world's experiment."""
        if name not in self._references:
            path = self.root / "reference"
            shutil.rmtree(path, ignore_errors=True)
            for stage in world.scenario("rounds"):
                self.complete(name, world, stage, path)
            self._references[name] = content(path)
            assert len(list(path.glob("round_*/.done"))) == 4
        return self._references[name]

    def complete(self, name: str, world: World, stage: Stage, path: Path) -> None:
        """Run a stage to its end."""
        begun = time.monotonic()
        running = Running.start(stage, world, path)
        if not running.wait(300):
            running.kill("all", random.Random())
            raise Bug("no end")
        self._length[self._key(name, stage)] = time.monotonic() - begun
        for status, said in running.results():
            check_line(status, said)
            if status:
                raise Bug(said)
        check_whole(path)
        check_clean(path)

    def _key(self, name: str, stage: Stage) -> tuple:
        return (
            name.partition(",")[0],
            stage[0].words.split()[0],
            "--nj" in stage[0].words,
            len(stage),
        )

    def kill_some(self, name: str, world: World, number: int, most: int) -> int:
        """Kill one experiment's commands now and then; return the number of kills."""
        dice = random.Random(f"{self.seed} {name} {number}")
        scenario, path = SCENARIOS[number % len(SCENARIOS)], self.root / "exp"
        row, kills, reference = f"{name}, {scenario}", 0, self.reference(name, world)
        shutil.rmtree(path, ignore_errors=True)
        stages = world.scenario(scenario)
        try:
            for stage in stages:
                long = any(words in stage[0].words for words in ("rounds", "reset"))
                for _ in range(dice.choice((1, 2, 3) if long else (0, 0, 0, 1, 2))):
                    if kills < most and (outcome := self._kill(name, world, stage, path, dice)):
                        self.count("kills", row, outcome)
                        kills += 1
                self.complete(name, world, stage, path)
            check_same(path, reference)
        except Bug as bug:
            self.tell("kills", row, f"experiment {number}", bug)
        return kills

    def _kill(self, name: str, world: World, stage: Stage, path: Path, dice: random.Random) -> str:
        """Start a stage and kill it; return "" if it ended before."""
        choices = ["all", "all", "one"] + ["worker"] * 2 * ("--nj 2" in stage[0].words)
        whom = dice.choice(choices if len(stage) == 1 else ["all", "one"])
        length = self._length.get(self._key(name, stage), 1.0)
        run = path / "ranks" / "run"
        before = run.stat().st_ino if run.exists() else 0
        running = Running.start(stage, world, path)
        time.sleep(dice.uniform(0, length))
        killed = running.kill(whom, dice)
        # Before that, ranks wait for each other.
        announced = len(stage) == 1 or (run.exists() and run.stat().st_ino != before)
        # A busy machine gives a command longer.
        if not running.wait(max(PATIENCE, 3 * length) if announced else 3.0):
            running.kill("all", dice)
            running.wait(10.0)
            if announced:
                raise Bug(f"no end after a kill of {whom}")
        for status, said in running.results():
            if status != -signal.SIGKILL:
                check_line(status, said)
        check_whole(path)
        return whom if killed else ""

    def crash(self, world: World, most: int | None) -> None:
        """Stop an experiment's commands at every change that they make."""
        dice, before, after = random.Random(self.seed), self.root / "before", self.root / "after"
        commands = (
            ("init", world.init),
            ("rounds", f"rounds {{}} --to 2 --evaluate {world.split}"),
            ("reset", "reset {} --round 1"),
            ("rounds again", f"rounds {{}} --to 2 --evaluate {world.split}"),
        )
        before.mkdir()
        points: list[tuple[str, Stage, Fault, Path, Path]] = []
        for at, (name, words) in enumerate(commands):
            path, stage = self.root / f"after.{at}", [Process(words)]
            for kind in ("before", "after", "full", "once full"):
                shutil.rmtree(path, ignore_errors=True)
                shutil.copytree(before, path)
                with tempfile.TemporaryFile() as log:
                    running = Running.start(stage, world, path, Fault(kind, 0, log.fileno()))
                    running.wait(60)
                    ((status, said),) = running.results()
                    assert status == 0, said
                    size = os.fstat(log.fileno()).st_size
                points += [(name, stage, Fault(kind, k), before, path) for k in range(1, size + 1)]
            before = after = path
        assert after.exists()
        for point in points if most is None else dice.sample(points, min(most, len(points))):
            self._crash(world, *point)

    def _crash(
        self, world: World, name: str, stage: Stage, fault: Fault, before: Path, after: Path
    ) -> None:
        path, row = self.root / "exp", f"{name}, {fault.kind}"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(before, path)
        try:
            running = Running.start(stage, world, path, fault)
            if not running.wait(60):
                running.kill("all", random.Random())
                raise Bug("no end")
            ((status, said),) = running.results()
            check_whole(path)
            if status == CRASHED:
                outcome = "died"
            else:
                check_line(status, said, "No space left on device")
                outcome = "refused" if status else "done"
                if fault.kind != "full":
                    check_clean(path)
            self.complete("crash", world, stage, path)
            check_same(path, content(after))
            self.count("crashes", row, outcome)
        except Bug as bug:
            self.tell("crashes", row, f"number {fault.at}", bug)

    def report(self) -> None:
        """Print the counts of each kind."""
        for table, rows in self.tables.items():
            outcomes = sorted({outcome for counter in rows.values() for outcome in counter})
            lines = [[row, *(rows[row][outcome] for outcome in outcomes)] for row in sorted(rows)]
            total = sum((Counter(counter) for counter in rows.values()), Counter())
            lines.append(["all", *(total[outcome] for outcome in outcomes)])
            print(format_table([table, *outcomes], lines))


def soak(worlds: Sequence[str], kills: int, crashes: int | None, seed: int, root: Path) -> int:
    """Run the whole test.

    Args:
        worlds: names in `WORLDS`.
        kills: the number of kills, shared by the worlds.
        crashes: the number of crash points, all if None.
        root: an empty folder.

    Returns:
        the number of bugs.
    """
    begun = time.monotonic()
    adopt()
    test = Soak(seed, root)
    for name in worlds:
        make, modules = WORLDS[name]
        made = make(root / name)
        fork_server.preload(modules)
        if name == "counts":
            test.crash(list(made.values())[-1], crashes)
        done, number = 0, 0
        while done < -(-kills // len(worlds)):
            chosen = list(made)[number // len(SCENARIOS) % len(made)]
            done += test.kill_some(chosen, made[chosen], number, -(-kills // len(worlds)) - done)
            number += 1
    test.report()
    print(f"seed {seed}, {time.monotonic() - begun:.0f} s, bugs: {test.bugs}", flush=True)
    return test.bugs
