"""Marginal distributions of words, estimated from N-best lists, which adapt a language model.

Z. Liu, F. Peng, "Federated marginal personalization for ASR rescoring", ICASSP 2022, sections 2.1
and 2.2. Words are numbers of a vocabulary that everybody knows, the language model's; what it lacks
is its unknown word. Nobody says `</s>`: it is in the vocabulary, but in no distribution of words.
"""

from __future__ import annotations

import numpy as np

from fedtools.lm.vocabulary import END_ID
from fedtools.privacy.marginals import project


def kernel(ranks: np.ndarray, sigma: float) -> np.ndarray:
    """Equation 3: the weights of hypotheses by rank, from 1; sigma 0 takes the best alone."""
    if sigma == 0:
        return (ranks == 1).astype(float)
    return np.exp(-((ranks - 1.0) ** 2) / (2 * sigma**2))


def most_of_a_word(sigma: float) -> float:
    """What a word counts that is in every hypothesis of a list, however long, up to a thousand."""
    return float(kernel(np.arange(1, 1001), sigma).sum())


def background_of(counts: np.ndarray) -> np.ndarray:
    """u(w) of the words' counts in the background text, (V,), one added to each; 0 for `</s>`.

    Clients count words alone. With `</s>` in u(w), each word would be likelier at a client than
    here, whatever the client says.
    """
    counts = counts + 1.0
    counts[END_ID] = 0
    return counts / counts.sum()


def smoothed(counts: np.ndarray, background: np.ndarray, smoothing: float) -> np.ndarray:
    """The distribution of counts, interpolated with the background's: "Smoothing" of equation 4.

    It is linear in the distribution, so that smoothing each client's and taking the mean of
    equation 6 is the same as smoothing the sum of all clients' counts.

    Args:
        counts: (V,), not negative; if all are zero, the background itself comes back.
        background: (V,), u(w).
        smoothing: weight of the background.

    Returns:
        (V,), of sum 1.
    """
    total = counts.sum()
    if total <= 0:
        return background
    return (1 - smoothing) * counts / total + smoothing * background


def of_noisy(counts: np.ndarray, background: np.ndarray, smoothing: float) -> np.ndarray:
    """`smoothed` of counts of which noise may have made some negative.

    It uses nothing but these and what is public, and so costs no privacy. With smoothing above 0 it
    is positive for each word.

    Args:
        counts: (V,); noise is on that of `</s>`, too, which is known to be 0.
        background, smoothing: as of `smoothed`.

    Returns:
        (V,), of sum 1; 0 where the background is.
    """
    words, found = background > 0, np.zeros(len(counts))
    found[words] = project(counts[words])
    return smoothed(found, background, smoothing)


def log_factors(
    background: np.ndarray,
    everybody: np.ndarray,
    own: np.ndarray,
    *,
    alpha: float,
    beta: float,
    scale: float,
    normalise: bool = False,
) -> np.ndarray:
    """What equations 1 and 2 add to the log-probability of each word, natural log.

    Args:
        background, everybody, own: (V,), u, the global and the client's distribution.
        alpha, beta: weights of the latter two; the background has the rest.
        scale: lambda, the power of the ratio of marginals.
        normalise: divide by a Z that does not depend on the history, the mean of the factors under
            u(w); the exact one needs every word's probability after every history.

    Returns:
        (V,), 0 for `</s>`, whose probability stays.
    """
    words = background > 0
    mixed = (1 - alpha - beta) * background + alpha * everybody + beta * own
    factors = np.zeros(len(background))
    factors[words] = scale * np.log(mixed[words] / background[words])
    if normalise:
        factors[words] -= np.log(background[words] @ np.exp(factors[words]))
    return factors
