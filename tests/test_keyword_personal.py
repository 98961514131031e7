"""Personal layers in keyword spotting: they stay at their client, and are evaluated there."""

from __future__ import annotations

from pathlib import Path

import keywords
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import inside, ledger
from keyword_world import CLIENTS, CONFIG, SIZES, begin, make_world
from safetensors.numpy import load_file, save_file
from scripts import script

from fedtools.audio.front_end import ScaledMfcc
from fedtools.core.tables import read_tsv
from fedtools.data.clips import Clips
from fedtools.models.keywords import build_network
from fedtools.tasks.kws.clips import ClipFeatures
from fedtools.tasks.kws.model import tensors_of

HEAD = 'method_conf.personal=["head.*"]'
NEWCOMER = "zoe"
TESTED = [CLIENTS[0], CLIENTS[1], CLIENTS[5], NEWCOMER]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make packed clips; the test and validation clips are of three clients and of a newcomer."""
    root = make_world(tmp_path_factory.mktemp("world"))
    counts = {CLIENTS[0]: [2, 3, 4, 1], CLIENTS[1]: [5, 0, 1, 2], CLIENTS[5]: [1, 1, 1, 1]}
    keywords.pack(root / "test", counts | {NEWCOMER: [3, 3, 3, 3]})
    keywords.config_file(root / "config.yaml", **CONFIG | {"rounds": 3, "evaluate_every": 1})
    return root


@pytest.fixture(scope="module")
def trained(world) -> Path:
    """Run three rounds, evaluated after each."""
    path = begin(world, world / "trained", "fedavg", HEAD, "keep_updates=true")
    inside("rounds", path, "--evaluate", "test").ok()
    return path


def sampled(path: Path, number: int) -> list[str]:
    return (path / f"round_{number:04d}" / "clients").read_text().split()


def head_of(path: Path, client: str, last: int) -> dict[str, np.ndarray]:
    """Return a client's head after round `last`: from its newest training, or the initial one."""
    for number in range(last, 0, -1):
        file = path / "clients" / client / f"round_{number:04d}" / "personal.safetensors"
        if file.exists():
            return load_file(file)
    initial = load_file(path / "init.safetensors")
    return {name: value for name, value in initial.items() if name.startswith("head.")}


def test_they_are_in_no_message(trained):
    names = load_file(trained / "init.safetensors").keys()
    head = {name for name in names if name.startswith("head.")}
    assert head and head < names
    messages = [*trained.glob("round_*/update.*.safetensors")]
    states = [*trained.glob("round_*/global.safetensors")]
    assert (len(messages), len(states)) == (3, 4)
    for path in (*messages, *states):
        found = load_file(path).keys()
        assert found and not found & head
        # Of the other tensors, only BatchNorm's counts are not sent.
        assert all("num_batches" in name for name in names - head - found)
    size = sum(value.nbytes for value in load_file(states[0]).values())
    rows = [row for row in ledger(trained) if row["client"] != "-"]
    assert rows and {int(row["bytes_up"]) for row in rows} == {size}


def test_epochs_are_clips_used_over_clips_there(trained):
    """Four steps of eight clips each, or of all clips where a client has fewer."""
    rows = [row for row in ledger(trained) if row["client"] != "-"]
    sizes = dict(zip(CLIENTS, SIZES, strict=True))
    for row in rows:
        size = sizes[row["client"]]
        assert float(row["client_epochs"]) == pytest.approx(4 * min(size, 8) / size, rel=1e-5)
    assert len({row["client_epochs"] for row in rows}) > 3


def test_each_stays_its_clients_own_and_is_kept_for_all_rounds(trained):
    head = {name for name in load_file(trained / "init.safetensors") if name.startswith("head.")}
    expected = {
        f"{client}/round_{number:04d}/personal.safetensors"
        for number in (1, 2, 3)
        for client in sampled(trained, number)
    }
    folder = trained / "clients"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == expected and len(found) == 15
    weights = []
    for name in sorted(found):
        state = load_file(folder / name)
        assert state.keys() == head
        weights.append(state["head.weight"].tobytes())
    assert len(set(weights)) == 15


def test_training_begins_with_ones_own(world, tmp_path):
    """With a rate of 0, each of a stack's different heads is unchanged."""
    settings = HEAD, "clients_per_round=7", "training.stack=3", "training.optim_conf.lr=0.0"
    path = begin(world, tmp_path / "exp", "fedavg", *settings)
    inside("rounds", path, "--to", "1").ok()
    initial = head_of(path, NEWCOMER, 0)
    marked = {}
    for number, client in enumerate(CLIENTS):
        file = path / "clients" / client / "round_0001" / "personal.safetensors"
        state = load_file(file)
        assert all(np.array_equal(state[name], initial[name]) for name in initial)
        marked[client] = {name: value + number for name, value in state.items()}
        save_file(marked[client], file)
    inside("rounds", path, "--to", "2").ok()
    for client in CLIENTS:
        state = load_file(path / "clients" / client / "round_0002" / "personal.safetensors")
        assert all(np.array_equal(state[name], marked[client][name]) for name in marked[client])


def logits_by_hand(
    path: Path, data: Path, client: str, number: int, head: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return labels and logits for a client's clips, by a round's model with the client's head."""
    config = yaml.safe_load((path / "config.yaml").read_text())
    clips = Clips.read(data)
    network = build_network(config["model"], len(clips.classes), "here").eval()
    state = load_file(path / f"round_{number + 1:04d}" / "global.safetensors")
    state |= head_of(path, head, number)
    with torch.no_grad():
        for name, value in state.items():
            tensors_of(network)[name].copy_(torch.from_numpy(value))
        rows = clips.rows(client)
        logits = network(ClipFeatures(clips, ScaledMfcc(), torch.device("cpu")).plain(rows)[None])[
            0
        ]
    return logits.double(), torch.from_numpy(np.array(clips.labels[rows]).astype("i8"))


def test_they_are_measured_by_client(world, trained):
    rows = read_tsv(trained / "evaluate_test.tsv", None)
    assert [(row["round"], row["client"]) for row in rows] == [
        (str(number), client) for number in range(4) for client in TESTED
    ]
    others = 0
    for row in rows:
        at, client = int(row["round"]), row["client"]
        logits, labels = logits_by_hand(trained, world / "test", client, at, client)
        loss = F.cross_entropy(logits, labels).item()
        errors = int((logits.argmax(1) != labels).sum())
        assert (int(row["errors"]), int(row["clips"])) == (errors, len(labels))
        assert float(row["loss"]) == pytest.approx(loss, abs=2e-6)
        assert float(row["accuracy"]) == pytest.approx(100 * (1 - errors / len(labels)), abs=1e-3)
        # A newcomer has the initial head; a trained one would give other figures.
        initial, _ = logits_by_hand(trained, world / "test", client, at, NEWCOMER)
        others += F.cross_entropy(initial, labels).item() != pytest.approx(loss, abs=1e-3)
    took_part = [
        set(TESTED) & {name for number in range(1, at + 1) for name in sampled(trained, number)}
        for at in range(4)
    ]
    assert others == sum(map(len, took_part)) > 3


def test_rates_of_all_clips_are_of_every_clients_own_model(cli, world, trained, tmp_path):
    """This covers false accepts and rejects, and the accuracy in reports."""

    def predicted(number: int) -> tuple[np.ndarray, np.ndarray]:
        found = [
            logits_by_hand(trained, world / "test", client, number, client) for client in TESTED
        ]
        return (
            np.concatenate([logits.argmax(1).numpy() for logits, _ in found]),
            np.concatenate([labels.numpy() for _, labels in found]),
        )

    cli("detection", trained).ok()
    (row,) = read_tsv(trained / "detection_test.tsv", None)
    taken, labels = predicted(3)
    # The first two classes are the negative ones.
    accepts, rejects = ((labels < 2) & (taken >= 2)).sum(), ((labels >= 2) & (taken < 2)).sum()
    assert (int(row["false_accepts"]), int(row["false_rejects"])) == (accepts, rejects)
    assert int(row["clips"]) == len(labels)
    place = tmp_path / "keywords" / "dscnn" / "fedavg"
    place.mkdir(parents=True)
    (place / "seed0").symlink_to(trained)
    named = "--section=s", "--corpus=c", "--release=r"
    script("report.py", tmp_path, tmp_path / "R.md", *named).ok()
    page = (tmp_path / "R.md").read_text()
    accuracies = [100 * np.equal(*predicted(number)).mean() for number in (1, 2, 3)]
    assert f"{np.mean(accuracies):.2f} (1)" in page


@pytest.mark.parametrize(("by", "column", "sign"), [("loss", "loss", 1), ("rate", "accuracy", -1)])
def test_averages_are_of_the_clients_own_rounds(world, cli, tmp_path, by, column, sign):
    config = world / "config.yaml"
    data = (f"--data=train={world / 'train'}", f"--data=valid={world / 'test'}")
    path = tmp_path / "exp"
    options = ("--config", config, "--method", "fedavg", "--set", HEAD, "--set", "average=2")
    cli("init", path, *options, *data).ok()
    cli("rounds", path).ok()
    cli("average", path, "--by", by).ok()
    rows = read_tsv(path / "evaluate_valid.tsv", None)
    known = {row["client"] for row in rows}
    for client in CLIENTS:
        figures = {
            number: np.mean(
                [
                    sign * float(row[column])
                    for row in rows
                    if row["round"] == str(number) and row["client"] in ({client} & known or known)
                ]
            )
            for number in (1, 2, 3)
        }
        best = sorted(sorted(figures, reverse=True), key=figures.get)[:2]
        found = load_file(path / "clients" / client / "model.safetensors")
        states = [
            load_file(path / f"round_{number + 1:04d}" / "global.safetensors")
            | head_of(path, client, number)
            for number in best
        ]
        for name in states[0]:
            mean = np.mean([state[name].astype("f8") for state in states], axis=0)
            np.testing.assert_allclose(found[name], mean, rtol=1e-6, atol=1e-7)


def test_a_private_model_is_kept_of_the_newest_round_alone(world, cli, tmp_path):
    path = begin(world, tmp_path / "exp", "alo", HEAD)
    cli("rounds", path).ok()
    for client in CLIENTS:
        took_part = [number for number in (1, 2, 3) if client in sampled(path, number)]
        kept = sorted((path / "clients" / client).rglob("*.safetensors"))
        expected = {f"round_{number:04d}/personal.safetensors" for number in took_part}
        if took_part:
            expected.add(f"round_{took_part[-1]:04d}/private.safetensors")
        assert {f"{file.parent.name}/{file.name}" for file in kept} == expected


def test_what_cannot_be_personal_is_refused(world, trained, cli, tmp_path):
    def refused(method: str, setting: str, *said: str) -> None:
        words = ("init", tmp_path / "exp", "--config", world / "config.yaml", "--method", method)
        cli(*words, "--data", f"train={world / 'train'}", "--set", setting).fails(1, *said)
        assert not (tmp_path / "exp").exists()

    wrong = 'method_conf.personal=["head.*", "hed.*"]'
    refused("fedavg", wrong, "config.yaml: method_conf.personal: no parameter matches 'hed.*'")
    # A key matches the whole name, not its beginning.
    refused("fedavg", 'method_conf.personal=["head"]', "no parameter matches 'head'")
    refused("fedavg", "method_conf.personal=head.*", "personal")
    refused("centralized", HEAD, "Centralized has no clients")
    said = "config.yaml: clients have personal layers"
    script("landscape.py", trained, tmp_path / "no.png").fails(1, said)
