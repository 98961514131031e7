"""The ways in which tests/net.py runs an experiment, and the hashes of what each writes."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from net_cases import CASES, init_command, made

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


def count_renames(folder: Path, listed: Path, last: int = 0) -> None:
    """Count the files renamed into place in a folder; exit before the one of this number."""
    count, inside = 0, str(folder)

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event == "os.rename" and os.fspath(arguments[1]).startswith(inside):
            count += 1
            with open(listed, "a") as file:
                file.write(".")
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


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
        listed = self.folder / "renames"
        exp = self.exp("one")
        self._fork("one", [self.rounds("one")], lambda: count_renames(exp, listed), begun=False)

    def after(self) -> None:
        """Run the commands on the models of the first way alone."""
        out = {"EXP": str(self.exp("one")), "WORLD": self.case.world}
        out["OUT"] = str(made(self.folder / "one" / "out"))
        self._fork("one", [_filled(line, out) for line in self.case.after])

    def three(self) -> None:
        """Run each step as a command; the last job first."""
        rounds = len(list(self.exp("one").glob("round_*/.done")))
        exp, commands = str(self.exp("three")), []
        for _ in range(rounds):
            commands.append(["sample", exp, "--nj", str(JOBS)])
            for job in range(JOBS, 0, -1):
                commands.append(["train-local", exp, "--job", str(job)])
            commands.append(["aggregate", exp])
        self._fork("three", [*commands, self.rounds("three")], begun=False)

    def killed(self) -> None:
        """Kill it before the same file each time, at every quarter."""
        listed = self.folder / "renames"
        share = max(1, len(listed.read_text()) // (KILLS + 1))
        exp = self.exp("killed")
        self._fork("killed", [], begun=False)
        for _ in range(KILLS):
            child = begin(
                [self.rounds("killed")],
                self.root,
                self.log("killed"),
                lambda: count_renames(exp, self.folder / "more", share),
                **self.env("killed"),
            )
            if wait(child) != -signal.SIGKILL:
                raise Failed("came to its end before it was killed")
        self._fork("killed", [self.rounds("killed")])

    def ranks(self) -> None:
        self._fork("ranks", [], begun=False)
        children = [
            begin(
                [self.rounds("ranks")],
                self.root,
                self.log("ranks"),
                **self.env("ranks"),
                RANK=str(rank),
                WORLD_SIZE=str(RANKS),
            )
            for rank in range(RANKS)
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

    def _fork(
        self,
        way: str,
        commands: Sequence[Sequence[str]],
        prepare: Callable[[], None] = lambda: None,
        begun: bool = True,
    ) -> None:
        """Run commands to their end, after `init` unless the experiment has begun."""
        first = [] if begun else [init_command(self.case, self.exp(way))]
        child = begin([*first, *commands], self.root, self.log(way), prepare, **self.env(way))
        raise_failed(wait(child), self.log(way))

    # --- what is hashed

    def hashes(self, way: str) -> Iterator[tuple[str, str]]:
        """Yield the hash of each file, or kind of client files, of a way."""
        parts: dict[str, list[bytes]] = {}
        names = (self.folder / way, b"RUN"), (self.root, b"ROOT")
        for path in sorted((self.folder / way).rglob("*")):
            name = path.relative_to(self.folder / way)
            if path.is_file() and not is_left_out(name):
                content = path.read_bytes()
                for folder, word in names:
                    content = content.replace(os.fsencode(folder), word)
                if path.suffix == ".tsv":
                    content = without_seconds(content)
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


# Times, hosts, versions, hashes of files with times, and job-local files.
LEFT_OUT = {"log", "noise.key", "software.yaml", "sha256sums", ".done", "jobs"}
FOLDERS_LEFT_OUT = {".locks", "ranks", "tensorboard"}


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
