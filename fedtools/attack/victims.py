"""The models under attack: those that clients sent in a round of an experiment.

What a client keeps for itself is not there: it is taken as the global model has it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedtools.attack.footprints import Probe, State
from fedtools.client.clips import ClipFeatures
from fedtools.federation.asr import AsrFederation, read_data
from fedtools.federation.base import Federation
from fedtools.federation.kws import KwsFederation, tensors_of
from fedtools.federation.model import ModelFederation
from fedtools.federation.steps import jobs_of
from fedtools.files.datadir import read_table
from fedtools.files.errors import UserError
from fedtools.files.messages import Message, Refusal, read_messages, sums_of
from fedtools.files.perturb import speakers_of
from fedtools.files.states import read_at
from fedtools.methods.base import SHARED


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
    where = federation.experiment.path
    if not isinstance(federation, ModelFederation):
        raise UserError("its clients train no models", path=where)
    owners, messages, refused = speakers_of_clients(federation), {}, {}
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


def _sent(federation: ModelFederation, number: int) -> Iterator[Message | Refusal]:
    experiment = federation.experiment
    if not experiment.is_done(number):
        remedy = f"run fedtools rounds {experiment.path} --to {number}"
        raise UserError(f"round {number} is not complete", path=experiment.path, remedy=remedy)
    phase = federation.method.phase(number)
    if phase.client is None or phase.sends != SHARED:
        problem = f"in round {number} clients send no models"
        raise UserError(problem, path=federation.where)
    folder = experiment.round_dir(number)
    if not any(folder.glob("update.*.tsv")):
        problem = "what clients sent is not there any more"
        remedy = "begin an experiment with keep_updates: true"
        raise UserError(problem, path=folder, remedy=remedy)
    messages, refusals = read_messages(
        folder,
        jobs_of(federation, number),
        experiment.sampled(number),
        federation.payload(phase),
        experiment.base(number),
    )
    yield from messages
    yield from refusals
    _warn_of_changes(experiment.sums(number), messages)


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


def speakers_of_clients(federation: Federation) -> dict[str, str]:
    """Client -> its speaker, of those clients that have one."""
    if not isinstance(federation, AsrFederation):
        # A client of the keyword recipe is a speaker.
        return {client: client for client in federation.experiment.clients}
    data = federation.read("train")
    people = dict(zip(data.utterances, speakers_of(data, data.utterances), strict=True))
    found = {}
    for client in federation.experiment.clients:
        own = {people[name] for name in data.client_utterances(client)}
        if len(own) == 1:
            found[client] = own.pop()
    return found


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
    federation: ModelFederation, number: int, indicator: Path, held: int, clips_at_once: int = 64
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
    federation.load_shared(number)
    models = [copy.deepcopy(federation.model).eval() for _ in range(1 + held)]
    if isinstance(federation, AsrFederation):
        data = read_data(indicator, federation.experiment.options.model)
        audio = federation.gather(data, data.utterances, labelled=False)

        def utterances() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            # One at a time: there is no padding, and a TDNN's frames are easily enough for a CPU.
            plan = [[index] for index in range(len(audio))]
            for batch in audio.stream(plan, federation.device):
                yield batch["speech"], batch["speech_lengths"]

        def encode(model: torch.nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> None:
            # Normalisation works in place.
            model.encode(given[0].clone(), given[1])

        train, people = federation.read("train"), set(speakers_of(data, data.utterances))
        _check_people(indicator, people, speakers_of(train, train.utterances))
        _check_persons(indicator, federation.data_path("train"))
        return Probe(models, lambda model: model.state_dict(), encode, utterances)
    if not isinstance(federation, KwsFederation):
        raise UserError("no attack knows these models", path=federation.where)
    clips = federation.read_clips(indicator)
    _check_people(indicator, set(clips.clients), federation.experiment.clients)
    mfcc = ClipFeatures(clips, federation.device).plain(slice(0, len(clips.labels)))

    def parts() -> Iterator[torch.Tensor]:
        return iter(mfcc[None].split(clips_at_once, 1))

    return Probe(models, tensors_of, lambda model, given: model(given), parts)
