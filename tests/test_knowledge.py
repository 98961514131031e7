"""Attackers with and without knowledge of a defence: by hand, and on planted defences."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from conftest import inside
from scipy.stats import binom
from updates_world import State, begin, data_with_constants, plant, sent, speakers

from fedtools.attack.defences import defended
from fedtools.attack.knowledge import ATTACKERS, IGNORANT, LAZY, SEMI, Versions, attackers
from fedtools.attack.options import A1
from fedtools.attack.speakers import a1, attributes
from fedtools.attack.speakers.cohort import blocks, combine, cosines, score_pairs
from fedtools.attack.speakers.footprint_files import Prints, undefended
from fedtools.attack.speakers.verify import COLUMNS, Model
from fedtools.attack.victims import find_victims
from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv
from fedtools.federation.federation import Federation
from fedtools.score.calibration import fit_ratios
from fedtools.score.verification import equal_error_rate

PEOPLE = speakers(12)
CLIENTS = [f"{one}-a{number}" for one in PEOPLE for number in (1, 2)]
FEW = ("--resamples", "20", "--others", "0")
# The versions used for enrolment, test and training: 0 undefended, 1 defended.
VERSIONS = {IGNORANT: (0, 1, 0), LAZY: (1, 1, 0), SEMI: (1, 1, 1)}
Rates = dict[tuple[str, str], float]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("known")
    data_with_constants(root / "exp_train", CLIENTS, 1)
    begin(root, "exp")
    return root


def planted(common: float) -> Callable[[str, State], State]:
    """Make changes of a speaker's direction, noise, and `common` times a common direction."""
    shared, noise = np.random.default_rng(1), np.random.default_rng(9)
    everybody: State = {}

    def change(client: str, start: State) -> State:
        own = np.random.default_rng([ord(letter) for letter in client[:3]])
        for name, value in sorted(start.items()):
            everybody.setdefault(name, shared.normal(0, 0.01 * common, value.shape))
        return {
            name: everybody[name]
            + 0.01 * own.normal(size=value.shape)
            + 0.005 * noise.normal(size=value.shape)
            for name, value in sorted(start.items())
        }

    return change


def rates(out: Path, defence: str) -> Rates:
    """Return equal error rates by attacker and part; every row names the defence."""
    rows = read_tsv(out / "weights.tsv", COLUMNS)
    assert {row["defence"] for row in rows} == {defence}
    # With few target trials, such as twelve, there is an interval.
    return {
        (row["attacker"], row["layer"]): (float(row["low"]) + float(row["high"])) / 2
        for row in rows
        if row["trials"] == "easy"
    }


def attacked(path: Path, out: Path, defence: str) -> Rates:
    inside("attack", "weights", path, out, "--defence", defence, *FEW).ok()
    return rates(out, defence)


def scores_of(path: Path) -> dict[tuple[str, str], float]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {(one, other): float(score) for one, other, score in lines}


# --- versions


@pytest.mark.parametrize("attacker", attackers(True), ids=ATTACKERS)
def test_versions_by_hand(attacker):
    """Each pair is scored both ways round, from the mean of the training version."""
    people = [f"p{number // 2}" for number in range(12)]
    versions = np.random.default_rng(0).normal(size=(2, 12, 9))
    rows = versions.reshape(24, 9)
    some = blocks(people, np.zeros(12, bool), 0)
    kept = Versions([f"m{number}" for number in range(12)], defended=True)
    scores = score_pairs(rows @ rows.T, kept.blocks(some, attacker), cosines)
    found = kept.seen(scores, attacker)
    assert found.shape == (12, 12) and np.isfinite(found).all()
    cohorts = {}
    for block in some:
        for one in block.rows:
            for other in block.columns:
                cohorts[one, other] = cohorts[other, one] = block.cohort
    enrolled, tested, learnt = (versions[number] for number in VERSIONS[attacker.name])
    for (one, other), cohort in cohorts.items():
        middle = learnt[cohort].mean(0)
        a, b = enrolled[one] - middle, tested[other] - middle
        expected = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        assert found[one, other] == pytest.approx(expected, abs=1e-9)


def test_who_attacks_depends_on_what_is_enrolled_and_learnt():
    def names(**about: bool) -> list[str]:
        return [one.name for one in attackers(True, **about)]

    assert names() == [IGNORANT, LAZY, SEMI]
    assert names(enrols=False) == [IGNORANT, SEMI] and names(learns=False) == [IGNORANT, LAZY]
    assert [one.name for one in attackers(False)] == ["-"]


def grouped(count: int, size: int) -> tuple[list[str], dict[str, list[str]]]:
    """Return names of models, and a partition of these: m0 with m1 and so on, but not by person."""
    names = [f"m{number:02d}" for number in range(count)]
    order = [names[(7 * number) % count] for number in range(count)]
    found = {}
    for first in range(0, count, size):
        found |= dict.fromkeys(order[first : first + size], order[first : first + size])
    return names, found


@pytest.mark.parametrize("attacker", attackers(True), ids=ATTACKERS)
def test_a_regression_is_trained_on_no_pair_that_shares_an_update(attacker):
    """Means of three: the pairs of the cohort are listed one by one, and a regression is fitted."""
    count, people = 60, [f"p{number // 2:02d}" for number in range(60)]
    names, groups = grouped(count, 3)
    random = np.random.default_rng(0)
    versions = Versions(names, True, groups)
    layers = []
    for told in (1.5, 0.5):
        own = np.repeat(random.normal(0, told, (count // 2, 12)), 2, 0)
        plain = own + random.normal(size=(count, 12))
        sent = np.stack([
            np.mean([plain[names.index(one)] for one in groups[name]], 0) for name in names
        ])  # fmt: skip
        layers.append(np.concatenate([plain, sent]))
    products = [rows @ rows.T for rows in layers]
    some = versions.blocks(blocks(people, np.zeros(count, bool), 0), attacker)
    shared = versions.shared
    _, fitted = combine(products, people * 2, some, others=0, seed=0, shared=shared)
    for block, ratios in list(zip(some, fitted, strict=True))[:4]:
        cohort = block.cohort.tolist()
        inner = blocks([people[one % count] for one in cohort], np.zeros(len(cohort), bool), 0)
        scores = [score_pairs(one[np.ix_(cohort, cohort)], inner, cosines) for one in products]
        rows, targets = [], []
        for (at, one), (place, other) in combinations(enumerate(cohort), 2):
            defended_pair = one >= count
            if defended_pair and names[other % count] in groups[names[one % count]]:
                continue
            rows.append([matrix[at, place] for matrix in scores])
            targets.append(people[one % count] == people[other % count])
        expected = fit_ratios(np.array(rows), np.array(targets))
        np.testing.assert_allclose(ratios.weights, expected.weights, rtol=1e-6)
        # Only the semi-informed attacker learns from means.
        assert (len(rows) < len(cohort) * (len(cohort) - 1) // 2) == (attacker.name == SEMI)


def test_a_cohort_normalises_by_no_model_that_shares_an_update():
    """By brute force, for means of three."""
    count, people = 36, [f"p{number // 2:02d}" for number in range(36)]
    names, groups = grouped(count, 3)
    plain = np.random.default_rng(0).normal(size=(count, 10))
    sent = np.stack([
        np.mean([plain[names.index(one)] for one in groups[name]], 0) for name in names
    ])  # fmt: skip
    models = {name: Model(person) for name, person in zip(names, people, strict=True)}
    versions = Versions(names, True, groups)
    found = a1.normed_cosines(
        np.concatenate([plain, sent]), versions, models, {}, 0, attackers(True)[2]
    )

    def cosine(one: np.ndarray, other: np.ndarray) -> float:
        return one @ other / np.linalg.norm(one) / np.linalg.norm(other)

    met = 0
    for block in blocks(people, np.zeros(count, bool), 0):
        middle = sent[block.cohort].mean(0)
        moved = sent - middle
        for one in block.rows:
            for other in block.columns:
                if names[other] in groups[names[one]]:
                    assert np.isnan(found[one, other]) or one == other
                    continue
                sides = []
                for side in (one, other):
                    rest = [
                        cosine(moved[side], moved[index])
                        for index in block.cohort
                        if names[index] not in groups[names[side]]
                    ]
                    met += len(rest) < len(block.cohort)
                    score = cosine(moved[one], moved[other])
                    sides.append((score - np.mean(rest)) / np.std(rest))
                assert found[one, other] == pytest.approx(np.mean(sides), abs=1e-8)
    assert met


def test_means_mislead_no_regression(tmp_path):
    """Means of four: the regression does about as well as the better of its two layers.

    Trained on pairs that share an update, it would learn that models that are alike are of two
    people.
    """
    count, people = 160, [f"p{number // 2:02d}" for number in range(160)]
    names, groups = grouped(count, 4)
    found = {}
    for seed in range(3):
        random = np.random.default_rng(seed)
        rows = []
        for told in (1.2, 1.2):
            own = np.repeat(random.normal(0, told, (count // 2, 300)), 2, 0)
            plain = own + random.normal(size=own.shape)
            place = {name: index for index, name in enumerate(names)}
            rows.append(np.stack([plain[[place[one] for one in groups[n]]].mean(0) for n in names]))
        products = [one @ one.T for one in rows]
        versions = Versions(names, False, groups)
        (attacker,) = attackers(False)
        some = blocks(people, np.zeros(count, bool), seed)
        ratios, _ = combine(products, people, some, others=0, seed=seed, shared=versions.shared)
        for name, scores in (
            ("together", ratios),
            ("first", score_pairs(products[0], some, cosines)),
        ):
            seen = versions.seen(scores, attacker)
            one, other = np.nonzero(np.triu(~np.isnan(seen), 1))
            targets = np.array(people)[one] == np.array(people)[other]
            found.setdefault(name, []).append(equal_error_rate(seen[one, other], targets))
    assert np.mean(found["together"]) < np.mean(found["first"]) + 2


# --- the attack on updates


def test_a_common_change_that_is_clipped_is_undone_by_who_knows_it(world, tmp_path):
    """The common change is a hundred times larger than the differences between models."""
    path = shutil.copytree(world / "exp", tmp_path / "exp")
    plant(path, planted(common=100))
    found = attacked(path, tmp_path / "out", "clip=0.01")
    inside("attack", "weights", path, tmp_path / "plain", *FEW).ok()
    plain = rates(tmp_path / "plain", "none")
    for part in ("encoder.layers.0", "all"):
        # Without errors, the interval is that of twelve trials.
        none = 100 * (1 - 0.025 ** (1 / len(PEOPLE))) / 2
        assert found[SEMI, part] == pytest.approx(none, abs=0.5) == plain["-", part]
        # Enrolled and tested models move together, and are near each other for one speaker.
        assert found[IGNORANT, part] > 30 and found[LAZY, part] < 20
    # The regression of an attacker trained on undefended models is misled, too.
    assert found[SEMI, "together"] < 20 < found[IGNORANT, "together"]


def test_noise_that_drowns_everything_is_undone_by_nobody(world, tmp_path):
    path = shutil.copytree(world / "exp", tmp_path / "exp")
    plant(path, planted(common=0))
    out, count = tmp_path / "out", len(PEOPLE)
    attacked(path, out, "noise=1000")
    low, high = 100 * np.array(binom.interval(0.999, count, 0.5)) / count
    rows = read_tsv(out / "weights.tsv", COLUMNS)
    assert {row["attacker"] for row in rows} == set(ATTACKERS)
    for row in rows:
        if row["layer"] in ("encoder.layers.0", "encoder.layers.2", "all"):
            assert float(row["low"]) <= high and float(row["high"]) >= low, row
            assert float(row["low"]) <= 50 <= float(row["high"]), row


def test_no_update_is_on_both_sides_of_a_trial(world, tmp_path):
    path = world / "exp"
    attacked(path, tmp_path, "mean=2")
    victims = find_victims(Federation(path), [1])
    means = dict(defended(Federation(path), victims, 1, "mean=2", 0).states(CLIENTS))
    plain = dict(victims.states(CLIENTS))
    name, members = "encoder.layers.0.affine.weight", {}
    for client in CLIENTS:
        rest = 2 * means[client][name] - plain[client][name]
        apart = {one: abs(rest - plain[one][name]).max() for one in CLIENTS}
        members[client] = {client, min(apart, key=apart.get)}
        assert min(apart.values()) < 1e-5
    assert all(members[one] == group for group in members.values() for one in group)
    for attacker in ATTACKERS:
        expected = {
            (one, other)
            for one, other in combinations(CLIENTS, 2)
            if not ({one} if attacker == IGNORANT else members[one]) & members[other]
        }
        found = scores_of(tmp_path / f"weights.all.{attacker}.easy")
        assert found.keys() == expected and 0 < len(expected) < len(list(combinations(CLIENTS, 2)))
        row = next(
            row
            for row in read_tsv(tmp_path / "weights.tsv", COLUMNS)
            if (row["attacker"], row["layer"]) == (attacker, "all")
        )
        assert int(row["targets"]) + int(row["others"]) == len(expected)
        # Speakers without a pair are not in the nearest-model test.
        assert row["linked%"] == "-"


def test_means_do_not_spoil_what_a_regression_says(tmp_path):
    """Means of three: ratios cost little more than the best that their order allows.

    Trained on pairs that share an update as well, they would cost 0.27 bits more.
    """
    clients = [f"{one}-a{number}" for one in speakers(24) for number in (1, 2)]
    data_with_constants(tmp_path / "exp_train", clients, 1)
    plant(begin(tmp_path, "exp"), planted(common=0))
    out = tmp_path / "out"
    inside("attack", "weights", tmp_path / "exp", out, "--defence", "mean=3", *FEW).ok()
    (row,) = (
        row
        for row in read_tsv(out / "weights.tsv", COLUMNS)
        if (row["attacker"], row["layer"], row["trials"]) == (SEMI, "together", "easy")
    )
    assert float(row["Cllr"]) - float(row["minCllr"]) < 0.18


# --- A1


def prints(rows: np.ndarray, defence: str, groups: dict[str, list[str]] | None = None) -> Prints:
    people = [name[:3] for name in CLIENTS]
    layers = {"h1": rows.reshape(len(CLIENTS), 2, -1)}
    return Prints(list(CLIENTS), people, layers, {"defence": defence}, groups or {})


def told(rows: list, *about: str) -> dict[str, float]:
    """Return the middle of the intervals of some scores, by attacker."""
    return {
        row["attacker"]: (float(row["low"]) + float(row["high"])) / 2
        for row in rows
        if (row["scores"], row["trials"]) == about
    }


def test_a1_of_footprints_that_a_defence_moves_together(tmp_path):
    """The defence adds the same to all models, which is more than they differ by."""
    random = np.random.default_rng(0)
    own = np.repeat(random.normal(size=(len(PEOPLE), 60)), 2, 0)
    plain = own + 0.2 * random.normal(size=own.shape)
    moved = plain + 50 * random.normal(size=60)
    models = {name: Model(name[:3]) for name in CLIENTS}
    options = A1(scores=("literal", "unit", "cohort"))
    chosen = {"undefended": prints(plain, ""), "resamples": 20}
    rows = a1.attack(prints(moved, "clip=1"), models, tmp_path, options, **chosen)
    cohort = told(rows, "both, cohort", "easy")
    assert cohort.keys() == set(ATTACKERS)
    assert cohort[SEMI] < 14 and cohort[IGNORANT] > 30 and cohort[LAZY] > 14
    for score in ("both", "both, unit"):
        found = told(rows, score, "easy")
        # Without training, attackers who enrol defended models lose nothing by a common shift.
        assert found.keys() == {IGNORANT, LAZY}
        assert found[IGNORANT] > 30 and found[LAZY] < 14
    assert (tmp_path / "a1-cohort.h1.semi-informed.easy").exists()
    # A pair that shares an update has no score.
    groups = {CLIENTS[0]: [CLIENTS[0], CLIENTS[5]]}
    a1.attack(prints(moved, "mean=2", groups), models, tmp_path, options, **chosen)
    missing = scores_of(tmp_path / "a1.h1.lazy-informed.easy").keys()
    assert (CLIENTS[0], CLIENTS[5]) not in missing and len(missing) == 24 * 23 // 2 - 1
    # The ignorant one has enrolled the first, which the sixth does not include.
    assert len(scores_of(tmp_path / "a1.h1.ignorant.easy")) == 24 * 23 // 2


def test_footprints_without_the_defence_must_be_of_the_same_models(tmp_path):
    rows = np.random.default_rng(0).normal(size=(len(CLIENTS), 8))
    where, behind, plain = [tmp_path], prints(rows, "bits=8"), prints(rows, "")
    assert undefended(plain, [], []) is None
    with pytest.raises(
        UserError, match="behind bits=8, and undefended ones are not given; give --un"
    ):
        undefended(behind, [], [])
    with pytest.raises(UserError, match="--undefended is given, but the footprints are behind no"):
        undefended(plain, [plain], where)
    with pytest.raises(UserError, match="made behind bits=8"):
        undefended(behind, [behind], where)
    less = Prints(CLIENTS[1:], plain.speakers[1:], {"h1": plain.layers["h1"][1:]}, plain.origin)
    with pytest.raises(UserError, match=f"no footprint of '{CLIENTS[0]}'"):
        undefended(behind, [less], where)
    other = Prints(plain.models, plain.speakers, plain.layers, {"defence": "", "part": "norm"})
    with pytest.raises(UserError, match="the part of the layers differs"):
        undefended(behind, [other], where)
    # In another order, they follow the models.
    turned = Prints(
        CLIENTS[::-1], plain.speakers[::-1], {"h1": plain.layers["h1"][::-1]}, plain.origin
    )
    found = undefended(behind, [turned], where)
    np.testing.assert_array_equal(found.layers["h1"], plain.layers["h1"])


# --- attributes


def test_a_classifier_of_undefended_models_does_not_tell_defended_ones(tmp_path):
    """Undefended, the sex shows in the first value; defended, only in the second."""
    random = np.random.default_rng(0)
    people = [f"s{index:03d}" for index in range(120)]
    names = [f"{one}-m{number}" for one in people for number in (1, 2)]
    sex = {name: "fm"[int(name[1:4]) % 2] for name in names}
    women = np.array([sex[name] == "f" for name in names])
    found = {}
    for at, defence in enumerate(("", "noise=1")):
        rows = random.normal(size=(len(names), 2, 6))
        rows[women, :, at] += 2
        owners = [name[:4] for name in names]
        found[defence] = Prints(names, owners, {"h1": rows}, {"defence": defence})
    owner = {name: name[:4] for name in names}
    rows = attributes.attack(
        found["noise=1"], owner, {"sex": sex}, tmp_path, undefended=found[""], permutations=0
    )
    area = {row["attacker"]: float(row["AUC%"]) for row in rows}
    assert area.keys() == {IGNORANT, SEMI} and {row["defence"] for row in rows} == {"noise=1"}
    assert area[SEMI] > 90 and abs(area[IGNORANT] - 50) < 20
    written = read_tsv(tmp_path / "attributes.tsv", attributes.COLUMNS)
    assert [row["attacker"] for row in written] == [IGNORANT, SEMI]
    # An attribute in the same value is found by both.
    same = Prints(names, owner.values(), {"h1": found[""].layers["h1"] * 2}, {"defence": "x"})
    rows = attributes.attack(
        same, owner, {"sex": sex}, tmp_path, undefended=found[""], permutations=0
    )
    assert all(float(row["AUC%"]) > 90 for row in rows)


def test_what_was_sent_is_what_is_attacked_without_a_defence(world, tmp_path):
    """Without a defence there is one attacker, listed as "-"."""
    for number, more in enumerate(((), ("--defence", "none"))):
        inside("attack", "weights", world / "exp", tmp_path / str(number), *FEW, *more).ok()
    tables = [(tmp_path / str(number) / "weights.tsv").read_bytes() for number in range(2)]
    assert tables[0] == tables[1]
    assert {row["attacker"] for row in read_tsv(tmp_path / "0/weights.tsv", COLUMNS)} == {"-"}
    assert len(sent(world / "exp")) == len(CLIENTS)
