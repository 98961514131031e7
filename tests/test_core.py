"""A federation without torch: counts, with the guarantees of those that train models."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, Result, ledger, run, torchless
from safetensors.numpy import load_file

CLIENTS = [f"c{number}" for number in range(7)]

# What somebody adds who counts words: a method and a task. In round 1 everybody sends counts, later
# those who were sampled do; in the third round nobody sends anything.
PLUGIN = """
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedtools.federation.base import Federation, Sent
from fedtools.federation.tasks import TASKS, Task
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
        texts = [(self.data_path("train") / name).read_text() for name in clients]
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


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Texts of clients, one without a word, and the plugin; torch cannot be imported."""
    root = tmp_path_factory.mktemp("counts")
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


@pytest.fixture(scope="module")
def reference(world) -> Path:
    path = begin(world, world / "reference")
    fedtools(world, "rounds", path).ok()
    return path


def counts_of(world: Path, clients: list[str]) -> list[int]:
    """An oracle that shares nothing with the plugin."""
    words = [word for name in clients for word in (world / "data" / name).read_text().split()]
    return [words.count("one"), words.count("two"), words.count("three")]


def test_counts_are_summed_exactly_in_phases(world, reference):
    sampled = {n: (reference / f"round_{n:04d}/clients").read_text().split() for n in range(1, 5)}
    found = {
        n: load_file(reference / f"round_{n:04d}/global.safetensors")["counts"].tolist()
        for n in range(1, 6)
    }
    assert sampled[1] == CLIENTS
    assert found[1] == [0, 0, 0] and found[2] == counts_of(world, CLIENTS)
    assert len(sampled[2]) == 4 and found[3] == counts_of(world, sampled[2])
    # Round 3 sends nothing, so that its state stays.
    assert found[4] == found[3]
    assert not list((reference / "round_0003").glob("update.*.safetensors"))
    assert found[5] == counts_of(world, sampled[4])


def test_the_ledger_is_the_sum_of_messages_and_charges_nobody_twice(reference):
    rows = ledger(reference)
    size = (reference / "round_0001/global.safetensors").stat().st_size
    up = {row["bytes_up"] for row in rows if row["client"] != "-" and row["round"] != "3"}
    assert up == {str(3 * 8)}
    assert {row["bytes_up"] for row in rows if row["round"] == "3"} == {"0"}
    held = set((reference / "round_0003/clients").read_text().split())
    for row in rows:
        if row["client"] == "-":
            assert row["bytes_down"] == "0"
        elif row["round"] == "4":
            # Rounds 3 and 4 begin with the same state: who had it needs it no more.
            assert row["bytes_down"] == ("0" if row["client"] in held else str(size))
        else:
            assert row["bytes_down"] == str(size)
    assert any(
        row["bytes_down"] == "0" for row in rows if row["round"] == "4" and row["client"] != "-"
    )
    assert all(row["status"] == "ok" for row in rows)


@pytest.mark.parametrize("jobs", [1, 3])
def test_single_commands_give_the_same_bytes(world, reference, tmp_path, jobs):
    path = begin(world, tmp_path / "exp")
    for _ in range(4):
        fedtools(world, "sample", path, "--nj", jobs).ok()
        for job in range(jobs, 0, -1):
            fedtools(world, "train-local", path, "--job", job).ok()
        fedtools(world, "aggregate", path).ok()
    assert states(path) == states(reference)


def test_killed_and_gone_on_with(world, reference, tmp_path):
    path, dice = begin(world, tmp_path / "exp"), random.Random()
    for _ in range(6):
        command = [sys.executable, "-m", "fedtools", "rounds", str(path)]
        process = subprocess.Popen(command, env={**os.environ, **environment(world)}, cwd=ROOT)
        time.sleep(dice.uniform(0.2, 0.8))
        process.kill()
        process.wait()
    fedtools(world, "rounds", path).ok()
    assert states(path) == states(reference)


def test_poisson_sampling_may_draw_nobody(world, tmp_path):
    path = begin(
        world, tmp_path / "exp", "--set", "sampling=poisson", "--set", "clients_per_round=1"
    )
    fedtools(world, "rounds", path, "--to", 14).ok()
    sizes = [
        len((path / f"round_{number:04d}/clients").read_text().split())
        for number in range(2, 15)
        if number != 3
    ]
    assert 0 in sizes and max(sizes) > 1
    empty = next(n for n in range(4, 15) if not (path / f"round_{n:04d}/clients").read_text())
    before, after = (
        (path / f"round_{number:04d}/global.safetensors").read_bytes()
        for number in (empty, empty + 1)
    )
    assert before == after
