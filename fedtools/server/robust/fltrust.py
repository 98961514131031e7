"""FLTrust: updates count as far as they point where the server's own clean data point.

X. Cao, M. Fang, J. Liu, N. Z. Gong: FLTrust: Byzantine-robust federated learning via trust
bootstrapping, NDSS 2021, algorithm 2. The server trains on a small labelled set of its own (the
root dataset), as a client does in the round, which gives D_0:

    TS_k = ReLU(cos(D_k, D_0))
    w <- w + sum_k TS_k (|D_0| / |D_k|) D_k / sum_k TS_k

Weights do not count. The step has at most the length of D_0. If nobody is trusted, w stays.
Statistics of BatchNorm are shortened to the length of the root's, and never lengthened: a variance
could become negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedtools.server.robust import RULES
from fedtools.server.robust.base import Part, Rule


@RULES.register("fltrust")
@dataclass(frozen=True)
class FLTrust(Rule):
    """The mean of updates of equal length, weighted by their cosine to the server's own update.

    It needs labelled data of the server's own: `fedtools init --data root=FOLDER`.
    """

    def root_in(self, number: int) -> bool:
        return True

    def shares(self, part: Part) -> np.ndarray:
        """Return TS_k |D_0| / |D_k|, divided by the sum of all TS_k."""
        assert part.along is not None and part.root is not None, "the server has not trained"
        norms, length = part.norms, math.sqrt(part.root)
        moved = (norms > 0) & (length > 0)
        trust = np.divide(part.along, norms * length, out=np.zeros_like(norms), where=moved)
        trust = np.maximum(trust, 0.0)
        scale = np.divide(length, norms, out=np.zeros_like(norms), where=moved)
        if part.statistics:
            scale = np.minimum(scale, 1.0)
        total = math.fsum(trust)
        shares: np.ndarray = trust * scale / total if total > 0 else np.zeros_like(norms)
        return shares
