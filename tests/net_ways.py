"""The ways in which tests/net.py runs an experiment, and the hashes of what each writes."""

from __future__ import annotations

import gc
import gzip
import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from net_cases import CASES, OFTEN, SIGKILLED, init_command
from net_worlds import made

sys.path.append(str(Path(__file__).resolve().parent / "soak"))

# (case, file) -> the first digits of the SHA-256 of its contents, or the failure.
Hashes = dict[tuple[str, str], str]
FAILED = "(run)"
JOBS, KILLS, RANKS = 3, 3, 2


class Failed(Exception):
    """A command that did not end as expected."""


def begin(
    commands: Sequence[Sequence[str]],
    root: Path,
    log: Path,
    prepare: Callable[[], None] = lambda: None,
    **env: str,
) -> int:
    """Start commands in a fork of this process, in the folder of worlds; return the process."""
    import forks

    with open(log, "ab") as output:
        return forks.fork(commands, root, output.fileno(), env=env, prepare=prepare)


def wait(child: int) -> int:
    """Wait for a process that `begin` started, and return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def raise_failed(code: int, log: Path) -> None:
    """Raise `Failed` with the last line of a log, unless the exit status is 0."""
    if code:
        said = log.read_text(errors="replace").splitlines() or [""]
        raise Failed(f"exit {code}: {said[-1]}")


class Stopped(BaseException):
    """The end of a command before it saves a file."""


def before_saves(folder: Path, act: Callable[[], None]) -> None:
    """Call a function before each file is renamed into place in a folder."""
    inside = str(folder)

    def hook(event: str, arguments: tuple) -> None:
        if event == "os.rename" and os.fspath(arguments[1]).startswith(inside):
            act()

    sys.addaudithook(hook)


def kill_before(folder: Path, number: int) -> None:
    """Kill this process before it saves a file of this number, from 1."""
    left = number

    def act() -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    before_saves(folder, act)


def stop_before(folder: Path, number: int, words: Sequence[str], ended: Callable[[], None]) -> None:
    """Run a command again and again, ended by an exception before it saves a file of this number.

    Args:
        ended: called after each time.
    """
    import fedtools.cli

    left = 0

    def act() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Stopped

    before_saves(folder, act)
    sys.argv = ["fedtools", *words]
    for _ in range(KILLS):
        left = number
        try:
            fedtools.cli.main()
        except Stopped:
            # What it held, such as locks, goes with its objects.
            gc.collect()
        else:
            raise Failed("came to its end before it was stopped")
        ended()
    left = 0


class Runner:
    """One case, in all ways.

    Attributes:
        folder: the folder of the case; each way has a folder in it, with the experiment in exp.
    """

    def __init__(self, name: str, root: Path):
        self.name, self.case, self.root, self.folder = name, CASES[name], root, root / "runs" / name

    def run(self) -> Hashes:
        """Return what every way writes, and which ways differ from the first."""
        first: dict[str, str] = {}
        found: dict[str, str] = {}
        for way in (self.one, self.three, self.killed, self.ranks):
            made(self.folder / way.__name__)
            try:
                way()
            except Failed as error:
                found[f"{FAILED} {way.__name__}"] = str(error)
                if not first:
                    break
                continue
            hashes = dict(self.hashes(way.__name__))
            first = first or hashes
            for file in sorted(first.keys() | hashes.keys()):
                if first.get(file) != hashes.get(file):
                    found[f"{file} ({way.__name__})"] = hashes.get(file, "missing")
        if first:
            try:
                self.after()
                found = dict(self.hashes("one")) | found
            except Failed as error:
                found[f"{FAILED} after"] = str(error)
        return {(self.name, file): value for file, value in found.items()}

    def one(self) -> None:
        listed, exp = self.folder / "saves", self.exp("one")

        def act() -> None:
            with open(listed, "a") as file:
                file.write(".")

        self._fork("one", [self.rounds("one")], lambda: before_saves(exp, act), begun=False)

    def after(self) -> None:
        """Run the commands on the models of the first way alone."""
        exp = self.exp("one")
        out = {"EXP": str(exp), "PLACE": str(exp.relative_to(self.root)), "WORLD": self.case.world}
        out["OUT"] = str(made(self.folder / "one" / "out"))
        self._fork("one", [_filled(line, out) for line in self.case.after])

    def three(self) -> None:
        """Run each step as a command, the last job first; `rounds` completes the last round."""
        rounds = len(list(self.exp("one").glob("round_*/.done")))
        exp, commands = str(self.exp("three")), []
        for number in range(1, rounds + 1):
            commands.append(["sample", exp, "--nj", str(JOBS)])
            jobs = range(JOBS, 0, -1) if number < rounds else (2,)
            commands += [["train-local", exp, "--job", str(job)] for job in jobs]
            commands += [["aggregate", exp]] if number < rounds else []
        self._fork("three", [*commands, self.rounds("three")], begun=False)

    def killed(self) -> None:
        """End it before the same file each time, at every quarter, by SIGKILL or an exception."""
        share = max(1, len((self.folder / "saves").read_text()) // (KILLS + 1))
        exp, rounds = self.exp("killed"), self.rounds("killed")
        # Names of files that training leaves when it is ended between two steps.
        midway = self.folder / "midway"

        def ended() -> None:
            with open(midway, "a") as file:
                file.writelines(f"{path}\n" for path in exp.rglob("checkpoint*"))

        self._fork("killed", [], begun=False)
        if self.name in SIGKILLED:
            for _ in range(KILLS):
                child = self._begin("killed", [rounds], lambda: kill_before(exp, share))
                if wait(child) != -signal.SIGKILL:
                    raise Failed("came to its end before it was killed")
                ended()
            self._fork("killed", [rounds])
        else:
            self._fork("killed", [rounds], lambda: stop_before(exp, share, rounds, ended))
        if set(OFTEN) & set(self.case.settings) and not midway.read_text():
            raise Failed("never ended between two steps of a training")

    def ranks(self) -> None:
        """Run all ranks at the same time, rank 0 last."""
        exp, size = self.exp("ranks"), {"WORLD_SIZE": str(RANKS)}
        self._fork("ranks", [], begun=False)
        # Files of an earlier run do not count as a rank of this one.
        for name in ("0", "1", "run", "0.err"):
            (made(exp / "ranks") / name).write_text('{"word": "old", "host": "", "process": 1}\n')
        children = [
            self._begin("ranks", [self.rounds("ranks")], RANK=str(rank), **size)
            for rank in reversed(range(RANKS))
        ]
        codes = [wait(child) for child in children]
        raise_failed(max(codes, key=abs), self.log("ranks"))

    def exp(self, way: str) -> Path:
        return self.folder / way / "exp"

    def log(self, way: str) -> Path:
        return self.folder / way / "log"

    def env(self, way: str) -> dict[str, str]:
        """Return an environment whose noise is the same each time and under no user's key."""
        key = self.folder / way / "noise.key"
        if not key.exists():
            key.touch(0o600)
            key.write_text("00" * 32)
        return {"FEDTOOLS_NOISE_KEY": str(key), "FEDTOOLS_NONCE": "0" * 32}

    def rounds(self, way: str) -> list[str]:
        measured = ["--evaluate", self.case.measured] if self.case.measured else []
        return ["rounds", str(self.exp(way)), *measured]

    def _begin(
        self,
        way: str,
        commands: Sequence[Sequence[str]],
        prepare: Callable[[], None] = lambda: None,
        **env: str,
    ) -> int:
        return begin(commands, self.root, self.log(way), prepare, **self.env(way), **env)

    def _fork(
        self,
        way: str,
        commands: Sequence[Sequence[str]],
        prepare: Callable[[], None] = lambda: None,
        begun: bool = True,
    ) -> None:
        """Run commands to their end, after `init` unless the experiment has begun."""
        first = [] if begun else [init_command(self.case, self.exp(way))]
        raise_failed(wait(self._begin(way, [*first, *commands], prepare)), self.log(way))

    # --- what is hashed

    def hashes(self, way: str) -> Iterator[tuple[str, str]]:
        """Yield the hash of each file, or kind of client files, of a way."""
        parts: dict[str, list[bytes]] = {}
        names = (self.folder / way, b"RUN"), (self.root, b"ROOT")
        for path in sorted((self.folder / way).rglob("*")):
            name = path.relative_to(self.folder / way)
            if path.is_file() and not is_left_out(name):
                content = path.read_bytes()
                if path.suffix == ".gz":
                    content = without_versions(gzip.decompress(content).replace(b', "', b',\n"'))
                for folder, word in names:
                    content = content.replace(os.fsencode(folder), word)
                if path.suffix == ".tsv":
                    content = without_seconds(content)
                if path.suffix == ".md":
                    content = without_versions(content)
                parts.setdefault(name_of(name), []).append(content)
        for folder in sorted(self.exp(way).glob("round_*")):
            if messages := messages_of(folder):
                parts[f"exp/{folder.name}/messages"] = messages
        for name, contents in sorted(parts.items()):
            digests = b"".join(hashlib.sha256(one).digest() for one in contents)
            yield name, hashlib.sha256(digests).hexdigest()[:16]


def _filled(line: str, names: dict[str, str]) -> list[str]:
    for name, path in names.items():
        line = line.replace(name, path)
    return line.split()


# Times, hosts, versions, hashes of files with times, job-local files, and each way's own commands.
LEFT_OUT = {"log", "noise.key", "software.yaml", "sha256sums", ".done", "jobs", "commands.sh"}
# Outputs of frozen layers are a cache.
FOLDERS_LEFT_OUT = {".locks", "ranks", "tensorboard", "frozen"}

# Beginnings of lines of a page, and of entries of what it is made of.
VERSIONS = (b"- Git, of this", b"- Experiment", b'"begun":')


def is_left_out(name: Path) -> bool:
    return (
        name.name in LEFT_OUT
        or bool(FOLDERS_LEFT_OUT & set(name.parts))
        # Split into jobs differently in each way; see `messages_of`.
        or name.name.startswith("update.")
        # It has the hash of feats.scp, which has absolute paths.
        or name.match("nbest.*.yaml")
    )


def name_of(name: Path) -> str:
    """Return a file's name, with all clients' names mapped to one."""
    parts = list(name.parts)
    if parts[1:2] == ["clients"] and len(parts) > 3:
        parts[2] = "*"
    return "/".join(parts)


def without_seconds(table: bytes) -> bytes:
    """Return a table without the column of that name."""
    rows = [line.split(b"\t") for line in table.splitlines()]
    if not rows or b"seconds" not in rows[0]:
        return table
    at = rows[0].index(b"seconds")
    return b"".join(b"\t".join([*row[:at], *row[at + 1 :]]) + b"\n" for row in rows)


def without_versions(page: bytes) -> bytes:
    """Return text without the lines that name versions of the code and its packages."""
    lines = page.splitlines(keepends=True)
    return b"".join(one for one in lines if not one.startswith(VERSIONS))


def messages_of(folder: Path) -> list[bytes]:
    """Return the messages of each client of a round, whichever job has them."""
    from safetensors.numpy import load_file

    sent = {}
    for path in folder.glob("update.*.tsv"):
        header, *rows = without_seconds(path.read_bytes()).splitlines(keepends=True)
        tensors = path.with_suffix(".safetensors")
        values = load_file(tensors) if tensors.exists() else {}
        for index, row in enumerate(rows):
            own = [name.encode() + values[name][index].tobytes() for name in sorted(values)]
            sent[row] = b"".join([header, row, *own])
    return [sent[row] for row in sorted(sent)]
