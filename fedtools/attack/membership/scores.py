"""Membership scores: how much more likely an utterance is under a model trained on it.

LiRA      N. Carlini, S. Chien, M. Nasr, S. Song, A. Terzis, F. Tramer: Membership inference attacks
          from first principles, S&P 2022. The score of an utterance is its distance from a
          Gaussian fitted to models without it (offline), or the likelihood ratio of Gaussians of
          models with it and without it (online, algorithm 1). With few models, all utterances of
          a client share one variance, as the paper advises; with 64 or more, each has its own.
RMIA      S. Zarifzadeh, P. Liu, R. Shokri: Low-cost high-power membership inference attacks, ICML
          2024. The share of utterances z of a population with (p(x | model) / p(x)) / (p(z | model)
          / p(z)) >= 1, where log p(x) is the mean over references without x. The paper averages
          p(x), which suits class probabilities; of transcripts, which have tens of nats, the best
          of the references would decide alone. Its correction for missing models with x applies to
          class probabilities, too; those of transcripts vanish.
threshold S. Yeom, I. Giacomelli, M. Fredrikson, S. Jha: Privacy risk in machine learning, CSF 2018,
          with the loss under the global model as the expected loss; and likewise for the gradient.
blind     From audio and the loss under the global model alone, without the client's update. D. Das,
          J. Zhang, F. Tramer: Blind baselines beat membership inference attacks for foundation
          models, 2024.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# Statistics of an utterance: the loss, which LiRA scales as the logit of exp(-loss); and the cosine
# of its gradient with the update.
LOSS, GRADIENT = 0, 1
STATISTICS = ("loss", "gradient")
# References: other clients' models, or models of the same speaker's speech.
ROUND, SPEAKER, NOBODY = "round", "speaker", "-"
# Number of models from which on each utterance has its own variance.
_OWN_VARIANCE = 64
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Seen:
    """Evidence of models on the utterances of a client's trials.

    Attributes:
        start: (n,), losses under the global model.
        victim: (n, 2), `LOSS` and `GRADIENT` of the client's model.
        cohort: (n, R, 2), likewise for other people's models.
        outside: (n, S, 2), for models of the same speaker's other speech; NaN where a model was
            trained on the utterance.
        inside: (n, S, 2), for the attacker's models trained on an utterance; NaN where not.
        population: (n,) bool, whether an utterance belongs to the population.
    """

    start: np.ndarray
    victim: np.ndarray
    cohort: np.ndarray
    outside: np.ndarray
    inside: np.ndarray
    population: np.ndarray


def scores_of(seen: Seen) -> Iterator[tuple[Key, np.ndarray]]:
    """Yield (attack, statistic, references) and scores of all utterances, (n,), large for members.

    Scores that need references, or models with an utterance, are left out where there are none.
    """
    plain = np.stack([seen.start - seen.victim[:, LOSS], seen.victim[:, GRADIENT]])
    for name, values in zip(STATISTICS, plain, strict=True):
        yield ("threshold", name, NOBODY), _centred(values, seen.population)
    for references, models in ((ROUND, seen.cohort), (SPEAKER, seen.outside)):
        if not models.shape[1]:
            continue
        for index, name in enumerate(STATISTICS):
            scores = offline(*(_scaled(one[..., index], index) for one in (seen.victim, models)))
            yield ("LiRA offline", name, references), _centred(scores, seen.population)
        if seen.population.any():
            scores = rmia(seen.victim[:, LOSS], models[..., LOSS], seen.population)
            yield ("RMIA", STATISTICS[LOSS], references), scores
    for index, name in enumerate(STATISTICS) if seen.inside.shape[1] else ():
        parts = (
            _scaled(one[..., index], index) for one in (seen.victim, seen.inside, seen.outside)
        )
        yield ("LiRA online", name, SPEAKER), online(*parts)


def offline(values: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """Return how many deviations values, (n,), are above those of models without them, (n, R)."""
    means = _means(outside)
    found: np.ndarray = (values - means) / np.sqrt(_variances(outside))
    return found


def online(values: np.ndarray, inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """Return log-likelihood ratios of values, (n,); NaN where no model had an utterance."""
    variances = [_variances(some) for some in (inside, outside)]
    if min(len(np.atleast_1d(one)) for one in variances) == 1:
        # With a variance for each side, the score would depend on the distance from both.
        variances = [_variances(inside, outside)] * 2
    one, other = (
        (values - _means(some)) ** 2 / variance + np.log(variance)
        for some, variance in zip((inside, outside), variances, strict=True)
    )
    found: np.ndarray = (other - one) / 2
    return found


def rmia(losses: np.ndarray, outside: np.ndarray, population: np.ndarray) -> np.ndarray:
    """Return the share of the population that each utterance dominates, (n,).

    Args:
        losses: (n,), losses under the model.
        outside: (n, R), losses under references; NaN where one had the utterance.
        population: (n,) bool.
    """
    ratios = _means(outside) - losses
    others = np.sort(ratios[population])
    return np.searchsorted(others, ratios, side="right") / len(others)


def _scaled(values: np.ndarray, statistic: int) -> np.ndarray:
    """Scale losses -log p as LiRA does, to log p - log(1 - p); return a cosine as it is."""
    if statistic == GRADIENT:
        return values
    losses = np.maximum(values, 1e-9)
    found: np.ndarray = -losses - np.log(-np.expm1(-losses))
    return found


def _means(values: np.ndarray) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found: np.ndarray = np.nanmean(values, 1)
    return found


def _variances(*models: np.ndarray) -> np.ndarray:
    """Return one pooled variance, or each utterance's, around the means of each of `models`."""
    counts = sum((~np.isnan(some)).sum(1) for some in models)
    squares = sum(np.nansum((some - _means(some)[:, None]) ** 2, 1) for some in models)
    free = sum(np.maximum((~np.isnan(some)).sum(1) - 1, 0) for some in models)
    if counts[counts > 0].min(initial=_OWN_VARIANCE) >= _OWN_VARIANCE:
        return np.maximum(squares / np.maximum(free, 1), 1e-12)
    pooled = squares.sum() / max(free.sum(), 1)
    # The deviation of one model of each kind is unknown.
    return np.array([pooled if pooled > 0 else 1.0])


def _centred(scores: np.ndarray, population: np.ndarray) -> np.ndarray:
    """Standardise scores by the population's, which gives each client its own threshold."""
    if population.sum() < 2 or not (spread := scores[population].std(ddof=1)):
        return scores
    found: np.ndarray = (scores - scores[population].mean()) / spread
    return found


def blind(
    features: np.ndarray, labels: np.ndarray, groups: np.ndarray, parts: np.ndarray
) -> np.ndarray:
    """Return cross-validated scores of a classifier of audio features, large for members, (n,).

    Args:
        features: (n, D) of audio.
        labels: (n,) bool.
        groups: (n,), clients, on whose means features are centred.
        parts: (n,), parts of the cross-validation, each of which is left out in turn.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    _, place = np.unique(groups, return_inverse=True)
    sums = np.zeros((place.max() + 1, features.shape[1]))
    np.add.at(sums, place, features)
    features = features - (sums / np.bincount(place)[:, None])[place]
    scores = np.zeros(len(labels))
    for part in np.unique(parts):
        tested = parts == part
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(features[~tested], labels[~tested])
        scores[tested] = model.decision_function(features[tested])
    return scores


def audio_features(audio: np.ndarray, loss: float) -> np.ndarray:
    """Return features of audio, (frames, values): means, deviations, changes, length, the loss."""
    frames = len(audio)
    steps = abs(np.diff(audio, axis=0)).mean(0) if frames > 1 else np.zeros(audio.shape[1])
    own = [np.log(frames), loss, loss / frames]
    return np.concatenate([audio.mean(0), audio.std(0), steps, own]).astype(np.float32)
