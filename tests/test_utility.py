"""Cost of defences: on networks with planted answers, and on models of speech by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import keywords
import numpy as np
import pytest
import simulated
from conftest import inside
from safetensors.numpy import load_file
from scipy.stats import beta
from updates_world import plant

from fedtools.attack.utility import NOTHING, ON, UTILITY, utility
from fedtools.core.tables import read_tsv
from fedtools.data.datadir import DataDir
from fedtools.federation.federation import Federation

# Seven people whose own networks always answer `yes`, and five whose answer `no`.
YES, NO = 2, 3
PEOPLE = {f"p{number:02d}": YES if number < 7 else NO for number in range(12)}
Rows = dict[tuple[str, str], dict[str, str]]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make one-word networks of people who say their network's word three times in four."""
    root = tmp_path_factory.mktemp("utility")
    keywords.pack(root / "train", {one: [0, 0, 2, 2] for one in PEOPLE})
    held = {one: [0, 1, 3, 0] if word == YES else [0, 1, 0, 3] for one, word in PEOPLE.items()}
    keywords.pack(root / "held", held)
    keywords.pack(root / "strangers", {f"z{number}": [2, 1, 1, 0] for number in range(3)})
    # Only the answers have four values.
    model = {"network": "dscnn", "network_conf": {"channels": 5, "blocks": 1}}
    keywords.config_file(root / "c.yaml", rounds=1, keep_updates=True, model=model)
    inside(
        *("init", root / "exp", "--config", root / "c.yaml", "--method", "fedavg"),
        *(
            word
            for name in ("train", "held", "strangers")
            for word in ("--data", f"{name}={root / name}")
        ),
        *("--set", "clients_per_round=null"),
    ).ok()
    inside("rounds", root / "exp").ok()
    (bias,) = [
        name
        for name, value in load_file(root / "exp/round_0001/global.safetensors").items()
        if value.shape == (len(keywords.CLASSES),)
    ]

    def certain(client: str, start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        moved = {name: np.zeros_like(value) for name, value in start.items()}
        moved[bias][PEOPLE[client]] = 1e4
        return moved

    plant(root / "exp", certain)
    (root / "bias").write_text(bias)
    return root


def measured(world: Path, out: Path, *more: str) -> Rows:
    splits = ("--split", "held", "--split", "strangers", "--resamples", "200")
    inside("attack", "utility", world / "exp", out, "--round", "1", *splits, *more).ok()
    rows = read_tsv(out, UTILITY)
    assert {row["rate"] for row in rows} == {"accuracy"}
    return {(row["defence"], row["on"]): row for row in rows}


def test_networks_that_say_one_word(world, tmp_path):
    bias = (world / "bias").read_text()
    defences = ("none", "mean=3", f"keep={bias}")
    words = [word for one in defences for word in ("--defence", one)]
    rows = measured(world, tmp_path / "u.tsv", *words)
    assert list(rows) == [(one, on) for one in (NOTHING, *defences) for on in ON]
    found = {key: float(row["value"]) for key, row in rows.items()}
    # Three of four are a person's own word. The mean answers `yes`, like most people's networks:
    # three of four for seven people, none for five, and one of four for three strangers.
    assert found["none", "own"] == 75
    assert found["none", "newcomers"] == 25
    assert found["none", "everybody"] == 100 * (7 * 3 + 3 * 1) / (4 * 15)
    # Means alone have less of a person's own change, and the same in the mean of all.
    assert found["mean=3", "own"] < 75
    for on in ("newcomers", "everybody"):
        assert found["mean=3", on] == found["none", on]
    # Without the only changed tensor, nothing was learnt.
    inside("evaluate", world / "exp", "--split", "held").ok()
    inside("evaluate", world / "exp", "--split", "strangers").ok()
    begun = {}
    for split in ("held", "strangers"):
        table = read_tsv(world / "exp" / f"evaluate_{split}.tsv", None)
        begun[split] = next(float(row["accuracy"]) for row in table if row["round"] == "0")
    for name in (NOTHING, f"keep={bias}"):
        assert found[name, "own"] == pytest.approx(begun["held"], abs=0.01)
        assert found[name, "newcomers"] == pytest.approx(begun["strangers"], abs=0.01)
        everybody = (12 * begun["held"] + 3 * begun["strangers"]) / 15
        assert found[name, "everybody"] == pytest.approx(everybody, abs=0.01)


def test_intervals_are_over_people(world, tmp_path):
    """Twelve people who are all alike have no uncertainty; three are three trials at best."""
    rows = measured(world, tmp_path / "u.tsv", "--defence", "none")
    counts = {on: int(rows["none", on]["speakers"]) for on in ON}
    assert counts == {"own": 12, "newcomers": 3, "everybody": 15}
    assert [rows["none", "own"][name] for name in ("low", "high")] == ["75.00", "75.00"]
    right = 3 * float(rows["none", "newcomers"]["value"]) / 100
    low, high = (float(rows["none", "newcomers"][name]) for name in ("low", "high"))
    assert low == pytest.approx(100 * beta.ppf(0.025, right, 4 - right), abs=0.01)
    assert high == pytest.approx(100 * beta.ppf(0.975, right + 1, 3 - right), abs=0.01)
    low, high = (float(rows["none", "everybody"][name]) for name in ("low", "high"))
    assert 10 < low < float(rows["none", "everybody"]["value"]) < high < 70
    # From draws of fifteen: seven with three of four, three with one of four and five with none.
    random = np.random.default_rng(0)
    people = np.array([75] * 7 + [25] * 3 + [0] * 5)
    drawn = np.percentile(random.choice(people, (20_000, 15)).mean(1), [2.5, 97.5])
    assert (low, high) == pytest.approx(drawn, abs=6)


def test_where_nobody_is(world, tmp_path):
    command = ("attack", "utility", world / "exp", tmp_path / "u.tsv", "--round", "1")
    inside(*command, "--defence", "none", "--split", "strangers").ok()
    rows = {(row["defence"], row["on"]): row for row in read_tsv(tmp_path / "u.tsv", UTILITY)}
    row = rows["none", "own"]
    assert [row[name] for name in UTILITY[3:]] == ["-", "-", "-", "0"]
    assert rows["none", "newcomers"]["value"] == rows["none", "everybody"]["value"] == "25.00"
    inside(*command, "--defence", "none", *["--split", "held"] * 2).fails(2, "the same split twice")
    inside(*command, "--defence", "none").fails(
        1, "no valid data; there are train, held, strangers"
    )
    inside(*command, "--defence", "x=1", "--split", "held").fails(1, "defence 'x=1' in 'x=1'")


def test_a_speaker_is_measured_by_each_of_its_models(tmp_path):
    """In speech whose split has no clients, both models of a speaker use the same utterances.

    One client has less data than the others: means are weighted by data, like the server's.
    """
    clients = [f"{one}-m{number}" for one in ("ann", "bob") for number in (1, 2)]
    simulated.one_speaker_each(simulated.data_dir(tmp_path / "whole", clients, 3))
    shutil.copytree(tmp_path / "whole", tmp_path / "train")
    whole = DataDir.read(tmp_path / "whole")
    few = {one for one in whole.text if one.startswith("ann-m1") and "000" not in one}
    whole.restrict(set(whole.text) - few, tmp_path / "train").write(remove_others=True)
    held = DataDir.read(simulated.data_dir(tmp_path / "held", ["ann", "bob", "zed"], 4, seed=7))
    held.utt2spk = dict(held.utt2client)
    held.utt2client = {}
    (tmp_path / "held" / "utt2client").unlink()
    held.write()
    inside(
        "train-tokens", tmp_path / "train/text", tmp_path / "tokens", "--token-type", "char"
    ).ok()
    simulated.config_file(tmp_path / "c.yaml")
    inside(
        *("init", tmp_path / "exp", "--config", tmp_path / "c.yaml", "--method", "fedavg"),
        *("--data", f"train={tmp_path / 'train'}", "--data", f"valid={tmp_path / 'held'}"),
        *("--asset", f"tokens={tmp_path / 'tokens'}", "--set", "method_conf.local_epochs=8"),
        *("--set", "training.optim_conf.lr=0.01", "--set", "rounds=1"),
        *("--set", "method_conf.weighting=utterances"),
    ).ok()
    inside("rounds", tmp_path / "exp").ok()
    out = tmp_path / "u.tsv"
    words = ("--defence", "none")
    inside("attack", "utility", tmp_path / "exp", out, "--round", "1", *words).ok()
    rows = {(row["defence"], row["on"]): row for row in read_tsv(out, UTILITY)}
    assert {row["rate"] for row in rows.values()} == {"wer"}
    assert [rows["none", on]["speakers"] for on in ON] == ["2", "1", "3"]
    # By hand: each sent model, on its speaker's utterances.
    federation = Federation(tmp_path / "exp")
    corpus, folder = federation.task.corpus, tmp_path / "exp" / "round_0001"
    data = corpus.read("valid")
    sent, start = load_file(folder / "update.1.safetensors"), federation.states.start(1)
    totals = np.zeros(2)
    for row, line in enumerate(read_tsv(folder / "update.1.tsv", None)):
        federation.task.load(start | {name: value[row] for name, value in sent.items()}, 0)
        own = [name for name in data.utterances if name.startswith(line["client"][:3])]
        found = federation.task.measured(corpus.gather(data, own))
        totals += [found["errors"], found["words"]]
    expected = 100 * totals[0] / totals[1]
    assert float(rows["none", "own"]["value"]) == pytest.approx(expected, abs=0.01)
    inside("evaluate", tmp_path / "exp", "--split", "valid").ok()
    table = read_tsv(tmp_path / "exp" / "evaluate_valid.tsv", None)
    after = {row["round"]: float(row["wer"]) for row in table}
    assert float(rows["none", "everybody"]["value"]) == pytest.approx(after["1"], abs=0.01)
    assert float(rows[NOTHING, "everybody"]["value"]) == pytest.approx(after["0"], abs=0.01)
    # The measured model is the server's next one.
    utility(federation, 1, ["none"], ["valid"])
    found = federation.task.models.build().state_dict()
    for name, value in load_file(tmp_path / "exp/round_0002/global.safetensors").items():
        np.testing.assert_allclose(found[name].numpy(), value, rtol=1e-5, atol=1e-7)
