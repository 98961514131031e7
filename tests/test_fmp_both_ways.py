"""FMP's federation on disk and its simulation: the same counts, noise and hypotheses to the bit."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import inside
from fmp_world import best_text
from rescored_world import WORDS, make_stream
from safetensors.numpy import load_file

from fedtools.federation.fmp.simulation import simulate
from fedtools.lm.reweighting import Lists, ListWeights
from fedtools.lm.stream import open_stream
from fedtools.methods.fmp import FMP
from fedtools.privacy.key import read_key
from fedtools.privacy.releases import Releases

T, SPAN = 3, 100.0
EVEN, CLOCK = {}, {"groups": "clock", "span": SPAN}
ALL, POISSON = {}, {"clients_per_round": 0.4, "sampling": "poisson"}
# In C order, which differs from a dictionary's.
CLIENTS = ("Zed", "ann", "cat")


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> Path:
    folder = make_stream(tmp_path_factory.mktemp("world") / "stream", 25, 5)
    table = folder / "utt2client"
    table.write_text(table.read_text().replace(" bob", " Zed"))
    return folder


@pytest.fixture(autouse=True)
def key(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "secret" / "noise.key"
    monkeypatch.setenv("FEDTOOLS_NOISE_KEY", str(path))
    return path


def federation(
    stream: Path, path: Path, sampling: dict, options: dict, jobs: int = 1
) -> list[np.ndarray]:
    """Run a federation's T rounds on disk; return the sent states, including the next."""
    config = {"task": "rescore", "rounds": T, "method_conf": options, **sampling}
    path.with_suffix(".yaml").write_text(yaml.safe_dump(config))
    arguments = ("--config", path.with_suffix(".yaml"), "--method", "fmp")
    inside("init", path, *arguments, "--data", f"train={stream}").ok()
    inside("rounds", path, "--nj", jobs).ok()
    names = [f"round_{number:04d}/global.safetensors" for number in range(1, T + 2)]
    return [load_file(path / name)["counts"] for name in names]


def sampled(path: Path) -> dict[int, list[str]]:
    return {
        number: (path / f"round_{number:04d}" / "clients").read_text().split()
        for number in range(1, T + 1)
    }


def cases():
    for groups, unit in ((EVEN, "user"), (CLOCK, "utterance")):
        for sampling in (ALL, POISSON):
            for sends in ("cumulative", "increments"):
                yield sampling, {"sends": sends, **groups}
            yield sampling, {"privacy": {"mechanism": "paper", "epsilon": 0.7}, **groups}
        for trust in ("server", "client"):
            for sends in ("cumulative", "increments"):
                privacy = {"mechanism": "laplace", "epsilon": 3.0, "cap": 4.0}
                privacy |= {"trust": trust, "unit": unit}
                yield ALL, {"privacy": privacy, "sends": sends, **groups}
    yield ALL, {"continuous": True, "sigma": 1.3, "normalise": True, "lm_weight": 2.0}


@pytest.mark.parametrize(("sampling", "options"), list(cases()))
def test_disk_and_simulation_agree(stream, tmp_path, key, sampling, options):
    """With noise under the same key, nonce and label; T rounds, and the group after them."""
    path, method = tmp_path / "exp", FMP(**options)
    on_disk = federation(stream, path, sampling, options)
    opened, releases = open_stream(stream), None
    if "privacy" in options:
        # From the checksums of all initial files, including the nonce.
        label = hashlib.sha256((path / "sha256sums").read_bytes()).hexdigest()
        releases = Releases(method.plan(T), read_key(key), label)
    lists = Lists(opened.rescored, method.part(ListWeights))
    groups = {client: opened.groups(client, T, method.clock) for client in CLIENTS}
    drawn = sampled(path)
    best, counts = simulate(method, lists, groups, releases, drawn.__getitem__)
    assert len(counts) == T + 1
    for one, other in zip(on_disk, counts, strict=True):
        assert one.tobytes() == other.tobytes()
    found = [opened.rescored.hypotheses[index] for index in best]
    assert best_text(path) == dict(zip(opened.rescored.utterances, found, strict=True))
    # At least one client spoke; and with sampling, not all clients each time.
    assert on_disk[-1].any()
    assert (sampling == ALL) == all(tuple(drawn[number]) == CLIENTS for number in drawn)
    assert sampling != POISSON or [] in drawn.values()


def added_up(values) -> float:
    total = 0.0
    for value in values:
        total = total + value
    return total


@pytest.mark.parametrize("sends", ["cumulative", "increments"])
def test_the_order_of_sums(stream, tmp_path, sends):
    """Words at a client and clients at the server are added in order, by Python's additions."""
    on_disk = federation(stream, tmp_path / "exp", ALL, {"sends": sends, "sigma": 5.0}, 2)
    lists: dict[str, list[list[str]]] = {}
    for line in (stream / "nbest.tsv").read_text().splitlines():
        name, *_, words = line.split("\t")
        lists.setdefault(name, []).append(words.split())
    owner = dict(line.split() for line in (stream / "utt2client").read_text().splitlines())
    segments = [line.split() for line in (stream / "segments").read_text().splitlines()]
    begin = {name: float(time) for name, _, time, _ in segments}
    numbers = {word: number for number, word in enumerate(["</s>", "<unk>", *WORDS])}
    expected = np.zeros(len(numbers))
    for number in range(1, T + 1):
        sent = []
        for client in CLIENTS:
            names = sorted((name for name in owner if owner[name] == client), key=begin.get)
            parts = np.array_split(names, T + 1)
            first = number - 1 if sends == "increments" else 0
            weights: dict[int, list[float]] = {word: [] for word in range(len(numbers))}
            for name in np.concatenate(parts[first:number]):
                for rank, words in enumerate(lists[name]):
                    for word in words:
                        kernel = math.exp(-(rank**2) / (2 * 5.0**2))
                        weights[numbers.get(word, 1)].append(kernel)
            sent.append([added_up(weights[word]) for word in weights])
        total = np.array([added_up(of_word) for of_word in zip(*sent, strict=True)])
        expected = expected + total if sends == "increments" else total
        assert on_disk[number].tolist() == expected.tolist()
