"""Differences of equal error rates on the same speakers, against a reference implementation."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from conftest import inside
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from fedtools.core.tables import read_tsv
from fedtools.score.verification import equal_error_rate

PEOPLE = [f"s{number:02d}" for number in range(30)]
MODELS = [f"{one}-m{number}" for one in PEOPLE for number in (1, 2, 3)]
PAIRS = list(combinations(MODELS, 2))
SAME = np.array([one[:3] == other[:3] for one, other in PAIRS])


def decided(folder: Path, name: str, scores: np.ndarray, kind: str = "easy") -> Path:
    folder.mkdir(exist_ok=True)
    kinds = ["target" if same else "nontarget" for same in SAME]
    lines = [f"{one} {other}" for one, other in PAIRS]
    for path, cells in ((f"trials.{kind}", kinds), (f"{name}.{kind}", scores)):
        text = "".join(f"{line} {cell}\n" for line, cell in zip(lines, cells, strict=True))
        (folder / path).write_text(text, encoding="utf-8")
    owners = "".join(f"{one} {one[:3]}\n" for one in MODELS)
    (folder / "model2speaker").write_text(owners, encoding="utf-8")
    return folder / f"{name}.{kind}"


@pytest.fixture(scope="module")
def scores() -> dict[str, np.ndarray]:
    """Return scores of a good attack and a worse one, which err on the same speakers."""
    random = np.random.default_rng(0)
    hard = dict(zip(PEOPLE, random.normal(0, 1, len(PEOPLE)), strict=True))
    own = np.array([hard[one[:3]] for one, _ in PAIRS])
    common = 2 * SAME + SAME * own + random.normal(0, 1, len(PAIRS))
    return {"good": common, "worse": common + random.normal(0, 0.4, len(PAIRS))}


def test_difference_is_as_sharp_as_shared_speakers_make_it(scores, tmp_path):
    paths = {name: decided(tmp_path / name, "a1.h1", one) for name, one in scores.items()}
    named = [f"{name}={path}" for name, path in paths.items()]
    inside("attack", "compare", tmp_path / "out.tsv", *named).ok()
    first, second = read_tsv(tmp_path / "out.tsv", None)
    rates = {name: equal_error_rate(one, SAME) for name, one in scores.items()}
    assert first["difference"] == "-"
    assert float(second["difference"]) == pytest.approx(rates["worse"] - rates["good"], abs=0.011)
    # Explicit draws: a speaker drawn m times has its trials m times, those of two speakers m x n
    # times.
    random = np.random.default_rng(1)
    sides = np.array([[PEOPLE.index(one[:3]) for one in pair] for pair in PAIRS])
    found = []
    for _ in range(1000):
        drawn = np.bincount(random.integers(30, size=30), minlength=30)
        weights = np.where(SAME, drawn[sides[:, 0]], drawn[sides].prod(1))
        both = [
            equal_error_rate(one.repeat(weights), SAME.repeat(weights)) for one in scores.values()
        ]
        found.append((*both, both[1] - both[0]))
    bounds = np.percentile(found, [2.5, 97.5], axis=0).T
    shown = [(first["low"], first["high"]), (second["low"], second["high"])]
    shown.append((second["dlow"], second["dhigh"]))
    for (low, high), by_hand in zip(shown, bounds, strict=True):
        assert (float(low), float(high)) == pytest.approx(tuple(by_hand), abs=0.2 * np.ptp(by_hand))
    width = [float(high) - float(low) for low, high in shown]
    assert width[2] < 0.7 * min(width[:2])


def test_seeds_are_averaged(scores, tmp_path):
    paths = [decided(tmp_path / name, "a1.h1", one) for name, one in scores.items()]
    named = [f"base={paths[0]}", f"both={paths[0]}", f"both={paths[1]}"]
    inside("attack", "compare", tmp_path / "out.tsv", *named).ok()
    base, both = read_tsv(tmp_path / "out.tsv", None)
    good, worse = (equal_error_rate(one, SAME) for one in scores.values())
    assert float(both["EER%"]) == pytest.approx((good + worse) / 2, abs=0.011)
    assert (both["least"], both["most"]) == (f"{good:.2f}", f"{worse:.2f}")
    assert (base["seeds"], both["seeds"]) == ("1", "2")


def of_seeds(shifts: list[float], folder: Path, name: str, scores: np.ndarray) -> list[str]:
    """Write scores of several seeds, in which targets score higher by a shift."""
    paths = [
        decided(folder / f"{name}{number}", "a1.h1", scores + shift * SAME)
        for number, shift in enumerate(shifts)
    ]
    return [f"{name}={path}" for path in paths]


def test_intervals_are_over_seeds_and_speakers(scores, tmp_path):
    """Seeds differ by more than speakers do: about Student's interval of three rates."""
    shifts = [-0.9, -0.7, 2.0]
    named = of_seeds(shifts, tmp_path, "a", scores["good"])
    named += of_seeds([shift - 0.2 for shift in shifts], tmp_path, "b", scores["good"])
    inside("attack", "compare", tmp_path / "out.tsv", *named).ok()
    first, second = read_tsv(tmp_path / "out.tsv", None)
    rates = [
        [equal_error_rate(scores["good"] + (one - less) * SAME, SAME) for one in shifts]
        for less in (0.0, 0.2)
    ]
    for row, own in zip((first, second), rates, strict=True):
        told = ttest_1samp(own, 0).confidence_interval(0.95)
        low, high = float(row["low"]), float(row["high"])
        assert low == pytest.approx(max(0.0, told.low), abs=4)
        assert high == pytest.approx(told.high, abs=4)
        # That of speakers alone is far narrower.
        assert high - low > 25
    gaps = np.subtract(rates[1], rates[0])
    assert float(second["difference"]) == pytest.approx(gaps.mean(), abs=0.011)
    told = ttest_1samp(gaps, 0).confidence_interval(0.95)
    # Paired by seed, they differ by much less than each varies.
    width = float(second["dhigh"]) - float(second["dlow"])
    assert width == pytest.approx(told.high - told.low, rel=0.5) and width < 15


def test_a_difference_that_varies_with_the_seed_has_students_interval(scores, tmp_path):
    """The first attack is the same with each seed, and the gap is small with the first seed."""
    shifts = [-0.1, -0.8, -2.0]
    named = of_seeds([0.0] * 3, tmp_path, "a", scores["good"])
    named += of_seeds(shifts, tmp_path, "b", scores["good"])
    inside("attack", "compare", tmp_path / "out.tsv", *named).ok()
    row = read_tsv(tmp_path / "out.tsv", None)[1]
    base = equal_error_rate(scores["good"], SAME)
    gaps = [equal_error_rate(scores["good"] + shift * SAME, SAME) - base for shift in shifts]
    told = ttest_1samp(gaps, 0).confidence_interval(0.95)
    assert float(row["difference"]) == pytest.approx(np.mean(gaps), abs=0.011)
    # Speakers add little to it.
    assert float(row["dlow"]) == pytest.approx(told.low, abs=4)
    assert float(row["dhigh"]) == pytest.approx(told.high, abs=4)
    assert told.high - told.low > 40


@pytest.mark.parametrize(("start", "own"), [(13, 1.0), (14, 1.4)])
def test_few_people_and_seeds_that_differ_by_person_by_hand(tmp_path, start, own):
    """Explicit draws of ten people, for whom each seed errs otherwise; Satterthwaite's interval."""
    random, people, seeds = np.random.default_rng(start), 10, 3
    few = [place for place, pair in enumerate(PAIRS) if max(pair) < f"s{people:02d}"]
    same = SAME[few]
    sides = np.array([[PEOPLE.index(one[:3]) for one in PAIRS[place]] for place in few])
    hard, given, named = random.normal(0, 1.2, people), [], []
    for number, shift in enumerate((0.6, 0.0, -0.9)):
        ease = 2 + shift + hard + random.normal(0, own, people)
        given.append(same * ease[sides[:, 0]] + random.normal(size=len(few)))
        whole = np.zeros(len(PAIRS))
        whole[few] = given[-1]
        path = decided(tmp_path / str(number), "a1.h1", whole)
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[place] for place in few))
        named.append(f"a={path}")
    inside("attack", "compare", tmp_path / "out.tsv", *named, "--resamples", "4000").ok()
    (row,) = read_tsv(tmp_path / "out.tsv", None)
    rates = np.array([equal_error_rate(scores, same) for scores in given])
    drawn = []
    for _ in range(2000):
        often = np.bincount(random.integers(people, size=people), minlength=people)
        weights = np.where(same, often[sides[:, 0]], often[sides].prod(1))
        drawn.append([equal_error_rate(one.repeat(weights), same.repeat(weights)) for one in given])
    table = np.array(drawn)
    between, within = rates.var(ddof=1), seeds * table.mean(1).var()
    both = (table - table.mean(1, keepdims=True)).var(0).sum() / (seeds - 1)
    squares = [(between, seeds - 1), (within, people - 1)]
    total = between + within - both
    free = total**2 / sum(
        one**2 / degrees for one, degrees in [*squares, (both, (seeds - 1) * (people - 1))]
    )
    # No variance is below 0.
    total, free = max((total, free), *squares)
    half = student.ppf(0.975, free) * np.sqrt(total / seeds)
    assert (float(row["low"]), float(row["high"])) == pytest.approx(
        (max(0.0, rates.mean() - half), rates.mean() + half), abs=0.06 * half
    )


def test_seeds_of_which_the_first_hardly_varies_over_speakers(scores, tmp_path):
    """The first seed is almost right for all speakers, the others are not."""
    random = np.random.default_rng(5)
    named = of_seeds([6.0], tmp_path, "a", scores["good"])
    hard = (
        scores["good"]
        - 3
        * SAME
        * np.repeat(random.normal(size=30), 1)[[PEOPLE.index(one[:3]) for one, _ in PAIRS]]
    )
    named += [f"a={decided(tmp_path / f'c{n}', 'a1.h1', hard)}" for n in range(2)]
    inside("attack", "compare", tmp_path / "one.tsv", named[0], "--resamples", "200").ok()
    inside("attack", "compare", tmp_path / "all.tsv", *named, "--resamples", "200").ok()
    (alone,), (every,) = (read_tsv(tmp_path / f"{name}.tsv", None) for name in ("one", "all"))
    width = [float(row["high"]) - float(row["low"]) for row in (alone, every)]
    assert width[1] > 10 * width[0]


def test_different_numbers_of_seeds_have_a_difference_without_an_interval(scores, tmp_path):
    named = of_seeds([0.0], tmp_path, "a", scores["good"])
    named += of_seeds([0.0, -0.5], tmp_path, "b", scores["good"])
    inside("attack", "compare", tmp_path / "out.tsv", *named).ok()
    _, row = read_tsv(tmp_path / "out.tsv", None)
    assert float(row["difference"]) > 0 and (row["dlow"], row["dhigh"]) == ("-", "-")


def test_a_perfect_attack_has_the_exact_interval(scores, tmp_path):
    """No error among 90 target trials; three seeds are no more trials."""
    for count in (1, 3):
        named = of_seeds([20.0] * count, tmp_path, "a", scores["good"])
        inside("attack", "compare", tmp_path / "out.tsv", *named).ok()
        (row,) = read_tsv(tmp_path / "out.tsv", None)
        assert (row["EER%"], row["low"]) == ("0.00", "0.00")
        assert float(row["high"]) == pytest.approx(100 * (1 - 0.025 ** (1 / 90)), abs=0.006)


def test_the_same_attack_differs_by_nothing(scores, tmp_path):
    path = decided(tmp_path / "one", "a1.h1", scores["good"])
    inside("attack", "compare", tmp_path / "out.tsv", f"a={path}", f"b={path}").ok()
    row = read_tsv(tmp_path / "out.tsv", None)[1]
    assert {row[name] for name in ("difference", "dlow", "dhigh")} == {"0.00"}


def test_trials_without_a_score_are_left_out(scores, tmp_path):
    path = decided(tmp_path / "one", "a1.h1", scores["good"])
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = np.arange(len(lines)) % 3 > 0
    path.write_text("".join(np.array(lines)[kept][::-1]), encoding="utf-8")
    inside("attack", "compare", tmp_path / "out.tsv", f"a={path}").ok()
    (row,) = read_tsv(tmp_path / "out.tsv", None)
    assert row["EER%"] == f"{equal_error_rate(scores['good'][kept], SAME[kept]):.2f}"
    assert (row["targets"], row["others"]) == (str(SAME[kept].sum()), str((~SAME[kept]).sum()))


@pytest.mark.parametrize("damage", ["twice", "word", "others", "trials", "owners"])
def test_what_does_not_fit_is_one_line(scores, tmp_path, damage):
    path = decided(tmp_path / "one", "a1.h1", scores["good"])
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if damage == "trials":
        (path.parent / "trials.easy").unlink()
    elif damage == "owners":
        (path.parent / "model2speaker").write_text("s00-m1 s00\n", encoding="utf-8")
    else:
        targets = [line for line, same in zip(lines, SAME, strict=True) if same]
        changed = {"twice": [*lines, lines[0]], "word": ["a b c\n", *lines[1:]], "others": targets}
        path.write_text("".join(changed[damage]), encoding="utf-8")
    inside("attack", "compare", tmp_path / "out.tsv", f"a={path}").fails(1, str(path.parent))
    assert not (tmp_path / "out.tsv").exists()
