"""A federation without torch, of texts whose words are counted, for the tests of several files."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from conftest import ROOT, Result, run, torchless

CLIENTS = [f"c{number}" for number in range(7)]

# What somebody adds who counts words: a method and a task. In round 1 everybody sends counts, later
# those who were sampled do; in the third round nobody sends anything.
PLUGIN = """
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from tqdm import tqdm

from fedtools.federation.base import Federation, Sent
from fedtools.federation.tasks import TASKS, Task
from fedtools.files.errors import UserError
from fedtools.files.messages import Payload, Report
from fedtools.methods import METHODS
from fedtools.methods.base import Method, Phase

WORDS = ["one", "two", "three"]
SPEC = {"counts": ((len(WORDS),), "float64")}


@METHODS.register("counting")
@dataclass(frozen=True)
class Counting(Method):
    title: ClassVar[str] = "Counting"
    tasks: ClassVar[tuple[str, ...]] = ("counts",)

    def phase(self, number):
        if number == 3:
            return Phase(client=lambda texts: texts, server=lambda server: server.keep(),
                         sends=Payload())
        return Phase(client=self.count, server=lambda server: server.sum(), sends=Payload(SPEC),
                     everybody=number == 1)

    def count(self, texts):
        return [[text.split().count(word) for word in WORDS] for text in texts]


class CountFederation(Federation):
    @staticmethod
    def begin(beginning):
        state = {"counts": np.zeros(len(WORDS))}
        return state, state

    def payload(self, phase):
        return phase.sends

    def units(self, clients, number):
        return [clients[at : at + 2] for at in range(0, len(clients), 2)]

    def work(self, clients, number, phase):
        # With a bar, as those who train have one.
        names = tqdm(clients, disable=None, leave=False)
        texts = [(self.data_path("train") / name).read_text() for name in names]
        time.sleep(float(os.environ.get("SLOW", 0)))
        if os.environ.get("FAIL"):
            raise UserError(os.environ["FAIL"])
        found = phase.client(texts)
        reports = [Report(name, len(text.split())) for name, text in zip(clients, texts)]
        yield Sent(reports, {"counts": np.array(found, "f8")} if phase.sends.tensors else None)

    def measure(self, split, client):
        return {"words": int(self.state["counts"].sum())}

    def load_result(self, client, number):
        from fedtools.files.states import load_state
        self.state = load_state(self.experiment.global_state(number + 1))


TASKS["counts"] = Task(
    federation="fedtools.methods.counting:CountFederation",
    columns=("words",), rate="words", sign=1,
    identity=lambda folder, labels: {
        path.name: path.read_text() for path in sorted(Path(folder).iterdir())
    },
    files=lambda data, assets, where: [],
    clients=lambda folder: sorted(path.name for path in Path(folder).iterdir()),
    by_client=False,
)
"""


def make_world(root: Path) -> Path:
    """Texts of clients, one without a word, and the plugin; torch cannot be imported."""
    (root / "data").mkdir()
    dice = random.Random(0)
    for number, client in enumerate(CLIENTS):
        words = dice.choices(["one", "two", "three", "four"], k=10 * number)
        (root / "data" / client).write_text(" ".join(words))
    (root / "plugin" / "methods").mkdir(parents=True)
    (root / "plugin" / "methods" / "counting.py").write_text(PLUGIN)
    (root / "config.yaml").write_text("task: counts\nrounds: 4\nclients_per_round: 4\n")
    torchless(root / "torchless")
    return root


def fedtools(world: Path, *arguments: object) -> Result:
    return run(sys.executable, "-m", "fedtools", *map(str, arguments), env=environment(world))


def environment(world: Path) -> dict[str, str]:
    path = os.pathsep.join([str(world / "torchless"), str(ROOT)])
    return {"FEDTOOLS_PATH": str(world / "plugin"), "PYTHONPATH": path}


def begin(world: Path, path: Path, *more: str) -> Path:
    config = ("--config", world / "config.yaml", "--method", "counting")
    fedtools(world, "init", path, *config, "--data", f"train={world / 'data'}", *more).ok()
    return path


def states(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in path.glob("round_*/global*")}
