"""Regression net: hashes of all files that federations write, by method, task and way of running.

    python tests/net.py                       compare with what is recorded in tests/net.tsv
    python tests/net.py --record              record
    python tests/net.py --only asr-fedavg lm  cases whose names start like these
    python tests/net.py --against REF         compare with another commit, on any machine

Every case runs in one job, in three, killed and resumed, and in two ranks, and must write the same
bytes each time. Files with times, hosts, paths and versions are left out. Bytes depend on the
processor and on torch: on other machines than the recording one, only the ways are compared with
each other.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from net_cases import CASES, WORLD_COMMANDS, made, make_worlds
from net_ways import FAILED, Hashes, Runner, begin, raise_failed, wait

TESTS = Path(__file__).resolve().parent
ROOT, TABLE = TESTS.parent, TESTS / "net.tsv"


def machine() -> str:
    """Return the properties of the machine that bytes depend on."""
    import torch

    vendor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("vendor_id"):
            vendor = line.split(":")[1].strip()
            break
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {vendor}"


def run_cases(names: Sequence[str], root: Path, workers: int) -> Hashes:
    """Run cases, `workers` at the same time."""
    from fork_server import preload

    preload(["fedtools.federation.rounds", "espnet2.asr.espnet_model", "torch._dynamo"])
    make_worlds(root)
    commands, log = [line.split() for line in WORLD_COMMANDS], root / "log"
    raise_failed(wait(begin(commands, root, log)), log)
    left, running, found = list(names), {}, {}
    while left or running:
        while left and len(running) < workers:
            name = left.pop(0)
            running[_begin_case(name, root)] = name
        child, status = os.waitpid(-1, 0)
        name = running.pop(child)
        if status:
            raise SystemExit(f"net.py: {name}: see above")
        found |= read(found_in(root, name))
        shutil.rmtree(root / "runs" / name)
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
        there = {case for case, _ in theirs}
        rows += [(case, "(not recorded)", "all") for case in sorted({c for c, _ in own} - there)]
        rows += [
            (*key, "all" if key in own and key in theirs else "gone" if key in theirs else "new")
            for key in sorted(own.keys() | theirs.keys())
            if key[0] in there and own.get(key) != theirs.get(key) and not is_fault(key[1])
        ]
    return rows


def is_fault(file: str) -> bool:
    """Return whether it is not a file but a report of how a way failed or differed."""
    return file.startswith(FAILED) or file.endswith(")")


def hashes_at(ref: str, names: Sequence[str], folder: Path, workers: int) -> Hashes:
    """Return the hashes of another commit, by this program and that commit's builders."""
    tree, out = folder / "tree", folder / "theirs.tsv"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), ref], check=True)
    try:
        for file in TESTS.glob("net*.py"):
            shutil.copy(file, tree / "tests")
        command = [sys.executable, str(tree / "tests" / "net.py"), "--write", str(out)]
        command += ["--workers", str(workers), "--only", *names]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tree)}, check=True)
        return read(out)
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def chosen(prefixes: Iterable[str] | None) -> list[str]:
    if prefixes is None:
        return list(CASES)
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in CASES):
            raise SystemExit(f"net.py: no case {prefix!r}; there are {', '.join(CASES)}")
    return [name for name in CASES if name.startswith(tuple(prefixes))]


def show(rows: Sequence[tuple[str, str, str]]) -> None:
    table = [("method", "file", "way"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write tests/net.tsv")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases with this prefix")
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
        theirs = None
        if options.against:
            theirs = hashes_at(options.against, names, Path(folder), options.workers)
    if options.record:
        if not any(is_fault(file) for _, file in ours):
            about, table = recorded(options.table)
            # Rows recorded on another machine do not stay next to this machine's.
            kept = table if about == machine() else {}
            others = {key: value for key, value in kept.items() if key[0] in set(CASES) - {*names}}
            write(options.table, others | ours, [machine()])
    elif not options.against:
        about, table = recorded(options.table)
        if about == machine():
            theirs = {key: value for key, value in table.items() if key[0] in names}
        else:
            print(f"recorded with {about}; here is {machine()}: only ways are compared")
    rows = compared(ours, theirs)
    if rows:
        show(rows)
    spent = time.monotonic() - begun
    print(f"{len(names)} cases, {len(ours)} files, {len(rows)} differ, {spent:.0f} s")
    raise SystemExit(bool(rows))


if __name__ == "__main__":
    main()
