"""The files of a secure sum: who has done which of its steps.

    round_0007/secure.<step>.<job>     the messages of a job's clients
    round_0007/secure.<step>.<job>.reply
                                       of keys and shares: what the server has for each of them
    round_0007/secure.<step>.reply     of masked: the list of survivors; of survivors: the list
                                       with signatures
    server/secure.<step>               messages that the server has taken, until it has the sum

Steps are those of `fedtools.privacy.secagg`, "keys" to "unmask". A step is due when the server has
replied to the one before. Nothing is written twice, and all is removed when the round closes.

Who takes part follows from what is frozen: all clients with a key, or those whose turn it is. So
does everything that a session is bound to, but for the state that the round starts from.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from fedtools.core.errors import UserError
from fedtools.core.untrusted import open_received
from fedtools.data.datadir import byte_order
from fedtools.exchange.client_keys import FILE as CLIENT_KEYS
from fedtools.exchange.options import Options
from fedtools.exchange.signed import SERVER
from fedtools.exchange.states import Spec
from fedtools.methods.base import Changes, Method
from fedtools.privacy.gaussian import most_noise
from fedtools.privacy.model_releases import cohort_of
from fedtools.privacy.secagg.plan import plan
from fedtools.privacy.secagg.session import Session
from fedtools.privacy.secagg.signed import Step
from fedtools.privacy.secagg.survivors import most_certificate_bytes, read_list
from fedtools.privacy.user_plan import UserPlan

if TYPE_CHECKING:
    from fedtools.exchange.experiment import Experiment
    from fedtools.federation.federation import Federation

# The steps to which the server replies with something for each client, or with one list for all.
EACH, ALL = (Step.KEYS, Step.SHARES), (Step.MASKED, Step.SURVIVORS)
FIRST_STEP = Step.KEYS.name.lower()
# Of the files that an experiment begins with, those that a site has others of, or none.
_OWN = (
    *("nonce", "noise_key", "data.yaml", "config.yaml", "clients.txt", "sites.tsv", "facts.tsv"),
    "origin",
)


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
        """Return what everybody computes from what is frozen, and from the round's first state."""
        method, keys = self._federation.method, self._roster()
        options, sends = method.secure_sums, method.phase(self.number).sends
        assert options is not None and isinstance(sends, Changes)
        sizes = (math.prod(shape) for shape, _ in self.spec.values())
        return Session(
            label=self._experiment.label,
            round=self.number,
            attempt=self.folder.attempt(),
            basis=f"{frozen_digest(self._experiment)} {self.folder.start_sum()}",
            roster=keys,
            plan=plan(options, len(keys)),
            size=sum(sizes),
            most=sends.grid.steps + most_noise(self.own_deviation),
        )

    def _roster(self) -> dict[str, str]:
        """Return the public keys of the clients that take part, whatever the round's folder says.

        Raises:
            UserError: if a client has a key that is no site's, although sites have keys.
        """
        experiment, privacy = self._experiment, self._federation.method.user_privacy
        keys, cohorts = experiment.client_keys, privacy.cohorts if privacy else 0
        turn = (self.number - 1) % cohorts if cohorts else 0
        names = [
            name
            for name in byte_order(keys)
            if not cohorts or cohort_of(experiment.seed, name, cohorts) == turn
        ]
        of_sites = {key for name, key in experiment.roster.items() if name != SERVER}
        if wrong := [name for name in names if of_sites and keys[name] not in of_sites]:
            problem = f"the key of {wrong[0]} is no site's in the roster"
            raise UserError(problem, path=experiment.path / CLIENT_KEYS)
        return {name: keys[name] for name in names}

    def check_start(self) -> None:
        """Raise a `UserError` if the round starts from another state than the session is about."""
        if not self.session.basis.endswith(self.folder.start_sum()):
            raise UserError("the state has changed during the round", path=self.folder.global_state)

    @cached_property
    def own_deviation(self) -> float:
        """Return the standard deviation of each client's own noise, in steps; 0 for none."""
        return UserPlan.read(self._experiment.path).own_deviation

    @property
    def spec(self) -> Spec:
        """Return the tensors of a client's change, in the order in which they are one vector."""
        return self._federation.states.shared_spec

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
            path = self.reply(Step.MASKED, job)
            with open_received(path, most_certificate_bytes(self.session)) as file:
                survivors = read_list(self.session, file.read()).survivors
            return bool(survivors & {*numbers})
        for step in reversed(EACH):
            if self.reply(step, job).exists():
                return self.reply(step, job).stat().st_size > 0
        return bool(numbers)

    def marks(self, jobs: Sequence[Sequence[str]]) -> list[Path]:
        """Return the messages that the clients of all jobs have to write now."""
        numbered = enumerate(jobs, 1)
        return [
            self.sent(self.due(job), job) for job, clients in numbered if self.left(job, clients)
        ]

    def due(self, job: int) -> Step:
        """Return the step that the clients of a job have to do."""
        steps = (*EACH, *ALL)
        return next((one for one in steps if not self.reply(one, job).exists()), Step.UNMASK)


def reply_names(job: int) -> dict[Step, str]:
    """Return the names of the files with the server's replies to a job, in their order."""
    found = {step: f"secure.{step.name.lower()}" for step in (*EACH, *ALL)}
    return {
        step: f"{name}.{job}.reply" if step in EACH else f"{name}.reply"
        for step, name in found.items()
    }


def frozen_digest(experiment: Experiment) -> str:
    """Return a sum of all that an experiment has fixed, the same at the server and all sites.

    Paths, and what is told of a site's own data, do not count.
    """
    options = {one.name: getattr(experiment.options, one.name) for one in fields(Options)}
    options["data"] = {}
    for section, name in (("model", "path"), ("method_conf", "noise_key")):
        options[section] = {key: one for key, one in options[section].items() if key != name}
    sums = {name: one for name, one in experiment.sums.items() if name not in _OWN}
    text = json.dumps([options, sums], sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()


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
        remedy = "leave it out: who agrees on keys knows who takes part, and no sample is secret"
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
    """Raise a `UserError` if clients may have signed a list of survivors in a round or later.

    They would refuse a second sum of the same changes, which tells more than one: see
    `fedtools.privacy.secagg.promises`. A list is signed as soon as it is seen, wherever that is.

    Args:
        number: the first round to be reset.
        last: the last complete round.
    """
    signed = [last] if number <= last and experiment.round(last).sampled() else []
    for at in range(number, last + 2):
        if (experiment.round(at).path / reply_names(1)[Step.MASKED]).exists():
            signed.append(at)
    if signed:
        problem = f"round {signed[0]} cannot be reset: clients have bound themselves to its sum"
        remedy = "go on from here, or begin another experiment"
        raise UserError(problem, path=experiment.path, remedy=remedy)
