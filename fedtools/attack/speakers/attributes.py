"""Attack on attributes: classify a speaker's sex, age or accent from footprints of models.

Each layer has a classifier, trained on other people's models: logistic regression on means and
deviations of the differences (see `footprints`), each value scaled by its spread in training. In
cross-validation all models of a person, those of several talks too, are in one part.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.attack.knowledge import attackers
from fedtools.attack.options import PERMUTATIONS
from fedtools.attack.speakers.footprint_files import Prints
from fedtools.attack.speakers.logistic import probabilities
from fedtools.core.recipe_sections import Bootstrap
from fedtools.core.seeds import generator, seed64
from fedtools.core.tables import write_tsv
from fedtools.score.bootstrap import speaker_draws
from fedtools.score.verification import rate_bounds

COLUMNS = (
    "attribute", "defence", "attacker", "layer", "accuracy%", "low", "high", "chance%", "AUC%",
    "AUClow", "AUChigh", "permuted%", "p", "plain%", "majority%", "models", "speakers", "classes",
)  # fmt: skip
SEX = "sex"
# Number of parts that people are split into; each part is tested once.
_PARTS = 10
# C of logistic regression, for few people.
_STRENGTH = 0.01
# The least number of people of a class.
FEWEST = 4


@dataclass(frozen=True)
class Labelled:
    """Models whose class is known, and what their layers have in common.

    Attributes:
        kept: (models,), their indices among all models.
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
        """Return the number of people of each class."""
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
    """Classify attributes of each model's speaker from each layer; write OUT/attributes.tsv.

    An attribute with fewer than two classes of at least four people, as in corpora that do not
    record it, has no rows, and a line on stderr says why: other attacks on the same models go on.

    `accuracy%` is the mean over classes, so that a constant answer gives chance, 100 / number of
    classes; `plain%` is the accuracy over all models, so that a constant answer gives the
    majority's share. AUC is the mean over classes, each against all others; chance is 50. Each
    interval covers the bootstrap interval over speakers and, because that has no width where no
    draw has an error, the exact binomial interval: for accuracy, of as many independent speakers as
    if all classes were as small as the rarest; for AUC, of as many independent pairs of two
    classes as the rarest class has people. `permuted%` is the mean AUC of classifiers trained and
    tested with people's classes permuted, and p is the share of these AUCs, counting the true one,
    that are not below the true one.

    Args:
        prints: footprints as `read_footprints` returns them.
        people: model -> person.
        attributes: attribute -> model -> class; models without one are left out.
        undefended: footprints of the same models without the defence, see
            `footprint_files.undefended`: with them there is an ignorant attacker, trained on these,
            in addition to the semi-informed one.
        permutations: number of permutations of people's classes; 0 for none.
        resamples: number of draws of speakers; fewer than ten speakers are not drawn.
        seed: random seed of the parts, the permutations and the draws.

    Returns:
        the rows written.
    """
    rows = []
    for attribute, classes in attributes.items():
        labelled = _labelled(attribute, prints.models, people, classes, out)
        if labelled is None:
            continue
        for attacker in attackers(undefended is not None, enrols=False):
            learnt = prints if attacker.learns or undefended is None else undefended
            for layer in prints.layers:
                own = _vectors(learnt, layer, labelled)
                tested = own if learnt is prints else _vectors(prints, layer, labelled)
                figures = _figures(
                    (own, tested), labelled, attribute, permutations, resamples, seed
                )
                about = {
                    "attribute": attribute,
                    "defence": prints.defence,
                    "attacker": attacker.name,
                }
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
    """Return the models in classes of enough people; None, with a line on stderr, if too few."""
    stated: dict[str, set[str]] = {}
    for model in models:
        if classes.get(model):
            stated.setdefault(people[model], set()).add(classes[model])
    own = {person: min(names) for person, names in stated.items() if len(names) == 1}
    if len(own) < len(stated):
        count = len(stated) - len(own)
        print(f"{out}: {attribute}: {count} people with several classes left out", file=sys.stderr)
    found = sorted(set(own.values()), reverse=True)
    sizes = {name: list(own.values()).count(name) for name in found}
    kept = [name for name in found if sizes[name] >= FEWEST]
    present = ", ".join(f"{size} of {name}" for name, size in sorted(sizes.items()))
    if len(kept) < 2:
        print(
            f"{out}: {attribute} is not attacked: two classes of at least {FEWEST} people are "
            f"needed, and there are {present or 'none'}",
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


# What classifiers are trained on and tested on, (models, D) each.
Features = tuple[np.ndarray, np.ndarray]


def _vectors(prints: Prints, layer: str, labelled: Labelled) -> np.ndarray:
    """Return a layer's footprints of labelled models, (models, D)."""
    return prints.layers[layer][labelled.kept].reshape(len(labelled.kept), -1)


def _figures(
    features: Features,
    labelled: Labelled,
    attribute: str,
    permutations: int,
    resamples: int,
    seed: int,
) -> dict[str, object]:
    """Return the figures of a layer."""
    count, person = len(labelled.classes), labelled.person
    labels = labelled.label[person]
    orders = [
        generator(seed, "permutation", attribute, number).permutation(len(labelled.people))
        for number in range(permutations)
    ]
    permuted = np.stack([labelled.label, *(labelled.label[order] for order in orders)])
    scores, *others = cross_validated(features, labelled, permuted, seed)
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
    low, high = rate_bounds(accuracy, count * rarest, drawn[0])
    area_low, area_high = rate_bounds(area, rarest, drawn[1])
    chance = [
        float(areas(other, label[person], once)[0])
        for other, label in zip(others, permuted[1:], strict=True)
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


def cross_validated(
    features: Features, labelled: Labelled, label: np.ndarray, seed: int
) -> np.ndarray:
    """Return the probabilities of models' classes by classifiers trained on other people's models.

    Args:
        features: what classifiers are trained on and tested on.
        labelled: the models; each class has at least `FEWEST` people, who are dealt out to parts,
            so that there are models of each class to train on.
        label: (B, people), numbers of people's classes, each row a problem of its own.
        seed: of the parts.

    Returns:
        (B, models, classes).
    """
    person = labelled.person
    parts = np.stack([deal(labelled.people, one, seed) for one in label])[:, person]
    numbers = np.arange(parts.max() + 1)
    # (B x parts, models)
    kept = (parts[:, None] != numbers[:, None]).reshape(-1, len(person))
    labels = np.repeat(label[:, person], len(numbers), axis=0)
    found = probabilities(*features, labels, kept, _STRENGTH)
    found = found.reshape(len(label), len(numbers), *found.shape[1:])
    own = np.take_along_axis(found, parts[:, None, :, None], 1)
    scores: np.ndarray = own[:, 0]
    return scores


def balanced(
    right: np.ndarray, labels: np.ndarray, classes: int, weights: np.ndarray | None = None
) -> float:
    """Return the mean of the classes' accuracies, in %; NaN if a class is missing."""
    weights = np.ones(len(right)) if weights is None else weights
    rates = []
    for kind in (labels == one for one in range(classes)):
        total = weights[kind].sum()
        rates.append((weights * right)[kind].sum() / total if total else np.nan)
    return float(100 * np.mean(rates))


def areas(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the area under the ROC curve in %, a mean over classes, each against all others.

    Args:
        scores: (items, classes), large where an item seems to be of the class.
        labels: (items,), numbers of classes from 0.
        weights: (draws, items).

    Returns:
        (draws,); NaN where a class is missing.
    """
    # scikit-learn's roc_auc_score takes one draw and class: 240 times as long for 1,000 draws.
    total = np.zeros(len(weights))
    for number, column in enumerate(scores.T):
        order = np.argsort(column, kind="stable")
        positive, column, own = labels[order] == number, column[order], weights[:, order]
        starts = np.flatnonzero(np.concatenate([[True], column[1:] > column[:-1]]))
        same = np.add.reduceat(own * positive, starts, axis=1)
        other = np.add.reduceat(own * ~positive, starts, axis=1)
        # Ties count half.
        below = np.cumsum(other, 1) - other / 2
        with np.errstate(invalid="ignore"):
            total += (same * below).sum(1) / (same.sum(1) * other.sum(1))
    return 100 * total / scores.shape[1]


def deal(people: Sequence[str], label: np.ndarray, seed: int) -> np.ndarray:
    """Return each person's part, (people,): classes are dealt out in an order from the seed."""
    keys = [(label[one], seed64(seed, "part", people[one])) for one in range(len(people))]
    order = sorted(range(len(people)), key=keys.__getitem__)
    parts = np.zeros(len(people), int)
    parts[order] = np.arange(len(people)) % min(_PARTS, len(people))
    return parts
