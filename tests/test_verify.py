"""Trials of models, and decisions on them, with scores of a known truth."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtools.attack.speakers.verify import Model, decide, make_trials
from fedtools.core.errors import UserError
from fedtools.score.trials import Trials


def paired(trials: Trials) -> list[tuple[str, str, bool]]:
    return list(zip(trials.enrolled, trials.test, map(bool, trials.targets), strict=True))


def test_other_trials_are_drawn_from_all():
    """All pairs of two speakers are equally frequent, whatever the names' order."""
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
    """Each pair has the kind given by its recordings; non-target pairs are in all kinds."""
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
    """Each talk has a direction of its own, and no speaker information."""
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
    # The third of 240 targets that share a channel is found.
    assert 20 < float(easy["EER%"]) < 45
    # Without known talks, there is the row of all, and files of the others are removed.
    unknown = {name: Model(model.speaker) for name, model in models.items()}
    again = decide(tmp_path, "a1", unknown, list(models), [matrix], {"both": "a1"}, **chosen)
    assert again == [easy]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a1.h1.easy", "a1.h1.easy.det.tsv", "a1.tsv", "model2speaker", "trials.easy",
    ]  # fmt: skip
