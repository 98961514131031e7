"""Of which sex, age or accent is the speaker? A classifier of footprints of other people's models.

What is told of each layer: logistic regression on means and deviations of the differences
(`fedtools.attack.footprints`), each value scaled by its spread in training; all models of a person
are either trained on or tested, in turn, those of several talks too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtools.attack.footprint_files import Prints
from fedtools.attack.knowledge import ANY, IGNORANT, SEMI
from fedtools.attack.options import PERMUTATIONS
from fedtools.files.sections import Bootstrap
from fedtools.files.seeds import generator, seed64
from fedtools.files.tables import write_tsv
from fedtools.score.bootstrap import interval, speaker_draws
from fedtools.score.verification import binomial_bounds

COLUMNS = (
    "attribute", "defence", "attacker", "layer", "accuracy%", "low", "high", "chance%", "AUC%",
    "AUClow", "AUChigh", "permuted%", "p", "plain%", "majority%", "models", "speakers", "classes",
)  # fmt: skip
SEX = "sex"
# Speakers are cut into so many parts, each tested once.
_PARTS = 10
# Of each class.
FEWEST = 4


@dataclass(frozen=True)
class Labelled:
    """The models whose class is known, and what is common to all layers of them.

    Attributes:
        kept: (models,), their places among all models.
        classes: names, in the order in which people are dealt out.
        people: names.
        person: (models,), the number of each model's person.
        label: (people,), the number of each person's class.
    """

    kept: np.ndarray
    classes: list[str]
    people: list[str]
    person: np.ndarray
    label: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """How many people are of each class."""
        return np.bincount(self.label, minlength=len(self.classes))


def attack(
    prints: Prints,
    people: Mapping[str, str],
    attributes: Mapping[str, Mapping[str, str]],
    out: Path,
    *,
    undefended: Prints | None = None,
    permutations: int = PERMUTATIONS,
    resamples: int = Bootstrap.resamples,
    seed: int = 0,
) -> list[dict[str, object]]:
    """Tell attributes of each model's speaker, layer by layer; write OUT/attributes.tsv.

    Of an attribute of which fewer than two classes have four people, as in corpora that do not tell
    it, the table has no rows and a line on stderr says why: other attacks on the same models go on.

    Accuracy is the mean of all classes' (so that saying always the same gives chance, 100 / number
    of classes), and that of all models beside it (so that it gives the majority's share). AUC is
    the mean over classes, each against all others; by chance it is 50. Both intervals hold that
    of draws of speakers and, because draws of no error know of none, the exact binomial one: of
    accuracy, of as many independent speakers, all classes being as many as the rarest one; of AUC,
    of as many independent pairs of two classes as the rarest one has people. `permuted%` is the
    mean AUC of classifiers trained and tested where people have each other's classes, and p the
    share of these, the true one among them, whose AUC is no lower.

    Args:
        prints: as `read_footprints` gives them.
        people: model -> who speaks.
        attributes: attribute -> model -> class; models without one are left out.
        undefended: of the same models without the defence, see `footprint_files.undefended`: there
            is then an ignorant attacker, who has trained on these, beside the semi-informed one.
        permutations: of people's classes; 0 for none.
        resamples: draws of speakers; of fewer than ten there are none.
        seed: of the parts, the permutations and the draws.

    Returns:
        the rows that were written.
    """
    rows = []
    for attribute, classes in attributes.items():
        labelled = _labelled(attribute, prints.models, people, classes, out)
        if labelled is None:
            continue
        sources = {ANY: prints} if undefended is None else {IGNORANT: undefended, SEMI: prints}
        for attacker, learnt in sources.items():
            for layer in prints.layers:
                features, own = (
                    one.layers[layer][labelled.kept].reshape(len(labelled.kept), -1)
                    for one in (prints, learnt)
                )
                figures = _figures(
                    (own, features), labelled, attribute, permutations, resamples, seed
                )
                about = {"attribute": attribute, "defence": prints.defence, "attacker": attacker}
                rows.append({**about, "layer": layer, **figures})
    write_tsv(out / "attributes.tsv", COLUMNS, rows)
    return rows


def _labelled(
    attribute: str,
    models: Sequence[str],
    people: Mapping[str, str],
    classes: Mapping[str, str],
    out: Path,
) -> Labelled | None:
    """Those who can be attacked, in classes of enough people; a line says why there are none."""
    told: dict[str, set[str]] = {}
    for model in models:
        if classes.get(model):
            told.setdefault(people[model], set()).add(classes[model])
    own = {person: min(said) for person, said in told.items() if len(said) == 1}
    if len(own) < len(told):
        count = len(told) - len(own)
        print(f"{out}: {attribute}: {count} people of several classes left out", file=sys.stderr)
    found = sorted(set(own.values()), reverse=True)
    sizes = {name: list(own.values()).count(name) for name in found}
    kept = [name for name in found if sizes[name] >= FEWEST]
    lacking = ", ".join(f"{size} of {name}" for name, size in sorted(sizes.items()))
    if len(kept) < 2:
        print(
            f"{out}: {attribute} is not attacked: models of {lacking or 'nobody'} are known, and "
            f"at least {FEWEST} people of each of two classes are needed",
            file=sys.stderr,
        )
        return None
    if rare := [name for name in found if name not in kept]:
        listed = ", ".join(f"{name} ({sizes[name]})" for name in sorted(rare))
        line = f"{out}: {attribute}: classes of fewer than {FEWEST} people left out: {listed}"
        print(line, file=sys.stderr)
    own = {person: name for person, name in own.items() if name in kept}
    places = [at for at, model in enumerate(models) if classes.get(model) and people[model] in own]
    names, person = np.unique([people[models[at]] for at in places], return_inverse=True)
    label = np.array([kept.index(own[name]) for name in names.tolist()])
    return Labelled(np.array(places), kept, names.tolist(), person, label)


# (Items, D) each: of what classifiers are trained on, and of what they are asked of.
Features = tuple[np.ndarray, np.ndarray]


def _figures(
    features: Features,
    labelled: Labelled,
    attribute: str,
    permutations: int,
    resamples: int,
    seed: int,
) -> dict[str, object]:
    """The figures of a layer."""
    count, person = len(labelled.classes), labelled.person
    labels = labelled.label[person]
    scores = _scores(features, labelled, labelled.label, seed)
    right = scores.argmax(1) == labels
    once = np.ones((1, len(labels)))
    accuracy, area = balanced(right, labels, count), float(areas(scores, labels, once)[0])
    draws = speaker_draws(len(labelled.people), resamples, seed, "attributes")
    drawn: list[np.ndarray | None] = [None, None]
    if not np.isnan(draws).any():
        weights = draws[:, person]
        drawn = [
            np.array([balanced(right, labels, count, one) for one in weights]),
            areas(scores, labels, weights),
        ]
    rarest = int(labelled.counts.min())
    low, high = _bounds(accuracy, count * rarest, drawn[0])
    area_low, area_high = _bounds(area, rarest, drawn[1])
    chance = [
        _permuted(features, labelled, attribute, number, seed) for number in range(permutations)
    ]
    figures = {
        "accuracy%": accuracy, "low": low, "high": high, "chance%": 100 / count,
        "AUC%": area, "AUClow": area_low, "AUChigh": area_high,
        "plain%": 100 * right.mean(), "majority%": 100 * np.bincount(labels).max() / len(labels),
    }  # fmt: skip
    higher = 1 + sum(one >= area for one in chance)
    return {
        **{key: f"{one:.1f}" for key, one in figures.items()},
        "permuted%": f"{np.mean(chance):.1f}" if chance else "-",
        "p": f"{higher / (1 + len(chance)):.3f}" if chance else "-",
        "models": len(labels),
        "speakers": len(labelled.people),
        "classes": "; ".join(
            f"{name} {size}"
            for name, size in sorted(zip(labelled.classes, labelled.counts, strict=True))
        ),
    }


def _scores(features: Features, labelled: Labelled, label: np.ndarray, seed: int) -> np.ndarray:
    """What is said of each model if people's classes are these, (models, classes)."""
    parts = deal(labelled.people, label, seed)
    person = labelled.person
    return cross_validated(*features, label[person], len(labelled.classes), parts[person])


def _permuted(
    features: Features, labelled: Labelled, attribute: str, number: int, seed: int
) -> float:
    """The AUC of one exchange of people's classes."""
    order = generator(seed, "permutation", attribute, number).permutation(len(labelled.people))
    label = labelled.label[order]
    scores = _scores(features, labelled, label, seed)
    return float(areas(scores, label[labelled.person], np.ones((1, len(labelled.person))))[0])


def cross_validated(
    learnt: np.ndarray,
    features: np.ndarray,
    labels: np.ndarray,
    classes: int,
    parts: np.ndarray,
    **options: Any,
) -> np.ndarray:
    """What a classifier that was trained on the other parts says of each item.

    Args:
        learnt: (items, D), that it is trained on.
        features: (items, D), that it is asked of; the same, or the same items otherwise.
        labels: (items,), numbers of classes from 0.
        classes: how many there are.
        parts: (items,), the part of each.
        options: of scikit-learn's LogisticRegression, in place of those for few people.

    Returns:
        (items, classes), probabilities; 0 of a class that none of the other parts has.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    told = np.zeros((len(labels), classes))
    chosen = options or {"C": 0.01, "class_weight": "balanced"}
    for part in np.unique(parts):
        tested = parts == part
        if len(known := np.unique(labels[~tested])) < 2:
            # Of one class alone all are this one's.
            told[np.ix_(tested, known)] = 1
            continue
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, **chosen))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(learnt[~tested], labels[~tested])
        told[np.ix_(tested, model.classes_)] = model.predict_proba(features[tested])
    return told


def balanced(
    right: np.ndarray, labels: np.ndarray, classes: int, weights: np.ndarray | None = None
) -> float:
    """The mean of the classes' accuracies, in %; NaN if one is missing."""
    weights = np.ones(len(right)) if weights is None else weights
    rates = []
    for kind in (labels == one for one in range(classes)):
        total = weights[kind].sum()
        rates.append((weights * right)[kind].sum() / total if total else np.nan)
    return float(100 * np.mean(rates))


def areas(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The area under the ROC curve, of each class against all others, their mean, in %.

    Args:
        scores: (items, classes), large where an item seems to be of the class.
        labels: (items,), numbers of classes from 0.
        weights: (draws, items).

    Returns:
        (draws,); NaN where a class is missing.
    """
    total = np.zeros(len(weights))
    for number, column in enumerate(scores.T):
        order = np.argsort(column, kind="stable")
        positive, column, own = labels[order] == number, column[order], weights[:, order]
        starts = np.flatnonzero(np.concatenate([[True], column[1:] > column[:-1]]))
        same = np.add.reduceat(own * positive, starts, axis=1)
        other = np.add.reduceat(own * ~positive, starts, axis=1)
        # Of equal scores a half is taken as right.
        below = np.cumsum(other, 1) - other / 2
        with np.errstate(invalid="ignore"):
            total += (same * below).sum(1) / (same.sum(1) * other.sum(1))
    return 100 * total / scores.shape[1]


def deal(people: Sequence[str], label: np.ndarray, seed: int) -> np.ndarray:
    """Each person's part, (people,): all classes are dealt out in an order of the seed."""
    keys = [(label[one], seed64(seed, "part", people[one])) for one in range(len(people))]
    order = sorted(range(len(people)), key=keys.__getitem__)
    parts = np.zeros(len(people), int)
    parts[order] = np.arange(len(people)) % min(_PARTS, len(people))
    return parts


def _bounds(value: float, independent: int, drawn: np.ndarray | None) -> tuple[float, float]:
    """The interval of a rate in %, which holds the binomial one and that of draws."""
    bounds = [binomial_bounds(value / 100, independent)]
    if drawn is not None:
        bounds.append(interval(drawn))
    lows, highs = zip(*bounds, strict=True)
    return min(lows), max(highs)
