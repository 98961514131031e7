"""The releases of an experiment with user-level privacy: the noisy mean change of each round.

C. Dwork, A. Roth: The algorithmic foundations of differential privacy, 2014, appendix A: the
Gaussian mechanism. H. B. McMahan, D. Ramage, K. Talwar, L. Zhang: Learning differentially private
recurrent language models, ICLR 2018: the mean is the noisy sum over a number that is public, such
as that of all clients, whoever sent something.

A release is drawn once, and kept in the record next to the noise key (`fedtools.privacy.record`).
If a round is reset, the next release has other noise, and another secret sample, and is counted,
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from fedtools.core.errors import UserError
from fedtools.core.seeds import seed64
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.private import Private
from fedtools.exchange.states import Spec, load_state
from fedtools.privacy.banded import estimate, mixed
from fedtools.privacy.gaussian import rounded_gaussian
from fedtools.privacy.key import RECORD, NoiseKey, open_key
from fedtools.privacy.record import NONCE, SERVER_NAME, Record, Row, close
from fedtools.privacy.user_plan import FILE, UserPlan

_TWO_64 = 2.0**64
# What the server keeps of the last rounds, where clients take turns.
_TURNS = "turns"


class ModelReleases:
    """The releases of an experiment on disk, each drawn once.

    Args:
        experiment: the experiment.
        option: path of the noise key, see `fedtools.privacy.key.key_path`.
    """

    def __init__(self, experiment: Experiment, option: str | Path | None = None):
        self.plan = UserPlan.read(experiment.path)
        self.record = Record(experiment.path, option)
        # Of all files at the start, including the nonce.
        self.label = experiment.label
        self._experiment, self._option = experiment, option

    @cached_property
    def _key(self) -> NoiseKey:
        return open_key(self._experiment.path, self._option)

    def mean_change(self, total: np.ndarray, number: int) -> np.ndarray:
        """Return what the server publishes of a round: the noisy mean of clients' changes.

        Args:
            total: int64 (values,), the sum of clients' changes, in steps.
            number: the round.

        Returns:
            float64 (values,), in the units of the model's tensors.
        """
        found = self._in_turns(total, number) if self.plan.cohorts else self._noisy(total, number)
        mean: np.ndarray = found * (self.plan.grid.step / self.plan.expected)
        return mean

    def _noisy(self, exact: np.ndarray, number: int) -> np.ndarray:
        """Return whole numbers with the round's noise, drawn once."""
        deviation = self.plan.deviation
        if not self._is_recorded:
            return exact

        def draw_noise(draw: int) -> np.ndarray:
            if not deviation:
                # Clients have added the noise.
                return exact
            self._check_sample(number, draw)
            stream = self._key.stream("change", self.label, number, draw, deviation.hex(), exact)
            noise = rounded_gaussian(stream, deviation, len(exact))
            noisy: np.ndarray = exact + noise
            return noisy

        own = self._experiment.at_server(number)
        found: np.ndarray = self.record.once(own, SERVER_NAME, draw_noise)
        return found

    @property
    def _is_recorded(self) -> bool:
        """Return whether releases are noisy, and so written into the record."""
        return bool(self.plan.deviation or self.plan.own_deviation)

    def _in_turns(self, total: np.ndarray, number: int) -> np.ndarray:
        """Return the estimate of a round's sum, see `fedtools.privacy.banded`.

        The exact sums of the last rounds are kept in the server's private folder.
        """
        own, coefficients = self._experiment.at_server(number), self.plan.coefficients
        shape = (len(coefficients) - 1, len(total))
        sums, estimates = np.zeros(shape, np.int64), np.zeros(shape)
        if number > 1 and len(coefficients) > 1:
            spec: Spec = {"sums": (shape, "int64"), "estimates": (shape, "float64")}
            kept = own.load(_TURNS, {**spec, "round": ((), "int64")})
            if kept is None or int(kept["round"]) != number - 1:
                problem = f"the sums of the rounds before round {number} are missing"
                raise UserError(problem, path=own.folder, remedy="run fedtools reset --round 1")
            sums, estimates = kept["sums"], kept["estimates"]
        latest = np.concatenate([total[None], sums])
        found = estimate(coefficients, self._noisy(mixed(coefficients, latest), number), estimates)
        if len(coefficients) > 1:
            newest = np.concatenate([found[None], estimates])[:-1]
            state = {"sums": latest[:-1], "estimates": newest, "round": np.array(number)}
            own.save(_TURNS, state)
            own.drop_old(keep=2)
        return found

    def sample(self, number: int) -> list[str]:
        """Return the clients of a round: all, a cohort, or a secret sample from the noise key.

        A client's cohort follows from the seed and its own name, so that no other client's turn
        depends on it.
        """
        clients, share, cohorts = self._experiment.clients, self.plan.share, self.plan.cohorts
        folder = self._experiment.round(number)
        if folder.is_done():
            return folder.sampled()
        self._check_open(number)
        if cohorts:
            turn, seed = (number - 1) % cohorts, self._experiment.seed
            return [one for one in clients if cohort_of(seed, one, cohorts) == turn]
        if share == 1:
            return clients
        own = self._experiment.at_server(number)
        kept = load_state(own.release) if own.release.exists() else {}
        if int(kept.get("round", 0)) == number:
            # A killed round, whose release is drawn.
            return self._sample(number, int(kept["draw"]))
        known = max((row.draw for row in self.record.of(SERVER_NAME, number)), default=0)
        return self._sample(number, known + 1)

    def _sample(self, number: int, draw: int) -> list[str]:
        """Return the secret sample of a draw of a round."""
        clients, share = self._experiment.clients, self.plan.share
        stream = self._key.stream("sample", self.label, number, draw, share.hex())
        drawn = np.frombuffer(stream.take(b"smpl", 0, 8 * len(clients)), ">u8")
        # Python compares whole numbers with floats exactly.
        most = share * _TWO_64
        return [one for one, value in zip(clients, drawn.tolist(), strict=True) if value < most]

    def _check_sample(self, number: int, draw: int) -> None:
        """Raise a `UserError` if a copy of the experiment has released this draw meanwhile."""
        folder = self._experiment.round(number)
        if self.plan.share < 1 and folder.sampled() != self._sample(number, draw):
            problem = "a copy of the experiment has released this round meanwhile"
            remedy = f"run fedtools reset --round {number}"
            raise UserError(problem, path=folder.path, remedy=remedy)

    def _check_open(self, number: int) -> None:
        """Raise a `UserError` if a round could not be released, before its clients train."""
        if not 1 <= number <= self.plan.rounds:
            problem = f"round {number}, and privacy was planned for {self.plan.rounds} rounds"
            remedy = "begin another experiment with more rounds"
            raise UserError(problem, path=self._experiment.path, remedy=remedy)
        if self._is_recorded:
            self.record.check()
            _ = self._key

    def released(self) -> set[Row]:
        """Return all releases, also those of copies of the experiment.

        Without noise they have no record, and are those of complete rounds.
        """
        if not self._is_recorded:
            return {Row(at, 1, "") for at in range(1, self._experiment.last_round() + 1)}
        return self.record.of(SERVER_NAME)

    def closed(self, number: int, clients: Sequence[str]) -> None:
        """Remove what was kept in case the round is repeated, since it is complete."""
        close(Private(self._experiment.path / "server", number))


def cohort_of(seed: int, client: str, cohorts: int) -> int:
    """Return the cohort of a client, from 0, which no other client has an influence on."""
    return seed64(seed, "cohort", client) % cohorts


def begin(experiment: Path, plan: UserPlan, option: str | Path | None) -> list[str]:
    """Write the plan of a new experiment, its nonce and its key's record; return their names."""
    plan.write(experiment)
    open_key(experiment, option)
    Record.begin(experiment, option)
    return [FILE, NONCE, RECORD]
