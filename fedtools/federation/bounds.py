"""A site's own word: what any request may make it do, written at the site in a YAML file.

A request is checked before any training. What is not allowed is refused by name, and nothing is
sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from fedtools.core.atomic import sha256
from fedtools.core.config import Natural, NonNegative, Positive, from_mapping, read_yaml
from fedtools.core.errors import UserError
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.messages import Payload
from fedtools.exchange.signed import FILE as ROSTER
from fedtools.federation.code import kinds_of, own_files
from fedtools.federation.federation import Federation
from fedtools.methods.base import Changes, Phase
from fedtools.privacy.options import CLIENTS
from fedtools.privacy.secagg.plan import plan
from fedtools.privacy.user_plan import UserPlan

Kind = Literal["models", "changes", "features"]
MODELS: Kind = "models"
CHANGES: Kind = "changes"
FEATURES: Kind = "features"


@dataclass(frozen=True)
class Bounds:
    """What a site allows; by default all but features and code of others.

    Attributes:
        roster: the SHA-256 of the roster of keys, as the server's operator has told it by another
            way; "" takes any.
        payloads: what may be sent: "models", states of a model or counts of words; "changes", the
            clipped changes of a model; "features".
        tensors: patterns, such as "decoder.*"; each sent tensor must match one.
        least_utterances: of each client that takes part, in training utterances or clips.
        most_rounds: of the experiment.
        most_steps: of a client in a round, at most; with local epochs, counted for batches of one.
        most_epochs: of a client in a round.
        privacy: whether user-level privacy is required.
        largest_clip: C, the largest norm of a client's change, where changes are sent.
        largest_epsilon: privacy loss of a client over all rounds, where changes are sent.
        secure_sums: whether secure sums are required, of which the server learns the sum alone.
        own_noise: whether the noise of user-level privacy must be the clients' own.
        least_summed: the fewest clients, of all sites, whose sum the server may learn.
        least_evaluated: the fewest words or clips of which the site tells how many are errors.
        code: whether methods and tasks in $FEDTOOLS_PATH may be used.
    """

    roster: str = ""
    payloads: tuple[Kind, ...] = (MODELS, CHANGES)
    tensors: tuple[str, ...] = ("*",)
    least_utterances: Natural = 0
    most_rounds: Positive | None = None
    most_steps: Positive | None = None
    most_epochs: NonNegative | None = None
    privacy: bool = False
    largest_clip: NonNegative | None = None
    largest_epsilon: NonNegative | None = None
    secure_sums: bool = False
    own_noise: bool = False
    least_summed: Natural = 0
    least_evaluated: Natural = 100
    code: bool = False


def read_bounds(path: Path) -> Bounds:
    """Read a site's bounds."""
    return from_mapping(Bounds, read_yaml(path), path)


def check_bounds(
    federation: Federation, clients: Sequence[str], number: int, bounds: Bounds
) -> None:
    """Raise a `UserError` if a request to train asks for more than the site allows.

    Args:
        federation: of the capsule.
        clients: those that are asked for.
        number: the round.
        bounds: the site's.
    """
    experiment, phase = federation.experiment, federation.method.phase(number)
    problems = [
        _of_privacy(federation, bounds),
        _of_sums(federation, bounds),
        _of_payload(federation.payload(phase), phase, bounds),
        *(_of_client(federation, client, phase, bounds) for client in clients),
    ]
    for problem in filter(None, problems):
        raise _refusal(experiment, problem)


def check_least_summed(experiment: Experiment, least: int, bounds: Bounds) -> None:
    """Raise a `UserError` if the server may learn the sum of fewer clients than the site allows."""
    if least < bounds.least_summed:
        problem = f"sum of {least} clients, but of {bounds.least_summed} or more (least_summed)"
        raise _refusal(experiment, problem)


def check_experiment(experiment: Experiment, bounds: Bounds) -> None:
    """Raise a `UserError` if a site does not allow an experiment, whatever a request asks for."""
    if problem := _of_experiment(experiment, bounds):
        raise _refusal(experiment, problem)


def check_code_allowed(federation: Federation, bounds: Bounds) -> None:
    """Raise a `UserError` if an experiment uses files of $FEDTOOLS_PATH, and the site allows none.

    Files are looked for here: a capsule need not say that it uses them.
    """
    options, task = federation.experiment.options, type(federation.task)
    kinds = kinds_of(options, federation.method, task)
    if not bounds.code and (own := own_files(kinds.values(), task)):
        problem = f"method or task in $FEDTOOLS_PATH (code): {next(iter(own.values()))}"
        raise _refusal(federation.experiment, problem)


def _refusal(experiment: Experiment, problem: str) -> UserError:
    remedy = "change the site's bounds, or ask the server for another experiment"
    return UserError(f"the site allows no {problem}", path=experiment.path, remedy=remedy)


def _of_experiment(experiment: Experiment, bounds: Bounds) -> str:
    """Return what of the experiment as a whole is not allowed; "" if all is."""
    if bounds.roster and (
        ROSTER not in experiment.sums or sha256(experiment.path / ROSTER) != bounds.roster
    ):
        return f"roster of keys but {bounds.roster[:16]}..."
    rounds, most = experiment.options.rounds, bounds.most_rounds
    if most is not None and rounds > most:
        return f"{rounds} rounds, but {most} (most_rounds)"
    return ""


def _of_payload(payload: Payload, phase: Phase, bounds: Bounds) -> str:
    """Return what of a round's payload is not allowed; "" if all is."""
    kinds = [FEATURES] if payload.features else []
    if payload.tensors:
        kinds.append(CHANGES if isinstance(phase.sends, Changes) else MODELS)
    for kind in kinds:
        if kind not in bounds.payloads:
            return f"{kind} to be sent (payloads)"
    for name in payload.tensors:
        if not any(fnmatchcase(name, pattern) for pattern in bounds.tensors):
            return f"tensor {name} to be sent (tensors)"
    return ""


def _of_client(federation: Federation, client: str, phase: Phase, bounds: Bounds) -> str:
    """Return what of a client's work is not allowed; "" if all is."""
    size, task = federation.sizes.get(client, 0), federation.task
    if size < bounds.least_utterances:
        return f"client with {size} utterances: {client} (least_utterances)"
    steps = task.limits(phase, 0).steps(client, size) if phase.trains else 0
    if bounds.most_steps is not None and steps > bounds.most_steps:
        return f"{steps} steps of {client} in a round, but {bounds.most_steps} (most_steps)"
    epochs = task.epochs(client, steps)
    if bounds.most_epochs is not None and epochs > bounds.most_epochs:
        return f"{epochs:g} epochs of {client} in a round, but {bounds.most_epochs:g} (most_epochs)"
    return ""


def _epsilon(federation: Federation) -> float | None:
    """Return the epsilon of an experiment: as the server says, or with the clients' own noise.

    The latter follows from what these clients add, and the options, whatever the capsule's plan
    says of it.
    """
    experiment, privacy = federation.experiment, federation.method.user_privacy
    found, sums = UserPlan.read(experiment.path), federation.method.secure_sums
    if privacy is None or privacy.trust != CLIENTS or sums is None:
        return found.epsilon
    if not found.own_deviation:
        return None
    numbers = plan(sums, len(experiment.client_keys))
    honest = numbers.least - numbers.colluding
    rounds, delta = experiment.options.rounds, privacy.delta
    return replace(found, rounds=rounds, delta=delta).with_shares(honest).epsilon


def _of_sums(federation: Federation, bounds: Bounds) -> str:
    """Return that secure sums are missing where they are required; "" otherwise."""
    if (bounds.secure_sums or bounds.least_summed) and federation.method.secure_sums is None:
        return "training without secure sums (secure_sums)"
    privacy = federation.method.user_privacy
    if bounds.own_noise and (privacy is None or privacy.trust != CLIENTS):
        return "training without noise of the clients' own (own_noise)"
    return ""


def _of_privacy(federation: Federation, bounds: Bounds) -> str:
    """Return what of a private experiment's plan is not allowed; "" if all is."""
    privacy, most = federation.method.user_privacy, bounds.largest_epsilon
    if privacy is None:
        return "training without user-level privacy (privacy)" if bounds.privacy else ""
    if bounds.largest_clip is not None and privacy.clip > bounds.largest_clip:
        return f"changes of norm {privacy.clip:g}, but {bounds.largest_clip:g} (largest_clip)"
    spent = _epsilon(federation)
    if most is not None and (spent is None or spent > most):
        found = "unbounded epsilon" if spent is None else f"epsilon of {spent:g}"
        return f"{found}, but {most:g} (largest_epsilon)"
    return ""
