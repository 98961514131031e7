"""Small federations, and the ways in which their commands are run, for `kills.py` to stop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import counts
import keyword_world
import simulated
from commands import fedtools

_COUNTS = (
    "fedtools.federation.init",
    "fedtools.federation.rounds",
    "tensorboard.summary.writer.record_writer",
    "tensorboard.compat.proto.event_pb2",
)
_KEYWORDS = ("torch._dynamo", "fedtools.tasks.kws.task", *_COUNTS)


@dataclass(frozen=True)
class Process:
    """A command line, in which {} is the experiment, and its changes of the environment."""

    words: str
    env: dict[str, str] = field(default_factory=dict)


# Processes that run at the same time.
Stage = list[Process]


@dataclass(frozen=True)
class World:
    """Data of a federation.

    Attributes:
        root: where they are.
        init: words that begin an experiment.
        split: the split on which models are measured.
        every: the number of rounds between measurements.
        reset: the round to which it can be reset; clients and server keep only their last states.
        averages: whether there are models to average.
    """

    root: Path
    init: str
    split: str
    every: int
    reset: int
    averages: bool

    def scenario(self, name: str) -> list[Stage]:
        """Return the stages of an experiment with 4 rounds, all of which have the same results."""
        evaluate = [Process(f"evaluate {{}} --split {self.split} --every {self.every}")]
        rounds = f"rounds {{}} --evaluate {self.split}"
        reset = f"reset {{}} --round {self.reset}"
        stages = {
            "rounds": [[Process(rounds)]],
            "jobs": [[Process(f"{rounds} --nj 2")]],
            "ranks": [[Process(rounds, {"RANK": str(n), "WORLD_SIZE": "3"}) for n in range(3)]],
            "single": [*self._single(), evaluate],
            "reset": [[Process(words)] for words in (rounds, reset, rounds)],
        }[name]
        last = [[Process("average {} --best 2")]] if self.averages else []
        return [[Process(self.init)], *stages, *last]

    def _single(self) -> Iterator[Stage]:
        # The number of the round is given: without it, a round completed before a kill would be
        # followed by the next round.
        for number in range(1, 5):
            yield [Process(f"sample {{}} --nj 2 --round {number}")]
            jobs = (f"train-local {{}} --job {job} --round {number}" for job in (1, 2))
            yield [Process(words) for words in jobs]
            yield [Process(f"aggregate {{}} --round {number}")]


SCENARIOS = ("rounds", "jobs", "ranks", "single", "reset")


def make_counts(root: Path) -> dict[str, World]:
    """Make federations of counts, with and without kept messages."""
    root.mkdir()
    counts.make_world(root)
    words = f"init {{}} --config {root}/config.yaml --method counting --data train={root}/data"
    # Before `fedtools.methods` is imported, which reads it.
    os.environ["FEDTOOLS_PATH"] = str(root / "plugin")
    return {
        f"counts, {what}": World(root, words + more, "train", 1, 2, False)
        for what, more in (("messages kept", ""), ("removed", " --set keep_updates=false"))
    }


def make_keywords(root: Path) -> dict[str, World]:
    """Make federations of models: with personal tensors, and with a server optimiser."""
    root.mkdir()
    keyword_world.make_world(root)
    data = " ".join(f"--data {name}={root}/{name}" for name in ("train", "test"))
    # One after the other, so that there are checkpoints.
    more = "--set training.save_interval_steps=2 --set training.stack=1"
    words = f"init {{}} --config {root}/config.yaml {data} --data valid={root}/test {more} --method"
    return {
        f"keywords, {method}": World(root, f"{words} {method}", "test", 2, 1, True)
        for method in ("fedkws_ui", "fedopt")
    }


def make_speech(root: Path) -> dict[str, World]:
    """Make federations of conformers, which train at clients, at each alone, and at the server."""
    root.mkdir()
    simulated.data_dir(root / "train", ["au", "en", "in"], 4)
    simulated.data_dir(root / "valid", ["au", "en", "in"], 1, seed=1)
    training = simulated.CONFIG["training"] | {"batch_bins": 1500, "save_interval_steps": 1}
    simulated.config_file(root / "config.yaml", rounds=4, training=training)
    tokens = ("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char")
    fedtools(*tokens).ok()
    data = " ".join(f"--data {name}={root}/{name}" for name in ("train", "valid"))
    words = f"init {{}} --config {root}/config.yaml {data} --asset tokens={root}/tokens --method"
    return {
        f"speech, {method}": World(root, f"{words} {method}", "valid", 1, 1, True)
        for method in ("fedavg", "client", "centralized")
    }


_SPEECH = ("torch._dynamo", "espnet2.asr.espnet_model", "fedtools.tasks.asr.task", *_COUNTS)
WORLDS = {
    "speech": (make_speech, _SPEECH),
    "counts": (make_counts, _COUNTS),
    "keywords": (make_keywords, _KEYWORDS),
}
