"""User-level privacy of an experiment: what it begins with, its releases, and what they spend."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from math import sqrt
from pathlib import Path

from fedtools.core.errors import UserError, some
from fedtools.data.datadir import read_table
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.options import Options
from fedtools.methods.base import Method
from fedtools.privacy.accountant import Gaussian, epsilon_of
from fedtools.privacy.key import key_path, make_key, read_key
from fedtools.privacy.model_releases import ModelReleases, begin
from fedtools.privacy.secagg.plan import plan
from fedtools.privacy.user_plan import UserPlan
from fedtools.server.server import Release
from fedtools.tasks.facts import Facts


class UserProtection:
    """The user-level privacy of a federation's models.

    Args:
        experiment: the experiment.
        method: its method, which has user-level privacy.
    """

    def __init__(self, experiment: Experiment, method: Method):
        self._experiment = experiment
        self.releases = ModelReleases(experiment, noise_key_of(method))

    def release(self, number: int) -> Release:
        """Return the function from the sum of a round's changes to the noisy mean change."""
        return partial(self.releases.mean_change, number=number)

    def closed(self, number: int, clients: Sequence[str]) -> None:
        """Remove what was kept in case the round is repeated, since it is complete."""
        self.releases.closed(number, clients)


def noise_key_of(method: Method) -> str | None:
    """Return the path of the noise key that a method was given, if any."""
    found: str | None = getattr(method, "noise_key", None)
    return found


def plan_of(
    method: Method,
    options: Options,
    facts: Facts,
    folders: Mapping[str, Path],
    where: str | Path,
    listed: bool,
    clients: Sequence[str],
) -> UserPlan | None:
    """Return the plan of a new experiment; None without user-level privacy.

    Args:
        method, options, facts: of the experiment.
        folders: its data, by split.
        where: where the options were read from, for messages.
        listed: whether the list of clients was given.
        clients: the clients.
    """
    if method.user_privacy is None:
        return None
    if options.average > 1 and "valid" in folders:
        people = people_of(facts, folders["train"]) if "train" in folders else {*clients}
        check_apart(people, facts, folders["valid"], f"average: {options.average}", where)
    # Before anything is written, so that a key that cannot be used leaves no files.
    make_key(path := key_path(noise_key_of(method)))
    read_key(path)
    if (delta := method.user_privacy.delta) >= 1 / options.clients:
        problem = f"delta is {delta:g}, and there are {options.clients:,} clients"
        print(f"warning: {where}: {problem}: choose it well below 1 / clients", file=sys.stderr)
    honest = 0
    if method.secure_sums:
        sums = plan(method.secure_sums, len(clients))
        honest = sums.least - sums.colluding
    return UserPlan.of(method.user_privacy, options, where, listed, honest)


def noise_of_clients(path: Path, clients: int) -> list[str]:
    """Return what is to be said of the noise that clients add, if they do.

    Beside epsilon as the least honest clients give it, against the server, stands that of the
    whole noise of all clients, against who sees the model alone.
    """
    found = UserPlan.read(path)
    if not found.own_deviation:
        return []
    whole = found.own_deviation * sqrt(clients) / found.grid.steps
    central = epsilon_of([Gaussian(whole, found.rounds, discrete=True)], found.delta)
    return [
        f"each client adds noise of {found.own_deviation:.6g} steps: epsilon {found.epsilon:.4g} "
        f"against the server, {central:.4g} if all take part and none colludes"
    ]


def check_apart(people: set[str], facts: Facts, valid: Path, what: str, where: str | Path) -> None:
    """Raise a `UserError` if rounds are to be chosen on speech of the clients.

    Args:
        people: who trains; of data at sites the clients are known, and not the speakers.
        facts: of the task.
        valid: the data directory.
        what: what chooses rounds, for the message.
        where: what the message is about.
    """
    if shared := people & people_of(facts, valid):
        problem = f"{what}: chooses rounds on data of {some(sorted(shared))}, who also train"
        remedy = "take the last round, or validation data of other people"
        raise UserError(problem, path=where, remedy=remedy)


def people_of(facts: Facts, folder: Path) -> set[str]:
    """Return the names of the clients and speakers of a data directory."""
    speakers = folder / "utt2spk"
    known = set(read_table(speakers).values()) if speakers.exists() else set()
    return known | set(facts.clients(folder))


def begin_protection(path: Path, method: Method, plan: UserPlan | None) -> list[str]:
    """Write what the privacy of a new experiment begins with, and return the files' names."""
    return begin(path, plan, noise_key_of(method)) if plan else []
