"""Model scores of each clip, and counts by speaker, against models loaded and run by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import kaldiio
import numpy as np
import pytest
from keywords import CLASSES, config_file, pack

from fedtools.core.tables import read_tsv
from fedtools.data.datadir import read_table
from fedtools.federation.federation import Federation

ROUNDS = 7
TEST = {"ann": [2, 1, 3, 2], "bob": [0, 2, 1, 3], "eve": [1, 0, 0, 4]}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scores")
    pack(folder / "train", {"tom": [4] * 4, "kim": [3, 2, 4, 5]})
    pack(folder / "test", TEST)
    return folder


def begun(world: Path, cli, tmp_path: Path, *options: str, every: int = 1) -> Path:
    config = config_file(tmp_path / "config.yaml", rounds=ROUNDS, evaluate_every=every)
    data = [f"--data={split}={world / split}" for split in ("train", "test")]
    exp = tmp_path / "exp"
    cli("init", exp, "--config", config, "--method", "fedavg", *data, *options).ok()
    return exp


@pytest.mark.parametrize(("every", "rounds"), [(1, [3, 4, 5, 6, 7]), (3, [3, 6, 7])])
def test_scores_are_of_the_last_five_evaluations(world, cli, tmp_path, every, rounds):
    exp = begun(world, cli, tmp_path, every=every)
    cli("rounds", exp, "--evaluate", "test").ok()
    out = cli("clip-scores", exp).ok().out
    assert out == f"{exp}: rounds {' '.join(map(str, rounds))}\n"
    assert {path.stem for path in (exp / "scores_test").iterdir()} == {
        f"round_{number:04d}" for number in rounds
    }
    table = read_tsv(exp / "speakers_test.tsv", None)
    measured = {int(row["round"]): row for row in read_tsv(exp / "evaluate_test.tsv", None)}
    truth = [line.split("\t") for line in (world / "test/clips.tsv").read_text().splitlines()[1:]]
    federation = Federation(exp)
    for number in rounds:
        federation.load_result(None, number)
        logits, _ = federation.task.logits("test")
        scp = read_table(exp / f"scores_test/round_{number:04d}.scp")
        found = np.stack([kaldiio.load_mat(scp[row[0]]) for row in truth])
        assert list(scp) == [row[0] for row in truth] and np.array_equal(found, logits.numpy())
        # Counted clip by clip; a clip of silence counts as a speaker of its own.
        clips, errors = Counter(), Counter()
        for (utterance, client, label, _), scores in zip(truth, found, strict=True):
            who = utterance if label == "_silence_" else client
            clips[who] += 1
            errors[who] += CLASSES[int(np.argmax(scores))] != label
        rows = [row for row in table if row["round"] == str(number)]
        counted = {row["speaker"]: (int(row["clips"]), int(row["errors"])) for row in rows}
        assert counted == {who: (clips[who], errors[who]) for who in clips}
        assert sorted(counted) == [row["speaker"] for row in rows]
        assert sum(errors.values()) == int(measured[number]["errors"])
    # The same errors by clip, of all evaluations together.
    by_clip = read_tsv(exp / "errors_test.tsv", None)
    assert {row["clip_tokens"] for row in by_clip} == {str(len(rounds))}
    assert {row["utterance"] for row in by_clip} == {row[0] for row in truth}
    sums: Counter[str] = Counter()
    for row in by_clip:
        sums[row["speaker"]] += int(row["clip_errors"])
    whole: Counter[str] = Counter()
    for row in table:
        whole[row["speaker"]] += int(row["errors"])
    assert sums == whole
    assert len(clips) == 3 + 3 and len(table) == len(rounds) * 6


def test_each_clients_own_model_hears_its_own_clips(world, cli, tmp_path):
    """With personal layers, scores agree with accuracy by client."""
    pack(tmp_path / "train", {"ann": [4] * 4, "bob": [3, 2, 4, 5]})
    pack(tmp_path / "test", {"ann": [2] * 4, "bob": [1, 2, 3, 1]})
    exp = begun(tmp_path, cli, tmp_path, "--set", "method_conf.personal=[head.*]")
    cli("rounds", exp, "--evaluate", "test").ok()
    cli("clip-scores", exp).ok()
    table = read_tsv(exp / "speakers_test.tsv", None)
    for row in read_tsv(exp / "evaluate_test.tsv", None)[-2:]:
        own = [
            one
            for one in table
            if one["round"] == row["round"] and one["speaker"].startswith(row["client"])
        ]
        assert sum(int(one["errors"]) for one in own) == int(row["errors"])
        assert sum(int(one["clips"]) for one in own) == int(row["clips"])


def test_before_any_round_they_are_of_the_start(world, cli, tmp_path):
    exp = begun(world, cli, tmp_path)
    assert cli("clip-scores", exp).ok().out == f"{exp}: rounds 0\n"
    cli("clip-scores", exp, "--split", "valid").fails(1, "no valid data")
