"""The files of a secure sum: who has done which of its steps.

    round_0007/secure.clients          at a site: all clients that take part
    round_0007/secure.<step>.<job>     the messages of a job's clients
    round_0007/secure.<step>.<job>.reply
                                       of keys and shares: what the server has for each of them
    round_0007/secure.<step>.reply     of masked: the list of survivors; of survivors: the list
                                       with signatures
    server/secure.<step>               messages that the server has taken, until it has the sum

Steps are those of `fedtools.privacy.secagg`, "keys" to "unmask". A step is due when the server has
replied to the one before. Nothing is written twice, and all is removed when the round closes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fedtools.core.errors import UserError
from fedtools.core.text_files import read_lines
from fedtools.exchange.options import Options
from fedtools.exchange.states import Spec
from fedtools.methods.base import Changes, Method
from fedtools.privacy.gaussian import most_noise
from fedtools.privacy.model_releases import cohort_of
from fedtools.privacy.secagg.plan import plan
from fedtools.privacy.secagg.session import Session
from fedtools.privacy.secagg.signed import Step
from fedtools.privacy.secagg.survivors import read_list
from fedtools.privacy.user_plan import UserPlan

if TYPE_CHECKING:
    from fedtools.exchange.experiment import Experiment
    from fedtools.federation.federation import Federation

# The steps to which the server replies with something for each client, or with one list for all.
EACH, ALL = (Step.KEYS, Step.SHARES), (Step.MASKED, Step.SURVIVORS)
FIRST_STEP = Step.KEYS.name.lower()


class SecureRound:
    """The attempt of an experiment at the secure sum of a round.

    Args:
        federation: its method asks for secure sums.
        number: the round, which is sampled.
    """

    def __init__(self, federation: Federation, number: int):
        self._federation, self._experiment = federation, federation.experiment
        self.folder = self._experiment.round(number)
        self.number = number

    @cached_property
    def session(self) -> Session:
        """Return what everybody computes from what is frozen."""
        method, experiment = self._federation.method, self._experiment
        names, keys = self._clients(), experiment.client_keys
        if unknown := [name for name in names if name not in keys]:
            raise UserError(f"{unknown[0]!r} has no key", path=experiment.path / "client_keys.tsv")
        options, sends = method.secure_sums, method.phase(self.number).sends
        assert options is not None and isinstance(sends, Changes)
        sizes = (math.prod(shape) for shape, _ in self.spec.values())
        return Session(
            label=experiment.label,
            round=self.number,
            attempt=self.folder.attempt(),
            roster={name: keys[name] for name in names},
            plan=plan(options, len(names)),
            size=sum(sizes),
            most=sends.grid.steps + most_noise(self.own_deviation),
        )

    @cached_property
    def own_deviation(self) -> float:
        """Return the standard deviation of each client's own noise, in steps; 0 for none."""
        return UserPlan.read(self._experiment.path).own_deviation

    @property
    def spec(self) -> Spec:
        """Return the tensors of a client's change, in the order in which they are one vector."""
        return self._federation.states.shared_spec

    def _clients(self) -> Sequence[str]:
        path = clients_file(self.folder.path)
        return read_lines(path) if path.exists() else self.folder.sampled()

    def sent(self, step: Step, job: int) -> Path:
        """Return the path of the messages of a job's clients."""
        return self.folder.path / f"secure.{step.name.lower()}.{job}"

    def reply(self, step: Step, job: int) -> Path:
        """Return the path of the server's reply to a job's messages."""
        return self.folder.path / reply_names(job)[step]

    def taken(self, step: Step) -> Path:
        """Return the path of the messages that the server has taken."""
        return self._experiment.path / "server" / f"secure.{step.name.lower()}"

    def left(self, job: int, clients: Sequence[str]) -> bool:
        """Return whether any client of a job is left, as far as the server has replied."""
        numbers = [self.session.number(client) for client in clients]
        if self.reply(Step.MASKED, job).exists():
            content = self.reply(Step.MASKED, job).read_bytes()
            return bool(read_list(self.session, content).survivors & {*numbers})
        for step in reversed(EACH):
            if self.reply(step, job).exists():
                return self.reply(step, job).stat().st_size > 0
        return bool(numbers)

    def marks(self, jobs: Sequence[Sequence[str]]) -> list[Path]:
        """Return the messages that the clients of all jobs have to write now."""
        step = self.due(next((job for job, clients in enumerate(jobs, 1) if clients), 1))
        numbered = enumerate(jobs, 1)
        return [self.sent(step, job) for job, clients in numbered if self.left(job, clients)]

    def due(self, job: int = 1) -> Step:
        """Return the step that the clients of a job have to do."""
        before = [step for step in (*EACH, *ALL) if self.reply(step, job).exists()]
        return list(Step)[len(before)]


def reply_names(job: int) -> dict[Step, str]:
    """Return the names of the files with the server's replies to a job, in their order."""
    found = {step: f"secure.{step.name.lower()}" for step in (*EACH, *ALL)}
    return {
        step: f"{name}.{job}.reply" if step in EACH else f"{name}.reply"
        for step, name in found.items()
    }


def clients_file(folder: Path) -> Path:
    """Return the path, in a round's folder at a site, of the list of all that take part."""
    return folder / "secure.clients"


def check_sums(method: Method, options: Options, clients: Sequence[str], where: str | Path) -> None:
    """Raise a `UserError` if secure sums of a new experiment's rounds are not possible.

    Args:
        where: where the options were read from, for messages.
    """
    privacy = method.user_privacy
    if method.secure_sums is None or privacy is None:
        return
    if options.clients_per_round not in (None, 1.0):
        problem = f"clients_per_round: {options.clients_per_round} with secure sums"
        remedy = (
            "leave it out: who agrees on keys knows who takes part, so that no sample is secret"
        )
        raise UserError(problem, path=where, remedy=remedy)
    fewest = len(clients)
    if privacy.cohorts:
        sizes = Counter(cohort_of(options.seed, one, privacy.cohorts) for one in clients)
        fewest = min(sizes[turn] for turn in range(privacy.cohorts))
    try:
        plan(method.secure_sums, fewest)
    except UserError as error:
        raise UserError(f"method_conf.sums_conf: {error}", path=where) from None


def replies_in(folder: Path) -> list[str]:
    """Return the names of the server's replies in the folder of a round."""
    return sorted(path.name for path in folder.glob("secure.*.reply"))


def check_unsigned(experiment: Experiment, number: int, last: int) -> None:
    """Raise a `UserError` if clients have signed a list of survivors in a round or a later one.

    They would refuse a second sum of the same changes, which tells more than one: see
    `fedtools.privacy.secagg.promises`.

    Args:
        number: the first round to be reset.
        last: the last complete round.
    """
    signed = [last] if number <= last and experiment.round(last).sampled() else []
    for at in range(number, last + 2):
        folder = experiment.round(at).path
        if any(folder.glob("secure.survivors.*")):
            signed.append(at)
    if signed:
        problem = f"round {signed[0]} cannot be reset: clients have bound themselves to its sum"
        remedy = "go on from here, or begin another experiment"
        raise UserError(problem, path=experiment.path, remedy=remedy)
