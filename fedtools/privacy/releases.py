"""The noise of one experiment: what of its counts leaves whoever is trusted, release by release."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np

from fedtools.files.atomic import sha256
from fedtools.privacy.key import NoiseKey, open_key
from fedtools.privacy.marginals import mend, paper_release
from fedtools.privacy.options import CLIENT, LAPLACE, PAPER, SERVER
from fedtools.privacy.plan import Plan


class Releases:
    """Noise on what clients send, or on what the server makes of it.

    Args:
        plan: what the options mean for the experiment.
        key: the secret.
        experiment: what tells the experiment from others.
    """

    def __init__(self, plan: Plan, key: NoiseKey, experiment: str):
        self.plan, self._key, self._experiment = plan, key, experiment

    def by_client(self, counts: np.ndarray, number: int, client: str) -> np.ndarray:
        """What a client sends of its bounded counts in a round, (V,)."""
        if self._by(CLIENT):
            return self._noisy(counts, number, client)
        return counts

    def by_server(
        self, counts: np.ndarray, number: int, background: np.ndarray, smoothing: float
    ) -> np.ndarray:
        """What the server makes of the sum of all clients' counts in a round, (V,).

        Of the mechanism "paper" it is not counts but the marginal of equation 8, whose smoothing is
        that of equation 4.
        """
        if self.plan.options.mechanism == PAPER and counts.sum() > 0:
            total = counts.sum()
            marginal = (1 - smoothing) * counts / total + smoothing * background
            noisy = paper_release(
                *(marginal[None], np.array([total]), self.plan.options.epsilon, self._key),
                experiment=self._experiment,
                number=number,
            )
            return mend(noisy, background)
        return self._noisy(counts, number, "") if self._by(SERVER) else counts

    def _by(self, who: str) -> bool:
        return self.plan.options.mechanism == LAPLACE and self.plan.options.trust == who

    def _noisy(self, counts: np.ndarray, number: int, sender: str) -> np.ndarray:
        return self.plan.release(
            counts, self._key, experiment=self._experiment, number=number, sender=sender
        )


class ReleasesOf(Releases):
    """Those of an experiment on disk, whose key is opened when noise is first drawn.

    Args:
        plan: what the options mean for it.
        path: its folder.
        option: where the key is, see `fedtools.privacy.key.key_path`.
    """

    def __init__(self, plan: Plan, path: Path, option: str | Path | None = None):
        self.plan, self._path, self._option = plan, path, option

    @cached_property
    def _key(self) -> NoiseKey:
        return open_key(self._path, self._option)

    @cached_property
    def _experiment(self) -> str:
        return sha256(self._path / "config.yaml")
