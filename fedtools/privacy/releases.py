"""The releases of one experiment: the noisy counts that leave the trusted parties."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import numpy as np

from fedtools.exchange.experiment import Experiment
from fedtools.privacy.key import NoiseKey, open_key
from fedtools.privacy.marginals import mend, paper_release
from fedtools.privacy.options import CLIENT, LAPLACE, SERVER
from fedtools.privacy.plan import Plan
from fedtools.privacy.record import SERVER_NAME, Record, Row


class Releases:
    """Noise on client messages, or on the server's sum of them.

    Args:
        plan: the noise parameters of the experiment.
        key: the secret key.
        experiment: the identity of the experiment, its data and its nonce; kept as an attribute.
        draw: the number of the draw of noise, from 1; draws are independent.
    """

    def __init__(self, plan: Plan, key: NoiseKey, experiment: str, draw: int = 1):
        self.plan, self._known_key, self.experiment = plan, key, experiment
        self._draw = draw

    @property
    def _key(self) -> NoiseKey:
        return self._known_key

    def by_client(self, counts: np.ndarray, number: int, client: str) -> np.ndarray:
        """Return what a client sends of its bounded counts in a round, (V,)."""
        if self._by(CLIENT):
            return self._once(
                number, client, lambda draw: self._noisy(counts, number, client, draw)
            )
        return counts

    def by_server(self, counts: np.ndarray, number: int) -> np.ndarray:
        """Return what the server publishes of the sum of all clients' counts in a round, (V,)."""
        if self._by(SERVER):
            return self._once(number, "", lambda draw: self._noisy(counts, number, "", draw))
        return counts

    def marginal(
        self, marginal: np.ndarray, total: float, number: int, background: np.ndarray
    ) -> np.ndarray:
        """Return equation 8 as a distribution, (V,): the server's release with mechanism "paper".

        Args:
            marginal: (V,), of equation 6.
            total: the sum of c_i over clients; if it is 0, the result is noise only.
            number: the round.
            background: (V,), u(w).
        """

        def noisy(draw: int) -> np.ndarray:
            released = paper_release(
                *(marginal[None], np.array([total]), self.plan.options.epsilon, self._key),
                experiment=self.experiment,
                number=number,
                draw=draw,
            )
            return mend(released, background)

        return self._once(number, "", noisy)

    def _once(self, number: int, sender: str, make: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return the release that `make` draws."""
        return make(self._draw)

    def _by(self, who: str) -> bool:
        return self.plan.options.mechanism == LAPLACE and self.plan.options.trust == who

    def _noisy(self, counts: np.ndarray, number: int, sender: str, draw: int) -> np.ndarray:
        return self.plan.release(
            *(counts, self._key),
            experiment=self.experiment,
            number=number,
            sender=sender,
            draw=draw,
        )


class ReleasesOf(Releases):
    """The releases of an experiment on disk, each drawn once.

    The key is opened when noise is first drawn.

    Args:
        plan: the noise parameters of the experiment.
        experiment: the experiment.
        option: path of the key, see `fedtools.privacy.key.key_path`.

    Raises:
        UserError: see `Record`.
    """

    def __init__(self, plan: Plan, experiment: Experiment, option: str | Path | None = None):
        self.plan, self._opened, self._option = plan, experiment, option
        self.record = Record(experiment.path, option)
        # The SHA-256 of the sums of all files at the start, including the nonce.
        self.experiment = experiment.label

    def rows(self, clients: Iterable[str]) -> set[tuple[str, Row]]:
        """Return all releases, with their senders."""
        by_client = self._by(CLIENT)
        senders = clients if by_client else [SERVER_NAME]
        return {(sender, row) for sender in senders for row in self.record.of(sender)}

    def _once(self, number: int, sender: str, make: Callable[[int], np.ndarray]) -> np.ndarray:
        opened = self._opened
        own = opened.own(sender, number) if sender else opened.at_server(number)
        return self.record.once(own, sender or SERVER_NAME, make)

    def by_client(self, counts: np.ndarray, number: int, client: str) -> np.ndarray:
        # Also where the server adds the noise: with other options, counts would leave without.
        self.record.check()
        return super().by_client(counts, number, client)

    @cached_property
    def _key(self) -> NoiseKey:
        return open_key(self._opened.path, self._option)
