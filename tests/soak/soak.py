#!/usr/bin/env python3
"""Damage inputs, one at a time, run commands on them, and report forbidden outcomes.

    python tests/soak/soak.py --inputs 10000 [--seed 1]
    python tests/soak/soak.py --only 4711 [--seed 1]     repeat one of them and print its output
    python tests/soak/soak.py --kills 200 [--seed 1]     federations that are stopped, see kills.py
    python tests/soak/soak.py --inputs 1000 --kills 20   both, one after the other

A command may succeed (exit status 0) or refuse its input (1, and one line that names a file).
Anything else is a bug: a traceback, a signal, no end, memory without bounds, an error that names no
file, a temporary file that stays, or a file under its final name that its reader refuses.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import select
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

import fork_server  # noqa: E402
import forks  # noqa: E402
import world  # noqa: E402
from more_inputs import SECRET  # noqa: E402
from mutate import mutate  # noqa: E402

from fedtools.core import tables  # noqa: E402
from fedtools.core.errors import UserError  # noqa: E402

SECONDS = 40.0
# In addition to what the process has at its start.
MEMORY = 3 << 30
IMPORTED = (
    *("pydantic.type_adapter", "pydantic.json_schema", "pydantic.plugin._loader"),
    *("flashlight.lib.text.decoder.kenlm", "kenlm", "sentencepiece", "torch._dynamo"),
    *("matplotlib.pyplot", "PIL.Image", "espnet2.asr.espnet_model", "espnet2.asr.ctc"),
    *("espnet2.asr.encoder.transformer_encoder", "espnet2.asr.encoder.conformer_encoder"),
    *("fedtools.audio.pack", "fedtools.federation.init", "fedtools.tasks.asr.task"),
    *("fedtools.tasks.kws.task", "fedtools.federation.asr.decode", "fedtools.federation.rounds"),
    *(
        "fedtools.tasks.rescore.task",
        "fedtools.federation.fmp.sweep",
        "fedtools.attack.membership.attack",
    ),
    *(
        "fedtools.attack.speakers.a1",
        "fedtools.attack.speakers.attributes",
        "fedtools.attack.speakers.footprints",
    ),
    *("fedtools.attack.features.attack", "fedtools.speaker.ivector", "fedtools.decode.foreign"),
    *("fedtools.models.acoustic.espnet", "fedtools.report.page", "fedtools.report.plots"),
)
# Outcomes that are not bugs.
FINE = ("done", "refused")


@dataclass(frozen=True)
class Ended:
    """The end of a command: its exit status, or minus a signal; None if it did not end."""

    status: int | None
    said: str
    grown: int


def run(words: Sequence[str], root: Path) -> Ended:
    """Run a command line in a fork of this process, which has imported all modules.

    Args:
        words: see `world.Command.words`.
        root: the world.
    """
    text = " ".join(words).replace("{}", str(root))
    commands = [line.split() for line in text.split(" && ")]
    # Without mapped files, whose pages a fork does not hold before it reads them.
    _, resident, mapped, *_ = map(int, Path("/proc/self/statm").read_text().split())
    before = (resident - mapped) * resource.getpagesize() >> 10
    with tempfile.TemporaryFile() as output:
        child = forks.fork(commands, root, output.fileno(), prepare=_limit)
        hung = not _wait(child)
        if hung:
            forks.kill(child)
        _, status, usage = os.wait4(child, 0)
        output.seek(0)
        said = output.read().decode("utf-8", "replace")
    code = None if hung else os.waitstatus_to_exitcode(status)
    return Ended(code, said, (usage.ru_maxrss - before) << 10)


def _wait(child: int) -> bool:
    """Return whether a process ends in time."""
    descriptor = os.pidfd_open(child)
    try:
        return bool(select.select([descriptor], [], [], SECONDS)[0])
    finally:
        os.close(descriptor)


def _limit() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def judge(ended: Ended, root: Path, changed: Sequence[Path]) -> str:
    """Return the outcome of a command as one word.

    Args:
        changed: the written files.
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
            forks.read(path)
        except UserError as error:
            print(f"    {error}")
            return "half-written"
    if ended.status == 0:
        return "done"
    last = ended.said.strip().rsplit("\n", 1)[-1]
    who, _, said = last.partition(": ")
    if who != "fedtools" and not who.endswith(".py"):
        return "no error line"
    # A damaged path may lead anywhere.
    named = str(root) in said or "/" in said.partition(": ")[0] or ": cannot be read: " in said
    return "refused" if named else "no file named"


def snapshot(root: Path) -> dict[Path, tuple[int, int]]:
    """Return the files of a folder, with the properties that change on writing."""
    found = {}
    for path in root.rglob("*"):
        status = path.lstat()
        if not path.is_dir():
            found[path] = status.st_mtime_ns, status.st_ino
    return found


def case(number: int, seed: int, base: Path, root: Path) -> tuple[str, str, str, Ended]:
    """Run one case; return command, damage, outcome and end."""
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
        # Of many similar files, such as recordings, one is enough.
        kind = "".join(mark for mark in path.name if not mark.isdigit())
        victims.setdefault(kind, []).append(path)
    everything = [path for paths in victims.values() for path in paths]
    # Options are written by hand and can be wrong in the most ways.
    weights = [5 if kind.endswith(".yaml") else 1 for kind in sorted(victims)]
    victim = dice.choice(victims[dice.choices(sorted(victims), weights)[0]])
    how = mutate(victim, dice, everything)
    before = snapshot(root)
    ended = run(command.words.split(), root)
    changed = [path for path, mark in snapshot(root).items() if before.get(path) != mark]
    outcome = judge(ended, root, [path for path in changed if path != victim])
    return command.name, f"{victim.relative_to(root)}: {how}", outcome, ended


def inputs_of(command: world.Command, root: Path) -> Iterator[Path]:
    """Yield the files that a command reads, in a fixed order."""
    for name in command.inputs:
        place = root / name
        if place.is_file():
            yield place
        yield from sorted(path for path in place.rglob("*") if path.is_file())


def make_world(root: Path, base: Path) -> None:
    """Make the inputs at their final paths, since they name each other, and keep a copy."""

    def call(words: Sequence[str]) -> None:
        ended = run(words, root)
        if ended.status != 0:
            sys.exit(f"{' '.join(words)}: exit status {ended.status}\n{ended.said}")

    root.mkdir(parents=True)
    world.build(root, call)
    root.rename(base)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make inputs worse and run commands on them.")
    parser.add_argument("--inputs", type=int, help="number of inputs; 100 without --kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", type=int, help="number of a single input, printed in full")
    parser.add_argument("--kills", type=int, help="number of kills of federations")
    parser.add_argument("--crashes", type=int, help="number of crash points; all by default")
    parser.add_argument("--worlds", nargs="+", default=["counts", "keywords"])
    options = parser.parse_args()
    if options.inputs is None:
        options.inputs = 100 if options.kills is None else 0
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    parts = []
    if options.inputs or options.only is not None:
        parts.append(worsen)
    if options.kills:
        parts.append(stop)
    found = False
    with tempfile.TemporaryDirectory(prefix="soak.", dir=place) as name:
        for part in parts:
            folder = Path(name) / part.__name__
            folder.mkdir()
            found |= _apart(part, options, folder)
    return int(found)


def _apart(part: Callable[..., int], options: argparse.Namespace, folder: Path) -> bool:
    """Run a part in its own process, as imports conflict; return whether it found bugs."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        bugs = 1
        try:
            # Not the user's own key and record of releases.
            os.environ["FEDTOOLS_NOISE_KEY"] = str(folder / "world" / SECRET / "noise.key")
            os.environ.pop("FEDTOOLS_NONCE", None)
            bugs = part(options, folder)
        except SystemExit as stopped:
            print(stopped, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(int(bugs > 0))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def stop(options: argparse.Namespace, folder: Path) -> int:
    """Stop federations according to the options; return the number of bugs."""
    import kills

    return kills.soak(options.worlds, options.kills, options.crashes, options.seed, folder)


def worsen(options: argparse.Namespace, folder: Path) -> int:
    """Damage inputs according to the options; return the number of bugs."""
    fork_server.preload(IMPORTED)
    numbers = range(options.start, options.start + options.inputs)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
    counts: dict[str, Counter[str]] = {}
    bugs = 0
    begin = time.monotonic()
    base, root = folder / "base", folder / "world"
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
    return bugs


if __name__ == "__main__":
    sys.exit(main())
