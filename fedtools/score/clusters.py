"""Agreement of clusters with speakers: mutual information and the adjusted Rand index.

Both take a table of counts, (speakers, clusters), so that speakers can be resampled by weights.
"""

from __future__ import annotations

import numpy as np

# scikit-learn's functions take no weights, and more than ten times as long for each permutation.


def counts_of(speakers: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Count the items of each speaker and cluster, (speakers, clusters), from labels (items,)."""
    shape = speakers.max() + 1, clusters.max() + 1
    cells = np.bincount(speakers * shape[1] + clusters, minlength=shape[0] * shape[1])
    return cells.reshape(shape).astype(np.float64)


def mutual_information(counts: np.ndarray) -> float:
    """Return mutual information over the mean of both entropies, 0 to 1; 1 if both are one group.

    Strehl and Ghosh, JMLR 3 (2002), with the arithmetic mean, as scikit-learn has it.
    """
    share = counts / counts.sum()
    rows, columns = share.sum(1), share.sum(0)
    entropies = _entropy(rows) + _entropy(columns)
    if not entropies:
        return 1.0
    return max(0.0, 2 * (entropies - _entropy(share.ravel())) / entropies)


def adjusted_rand_index(counts: np.ndarray, drawn: np.ndarray | None = None) -> float:
    """Return the Rand index adjusted for chance: 1 for the same groups, 0 expected by chance.

    Hubert and Arabie, Journal of Classification 2 (1985), equation 5.

    Args:
        counts: (speakers, clusters).
        drawn: (speakers,), how often each is drawn; by default once. A speaker that is drawn twice
            counts as two, and pairs of items between these two do not count.
    """
    drawn = np.ones(len(counts)) if drawn is None else drawn
    sizes = counts.sum(1)
    # Pairs with the same speaker and cluster; with the same speaker. Pairs of two speakers with the
    # same cluster; with any clusters.
    both, same_speaker = drawn @ _pairs(counts).sum(1), drawn @ _pairs(sizes)
    of_two = (np.square(drawn @ counts) - np.square(drawn) @ np.square(counts)).sum() / 2
    of_any = (np.square(drawn @ sizes) - np.square(drawn) @ np.square(sizes)) / 2
    expected = same_speaker * (both + of_two) / (same_speaker + of_any)
    most = (same_speaker + both + of_two) / 2
    return 1.0 if most == expected else float((both - expected) / (most - expected))


def resampled_information(counts: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return mutual information of draws of speakers, (draws,), shifted to the original's mean.

    A draw has fewer distinct speakers, which lowers mutual information even if it is all chance: in
    simulations 95 % intervals of unshifted values cover the true value in 40 to 90 % of the cases,
    those of shifted values in 80 to 98 %.

    Args:
        counts: (speakers, clusters).
        draws: (draws, speakers), how often each is drawn.
    """
    found = np.array([mutual_information(counts * drawn[:, None]) for drawn in draws])
    return np.clip(found - found.mean() + mutual_information(counts), 0, 1)


def _entropy(shares: np.ndarray) -> float:
    known = shares[shares > 0]
    return float(-(known * np.log(known)).sum())


def _pairs(counts: np.ndarray) -> np.ndarray:
    return counts * (counts - 1) / 2
