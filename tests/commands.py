"""Commands called as a user calls them, and their results; without pytest, for soak tests too."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forked import KIND, forked, programs

ROOT = Path(__file__).resolve().parent.parent
# What a recipe that ran here has made, below egs/CORPUS/RECIPE.
MADE = ("data", "downloads", "dump", "exp")


@dataclass
class Result:
    """Exit status and outputs of a finished command."""

    code: int
    out: str
    err: str

    def ok(self) -> Result:
        """Assert that it succeeded; a failing test shows the command's output."""
        assert self.code == 0, f"exit {self.code}\n{self.out}\n{self.err}"
        return self

    def fails(self, code: int, *said: str) -> Result:
        """Assert exit status, one line on stderr without a traceback, and the line's content."""
        assert self.code == code, f"exit {self.code}\n{self.out}\n{self.err}"
        assert "Traceback" not in self.err, self.err
        if code == 1:
            assert self.err.strip().count("\n") == 0, self.err
        for text in said:
            assert text in self.err, f"{text!r} not in {self.err!r}"
        return self


def start(
    *command: str | Path, env: dict[str, str] | None = None, cold: bool = False, **settings
) -> subprocess.Popen:
    """Start a command; of Python's programs, those named in `forked` are forks of a server.

    Args:
        env: variables that are added to those of this process. A PATH of its own is left as it is.
        cold: give every program an interpreter of its own, as a user's has.
        settings: of `subprocess.Popen`.
    """
    words, environment = [str(part) for part in command], {**os.environ, **(env or {})}
    if not cold and (folder := programs()):
        if words[0] == sys.executable:
            words[0] = str(folder / "python3")
        if environment["PATH"] == os.environ["PATH"]:
            environment = forked(environment)
    fixed = {"stdin": subprocess.DEVNULL, "cwd": ROOT, "text": True}
    return subprocess.Popen(words, env=environment, **fixed | settings)


def run(*command: str | Path, cwd: Path | None = None, input: str | None = None, **how) -> Result:
    """Run any command to its end; `how` has arguments of `start`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        pipes["stdin"] = subprocess.PIPE
    with start(*command, cwd=cwd or ROOT, **pipes, **how) as process:
        out, err = process.communicate(input)
    return Result(process.returncode, out, err)


def kill_when(command: list[str], env: dict[str, str], folder: Path, pattern: str) -> None:
    """Start a command, and kill it by SIGKILL as soon as a directory has a file of a given name."""
    assert not list(folder.glob(pattern)), f"{pattern} is there before the command"
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = start(*command, env=env, start_new_session=True, **silent)
    while process.poll() is None and not any(folder.glob(pattern)):
        time.sleep(0.01)
    assert process.poll() is None, f"ended, with or without {pattern}"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # A fork is killed with its client, but the kernel may still be about to close its files.
    wait_until(lambda: not is_locked(folder))


def is_locked(folder: Path) -> bool:
    """Return whether a process holds one of fedtools' locks below a folder."""
    inodes = {str(path.stat().st_ino) for path in folder.rglob(".locks/*")}
    lines = Path("/proc/locks").read_text().splitlines()
    return any(line.split()[-3].rpartition(":")[2] in inodes for line in lines)


def fedtools(*arguments: str | Path, **how) -> Result:
    """Run `fedtools ...` in a process of its own."""
    return run(sys.executable, "-m", "fedtools", *arguments, **how)


def sources(tops: Iterable[str], pattern: str) -> Iterator[Path]:
    """Yield the checkout's own files below some folders, not those that its recipes have made."""
    for top in tops:
        for path in (ROOT / top).rglob(pattern):
            parts = path.relative_to(ROOT).parts
            made = parts[0] == "egs" and len(parts) > 3 and parts[3] in MADE
            if path.is_file() and not made:
                yield path


def contents(paths: Iterable[Path]) -> dict[Path, bytes]:
    """Return the contents of the files below a path, of which there is at least one."""
    found = {path: path.read_bytes() for path in paths if path.is_file()}
    assert found
    return found


def ledger(experiment: Path) -> list[dict[str, str]]:
    """Return the rows of an experiment's ledger, read without the reader under test."""
    rows = []
    for path in sorted(experiment.glob("round_*/ledger.tsv")):
        header, *lines = (line.split("\t") for line in path.read_text().splitlines())
        rows += [dict(zip(header, line, strict=True)) for line in lines]
    return rows


def torchless(folder: Path) -> dict[str, str]:
    """Return an environment in which `import torch` fails, by a module in `folder`."""
    folder.mkdir()
    (folder / "torch.py").write_text("raise ModuleNotFoundError('no torch here', name='torch')\n")
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {"PYTHONPATH": path, KIND: "light"}


def inside(*arguments: str | Path) -> Result:
    """Run `fedtools ...` inside this process: the same `main`, without a second torch import."""
    from fedtools.cli import main

    out, err, code, argv = io.StringIO(), io.StringIO(), 0, sys.argv
    sys.argv = ["fedtools", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = argv
    return Result(code, out.getvalue(), err.getvalue())


def wait_until(condition, seconds: float = 60) -> None:
    """Wait for a condition to become true; the test fails if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
