"""A federation without torch that counts words of texts, shared by several test files."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from commands import ROOT, Result, run, torchless
from forked import KIND

CLIENTS = [f"c{number}" for number in range(7)]

# The plugin of a user who counts words: a method and a task. In round 1 every client sends counts,
# later the sampled clients do; in the third round no client sends any.
METHOD = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedtools.client.unit import Trained
from fedtools.exchange.messages import Payload
from fedtools.methods import METHODS
from fedtools.methods.base import Method, Phase

WORDS = ["one", "two", "three"]
SPEC = {"counts": ((len(WORDS),), "float64")}


def counted(words):
    return np.array([words.count(word) for word in WORDS], "f8")


@METHODS.register("counting")
@dataclass(frozen=True)
class Counting(Method):
    title: ClassVar[str] = "Counting"
    needs: ClassVar[tuple[str, ...]] = ("words",)

    def phase(self, number):
        if number == 3:
            return Phase(self.rest, self.keep, sends=Payload())
        return Phase(self.client, self.server, sends=Payload(SPEC), everybody=number == 1)

    def client(self, texts):
        words = [text.split() for text in texts]
        return [Trained(0, 0.0, len(one), tensors={"counts": counted(one)})
                for one in words]

    def rest(self, texts):
        return [Trained(0, 0.0, len(text.split())) for text in texts]

    def server(self, server):
        server.sum()

    def keep(self, server):
        server.keep()
"""

TASK = """
import os
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fedtools.core.errors import UserError
from fedtools.methods.counting import SPEC
from fedtools.tasks import TASKS
from fedtools.tasks.base import Task
from fedtools.tasks.facts import Facts


class CountTask(Task):
    spec = SPEC

    @staticmethod
    def begin(new):
        state = {"counts": np.zeros(3)}
        return state, state

    def units(self, clients, number):
        return [clients[at : at + 2] for at in range(0, len(clients), 2)]

    def source(self, clients, number, phase):
        # With a bar, as those who train have one.
        names = tqdm(clients, disable=None, leave=False)
        texts = [(self.data_path("train") / name).read_text() for name in names]
        time.sleep(float(os.environ.get("SLOW", 0)))
        if os.environ.get("FAIL"):
            raise UserError(os.environ["FAIL"])
        return texts

    def load(self, state, number):
        self.state = state

    def measure(self, split, client):
        return {"words": int(self.state["counts"].sum())}


TASKS.register("counts")(
    Facts(
        opens="fedtools.tasks.counts:CountTask",
        parts=("words",),
        columns=("words",), rate="words", sign=1,
        identity=lambda folder, labels: {
            path.name: path.read_text() for path in sorted(Path(folder).iterdir())
        },
        files=lambda data, assets, where: [],
        sizes=lambda folder: {path.name: 1 for path in sorted(Path(folder).iterdir())},
        by_client=False,
    )
)
"""


def make_world(root: Path) -> Path:
    """Make texts of clients, one without words, and the plugin; torch cannot be imported."""
    (root / "data").mkdir()
    dice = random.Random(0)
    for number, client in enumerate(CLIENTS):
        words = dice.choices(["one", "two", "three", "four"], k=10 * number)
        (root / "data" / client).write_text(" ".join(words))
    for folder, name, text in (("methods", "counting", METHOD), ("tasks", "counts", TASK)):
        (root / "plugin" / folder).mkdir(parents=True)
        (root / "plugin" / folder / f"{name}.py").write_text(text)
    (root / "config.yaml").write_text("task: counts\nrounds: 4\nclients_per_round: 4\n")
    torchless(root / "torchless")
    return root


def fedtools(world: Path, *arguments: object) -> Result:
    return run(sys.executable, "-m", "fedtools", *map(str, arguments), env=environment(world))


def environment(world: Path) -> dict[str, str]:
    path = os.pathsep.join([str(world / "torchless"), str(ROOT)])
    return {"FEDTOOLS_PATH": str(world / "plugin"), "PYTHONPATH": path, KIND: "light"}


def begin(world: Path, path: Path, *more: str) -> Path:
    config = ("--config", world / "config.yaml", "--method", "counting")
    fedtools(world, "init", path, *config, "--data", f"train={world / 'data'}", *more).ok()
    return path


def states(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in path.glob("round_*/global*")}
