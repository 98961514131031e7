"""Changes that attackers send in place of their own: sign flip, inner products, replacement.

A change is a model after training minus the model that the server sent, all trained values end to
end, float64. (m, D) are those of a round's m attackers.
"""

from __future__ import annotations

import numpy as np


def sign_flip(honest: np.ndarray, factor: float) -> np.ndarray:
    """Return each attacker's own change, times minus `factor`: (m, D) -> (m, D).

    L. Li, W. Xu, T. Chen, G. Giannakis, Q. Ling: RSA: Byzantine-robust stochastic aggregation
    methods for distributed learning from heterogeneous datasets, AAAI 2019.
    """
    return -factor * honest


def inner_product(honest: np.ndarray, epsilon: float) -> np.ndarray:
    """Return the mean change, times minus `epsilon`, for all: (m, D) -> (m, D).

    C. Xie, O. Koyejo, I. Gupta: Fall of empires: breaking Byzantine-tolerant SGD by inner product
    manipulation, UAI 2020: the inner product of the aggregate with the true mean becomes
    negative. The mean is that of the attackers' own honest changes, which is all that they know.
    """
    return np.tile(-epsilon * honest.mean(0), (len(honest), 1))


def boosted(towards: np.ndarray, boost: float) -> np.ndarray:
    """Return changes towards malicious models, times `boost`: (m, D) -> (m, D).

    E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin, V. Shmatikov: How to backdoor federated learning,
    AISTATS 2020, equation 3: with n clients in a round, of which m attack, boost n / m and equal
    weights, the mean of all models is the mean malicious model, but for what the others change.
    """
    return boost * towards
