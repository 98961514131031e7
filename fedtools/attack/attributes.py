"""Is it a woman's or a man's model? A classifier of footprints, trained on other speakers' models.

What is told of each layer: logistic regression on means and deviations of the differences
(`fedtools.attack.footprints`), each value scaled by its spread in training; all models of a person
are either trained on or tested, in turn, those of several talks too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedtools.attack.footprint_files import Prints
from fedtools.attack.verify import Model
from fedtools.files.sections import Bootstrap
from fedtools.files.seeds import seed64
from fedtools.files.tables import write_tsv
from fedtools.score.bootstrap import interval, speaker_draws
from fedtools.score.verification import binomial_bounds

COLUMNS = ("layer", "accuracy%", "low", "high", "chance%", "models", "speakers")
# Speakers are cut into so many parts, each tested once.
_PARTS = 10
_FEWEST = 4


def attack(
    prints: Prints,
    models: Mapping[str, Model],
    out: Path,
    *,
    resamples: int = Bootstrap.resamples,
    seed: int = 0,
) -> list[dict[str, object]]:
    """Tell the sex of each model's speaker, layer by layer; write OUT/attributes.tsv.

    With fewer than four speakers of either sex, as in corpora that do not tell it, the table has no
    rows and a line on stderr says why: other attacks on the same models go on.

    Accuracy is the mean of both sexes' (so that saying always the same gives 50 %, the chance).
    Its interval holds that of draws of speakers and, because draws of no error know of none, the
    exact binomial one of as many independent speakers, both sexes being as many as the rarer one.

    Args:
        prints: as `read_footprints` gives them.
        models: what is known of models; those without a sex are left out.
        resamples: draws of speakers; of fewer than ten there are none.
        seed: of the parts and the draws.

    Returns:
        the rows that were written.
    """
    kept = [
        index
        for index, name in enumerate(prints.models)
        if name in models and models[name].gender in ("f", "m")
    ]
    known = [models[prints.models[index]] for index in kept]
    female = np.array([model.gender == "f" for model in known], bool)
    people = [model.person or model.speaker for model in known]
    names, speakers = np.unique(people, return_inverse=True)
    counts = [len(np.unique(speakers[female == kind])) for kind in (True, False)]
    if min(counts) < _FEWEST:
        print(
            f"{out}: sex is not attacked: models of {counts[0]} women and {counts[1]} men are "
            f"known, and at least {_FEWEST} of each are needed",
            file=sys.stderr,
        )
        write_tsv(out / "attributes.tsv", COLUMNS, [])
        return []
    parts = _parts(names.tolist(), speakers, female, seed)
    draws = speaker_draws(len(names), resamples, seed, "attributes")
    rows = []
    for layer, values in prints.layers.items():
        told = cross_validated(values[kept].reshape(len(kept), -1), female, parts[speakers])
        right = told == female
        accuracy = balanced(right, female)
        bounds = [binomial_bounds(accuracy / 100, 2 * min(counts))]
        if not np.isnan(draws).any():
            drawn = [balanced(right, female, weights[speakers]) for weights in draws]
            bounds.append(interval(np.array(drawn)))
        lows, highs = zip(*bounds, strict=True)
        figures = {"accuracy%": accuracy, "low": min(lows), "high": max(highs), "chance%": 50.0}
        cells = {key: f"{one:.1f}" for key, one in figures.items()}
        rows.append({"layer": layer, **cells, "models": len(kept), "speakers": len(names)})
    write_tsv(out / "attributes.tsv", COLUMNS, rows)
    return rows


def cross_validated(features: np.ndarray, labels: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """What a classifier that was trained on the other parts says of each item.

    Args:
        features: (items, D).
        labels: (items,) bool.
        parts: (items,), the part of each.

    Returns:
        (items,) bool.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    told = np.zeros(len(labels), bool)
    for part in np.unique(parts):
        tested = parts == part
        model = make_pipeline(
            StandardScaler(), LogisticRegression(C=0.01, class_weight="balanced", max_iter=1000)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(features[~tested], labels[~tested])
        told[tested] = model.predict(features[tested])
    return told


def balanced(right: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    """The mean of the two labels' accuracies, in %; NaN if one is missing."""
    weights = np.ones(len(right)) if weights is None else weights
    rates = []
    for kind in (labels, ~labels):
        total = weights[kind].sum()
        rates.append((weights * right)[kind].sum() / total if total else np.nan)
    return float(100 * np.mean(rates))


def _parts(names: list[str], speakers: np.ndarray, female: np.ndarray, seed: int) -> np.ndarray:
    """Each speaker's part, (speakers,): both sexes are dealt out in an order of the seed."""
    sex = np.zeros(len(names), bool)
    sex[speakers] = female
    order = sorted(range(len(names)), key=lambda one: (sex[one], seed64(seed, "part", names[one])))
    parts = np.zeros(len(names), int)
    parts[order] = np.arange(len(names)) % min(_PARTS, len(names))
    return parts
