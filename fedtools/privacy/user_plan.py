"""The noise of an experiment with user-level privacy, fixed before its first round.

    EXP/privacy.yaml    the fields of UserPlan

The file is one of the experiment's fixed files, and its sum is in the record next to the noise key:
the noise does not change with the version of a library that computed it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from fedtools.core.config import from_mapping, read_yaml, write_yaml
from fedtools.core.errors import UserError
from fedtools.exchange.options import Options
from fedtools.privacy.accountant import (
    LEAST_DELTA,
    Gaussian,
    accountant_of,
    epsilon_of,
    noise_for,
)
from fedtools.privacy.banded import UNIT, make_coefficients, norm_of
from fedtools.privacy.clipping import STEPS, Grid
from fedtools.privacy.discrete_gaussian import LEAST_DEVIATION as LEAST_SHARE
from fedtools.privacy.distributed import Distributed, epsilon_of_rho, share_for
from fedtools.privacy.gaussian import LEAST_DEVIATION, MOST_DEVIATION
from fedtools.privacy.options import CLIENTS, SERVER, UserPrivacy
from fedtools.privacy.record import Row

FILE = "privacy.yaml"
# Values of a vector, more than any has: what they count for is far below all digits.
_MOST_VALUES = 1 << 34


@dataclass(frozen=True)
class UserPlan:
    """Clipping, noise and accounting of an experiment.

    Attributes:
        clip: C, the largest norm of a client's change.
        noise: z, standard deviation of the noise on a sum of changes, in multiples of C; with
            cohorts, in multiples of C times the norm of the coefficients.
        delta: probability with which the privacy loss may exceed epsilon.
        epsilon: privacy loss over all rounds; None without noise, which bounds none.
        rounds: T, the number of releases.
        clients: n, the number of clients in the public list.
        share: q, the probability with which each client takes part in a round, by a secret draw; 1
            if all take part, or those whose turn it is.
        cohorts: m, the number of groups of clients that take turns; 0 without turns.
        coefficients: of the sums that noise is added to, see `fedtools.privacy.banded`; without
            turns 2^10, which is 1.
        simulated_users: see `UserPrivacy`; epsilon is that of the noise that is really added.
        accountant: the method, and version of the library, that computed epsilon.
        listed: whether the list of clients was given, and not made from the data.
        trust: who adds the noise: "server" or "clients".
        own_deviation: with noise of clients, the standard deviation of each one's, in steps; z is
            what the fewest honest clients of a sum add together.
    """

    clip: float
    noise: float
    delta: float
    epsilon: float | None
    rounds: int
    clients: int
    share: float
    cohorts: int
    coefficients: tuple[int, ...]
    simulated_users: float
    accountant: str
    listed: bool
    trust: str = SERVER
    own_deviation: float = 0.0

    def __post_init__(self) -> None:
        """Check what a site reckons with, which may be of a server that it does not trust.

        Raises:
            ValueError: if a number is out of range.
        """
        if self.rounds < 1 or not 0 < self.delta < 1:
            raise ValueError(f"{self.rounds} rounds, and a delta of {self.delta}")
        own = self.own_deviation
        if own and not LEAST_SHARE <= own <= MOST_DEVIATION:
            raise ValueError(f"own_deviation is {own:g} steps")

    @classmethod
    def of(
        cls,
        privacy: UserPrivacy,
        options: Options,
        where: str | Path,
        listed: bool,
        honest: int = 0,
    ) -> UserPlan:
        """Plan an experiment, whose `options` have the number of clients and of rounds.

        Args:
            where: where the options were read from, for messages.
            listed: whether the list of clients was given, and not made from the data.
            honest: with noise of clients, the fewest honest ones in a sum.

        Raises:
            UserError: if no epsilon is given, a sample is not secret, or epsilon is not to be had.
        """
        if privacy.epsilon is None and privacy.noise is None:
            remedy = "give one, such as epsilon: 8, or the noise"
            raise UserError("method_conf: no epsilon", path=where, remedy=remedy)
        share, rounds, noise = _share(options, privacy, where), options.rounds, privacy.noise
        if share < 1 and privacy.delta < LEAST_DELTA:
            problem = f"method_conf: delta is {privacy.delta:g}; with a secret sample"
            raise UserError(f"{problem} it must be at least {LEAST_DELTA:g}", path=where)
        turns = ceil(rounds / privacy.cohorts) if privacy.cohorts else rounds
        own, discrete = 0.0, privacy.trust == CLIENTS
        if discrete:
            noise, own = _noise_of_clients(privacy, rounds, honest, where)
        elif noise is None:
            assert privacy.epsilon is not None
            noise = noise_for(privacy.epsilon, privacy.delta, turns, share)
        added = noise / privacy.simulated_users
        spent = [Gaussian(added, turns, share, discrete=discrete)] if added else []
        bands = min(privacy.bands or privacy.cohorts, rounds) if privacy.cohorts else 1
        found = cls(
            clip=privacy.clip,
            noise=noise,
            delta=privacy.delta,
            epsilon=epsilon_of(spent, privacy.delta) if spent else None,
            rounds=rounds,
            clients=options.clients,
            share=share,
            cohorts=privacy.cohorts,
            coefficients=tuple(make_coefficients(bands, rounds)),
            simulated_users=privacy.simulated_users,
            accountant=accountant_of(spent) if spent else "-",
            listed=listed,
            trust=privacy.trust,
            own_deviation=own,
        )
        if found.deviation and not LEAST_DEVIATION <= found.deviation <= MOST_DEVIATION:
            size = "small" if found.deviation < LEAST_DEVIATION else "large"
            problem = f"method_conf: noise of {added:.3g} C is too {size} to be drawn exactly"
            remedy = "choose another epsilon, noise, or number of cohorts"
            raise UserError(problem, path=where, remedy=remedy)
        return found

    @classmethod
    def read(cls, experiment: Path) -> UserPlan:
        """Read the plan of an experiment."""
        path = experiment / FILE
        if not path.is_file():
            problem, remedy = "missing", "put the original back, or begin another experiment"
            raise UserError(problem, path=path, remedy=remedy)
        found: Mapping[str, Any] = read_yaml(path)
        return from_mapping(cls, found, path)

    def with_shares(self, honest: int) -> UserPlan:
        """Return the plan with z and epsilon as they follow from the clients' own noise.

        Args:
            honest: the fewest honest clients in a sum.
        """
        shares = Distributed(self.own_deviation, honest, STEPS * 1.0, _MOST_VALUES, self.rounds)
        noise = self.simulated_users * sqrt(self.rounds / (2 * shares.rho))
        return replace(self, noise=noise, epsilon=epsilon_of_rho(shares.rho, self.delta))

    def write(self, experiment: Path) -> None:
        """Write the plan into the folder of an experiment."""
        fields = asdict(self) | {"coefficients": list(self.coefficients)}
        if self.trust == SERVER:
            del fields["trust"], fields["own_deviation"]
        write_yaml(experiment / FILE, fields)

    @property
    def grid(self) -> Grid:
        """Return the grid of clients' changes."""
        return Grid(self.clip)

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the server's noise, in steps of what it is added to.

        These are sums; with cohorts, sums with coefficients. It is 0 if clients add the noise.
        """
        if self.trust == CLIENTS:
            return 0.0
        steps = self.grid.steps * (UNIT * norm_of(self.coefficients) if self.cohorts else 1)
        return self.noise * steps / self.simulated_users

    @property
    def expected(self) -> float:
        """Return the public number that a sum is divided by: of clients expected in a round."""
        return self.clients / self.cohorts if self.cohorts else self.share * self.clients

    @property
    def taking_part(self) -> str:
        """Return who takes part in a round, for a table."""
        if self.cohorts:
            return f"one of {self.cohorts} cohorts"
        return "all" if self.share == 1 else f"a secret sample, {self.share:.4g} of all"

    def spent(self, released: Collection[Row], sampled: bool = True) -> Gaussian | None:
        """Return what the accountant takes of some releases; None for none, or without noise.

        With cohorts, all draws of an experiment are bounded together: if any round was drawn twice,
        the whole counts twice.

        Args:
            released: the releases.
            sampled: whether the adversary does not know who took part, so that sampling amplifies.
        """
        added = self.noise / self.simulated_users
        if not added or not released:
            return None
        if not self.cohorts:
            share, discrete = self.share if sampled else 1.0, self.trust == CLIENTS
            return Gaussian(added, len(released), share, discrete=discrete)
        turns = ceil(max(row.number for row in released) / self.cohorts)
        return Gaussian(added, turns * max(row.draw for row in released))


def _noise_of_clients(
    privacy: UserPrivacy, rounds: int, honest: int, where: str | Path
) -> tuple[float, float]:
    """Return z, and the standard deviation in steps of each client's noise.

    Raises:
        UserError: if a share would be too small to be accounted for.
    """
    norm = STEPS * 1.0
    if privacy.epsilon is not None:
        share = share_for(privacy.epsilon, privacy.delta, rounds, norm, honest, _MOST_VALUES)
    else:
        assert privacy.noise is not None
        share = privacy.noise * norm / sqrt(honest)
    if not share:
        return 0.0, 0.0
    drawn = share / privacy.simulated_users
    if not LEAST_SHARE <= drawn <= MOST_DEVIATION:
        size = "small" if drawn < LEAST_SHARE else "large"
        problem = f"method_conf: shares of noise of {drawn:.3g} steps are too {size}"
        raise UserError(problem, path=where, remedy="choose another epsilon or noise")
    rho = Distributed(drawn, honest, norm, _MOST_VALUES, 1).rho
    return privacy.simulated_users / sqrt(2 * rho), drawn


def _share(options: Options, privacy: UserPrivacy, where: str | Path) -> float:
    """Return the probability with which a client takes part in a round."""
    count = options.clients_per_round
    if count is None or (isinstance(count, float) and count == 1):
        return 1.0
    if privacy.cohorts:
        problem = f"cohorts exclude clients_per_round: {count}"
        remedy = "leave it out: the cohorts say who takes part"
        raise UserError(problem, path=where, remedy=remedy)
    if options.sampling != "poisson":
        problem = f"user-level privacy excludes clients_per_round: {count} with sampling: fixed"
        remedy = "let all clients take part, or set sampling: poisson, which is drawn in secret"
        raise UserError(problem, path=where, remedy=remedy)
    return count if isinstance(count, float) else count / options.clients
