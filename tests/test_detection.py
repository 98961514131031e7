"""False accepts and rejects: counted by hand, by another program, and in a real experiment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keywords import CLASSES, config_file, pack
from safetensors.numpy import load_file, save_file

from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv
from fedtools.exchange.experiment import Experiment
from fedtools.federation.federation import Federation
from fedtools.score.detection import NEGATIVE, RATES, Detection, detect


def found(labels: list[str], predicted: list[str]) -> Detection:
    indices = [np.array([CLASSES.index(name) for name in names]) for names in (predicted, labels)]
    return detect(*indices, CLASSES, "here")


def test_rates_counted_by_hand():
    labels = ["_silence_", "_unknown_", "_unknown_", "_unknown_", "yes", "yes", "no", "no"]
    # Silence taken for an unknown word, and yes for no, are neither accepts nor rejects.
    predicted = ["_unknown_", "_unknown_", "yes", "no", "no", "_silence_", "_unknown_", "_unknown_"]
    result = found(labels, predicted)
    assert result == Detection(clips=8, negatives=4, false_accepts=2, false_rejects=3)
    assert result.rates == dict(zip(RATES, (25.0, 37.5, 50.0, 75.0), strict=True))


@given(st.lists(st.tuples(*[st.sampled_from(CLASSES)] * 2), max_size=30))
def test_counts_are_those_of_a_loop_over_the_clips(pairs):
    pairs = [("yes", "yes"), ("_silence_", "_silence_"), *pairs]
    labels, predicted = (list(column) for column in zip(*pairs, strict=True))
    result = found(labels, predicted)
    accepts = sum(label in NEGATIVE and taken not in NEGATIVE for label, taken in pairs)
    rejects = sum(label not in NEGATIVE and taken in NEGATIVE for label, taken in pairs)
    assert (result.false_accepts, result.false_rejects) == (accepts, rejects)
    assert result.negatives == sum(label in NEGATIVE for label in labels)


def test_clips_that_cannot_be_falsely_taken_are_refused():
    with pytest.raises(UserError, match="12-class"):
        detect(np.array([0]), np.array([0]), ["yes", "no"], "here")
    with pytest.raises(UserError, match="no clip of a negative class"):
        found(["yes"], ["yes"])
    with pytest.raises(UserError, match="no clip of a positive class"):
        found(["_silence_"], ["yes"])


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Make experiments with untrained models; return their folder."""
    monkeypatch.chdir(tmp_path)
    config_file(Path("config.yaml"))

    def make(cli, classes: tuple[str, ...], seed: int = 0) -> Path:
        for split in ("train", "test"):
            pack(Path(split), {"ann": [3] * len(classes)}, classes)
        data = ("--data", "train=train", "--data", "test=test")
        path = Path(f"exp{seed}")
        options = ("--config", "config.yaml", "--method", "fedavg", "--seed", seed)
        cli("init", path, *options, *data).ok()
        return path

    return make


def test_the_command_measures_the_last_model(cli, experiment):
    paths = [experiment(cli, CLASSES, seed) for seed in (0, 1)]
    cli("rounds", paths[1], "--to", "1").ok()
    out = cli("detection", *paths).ok().out
    for number, path in enumerate(paths):
        federation = Federation(path)
        federation.load_result(None, number)
        logits, labels = federation.task.logits("test")
        expected = detect(logits.argmax(1).numpy(), labels.numpy(), CLASSES, "here")
        (row,) = read_tsv(path / "detection_test.tsv", None)
        assert (row["round"], row["clips"], row["negatives"]) == (str(number), "12", "6")
        for name in RATES:
            assert float(row[name]) == pytest.approx(expected.rates[name], abs=1e-4)
        (line,) = [line for line in out.splitlines() if line.startswith(str(path))]
        assert line.split()[1:] == list(row.values())
    assert "`_silence_` and `_unknown_`" in out
    assert "in % of all clips" in out


def test_the_command_takes_the_last_configured_round_and_no_other(cli, experiment):
    """Each model gives all clips one label, and neither an earlier nor a later round is used."""
    path = experiment(cli, CLASSES)
    cli("rounds", path, "--to", "4").ok()
    taken = {2: "_unknown_", 3: "yes", 4: "_silence_"}
    for number, label in taken.items():
        file = path / f"round_{number + 1:04d}" / "global.safetensors"
        state = load_file(file)
        state["head.weight"][:], state["head.bias"][:] = 0, np.equal(CLASSES, label)
        save_file(state, file)
        Experiment(path).round(number).close()
    cli("detection", path).ok()
    (row,) = read_tsv(path / "detection_test.tsv", None)
    # All six negative clips are accepted, and none of six positive ones is rejected.
    found = [row[name] for name in ("round", "negatives", "false_accepts", "false_rejects")]
    assert found == ["3", "6", "6", "0"]


def test_each_split_is_measured_on_its_own_clips(cli, tmp_path):
    """Accuracy and detection use validation clips for validation, and test clips for test."""
    counts = {"train": [2, 2, 2, 2], "valid": [1, 2, 3, 4], "test": [3, 1, 1, 2]}
    data = [f"--data={split}={tmp_path / split}" for split in counts]
    for split, clips in counts.items():
        pack(tmp_path / split, {"ann": clips})
    path, config = tmp_path / "exp", config_file(tmp_path / "config.yaml")
    cli("init", path, "--config", config, "--method", "fedavg", *data).ok()
    for split, clips in counts.items():
        cli("evaluate", path, "--split", split).ok()
        cli("detection", path, "--split", split).ok()
        (measured,) = read_tsv(path / f"evaluate_{split}.tsv", None)
        (row,) = read_tsv(path / f"detection_{split}.tsv", None)
        assert measured["clips"] == row["clips"] == str(sum(clips))
        assert row["negatives"] == str(sum(clips[:2]))


def test_data_without_negative_classes_are_refused(cli, experiment):
    path = experiment(cli, ("yes", "no"))
    cli("detection", path).fails(1, "test: no class is", "12-class task")
    assert not (path / "detection_test.tsv").exists()
    cli("detection", path, "--split", "valid").fails(1, "no valid data")
