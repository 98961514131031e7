"""Regression net: hashes of all files that federations write, by method, task and way of running.

    python tests/net.py                       compare with what is recorded in tests/net.tsv
    python tests/net.py --record              record
    python tests/net.py --only asr-fedavg lm  this case, and those whose names start like that
    python tests/net.py --against REF         compare with another commit, on any machine

Every case runs in one job, in three, killed and resumed, and in two ranks, and must write the same
bytes each time. Files with times, hosts, paths and versions are left out. Bytes depend on the
processor, on torch, and those of pictures on matplotlib: on other machines than the recording one,
only the ways are compared with each other. A commit that moves code passes `--against` its parent,
which runs both on this machine. Cases that the other commit does not have, and cannot run, are
listed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from net_cases import CASES
from net_ways import FAILED, Failed, Hashes, Runner, begin, raise_failed, wait
from net_worlds import NEEDS, PLUGIN, TORCHLESS, WORLDS, made

# Stands for the files of a case with which there is nothing to compare.
NEW = "(not recorded)"
TESTS = Path(__file__).resolve().parent
ROOT, TABLE = TESTS.parent, TESTS / "net.tsv"


def machine() -> str:
    """Return the properties of the machine that bytes depend on."""
    import matplotlib
    import torch

    vendor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("vendor_id"):
            vendor = line.split(":")[1].strip()
            break
    versions = f"torch {torch.__version__}, matplotlib {matplotlib.__version__}"
    return f"{versions}, {torch.backends.cpu.get_cpu_capability()}, {vendor}"


# Modules that commands import at run time: of all cases, and of those on pretrained models.
THIRD = (
    *("espnet2.asr.espnet_model", "numpy.random", "scipy.stats"),
    *("matplotlib.pyplot", "matplotlib.backends.backend_agg", "sentencepiece"),
    *("flashlight.lib.text.decoder.kenlm", "kenlm"),
)
PRETRAINED = ("transformers.models.whisper.modeling_whisper",)


def preload(worlds: Iterable[str]) -> None:
    """Import what commands need, once; start no thread."""
    sys.path.insert(0, str(ROOT))
    import fedtools.cli

    files = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "fedtools").rglob("*.py"))
    names = [".".join(path.parts).removesuffix(".__init__") for path in sorted(files)]
    # What Flower runs, in an environment of its own, is no module of ours.
    left = re.compile(r"\.__main__$|\.flower_app\.")
    names = [name for name in names if not left.search(name)] + [*THIRD]
    if {*worlds} <= TORCHLESS:
        names = [f"fedtools.cli.{group}" for group in fedtools.cli.GROUPS]
    if {*worlds} & {"whisper", "clips"}:
        names += PRETRAINED
    for name in names:
        importlib.import_module(name)
    # A collection in a child would write to, and so copy, every page of these objects.
    gc.collect()
    gc.freeze()


def make_worlds(worlds: Sequence[str], root: Path) -> dict[str, str]:
    """Make worlds by the tests' own builders, and return why some could not be made."""
    failed = {}
    for world in worlds:
        make, lines = WORLDS[world]
        path, log = root / world, root / f"{world}.log"
        prepare = (lambda: None) if path.exists() else partial(make, path)
        child = begin([line.split() for line in lines], root, log, prepare)
        try:
            raise_failed(wait(child), log)
        except Failed as error:
            failed[world] = str(error)
    return failed


def worlds_of(names: Iterable[str]) -> list[str]:
    needed = {CASES[name].world for name in names}
    needed |= {NEEDS[world] for world in needed if world in NEEDS}
    return [world for world in WORLDS if world in needed]


def run_cases(names: Sequence[str], root: Path, workers: int) -> Hashes:
    """Run cases, `workers` at the same time; what could not be run is in the results, too."""
    worlds = worlds_of(names)
    os.environ.pop("FEDTOOLS_PATH", None)
    if "counts" in worlds:
        # Methods of a user are found when the package is imported.
        WORLDS["counts"][0](root / "counts")
        os.environ["FEDTOOLS_PATH"] = str(root / PLUGIN)
    preload(worlds)
    failed = make_worlds(worlds, root)
    found = {
        (name, f"{FAILED} world"): failed[CASES[name].world]
        for name in names
        if CASES[name].world in failed
    }
    left, running = [name for name in names if CASES[name].world not in failed], {}
    while left or running:
        while left and len(running) < workers:
            name = left.pop(0)
            running[_begin_case(name, root)] = name
        child, status = os.waitpid(-1, 0)
        name = running.pop(child)
        if status:
            found[name, f"{FAILED} case"] = f"status {status}: see above"
        else:
            found |= read(found_in(root, name))
        shutil.rmtree(root / "runs" / name, ignore_errors=True)
    return found


def _begin_case(name: str, root: Path) -> int:
    """Run a case in a fork, which writes its hashes; return the process."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        write(found_in(root, name), Runner(name, root).run())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def found_in(root: Path, name: str) -> Path:
    return root / f"{name}.tsv"


def write(path: Path, hashes: Hashes, about: Sequence[str] = ()) -> None:
    lines = [f"# {one}" for one in about]
    lines += ["\t".join([case, file, value]) for (case, file), value in sorted(hashes.items())]
    path.write_text("".join(f"{line}\n" for line in lines))


def read(path: Path) -> Hashes:
    rows = (line.split("\t") for line in path.read_text().splitlines() if line[:1] != "#")
    return {(case, file): value for case, file, value in rows}


def recorded(table: Path) -> tuple[str, Hashes]:
    """Return the machine a table is from, and its rows."""
    if not table.exists():
        return "nothing", {}
    return table.read_text().partition("\n")[0].removeprefix("# "), read(table)


def recorded_here(table: Path, names: Iterable[str]) -> Hashes | None:
    """Return the rows of some cases, or nothing if they are of another kind of machine."""
    about, rows = recorded(table)
    if about != machine():
        print(f"recorded with {about}; here is {machine()}: only ways are compared")
        return None
    return {key: value for key, value in rows.items() if key[0] in names}


def compared(ours: Hashes, theirs: Hashes | None) -> list[tuple[str, str, str]]:
    """Return rows of (method, file, way) that differ; `theirs` None compares the ways alone."""
    rows = []
    for case, file in sorted(ours):
        if file.startswith(FAILED):
            rows.append((case, ours[case, file], file.split()[-1]))
        elif file.endswith(")"):
            name, _, way = file.rstrip(")").rpartition(" (")
            rows.append((case, name, way))
    if theirs is not None:
        own = {key: value for key, value in ours.items() if not is_fault(key[1])}
        there = cases_of(theirs)
        rows += [(case, NEW, "all") for case in sorted({c for c, _ in own} - there)]
        rows += [
            (*key, "all" if key in own and key in theirs else "gone" if key in theirs else "new")
            for key in sorted(own.keys() | theirs.keys())
            if key[0] in there and own.get(key) != theirs.get(key) and not is_fault(key[1])
        ]
    return rows


def cases_of(hashes: Hashes) -> set[str]:
    """Return the cases that were run."""
    return {case for case, file in hashes if not is_fault(file)}


def is_fault(file: str) -> bool:
    """Return whether it is not a file but a report of how a way failed or differed."""
    return file.startswith(FAILED) or file.endswith(")")


def hashes_at(
    ref: str, names: Sequence[str], folder: Path, workers: int
) -> tuple[Hashes, dict[str, str]]:
    """Return what another commit writes, by this program and that commit's builders.

    Returns:
        hashes, and why each case that is new since then cannot be run there.
    """
    tree, out = folder / "tree", folder / "theirs.tsv"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), ref], check=True)
    try:
        known = (tree / "tests" / "net_cases.py").read_text()
        for file in TESTS.glob("net*.py"):
            shutil.copy(file, tree / "tests")
        command = [sys.executable, str(tree / "tests" / "net.py"), "--write", str(out)]
        command += ["--workers", str(workers), "--only", *names]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tree)}, check=True)
        theirs = read(out)
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    lacking = {name for name in names if f'"{name}"' not in known} - cases_of(theirs)
    return theirs, {case: why for (case, _), why in theirs.items() if case in lacking}


def chosen(names: Iterable[str] | None) -> list[str]:
    """Return the cases of some names, or whose names start like one that is no case's."""
    if names is None:
        return list(CASES)
    found = set()
    for name in names:
        some = {name} if name in CASES else {case for case in CASES if case.startswith(name)}
        if not some:
            raise SystemExit(f"net.py: no case {name!r}; there are {', '.join(CASES)}")
        found |= some
    return [case for case in CASES if case in found]


def show(rows: Sequence[tuple[str, str, str]]) -> None:
    table = [("method", "file", "way"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write tests/net.tsv")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases, or this prefix")
    parser.add_argument("--against", metavar="REF", help="compare with a commit")
    parser.add_argument("--table", type=Path, default=TABLE, help="default: tests/net.tsv")
    parser.add_argument("--write", type=Path, metavar="TSV", help="write hashes, compare nothing")
    parser.add_argument("--workers", type=int, default=2, help="cases at the same time")
    options = parser.parse_args()
    names, begun = chosen(options.only), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="net-") as folder:
        ours = run_cases(names, made(Path(folder) / "ours"), options.workers)
        if options.write:
            write(options.write, ours)
            return
        theirs: Hashes | None = None
        new: dict[str, str] = {}
        if options.against:
            theirs, new = hashes_at(options.against, names, Path(folder), options.workers)
    if options.record:
        if not any(is_fault(file) for _, file in ours):
            about, table = recorded(options.table)
            # Rows recorded on another machine do not stay next to this machine's.
            kept = table if about == machine() else {}
            others = {key: value for key, value in kept.items() if key[0] in set(CASES) - {*names}}
            write(options.table, others | ours, [machine()])
    elif not options.against:
        theirs = recorded_here(options.table, names)
    rows = [row for row in compared(ours, theirs) if row[:2] not in {(one, NEW) for one in new}]
    for name, why in new.items():
        print(f"{name}: new since {options.against}, which cannot run it: {why}")
    if new and not {*names} - {*new}:
        raise SystemExit(f"net.py: {options.against} can run none of these cases")
    if rows:
        show(rows)
    spent = time.monotonic() - begun
    print(f"{len(names)} cases, {len(ours)} files, {len(rows)} differ, {spent:.0f} s")
    raise SystemExit(bool(rows))


if __name__ == "__main__":
    main()
