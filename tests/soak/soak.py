#!/usr/bin/env python3
"""Make inputs worse, one at a time, run commands on them, and say what no command may do.

    python tests/soak/soak.py --inputs 10000 [--seed 1]
    python tests/soak/soak.py --only 4711 [--seed 1]     one of them again, with what it said

A command may do its work (exit status 0) or refuse it (1, and one line that names a file). What
else it does is a bug: a traceback, a signal, no end, memory without bounds, an error that names no
file, a temporary file that stays, or a file under its final name that its reader refuses.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import random
import resource
import runpy
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

import typer  # noqa: E402
import world  # noqa: E402
from mutate import mutate  # noqa: E402

import fedtools.cli  # noqa: E402
from fedtools.files import config, datadir, lines, nbest, states, tables  # noqa: E402
from fedtools.files.errors import UserError  # noqa: E402

SECONDS = 40.0
# Beyond what the process has when it begins.
MEMORY = 3 << 30
IMPORTED = (
    *(f"fedtools.cli.{path.stem}" for path in (world.ROOT / "fedtools/cli").glob("[a-z]*.py")),
    *("flashlight.lib.text.decoder.kenlm", "kenlm", "sentencepiece", "torch._dynamo"),
    *("matplotlib.pyplot", "PIL.Image", "espnet2.asr.espnet_model", "espnet2.asr.ctc"),
    *("espnet2.asr.encoder.transformer_encoder", "espnet2.asr.encoder.conformer_encoder"),
    *("fedtools.audio.pack", "fedtools.federation.init", "fedtools.federation.asr"),
    *("fedtools.federation.kws", "fedtools.federation.decode", "fedtools.federation.rounds"),
    *("fedtools.models.espnet", "fedtools.report.keywords", "fedtools.report.page"),
)
# Outcomes that are no bug.
FINE = ("done", "refused")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit status, or minus a signal; None if it had no end."""

    status: int | None
    said: str
    grown: int


def run(words: Sequence[str], root: Path) -> Ended:
    """Run a command line in a fork of this process, which has imported everything.

    Args:
        words: see `world.Command.words`.
        root: the world.
    """
    command = [word.replace("{}", str(root)) for word in words]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        if not (child := os.fork()):
            _child(command, root, output.fileno())
        hung = not _wait(child)
        if hung:
            os.killpg(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        output.seek(0)
        said = output.read().decode("utf-8", "replace")
    code = None if hung else os.waitstatus_to_exitcode(status)
    return Ended(code, said, (usage.ru_maxrss - before) << 10)


def _wait(child: int) -> bool:
    """Whether a process ends in time."""
    descriptor = os.pidfd_open(child)
    try:
        return bool(select.select([descriptor], [], [], SECONDS)[0])
    finally:
        os.close(descriptor)


def _child(command: list[str], root: Path, output: int) -> None:
    """Be the command: does not return."""
    code = 70
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(root)
        code = 0
        for line in " ".join(command).split(" && "):
            code = code or _main(line.split())
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)


def _main(command: list[str]) -> int:
    sys.argv = ["fedtools", *command]
    try:
        if command[0].endswith(".py"):
            script = world.ROOT / command[0]
            sys.argv = [str(script), *command[1:]]
            sys.path.insert(0, str(script.parent))
            runpy.run_path(str(script), run_name="__main__")
        else:
            fedtools.cli.main()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def judge(ended: Ended, root: Path, changed: Sequence[Path]) -> str:
    """The outcome of a command, in a word.

    Args:
        changed: the files that it wrote.
    """
    if ended.status is None:
        return "no end"
    if ended.status < 0:
        return f"signal {-ended.status}"
    if "Traceback (most recent call last)" in ended.said:
        return "traceback"
    if ended.grown > MEMORY // 2:
        return "memory"
    if ended.status not in (0, 1):
        return f"status {ended.status}"
    if any(".tmp" in path.suffixes for path in changed):
        return "left over"
    for path in changed:
        try:
            read(path)
        except UserError as error:
            print(f"    {error}")
            return "half-written"
    if ended.status == 0:
        return "done"
    last = ended.said.strip().rsplit("\n", 1)[-1]
    who, _, said = last.partition(": ")
    if who not in ("fedtools", "prepare.py", "validate_data_dir.py"):
        return "no error line"
    # A path that was made worse may lead anywhere.
    named = str(root) in said or "/" in said.partition(": ")[0]
    return "refused" if named else "no file named"


def read(path: Path) -> None:
    """Read a file as its own reader does; a `UserError` if that refuses it."""
    if path.name.startswith("nbest.") and path.suffix == ".tsv":
        nbest.read_nbest(path)
    elif path.suffix == ".tsv":
        tables.read_tsv(path, None)
    elif path.suffix == ".yaml":
        config.read_yaml(path)
    elif path.suffix == ".safetensors":
        states.read_layout(path)
    elif datadir.keyed_by(path.name) or path.name in ("client2utt", "text"):
        datadir.read_table(path, values="optional")
    elif path.suffix in (".txt", ".md", ".trn"):
        lines.read_lines(path)
    elif path.suffix == ".png" and not path.read_bytes().endswith(b"IEND\xaeB`\x82"):
        raise UserError("cut off", path=path)


def snapshot(root: Path) -> dict[Path, tuple[int, int]]:
    """The files of a folder, with what changes when one is written."""
    found = {}
    for path in root.rglob("*"):
        status = path.lstat()
        if not path.is_dir():
            found[path] = status.st_mtime_ns, status.st_ino
    return found


def case(number: int, seed: int, base: Path, root: Path) -> tuple[str, str, str, Ended]:
    """Run one case: the command, what was made worse, the outcome, and how it ended."""
    dice = random.Random(f"{seed} {number}")
    command = world.COMMANDS[number % len(world.COMMANDS)]
    shutil.rmtree(root, ignore_errors=True)
    for name in (*command.inputs, *command.also):
        source, target = base / name, root / name
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, target)
    victims: dict[str, list[Path]] = {}
    for path in inputs_of(command, root):
        # Of many alike, such as recordings, one is as good as all.
        kind = "".join(mark for mark in path.name if not mark.isdigit())
        victims.setdefault(kind, []).append(path)
    everything = [path for paths in victims.values() for path in paths]
    # Options are what people write by hand, and can be wrong in the most ways.
    weights = [5 if kind.endswith(".yaml") else 1 for kind in sorted(victims)]
    victim = dice.choice(victims[dice.choices(sorted(victims), weights)[0]])
    how = mutate(victim, dice, everything)
    before = snapshot(root)
    ended = run(command.words.split(), root)
    changed = [path for path, mark in snapshot(root).items() if before.get(path) != mark]
    outcome = judge(ended, root, [path for path in changed if path != victim])
    return command.name, f"{victim.relative_to(root)}: {how}", outcome, ended


def inputs_of(command: world.Command, root: Path) -> Iterator[Path]:
    """The files that a command reads, in a fixed order."""
    for name in command.inputs:
        place = root / name
        if place.is_file():
            yield place
        yield from sorted(path for path in place.rglob("*") if path.is_file())


def make_world(root: Path, base: Path) -> None:
    """Make the inputs where commands will find them, for they name each other, and keep a copy."""

    def call(words: Sequence[str]) -> None:
        ended = run(words, root)
        if ended.status != 0:
            sys.exit(f"{' '.join(words)}: exit status {ended.status}\n{ended.said}")

    root.mkdir(parents=True)
    world.build(root, call)
    root.rename(base)


def preload() -> None:
    """Import what commands import, once; no thread begins."""
    for name in IMPORTED:
        importlib.import_module(name)
    # `main` calls it without arguments in both forms; to build it takes longer than most commands.
    fedtools.cli.app = typer.main.get_command(fedtools.cli.app)
    # A collection in a child would write to, and so copy, every page of what is here.
    gc.collect()
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser(description="Make inputs worse and run commands on them.")
    parser.add_argument("--inputs", type=int, default=100, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first")
    parser.add_argument("--only", type=int, help="the number of a single one, told in full")
    options = parser.parse_args()
    preload()
    numbers = range(options.start, options.start + options.inputs)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
    counts: dict[str, Counter[str]] = {}
    bugs = 0
    begin = time.monotonic()
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="soak.", dir=place) as name:
        base, root = Path(name) / "base", Path(name) / "world"
        make_world(root, base)
        for number in numbers:
            command, how, outcome, ended = case(number, options.seed, base, root)
            counts.setdefault(command, Counter())[outcome] += 1
            if options.only is not None:
                print(f"{command}, {how}: {outcome}, exit status {ended.status}\n{ended.said}")
            elif outcome not in FINE:
                last = ended.said.strip().rsplit("\n", 1)[-1][:300]
                print(f"--only {number} --seed {options.seed}: {command}, {how}: {outcome}\n"
                      f"    {last}", flush=True)  # fmt: skip
            bugs += outcome not in FINE
    outcomes = sorted({outcome for counter in counts.values() for outcome in counter})
    rows = [[name, *(counts[name][outcome] for outcome in outcomes)] for name in sorted(counts)]
    total = [sum(counter[outcome] for counter in counts.values()) for outcome in outcomes]
    print(tables.format_table(["command", *outcomes], [*rows, ["all", *total]]), end="")
    print(f"{len(numbers)} inputs in {time.monotonic() - begin:.0f} s, bugs: {bugs}")
    return int(bugs > 0)


if __name__ == "__main__":
    sys.exit(main())
