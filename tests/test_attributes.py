"""Sex from footprints: on footprints that tell it, that do not, and by the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedtools.attack.attributes import COLUMNS, attack, balanced, cross_validated
from fedtools.attack.footprint_files import Prints
from fedtools.attack.verify import Model
from fedtools.files.tables import read_tsv
from fedtools.score.verification import binomial_bounds


def some(speakers: int, shift: float, own: float = 1.0) -> tuple[Prints, dict[str, Model]]:
    """Two models of each speaker, who has a direction of its own; women's are shifted."""
    random = np.random.default_rng(0)
    names, models, rows = [], {}, []
    for index in range(speakers):
        sex = "fm"[index % 2]
        centre = own * random.normal(size=(2, 30)) + shift * (sex == "f") * np.eye(30)[0]
        for number in (1, 2):
            name = f"s{index:02d}-m{number}"
            names.append(name)
            models[name] = Model(f"s{index:02d}", sex)
            rows.append(centre + 0.1 * random.normal(size=(2, 30)))
    return Prints(names, [models[name].speaker for name in names], {"h1": np.array(rows)}), models


def test_sex_that_shows_is_told_and_speakers_are_not_learnt_by_heart(tmp_path):
    """Models of a speaker are nearly the same: trained on one of them, nobody errs on the other."""
    for shift, least, most in ((10.0, 90, 100), (0.0, 20, 75)):
        prints, models = some(40, shift)
        (row,) = attack(prints, models, tmp_path)
        assert least <= float(row["accuracy%"]) <= most
        assert float(row["low"]) <= float(row["accuracy%"]) <= float(row["high"])
        assert (row["models"], row["speakers"]) == (80, 40)
    assert read_tsv(tmp_path / "attributes.tsv", COLUMNS)[0]["chance%"] == "50.0"


def test_what_is_learnt_by_heart_of_one_talk_does_not_help_with_another(tmp_path):
    """Where a speaker is a talk, a person's talks are either trained on or tested."""
    prints, models = some(40, 0.0)
    talks = {name: replace(one, speaker=name, person=one.speaker) for name, one in models.items()}
    (row,) = attack(prints, talks, tmp_path)
    assert float(row["accuracy%"]) <= 75 and row["speakers"] == 40
    (row,) = attack(prints, {n: replace(one, person="") for n, one in talks.items()}, tmp_path)
    assert float(row["accuracy%"]) > 75 and row["speakers"] == 80


@pytest.mark.parametrize("speakers", [8, 40])
def test_intervals_hold_the_binomial_one(tmp_path, speakers):
    """Draws of speakers who are all told right know of no error; of eight there are no draws."""
    (row,) = attack(*some(speakers, 100.0, 0.0), tmp_path)
    accuracy, *bounds = (float(row[name]) for name in ("accuracy%", "low", "high"))
    assert (accuracy == 100) == (speakers == 40)
    assert bounds == pytest.approx(binomial_bounds(accuracy / 100, speakers), abs=0.2)


def test_each_part_is_told_by_the_others():
    """Labels of a part do not change what is said of it."""
    random = np.random.default_rng(1)
    features, labels = random.normal(size=(40, 5)), np.arange(40) % 2 == 0
    parts = np.arange(40) // 4
    told = cross_validated(features, labels, parts)
    for part in (0, 7):
        other = labels.copy()
        other[parts == part] ^= True
        again = cross_validated(features, other, parts)
        assert np.array_equal(told[parts == part], again[parts == part])


def test_accuracy_is_the_mean_of_both_sexes():
    right = np.array([True, True, True, False, True])
    female = np.array([True, True, True, True, False])
    assert balanced(right, female) == pytest.approx(100 * (0.75 + 1) / 2)
    weights = np.array([0.0, 0, 1, 1, 2])
    assert balanced(right, female, weights) == pytest.approx(100 * (0.5 + 1) / 2)
    assert np.isnan(balanced(right[:4], female[:4]))


def test_too_few_of_a_known_sex_give_no_figures_and_a_line(tmp_path: Path, capsys):
    prints, models = some(6, 1.0)
    assert attack(prints, models, tmp_path) == []
    assert "models of 3 women and 3 men are known" in capsys.readouterr().err
    prints, models = some(40, 1.0)
    assert len(attack(prints, models, tmp_path)) == 1
    unknown = {name: Model(model.speaker) for name, model in models.items()}
    # What an earlier run has left does not stay.
    assert attack(prints, unknown, tmp_path) == read_tsv(tmp_path / "attributes.tsv", COLUMNS) == []
    assert "models of 0 women and 0 men are known" in capsys.readouterr().err
