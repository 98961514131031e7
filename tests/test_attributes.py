"""Attributes from footprints with and without information on them, and by the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import inside
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from fedtools.attack.speakers.attributes import (
    COLUMNS,
    Labelled,
    areas,
    attack,
    balanced,
    cross_validated,
    deal,
)
from fedtools.attack.speakers.footprint_files import Prints
from fedtools.attack.speakers.logistic import probabilities
from fedtools.core.config import write_yaml
from fedtools.core.tables import read_tsv, write_tsv
from fedtools.data.ark import write_ark
from fedtools.data.datadir import write_table
from fedtools.score.verification import binomial_bounds

Some = tuple[Prints, dict[str, str], dict[str, str]]


def some(
    speakers: int, shift: float, own: float = 1.0, classes: str = "fm", size: int = 30
) -> Some:
    """Make two models per speaker, along its own direction; all classes but one are shifted.

    Returns:
        footprints, and each model's person and class.
    """
    random = np.random.default_rng(0)
    people, told, rows = {}, {}, []
    for index in range(speakers):
        kind = index % len(classes)
        way = np.eye(size)[kind] if kind < len(classes) - 1 else np.zeros(size)
        centre = own * random.normal(size=(2, size)) + shift * way
        for number in (1, 2):
            name = f"s{index:02d}-m{number}"
            people[name], told[name] = f"s{index:02d}", classes[kind]
            rows.append(centre + 0.1 * random.normal(size=(2, size)))
    return Prints(list(people), list(people.values()), {"h1": np.array(rows)}), people, told


def tell(
    found: Some, out: Path, *, permutations: int = 0, people: dict[str, str] | None = None
) -> list[dict[str, object]]:
    prints, own, told = found
    return attack(prints, people or own, {"sex": told}, out, permutations=permutations)


def number(row: dict[str, object], name: str) -> float:
    return float(str(row[name]))


def interval(row: dict[str, object], *names: str) -> tuple[float, float, float]:
    return tuple(number(row, name) for name in names)


def test_what_shows_is_told_and_speakers_are_not_learnt_by_heart(tmp_path):
    """Models of a speaker are nearly the same, yet training on one does not help on the other."""
    for shift, least, most in ((10.0, 90, 100), (0.0, 20, 75)):
        (row,) = tell(some(40, shift), tmp_path)
        for name, low, high in (("accuracy%", "low", "high"), ("AUC%", "AUClow", "AUChigh")):
            value, *bounds = interval(row, name, low, high)
            assert least <= value <= most
            assert bounds[0] <= value <= bounds[1]
        assert (row["models"], row["speakers"], row["classes"]) == (80, 40, "f 20; m 20")
    written = read_tsv(tmp_path / "attributes.tsv", COLUMNS)
    assert (written[0]["attribute"], written[0]["chance%"]) == ("sex", "50.0")


@pytest.mark.parametrize("classes", ["fm", "abcd"])
def test_a_speaker_in_training_and_test_would_be_seen(tmp_path, classes):
    """If each model counted as a person, memorised speakers would look like an attribute."""
    found = some(40, 0.0, classes=classes)
    (row,) = tell(found, tmp_path)
    chance = 100 / len(classes)
    assert number(row, "low") <= chance <= number(row, "high") and number(row, "AUC%") < 70
    (leaky,) = tell(found, tmp_path, people={name: name for name in found[1]})
    for name, low in (("accuracy%", "low"), ("AUC%", "AUClow")):
        assert number(leaky, name) > number(row, name) + 20
        assert number(leaky, low) > (chance if name == "accuracy%" else 50)
    parts = deal([f"s{index}" for index in range(40)], np.arange(40) % len(classes), 0)
    # Each part has as equal a share of every class as possible.
    counts = np.array([np.bincount(parts[kind :: len(classes)], minlength=10) for kind in range(2)])
    assert counts.max() - counts.min() <= 1 and set(parts) == set(range(10))


@pytest.mark.parametrize(("classes", "shift"), [("fm", 1.5), ("abc", 3.0), ("abcd", 0.0)])
def test_the_area_is_what_the_distance_of_classes_makes_it(tmp_path, classes, shift):
    """For one value, N(0, 1) or N(d, 1), the area is Phi(d / sqrt 2); without values, a half."""
    found = some(400, shift, classes=classes, size=len(classes))
    (row,) = tell(found, tmp_path)
    low, high = number(row, "AUClow"), number(row, "AUChigh")
    # Mean and deviation show it independently: the distance is sqrt(2) d.
    known = 100 * norm.cdf(shift) if classes == "fm" else 50.0
    if classes == "abc":
        assert low > 90
    else:
        assert low <= known <= high and abs(number(row, "AUC%") - known) < 5
    assert number(row, "chance%") == pytest.approx(100 / len(classes), abs=0.05)
    assert number(row, "majority%") == pytest.approx(100 * -(-400 // len(classes)) / 400, abs=0.05)


def test_classes_of_other_people_are_chance(tmp_path):
    """Permuted labels bring a visible attribute to chance, and without one p is not small."""
    (row,) = tell(some(40, 10.0), tmp_path, permutations=19)
    assert row["p"] == "0.050" and abs(number(row, "permuted%") - 50) < 10
    ps, held = [], []
    for seed in range(6):
        prints, people, told = some(40, 10.0)
        order = np.random.default_rng(seed).permutation(40)
        names = sorted(set(people.values()))
        others = {f"s{index:02d}": told[f"{names[place]}-m1"] for index, place in enumerate(order)}
        wrong = {name: others[person] for name, person in people.items()}
        (row,) = attack(prints, people, {"sex": wrong}, tmp_path, permutations=9)
        held.append(number(row, "low") <= 50 <= number(row, "high"))
        held.append(number(row, "AUClow") <= 50 <= number(row, "AUChigh"))
        ps.append(number(row, "p"))
    # Of six and of twelve, one may be wrong by chance.
    assert sorted(ps)[1] > 0.1 and sum(held) >= 11
    assert tell(some(40, 10.0), tmp_path)[0]["p"] == "-"


@pytest.mark.parametrize("speakers", [8, 40])
def test_intervals_hold_the_binomial_one(tmp_path, speakers):
    """With all speakers right, resampling has no errors; with eight speakers there are no draws."""
    (row,) = tell(some(speakers, 100.0, 0.0), tmp_path)
    accuracy, *bounds = interval(row, "accuracy%", "low", "high")
    assert (accuracy == 100) == (speakers == 40)
    assert bounds == pytest.approx(binomial_bounds(accuracy / 100, speakers), abs=0.2)
    area, *bounds = interval(row, "AUC%", "AUClow", "AUChigh")
    assert bounds == pytest.approx(binomial_bounds(area / 100, speakers // 2), abs=0.2)


def of_people(labels: np.ndarray, models: int = 2) -> Labelled:
    """Return people of given classes with some models each."""
    people = [f"s{index}" for index in range(len(labels))]
    person = np.repeat(np.arange(len(labels)), models)
    names = [f"class{number}" for number in range(labels.max() + 1)]
    return Labelled(np.arange(len(person)), names, people, person, labels)


def test_a_value_that_differs_by_rounding_alone_tells_nothing():
    random = np.random.default_rng(2)
    known = of_people(np.arange(15) % 2)
    labels = known.label[known.person]
    features = random.normal(size=(30, 4))
    rounded = np.full((30, 1), 0.7) + labels[:, None] * np.spacing(0.7)
    told = [
        cross_validated((one, one), known, known.label[None], 0)
        for one in (features, np.hstack([features, rounded]))
    ]
    assert np.allclose(*told)


@pytest.mark.parametrize(
    "classes, people, within", [(2, 29, 1e-5), (3, 29, 1e-5), (5, 29, 1e-5), (5, 60, 0.01)]
)
def test_classifiers_are_those_of_scikit_learn(classes, people, within):
    """Each labelling and part by itself, tested on other features; one model is an outlier.

    Sixty people are left to scikit-learn with its own, wider tolerance.
    """
    random = np.random.default_rng(classes)
    known = of_people(np.sort(np.arange(people) % classes))
    count = len(known.person)
    learnt = random.normal(size=(count, 30)) * random.lognormal(size=30) + 3
    learnt[7] *= 1000
    tested = learnt + random.normal(size=(count, 30))
    label = np.stack([random.permutation(known.label) for _ in range(3)])
    found = cross_validated((learnt, tested), known, label, 9)
    for one, told in zip(label, found, strict=True):
        parts = deal(known.people, one, 9)[known.person]
        own = one[known.person]
        for part in range(10):
            away = parts != part
            mean, spread = learnt[away].mean(0), learnt[away].std(0)
            model = LogisticRegression(C=0.01, class_weight="balanced", tol=1e-9, max_iter=10_000)
            model.fit((learnt[away] - mean) / spread, own[away])
            wanted = model.predict_proba((tested[~away] - mean) / spread)
            assert np.allclose(told[~away], wanted, atol=within)


@pytest.mark.parametrize("value", [0.0, 0.7, 1e10])
@pytest.mark.parametrize("speakers, classes", [(8, "fm"), (9, "fm"), (24, "fm"), (24, "abc")])
def test_a_layer_without_information_is_chance(tmp_path, value, speakers, classes):
    """All models alike are told alike: no order of theirs is one of rounding."""
    prints, people, told = some(speakers, 3.0, classes=classes)
    prints.layers["h1"] = np.full_like(prints.layers["h1"], value, dtype=np.float32)
    (row,) = tell((prints, people, told), tmp_path, permutations=20)
    assert (row["AUC%"], row["permuted%"], row["p"]) == ("50.0", "50.0", "1.000")


@pytest.mark.parametrize("factor", [1e6, 1e18, 1e30])
@pytest.mark.parametrize("classes", ["fm", "abc"])
def test_a_model_far_from_all_others_stops_nothing(tmp_path, factor, classes):
    prints, people, told = some(24, 3.0, classes=classes)
    layers = prints.layers["h1"].astype(np.float32)
    prints.layers["h1"] = np.array(
        [factor * one if at == 3 else one for at, one in enumerate(layers)]
    )
    (row,) = tell((prints, people, told), tmp_path, permutations=5)
    assert 30 < number(row, "AUC%") < 100


def test_each_part_is_told_by_the_others():
    """The features and classes of a part that is tested do not affect how others are told."""
    random = np.random.default_rng(1)
    known = of_people(np.arange(40) % 3)
    features = random.normal(size=(80, 5))
    told = cross_validated((features, features), known, known.label[None], 0)[0]
    assert np.allclose(told.sum(1), 1)
    parts = deal(known.people, known.label, 0)[known.person]
    for part in (0, 7):
        moved = features.copy()
        moved[parts == part] += 5
        again = cross_validated((moved, features), known, known.label[None], 0)[0]
        assert np.allclose(told[parts == part], again[parts == part])
        assert not np.allclose(told[parts != part], again[parts != part])


def test_a_class_without_people_to_train_on_is_an_error():
    features = np.random.default_rng(0).normal(size=(4, 3))
    with pytest.raises(ValueError, match="no item"):
        probabilities(features, features, np.array([[0, 0, 1, 1]]), np.array([[1, 1, 0, 0]]) > 0, 1)


def test_accuracy_is_the_mean_of_the_classes():
    right = np.array([True, True, True, False, True])
    labels = np.array([0, 0, 0, 0, 1])
    assert balanced(right, labels, 2) == pytest.approx(100 * (0.75 + 1) / 2)
    weights = np.array([0.0, 0, 1, 1, 2])
    assert balanced(right, labels, 2, weights) == pytest.approx(100 * (0.5 + 1) / 2)
    assert np.isnan(balanced(right, labels, 3))


def test_areas_are_those_of_scikit_learn():
    random = np.random.default_rng(2)
    # Coarse values, so that some scores are equal.
    scores, labels = random.integers(0, 6, (60, 3)) / 6, random.integers(0, 3, 60)
    weights = random.integers(0, 3, (4, 60)).astype(float)
    for own, area in zip(weights, areas(scores, labels, weights), strict=True):
        kinds = [
            roc_auc_score(labels == kind, scores[:, kind], sample_weight=own) for kind in range(3)
        ]
        assert area == pytest.approx(100 * np.mean(kinds))
    assert np.isnan(areas(scores, labels, (labels > 0)[None].astype(float))).all()


def test_too_few_of_a_known_class_give_no_figures_and_a_line(tmp_path: Path, capsys):
    assert tell(some(6, 1.0), tmp_path) == []
    said = capsys.readouterr().err
    assert "sex is not attacked: two classes of at least 4 people are needed" in said
    assert "and there are 3 of f, 3 of m" in said
    prints, people, told = some(40, 1.0)
    assert len(tell((prints, people, told), tmp_path)) == 1
    # Files of an earlier run are removed.
    empty = dict.fromkeys(told, "")
    assert tell((prints, people, empty), tmp_path) == []
    assert read_tsv(tmp_path / "attributes.tsv", COLUMNS) == []
    assert "people are needed, and there are none" in capsys.readouterr().err


def test_rare_classes_and_people_of_several_are_left_out(tmp_path, capsys):
    prints, people, told = some(40, 10.0)
    told |= dict.fromkeys(("s00-m1", "s00-m2", "s02-m1"), "x") | {"s01-m1": "f"}
    (row,) = tell((prints, people, told), tmp_path)
    assert (row["speakers"], row["models"], row["classes"]) == (37, 74, "f 18; m 19")
    said = capsys.readouterr().err
    assert "sex: 2 people with several classes left out" in said
    assert "classes of fewer than 4 people left out: x (1)" in said


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Write footprints of 24 speakers, and the data from which they were learnt."""
    folder = tmp_path_factory.mktemp("written")
    prints, people, told = some(24, 10.0, classes="abc", size=6)
    out = folder / "prints"
    out.mkdir()
    rows = [{"model": m, "speaker": s, "status": "ok"} for m, s in people.items()]
    write_tsv(out / "models.1.tsv", ("model", "speaker", "status"), rows)
    matrices = zip(prints.models, prints.layers["h1"].astype(np.float32), strict=True)
    path = out / "footprints.1.01-h1.ark"
    write_table(path.with_suffix(".scp"), write_ark(path, matrices))
    names = sorted(one.name for one in out.glob("footprints.1.*"))
    (out / "footprints.1.files").write_text("".join(f"{name}\n" for name in names))
    write_yaml(out / "footprints.1.yaml", {"job": "1 of 1"})
    data = folder / "data"
    data.mkdir()
    accents = {person: told[model] for model, person in people.items()}
    utts = {f"{person}-{index}": person for person in accents for index in (1, 2)}
    write_table(data / "utt2spk", utts)
    names = {"a": "Indian English", "b": "Scottish English", "c": "US English"}
    write_table(data / "utt2accent", {utt: names[accents[one]] for utt, one in utts.items()})
    ages = {"a": "17", "b": "40.5", "c": "71"}
    write_table(data / "spk2age", {person: ages[kind] for person, kind in accents.items()})
    return folder


def told_by(folder: Path, out: Path, *arguments: str | Path):
    short = ("--permutations", "3", "--resamples", "20")
    return inside("attack", "attributes", folder / "prints", out, *arguments, *short)


def test_tables_of_utterances_and_of_speakers(written, tmp_path):
    tables = ("--table", written / "data/utt2accent", "--table", written / "data/spk2age")
    told_by(written, tmp_path, *tables, "--bins", "18,65").ok()
    accent, age = read_tsv(tmp_path / "attributes.tsv", COLUMNS)
    assert (accent["attribute"], age["attribute"]) == ("accent", "age")
    assert accent["classes"] == "Indian English 8; Scottish English 8; US English 8"
    assert age["classes"] == "18-65 8; <18 8; >=65 8"
    for row in (accent, age):
        assert float(row["accuracy%"]) > 90 and row["chance%"] == row["majority%"] == "33.3"
    # An age on an edge is in the class above it; the class beyond 100 is empty.
    told_by(written, tmp_path, *tables[2:], "--bins", "17,71,100").ok()
    assert read_tsv(tmp_path / "attributes.tsv", None)[0]["classes"] == "17-71 16; 71-100 8"
    # Three ages make three classes.
    told_by(written, tmp_path, *tables[2:]).ok()
    assert read_tsv(tmp_path / "attributes.tsv", None)[0]["classes"] == "17 8; 40.5 8; 71 8"


def test_a_speaker_whose_utterances_say_several_things_is_left_out(written, tmp_path):
    lines = (written / "data" / "utt2accent").read_text().splitlines()
    (tmp_path / "utt2accent").write_text("\n".join([f"{lines[0]}s", *lines[1:]]) + "\n")
    (tmp_path / "utt2spk").write_text((written / "data" / "utt2spk").read_text())
    told_by(written, tmp_path, "--table", tmp_path / "utt2accent").ok()
    (row,) = read_tsv(tmp_path / "attributes.tsv", None)
    assert (row["speakers"], row["classes"][:17]) == ("23", "Indian English 7;")


def test_mistakes_are_told(written, tmp_path):
    data = written / "data"
    told_by(written, tmp_path).fails(2, "give --models or --table")
    for bins in ("a", "3,2", "2,2", "", "nan", "1,inf"):
        done = told_by(written, tmp_path, "--table", data / "spk2age", "--bins", bins)
        done.fails(2, "not numbers in ascending order")
    done = told_by(written, tmp_path, "--table", data / "utt2accent", "--bins", "3")
    done.fails(1, f"{data}/utt2accent: no table has only numbers; leave out --bins")
    for name in ("utt2spk", "text", "spk2utt"):
        done = told_by(written, tmp_path, "--table", data / name)
        done.fails(1, f"{data}/{name}: not a table of an attribute; give a utt2X or a spk2X")
    (tmp_path / "spk2age").write_text("nobody 3\n")
    done = told_by(written, tmp_path, "--table", tmp_path / "spk2age")
    done.fails(1, f"{tmp_path}/spk2age: it has none of the models' speakers, such as 's00'")
    both = ("--table", data / "spk2age", "--table", tmp_path / "spk2age")
    (tmp_path / "spk2age").write_text("s01 3\n")
    told_by(written, tmp_path, *both).fails(1, "a second table of 'age'")
    (tmp_path / "utt2accent").write_text("s00-1 x\n")
    (tmp_path / "utt2spk").write_text("s00-2 s00\n")
    done = told_by(written, tmp_path, "--table", tmp_path / "utt2accent")
    done.fails(1, f"{tmp_path}/utt2accent:1: 's00-1' is not in {tmp_path}/utt2spk")
    assert not (tmp_path / "attributes.tsv").exists()
