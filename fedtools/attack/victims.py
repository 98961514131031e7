"""Models under attack: those that clients sent in a round of an experiment.

Tensors that clients keep are not sent: attacks use those of the global model. Of a secure sum, all
that is there of each client in it is what everybody has: the next global model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from fedtools.core.errors import UserError
from fedtools.data.datadir import read_table
from fedtools.exchange.experiment import Experiment, RoundFolder
from fedtools.exchange.ledger import read_round
from fedtools.exchange.messages import COUNTED, Message, Refusal, read_messages, sums_of
from fedtools.exchange.states import read_at, read_layout, stacked_layout
from fedtools.federation.federation import Federation
from fedtools.federation.steps import jobs_of
from fedtools.methods.base import SHARED
from fedtools.models.adapt.copies import copy_of
from fedtools.tasks.parts import INDICATOR, MODELS, SPEAKERS

State = Mapping[str, Any]


class Probe(NamedTuple):
    """Models of one kind, and inputs on which an attacker compares them.

    Attributes:
        models: models of one architecture; the first one is the global model.
        tensors: returns a model's parameters and buffers by name, not copied.
        run: computes a model's hidden layers for an input.
        inputs: yields the inputs of the Indicator, one after the other, without padding.
    """

    models: Sequence[nn.Module]
    tensors: Callable[[nn.Module], dict[str, Tensor]]
    run: Callable[[nn.Module, Any], Any]
    inputs: Callable[[], Iterator[Any]]


@dataclass(frozen=True)
class Victims:
    """Messages of the clients of some rounds.

    Attributes:
        messages: name of the model -> message. The name is the client's, with the round's if there
            are several rounds.
        refused: name of the model -> why its message was refused.
        speakers: name of the model -> speaker; models of clients with several speakers are missing.
    """

    messages: dict[str, Message]
    refused: dict[str, str]
    speakers: dict[str, str]

    def states(self, wanted: Sequence[str]) -> Iterator[tuple[str, State]]:
        """Yield the tensors of some models; leave out and refuse models that are not finite."""
        for name in wanted:
            state = read_state(self.messages[name])
            bad = next((key for key, value in state.items() if not np.isfinite(value).all()), "")
            if bad:
                self.refused[name] = f"NaN or Inf in tensor {bad!r}"
            else:
                yield name, state


def find_victims(federation: Federation, rounds: Sequence[int]) -> Victims:
    """Find the messages of some rounds.

    Raises:
        UserError: if a round is not complete, sends no models, or its messages are missing.
    """
    federation.task.need(MODELS)
    owners, messages, refused = federation.task.need(SPEAKERS)(), {}, {}
    speakers: dict[str, str] = {}
    for number in rounds:
        for item in _sent(federation, number):
            name = f"{item.client}-r{number:04d}" if len(rounds) > 1 else item.client
            if isinstance(item, Refusal):
                refused[name] = item.reason
                continue
            messages[name] = item
            if item.client in owners:
                speakers[name] = owners[item.client]
    return Victims(messages, refused, speakers)


def sound_victims(federation: Federation, rounds: Sequence[int]) -> Victims:
    """Find the messages of some rounds with finite models, and report refused ones on stderr.

    All models are read.

    Raises:
        UserError: as in `find_victims`.
    """
    victims = find_victims(federation, rounds)
    for _ in victims.states(sorted(victims.messages)):
        pass
    for name, reason in sorted(victims.refused.items()):
        print(f"{name}: refused: {reason}", file=sys.stderr)
    kept = {name: one for name, one in victims.messages.items() if name not in victims.refused}
    return replace(victims, messages=kept)


def _sent(federation: Federation, number: int) -> Iterator[Message | Refusal]:
    folder = federation.experiment.round(number)
    phase = federation.method.phase(number)
    if federation.method.secure_sums:
        yield from summed(federation, number)
        return
    if folder.is_done() and (phase.client_update is None or phase.sends != SHARED):
        problem = f"in round {number} clients send no models"
        raise UserError(problem, path=federation.where)
    messages, refusals = received(federation, number)
    yield from messages
    yield from refusals
    _warn_of_changes(folder.sums(), messages)


def summed(federation: Federation, number: int) -> list[Message | Refusal]:
    """Return the clients of a secure sum, each with the model that the sum has led to.

    Raises:
        UserError: if the round is not complete.
    """
    experiment = federation.experiment
    folder = experiment.round(number)
    _require_done(experiment, folder)
    following = experiment.round(number + 1)
    following.start_sum()
    layout = stacked_layout(read_layout(following.global_state))
    found: list[Message | Refusal] = []
    for row in read_round(experiment, number):
        if not experiment.knows(row.client):
            continue
        if row.status not in COUNTED:
            found.append(Refusal(row.client, row.status))
            continue
        path = following.global_state
        found.append(Message(row.client, 0, 0, 0.0, 0.0, row.bytes_up, path, layout, 0))
    return found


def received(federation: Federation, number: int) -> tuple[list[Message], list[Refusal]]:
    """Read the messages and refusals of a complete round, see `read_messages`.

    Raises:
        UserError: if the round is not complete, or its messages are missing.
    """
    experiment = federation.experiment
    folder = experiment.round(number)
    _require_done(experiment, folder)
    if not any(folder.path.glob("update.*.tsv")):
        problem = "client updates are missing"
        remedy = "begin an experiment with keep_updates: true"
        raise UserError(problem, path=folder.path, remedy=remedy)
    return read_messages(
        folder.path,
        jobs_of(federation, number),
        folder.sampled(),
        federation.payload(federation.method.phase(number)),
        folder.origin(),
    )


def _require_done(experiment: Experiment, folder: RoundFolder) -> None:
    if not folder.is_done():
        remedy = f"run fedtools rounds {experiment.path} --to {folder.number}"
        problem = f"round {folder.number} is not complete"
        raise UserError(problem, path=experiment.path, remedy=remedy)


def _warn_of_changes(sums: Mapping[str, str], messages: Sequence[Message]) -> None:
    """Warn of files that changed since their round was closed.

    A warning is enough: the files were validated again, and only attacks read them.
    """
    found = sums_of(messages)
    for path in sorted({path for message in messages for path in message.seals}):
        if sums.get(path.name) != found.get(path.name):
            print(f"warning: {path}: changed since its round was closed", file=sys.stderr)


def read_state(message: Message) -> dict[str, np.ndarray]:
    """Read the tensors that one client sent."""
    state = {}
    with message.open() as file:
        for name, (shape, kind) in message.layout.spec.items():
            state[name] = np.empty(shape[1:], kind)
            if not read_at(file.fileno(), state[name], message.offset(name)):
                raise UserError("changed while it was read", path=message.path)
    return state


def _check_people(indicator: Path, people: set[str], trained: Iterable[str]) -> None:
    if shared := people & set(trained):
        problem = f"{min(shared)!r} is a speaker of the training data and of the Indicator"
        raise UserError(problem, path=indicator, remedy="give speech of other people")


def _check_persons(indicator: Path, train: Path) -> None:
    """Raise a `UserError` if both share a person by `utt2person`, e.g. if speakers are talks."""
    tables = [path / "utt2person" for path in (indicator, train)]
    if not all(table.exists() for table in tables):
        return
    one, other = (set(read_table(table).values()) for table in tables)
    if shared := one & other:
        problem = f"{min(shared)!r} is also in {tables[1]}"
        raise UserError(problem, path=tables[0], remedy="give speech of other people")


def make_probe(
    federation: Federation, number: int, indicator: Path, held: int, clips_at_once: int = 64
) -> Probe:
    """Build the probe of a round's models.

    Args:
        number: number of the round, whose clients began with its global model.
        indicator: a data directory with features or clips of speakers outside the training data.
        held: personalised models in memory at a time.
        clips_at_once: clips in one input of keyword networks; activations of several clips do not
            show which frames belong to one clip.

    Raises:
        UserError: if a speaker of the Indicator is in the training data, or a person, by
            `utt2person`.
    """
    federation.load_result(None, number - 1)
    models = federation.task.need(MODELS)
    held_models = [copy_of(models.build()).eval() for _ in range(1 + held)]
    speech = federation.task.need(INDICATOR)(indicator, clips_at_once)
    _check_people(indicator, speech.speakers, speech.trained)
    _check_persons(indicator, federation.task.data_path("train"))
    return Probe(held_models, models.tensors, speech.forward, speech.inputs)
