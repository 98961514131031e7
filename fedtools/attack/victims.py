"""The models under attack: those that clients sent in a round of an experiment.

What a client keeps for itself is not there: it is taken as the global model has it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedtools.attack.footprints import Probe, State
from fedtools.federation.federation import Federation
from fedtools.federation.steps import jobs_of
from fedtools.files.datadir import read_table
from fedtools.files.errors import UserError
from fedtools.files.messages import Message, Refusal, read_messages, sums_of
from fedtools.files.states import read_at
from fedtools.methods.base import SHARED
from fedtools.models.copies import copy_of
from fedtools.tasks.parts import INDICATOR, MODELS, SPEAKERS


@dataclass(frozen=True)
class Victims:
    """What the clients of some rounds sent.

    Attributes:
        messages: by the model's name: the client's, and with several rounds the round's.
        refused: clients whose message is none, by the model's name.
        speakers: of each model; models of clients with several speakers are not there.
    """

    messages: dict[str, Message]
    refused: dict[str, str]
    speakers: dict[str, str]

    def states(self, wanted: Sequence[str]) -> Iterator[tuple[str, State]]:
        """The tensors of some models; one that is not finite is left out, and is then refused."""
        for name in wanted:
            state = read_state(self.messages[name])
            bad = next((key for key, value in state.items() if not np.isfinite(value).all()), "")
            if bad:
                self.refused[name] = f"NaN or Inf in tensor {bad!r}"
            else:
                yield name, state


def find_victims(federation: Federation, rounds: Sequence[int]) -> Victims:
    """The messages of some rounds.

    Raises:
        UserError: if a round is not complete, sends no models, or its messages are gone.
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
    """The messages of some rounds whose models are finite, all of which are read; others are named.

    Raises:
        UserError: as of `find_victims`.
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
    if folder.is_done() and (phase.client is None or phase.sends != SHARED):
        problem = f"in round {number} clients send no models"
        raise UserError(problem, path=federation.where)
    messages, refusals = received(federation, number)
    yield from messages
    yield from refusals
    _warn_of_changes(folder.sums(), messages)


def received(federation: Federation, number: int) -> tuple[list[Message], list[Refusal]]:
    """What the clients of a complete round sent, as `read_messages` finds it.

    Raises:
        UserError: if the round is not complete, or what was sent is gone.
    """
    experiment = federation.experiment
    folder = experiment.round(number)
    if not folder.is_done():
        remedy = f"run fedtools rounds {experiment.path} --to {number}"
        raise UserError(f"round {number} is not complete", path=experiment.path, remedy=remedy)
    if not any(folder.path.glob("update.*.tsv")):
        problem = "what clients sent is not there any more"
        remedy = "begin an experiment with keep_updates: true"
        raise UserError(problem, path=folder.path, remedy=remedy)
    return read_messages(
        folder.path,
        jobs_of(federation, number),
        folder.sampled(),
        federation.payload(federation.method.phase(number)),
        folder.base(),
    )


def _warn_of_changes(sums: Mapping[str, str], messages: Sequence[Message]) -> None:
    """Tell of files that are not as they were when their round was closed.

    They were checked again, and nothing but attacks reads them; rounds of earlier versions have no
    sums of them.
    """
    found = sums_of(messages) if any(name.startswith("update.") for name in sums) else {}
    for path in sorted({path for message in messages for path in message.seals}):
        if found and sums.get(path.name) != found.get(path.name):
            print(f"warning: {path}: changed since its round was closed", file=sys.stderr)


def read_state(message: Message) -> dict[str, np.ndarray]:
    """The tensors that one client sent."""
    state = {}
    with message.open() as file:
        for name, (shape, kind) in message.layout.spec.items():
            state[name] = np.empty(shape[1:], kind)
            if not read_at(file.fileno(), state[name], message.offset(name)):
                raise UserError("changed while it was read", path=message.path)
    return state


def _check_people(indicator: Path, people: set[str], trained: Iterable[str]) -> None:
    if shared := people & set(trained):
        problem = f"{min(shared)!r} is in the training data, and a speaker of the Indicator"
        raise UserError(problem, path=indicator, remedy="give speech of other people")


def _check_persons(indicator: Path, train: Path) -> None:
    """Where a speaker is a talk, it is `utt2person` that tells who is in both."""
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
    """How the models of a round are looked at.

    Args:
        number: the round, whose global model is what clients began with.
        indicator: speech of nobody in particular: a data directory with features, or with clips.
        held: personalised models in memory at a time.
        clips_at_once: of an input of keyword networks; which frames are of one clip cannot be seen
            in the activations of several.

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
