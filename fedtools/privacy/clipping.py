"""Clipping of clients' changes to a norm, in whole steps of a grid.

H. B. McMahan, D. Ramage, K. Talwar, L. Zhang: Learning differentially private recurrent language
models, ICLR 2018, algorithm 1, "flat clipping": a client's change of all tensors together is scaled
to a Euclidean norm of at most C, a public number that depends on no data. Here it is then rounded
to whole steps of C / 2^20, so that a server can check the norm, and add up the changes, exactly.

Rounding to the nearest step could lengthen a change of d values by sqrt(d) / 2 steps. It is
towards 0 instead, and the change is first scaled to C (1 - 2^-20), so that errors in floating point
do not matter either: no change that `Grid.rounded` returns is longer than C.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fedtools.exchange.values import Values

STEPS = 1 << 20
_MARGIN = 2.0**-20


@dataclass(frozen=True)
class Grid:
    """The grid of the changes that clients send.

    Attributes:
        clip: C, the largest norm of a change, in the units of the model's tensors.
        steps: C in steps.
    """

    clip: float
    steps: int = STEPS

    @property
    def step(self) -> float:
        """Return the length of a step, in the units of the model's tensors."""
        return self.clip / self.steps

    def rounded(self, changes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Clip each client's change, and round it to whole steps.

        Args:
            changes: name -> float64 (K, ...), the changes of K clients.

        Returns:
            name -> int32 (K, ...); zeros for a client whose change is not finite. The sum of a
            client's squares, over all tensors, is at most `steps` squared.
        """
        with np.errstate(all="ignore"):
            norms = np.sqrt(sum(np.square(_rows(one)).sum(1) for one in changes.values()))
            factors = np.minimum(1.0, self.clip * (1 - _MARGIN) / norms) / self.step
        finite = np.isfinite(norms)
        # A change of 0 divides by 0, and stays 0.
        factors[~finite | (norms == 0)] = 0.0
        found = {
            name: np.trunc(np.where(finite[:, None], _rows(one), 0) * factors[:, None])
            for name, one in changes.items()
        }
        whole = {name: one.astype(np.int32) for name, one in found.items()}
        if longest(whole.values()) > self.steps**2:
            raise ValueError(f"a change longer than {self.steps} steps")
        return {name: one.reshape(changes[name].shape) for name, one in whole.items()}

    def values(self, names: Iterable[str]) -> dict[str, Values]:
        """Return the bounds on the elements of a change, by the names of its tensors."""
        return dict.fromkeys(names, Values(least=-self.steps, most=self.steps))


def longest(changes: Iterable[np.ndarray]) -> int:
    """Return the largest sum of squares of a client, of tensors of whole numbers, (K, values)."""
    squares = sum(np.square(one, dtype=np.int64).sum(1) for one in changes)
    return int(np.max(squares, initial=0))


def _rows(change: np.ndarray) -> np.ndarray:
    """Reshape (K, ...) to (K, values)."""
    return change.reshape(len(change), -1)
