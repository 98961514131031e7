"""Print the modules and rooms that four commands visit, and how often their calls climb.

    python3 tests/ways.py

A call climbs if the function that is called lies on a floor of .importlinter above that of its
caller: a callback, or a method of an object that was handed down. What an import runs, and code of
other packages, is not counted; a function that such code calls is called by whoever called it.
"""

from __future__ import annotations

import configparser
import os
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import net
from net_cases import CASES, init_command
from net_ways import raise_failed

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fedtools"
EXP = Path("ways/exp")
# What is done first, and the commands that are followed.
PREPARED = ("sample ways/exp --nj 1",)
FOLLOWED = {
    "train-local": "train-local ways/exp --job 1",
    "aggregate": "aggregate ways/exp",
    "rescore": "rescore lm/made lm/nnlm ways/rescored",
    "attack weights": "attack weights ways/exp ways/attacks --set weights.scores=parts "
    "--others 0 --resamples 20",
}


def floors() -> dict[str, int]:
    """Return the floor of each room of the package, from the bottom."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    lines = contracts["importlinter:contract:floors"]["layers"].split("\n")
    rooms = [[room.strip() for room in line.split("|")] for line in lines if line.strip()]
    return {room: floor for floor, line in enumerate(reversed(rooms)) for room in line}


@dataclass
class Way:
    """What a command has visited: modules, in order, and calls from one module to another."""

    modules: dict[str, None] = field(default_factory=dict)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def follow(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call, for `sys.setprofile`."""
        if event != "call" or frame.f_code.co_name in ("<module>", "__getattr__"):
            return
        if (called := module_of(frame)) is None:
            return
        self.modules.setdefault(called)
        caller = frame.f_back
        while caller is not None:
            if (calling := module_of(caller)) is not None:
                if calling != called:
                    self.calls[calling, called] += 1
                return
            caller = caller.f_back

    def climbs(self) -> Counter[tuple[str, str]]:
        """Return the calls whose caller lies on a lower floor."""
        floor = floors()
        return Counter(
            {
                (calling, called): number
                for (calling, called), number in self.calls.items()
                if floor[room_of(calling)] < floor[room_of(called)]
            }
        )

    def table(self) -> str:
        """Return the rooms with the number of their modules, in order, and all climbs."""
        rooms = Counter(room_of(name) for name in self.modules)
        climbs = self.climbs()
        lines = [
            f"{len(self.modules)} modules of {len(rooms)} rooms: "
            + ", ".join(f"{room} {number}" for room, number in rooms.items()),
            f"{self.calls.total()} calls between modules, of which {climbs.total()} climb, "
            f"from {len(climbs)} places",
            *(f"  {calling} -> {called}  {number}" for (calling, called), number in climbs.items()),
        ]
        return "".join(f"    {line}\n" for line in lines)


def module_of(frame: FrameType) -> str | None:
    """Return the package's module that a frame is in, without the package's name."""
    name = frame.f_code.co_filename
    if not name.startswith(f"{PACKAGE}/"):
        return None
    return name[len(f"{PACKAGE}/") : -len(".py")].removesuffix("/__init__")


def room_of(module: str) -> str:
    return module.partition("/")[0]


def run(line: str, root: Path, way: Way | None = None) -> None:
    """Run a command in a fork of this process; return when it has ended well."""
    log = root / "ways.log"
    table = root / "ways.txt"
    if not (child := os.fork()):
        code = 1
        try:
            os.chdir(root)
            with open(log, "wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            code = called(line, way)
            if way is not None:
                table.write_text(way.table())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    raise_failed(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), log)
    if way is not None:
        print(table.read_text(), end="", flush=True)


def called(line: str, way: Way | None) -> int:
    """Run a command in this process, and return its exit status."""
    from fedtools.cli import main

    sys.argv = ["fedtools", *line.split()]
    if way is not None:
        sys.setprofile(way.follow)
    try:
        main()
    except SystemExit as error:
        return int(error.code or 0)
    finally:
        sys.setprofile(None)
    return 0


def main() -> None:
    case = CASES["voices-fedavg"]
    with tempfile.TemporaryDirectory(prefix="ways.") as folder:
        root = Path(folder)
        net.preload(["voices", "lm"])
        for world, problem in net.make_worlds(["voices", "lm"], root).items():
            sys.exit(f"ways.py: {world}: {problem}")
        for line in (" ".join(init_command(case, EXP)), *PREPARED):
            run(line, root)
        for name, line in FOLLOWED.items():
            if name == "attack weights":
                run("rounds ways/exp", root)
            print(f"fedtools {name}", flush=True)
            run(line, root, Way())


if __name__ == "__main__":
    main()
