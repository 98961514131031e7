"""Attack II: cluster utterances by speaker, from the features that were sent alone.

Zhu et al. (Interspeech 2022), section 3.5.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np

from fedtools.attack.features.figures import Figure, Speakers
from fedtools.attack.features.retrieval import unit
from fedtools.core.seeds import generator, seed64
from fedtools.score.clusters import (
    adjusted_rand_index,
    counts_of,
    mutual_information,
    resampled_information,
)

NEIGHBOURS = 5
# Number of permutations of the speakers' labels that chance levels are means over.
_PERMUTATIONS = 200


def sort_speakers(
    attack: str, vectors: np.ndarray, speakers: Speakers, key: tuple[int | str, ...]
) -> Iterator[Figure]:
    """Yield figures of how well neighbours and clusters agree with speakers.

    Neighbours are by cosine, leaving one out; k-means has as many clusters as speakers, on vectors
    of length 1, whose distances are equivalent to cosines. Vectors are centred: what all have in
    common would make all cosines alike.

    Args:
        attack: name of the attack.
        vectors: (utterances, D).
        speakers: speakers of the utterances.
        key: (seed, ...), random seed.
    """
    numbers = speakers.numbers
    centred = unit(vectors - vectors.mean(0))
    near = nearest(centred, NEIGHBOURS)
    clusters = _k_means(centred, speakers.count, key)
    counts = counts_of(numbers, clusters)
    random = generator(*key, "permutations")
    chance = np.zeros(3)
    for _ in range(_PERMUTATIONS):
        other = random.permutation(numbers)
        table = counts_of(other, clusters)
        correct = (vote(other[near]) == other).mean()
        chance += correct, mutual_information(table), adjusted_rand_index(table)
    chance /= _PERMUTATIONS
    right = (vote(numbers[near]) == numbers).astype(float)
    yield speakers.ratio(attack, "kNN%", right, np.ones(len(right)), 100 * float(chance[0]), 100)
    # Draws of one speaker alone cannot be clustered.
    several = (speakers.draws > 0).sum(1) > 1
    draws = speakers.draws[several]
    drawn = np.full((2, len(several)), np.nan)
    drawn[0, several] = resampled_information(counts, draws)
    drawn[1, several] = [adjusted_rand_index(counts, one) for one in draws]
    values = mutual_information(counts), adjusted_rand_index(counts)
    levels = chance[1:].tolist()
    for name, value, found, expected in zip(("NMI", "ARI"), values, drawn, levels, strict=True):
        yield speakers.figure(attack, name, value, found, expected, speakers.count, len(numbers))


def nearest(vectors: np.ndarray, neighbours: int) -> np.ndarray:
    """Return the most similar other vectors of each, nearest first: (utterances, neighbours)."""
    scores = vectors @ vectors.T
    np.fill_diagonal(scores, -np.inf)
    return np.argsort(-scores, axis=1, kind="stable")[:, : min(neighbours, len(vectors) - 1)]


def vote(labels: np.ndarray) -> np.ndarray:
    """Return the most frequent label of each row; in a tie, the one in the first column."""
    votes = (labels[:, :, None] == labels[:, None]).sum(2)
    return np.take_along_axis(labels, votes.argmax(1)[:, None], 1)[:, 0]


def _k_means(vectors: np.ndarray, clusters: int, key: tuple[int | str, ...]) -> np.ndarray:
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    state = seed64(*key, "k-means") % 2**32
    with warnings.catch_warnings():
        # There may be fewer clusters where utterances are equal.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return KMeans(clusters, n_init=10, random_state=state).fit(vectors).labels_
