"""Trials of models and the scores of attack A2: on vectors whose speakers are known."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtools.attack.a2 import _decide
from fedtools.attack.options import A2
from fedtools.attack.verify import COLUMNS, Model, decide, make_trials
from fedtools.attack.xvectors import Training
from fedtools.files.errors import UserError
from fedtools.files.tables import read_tsv
from fedtools.score.trials import Trials

Vectors = dict[str, np.ndarray]


def paired(trials: Trials) -> list[tuple[str, str, bool]]:
    return list(zip(trials.enrolled, trials.test, map(bool, trials.targets), strict=True))


def test_other_trials_are_drawn_from_all():
    """Each pair of two speakers as often as any other one, whatever the names' order."""
    models = {
        f"{speaker}{number}": Model(speaker, talks=frozenset({f"{speaker}-talk{number}"}))
        for speaker in "abcd"
        for number in (1, 2)
    }
    pairs = [(one, other) for one, other in combinations(sorted(models), 2) if one[0] != other[0]]
    few, seeds, drawn = len(pairs) // 4, 400, Counter()
    for seed in range(seeds):
        trials = make_trials(models, others=few, seed=seed)
        assert list(trials) == ["easy", "other"]
        found = paired(trials["easy"])
        assert [pair[:2] for pair in found if pair[2]] == [(f"{one}1", f"{one}2") for one in "abcd"]
        others = [pair[:2] for pair in found if not pair[2]]
        assert len(others) == len(set(others)) == few
        drawn.update(others)
        assert paired(trials["other"]) == found
    expected = seeds * few / len(pairs)
    spread = (expected * (1 - few / len(pairs))) ** 0.5
    assert drawn.keys() == set(pairs)
    assert all(abs(count - expected) < 5 * spread for count in drawn.values())
    again = make_trials(models, others=few, seed=3)["easy"]
    assert again.enrolled == make_trials(models, others=few, seed=3)["easy"].enrolled


KNOWN_TALKS = st.sets(st.sampled_from("xyz"), max_size=2)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), KNOWN_TALKS), min_size=2, max_size=9),
    st.integers(0, 12),
)
def test_kinds_of_targets_by_brute_force(told, others):
    """Each pair in the kind that its recordings say; those of two speakers are the same in all."""
    models = {
        f"m{number}": Model(speaker, talks=frozenset(f"{speaker}{talk}" for talk in talks))
        for number, (speaker, talks) in enumerate(told)
    }
    expected: dict[str, set[tuple[str, str]]] = {}
    for one, other in product(models, models):
        a, b = models[one], models[other]
        if one < other and a.speaker == b.speaker:
            expected.setdefault("easy", set()).add((one, other))
            shared = [talk for talk in a.talks if talk in b.talks]
            if a.talks and b.talks:
                expected.setdefault("same" if shared else "other", set()).add((one, other))
    nobody = sum(models[a].speaker < models[b].speaker for a, b in product(models, models))
    if not expected or not nobody:
        with pytest.raises(UserError, match="no pair of models of"):
            make_trials(models, others=others)
        return
    found = {kind: paired(some) for kind, some in make_trials(models, others=others).items()}
    assert found.keys() == expected.keys()
    for kind, pairs in found.items():
        assert pairs == sorted(pairs)
        assert {pair[:2] for pair in pairs if pair[2]} == expected[kind]
        rest = [pair for pair in pairs if not pair[2]]
        assert len(rest) == (min(others, nobody) if others else nobody)
        assert rest == [pair for pair in found["easy"] if not pair[2]]
        assert all(models[one].speaker != models[other].speaker for one, other, _ in rest)


def test_scores_that_know_the_channel_alone_tell_no_speaker(tmp_path):
    """Each talk has a direction of its own, and nothing of its speaker."""
    random, models, rows = np.random.default_rng(0), {}, []
    for speaker, talk, number in product(range(40), range(2), range(2)):
        name = f"s{speaker:02d}-{talk}-{number}"
        models[name] = Model(name[:3], talks=frozenset({name[:5]}))
        if number == 0:
            channel = random.normal(size=30)
        rows.append(channel + 0.1 * random.normal(size=30))
    rows = np.array(rows) / np.linalg.norm(rows, axis=1, keepdims=True)
    chosen = {"others": 0, "resamples": 50, "seed": 0}
    matrix = ("-", "h1", "both", rows @ rows.T)
    found = decide(tmp_path, "a1", models, list(models), [matrix], {"both": "a1"}, **chosen)
    assert [row["trials"] for row in found] == ["easy", "same", "other"]
    easy, same, other = found
    assert (easy["targets"], same["targets"], other["targets"]) == (240, 80, 160)
    assert {row["others"] for row in found} == {16 * 40 * 39 // 2}
    assert float(same["EER%"]) < 0.5 and float(same["high"]) < 10
    assert float(other["low"]) < 50 < float(other["high"]) and float(other["low"]) > 35
    # Of 240 targets, the third that share a channel are told.
    assert 20 < float(easy["EER%"]) < 45
    # Where talks are not told, there is the row of all, and no file of the others is left.
    unknown = {name: Model(model.speaker) for name, model in models.items()}
    again = decide(tmp_path, "a1", unknown, list(models), [matrix], {"both": "a1"}, **chosen)
    assert again == [easy]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a1.h1.easy", "a1.h1.easy.det.tsv", "a1.tsv", "model2speaker", "trials.easy",
    ]  # fmt: skip


# --- attack A2's scores, of embeddings of two sets of people

KNOWN, ATTACKED, MODELS = 30, 24, 2


def embedded(speakers: int, own: slice, noise: slice, seed: int, size: int = 8) -> Vectors:
    """Two vectors of each speaker, who differ in some directions, and a speaker's in others."""
    random, found = np.random.default_rng(seed), {}
    for speaker in range(speakers):
        person = np.zeros(size)
        person[own] = random.normal(0, 1, size)[own]
        for number in range(MODELS):
            found[f"{'abcdefgh'[seed]}{speaker:02d}-{number}"] = person + random.normal(
                0, np.where(np.isin(np.arange(size), np.arange(size)[noise]), 1.0, 0.05), size
            )
    return found


def scored(folder: Path, known: Vectors, attacked: Vectors, dimension: int = 4):
    """The PLDA scores of all pairs, and the figures by what scores are of."""
    speakers = {name: name[:3] for name in known}
    models = {name: Model(name[:3]) for name in attacked}
    training = Training(1, A2(dimension=dimension, others=0))
    _decide(known, speakers, attacked, models, folder, "a2.h1", training, 20)
    lines = [line.split() for line in (folder / "a2.h1.easy").read_text().splitlines()]
    rows = read_tsv(folder / "a2.h1.tsv", COLUMNS)
    return {(one, other): float(value) for one, other, value in lines}, {
        row["scores"]: row for row in rows
    }


FIRST, LAST = slice(0, 4), slice(4, 8)


def test_nothing_is_learnt_from_those_who_are_attacked(tmp_path):
    """The score of a pair is the same whoever else is attacked."""
    known, attacked = embedded(KNOWN, FIRST, LAST, 0), embedded(ATTACKED, FIRST, LAST, 1)
    whole, rows = scored(tmp_path, known, attacked)
    # They are scores of speakers, and PLDA knows which directions are of theirs.
    assert float(rows["PLDA"]["EER%"]) < 3 < 10 < float(rows["cosine"]["EER%"])
    some = {name: attacked[name] for name in list(attacked)[: 6 * MODELS]}
    part, _ = scored(tmp_path, known, some)
    assert len(part) == 66
    for pair, score in part.items():
        assert score == pytest.approx(whole[pair], rel=1e-6, abs=1e-6)


def test_who_differs_otherwise_than_those_who_are_known_is_not_told(tmp_path):
    """Directions that are noise of the known people are left out, although others differ there."""
    known, attacked = embedded(KNOWN, FIRST, LAST, 0), embedded(ATTACKED, LAST, FIRST, 1)
    _, rows = scored(tmp_path, known, attacked)
    assert float(rows["PLDA"]["EER%"]) > 30


def test_how_long_vectors_are_does_not_matter(tmp_path):
    """Lengths, from the middle of the known ones on, are those of models and no speaker's."""
    known, attacked = embedded(KNOWN, FIRST, LAST, 0), embedded(ATTACKED, FIRST, LAST, 1)
    middle, random = np.mean(list(known.values()), 0), np.random.default_rng(5)
    longer = {
        name: middle + random.uniform(0.2, 5) * (value - middle) for name, value in attacked.items()
    }
    before, rows = scored(tmp_path, known, attacked)
    after, others = scored(tmp_path, known, longer)
    assert rows == others
    for pair, score in before.items():
        assert after[pair] == pytest.approx(score, rel=1e-6, abs=1e-6)


def test_where_vectors_lie_does_not_matter(tmp_path):
    """Everybody's common part is no speaker's: by the cosine, too, it is taken off first."""
    shift = np.random.default_rng(5).normal(0, 30, 8)
    known, attacked = embedded(KNOWN, FIRST, slice(0, 0), 0), embedded(ATTACKED, FIRST, LAST, 1)
    before, rows = scored(tmp_path, known, attacked)
    moved = [{name: value + shift for name, value in one.items()} for one in (known, attacked)]
    after, others = scored(tmp_path, *moved)
    for pair, score in before.items():
        assert after[pair] == pytest.approx(score, rel=1e-6, abs=1e-6)
    assert rows == others
    # The middle is that of the known ones, also where it is not the others'.
    attacked = {name: value + np.r_[2.0, np.zeros(7)] for name, value in attacked.items()}
    apart_from_all, rows = scored(tmp_path, known, attacked)
    assert apart_from_all.keys() == before.keys() and rows != others
    middle = np.mean(list(known.values()), 0)
    apart = {
        name: (value - middle) / np.linalg.norm(value - middle) for name, value in attacked.items()
    }
    cosines = {pair: apart[pair[0]] @ apart[pair[1]] for pair in before}
    targets, others = (
        np.array([
            value for (one, other), value in cosines.items() if (one[:3] == other[:3]) == same
        ])
        for same in (True, False)
    )  # fmt: skip
    # At the threshold where both errors are the same, as nearly as steps allow.
    rates = [((targets < level).mean(), (others >= level).mean()) for level in np.sort(targets)]
    rejected, accepted = min(rates, key=lambda pair: abs(pair[0] - pair[1]))
    found = float(rows["cosine"]["EER%"])
    assert found == pytest.approx(50 * (rejected + accepted), abs=100 / len(targets))
