"""Features of the same utterances, twice: as clients sent them, and by the initial model.

Zhu et al. (Interspeech 2022), section 3.5, call the first personalised, the second unadapted.
Clients send utterances under numbers. The evaluator of an attack knows which utterance a number
stands for, from the clients' filterbanks, which never leave the clients; the attacker does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtools.audio.perturb import speakers_of, unperturbed
from fedtools.core.errors import UserError
from fedtools.core.seeds import generator
from fedtools.data.ark import FeatureReader
from fedtools.data.datadir import DataDir, read_table
from fedtools.exchange.ledger import SERVER_ROW, read_round
from fedtools.exchange.messages import COUNTED
from fedtools.exchange.sent_features import feature_paths, open_sent, sent_names
from fedtools.federation.federation import Federation
from fedtools.methods.decouplefl import DecoupleFL
from fedtools.models.acoustic.asr import input_size_of, positions, shortest_input
from fedtools.models.pooling import pooled
from fedtools.models.pretrained.options import is_seq2seq
from fedtools.tasks.asr.data import Batch, Utterances
from fedtools.tasks.parts import CORPUS, DEVICE, MODELS

# Frames enough for every model's convolutions, and a multiple of all of their steps.
_FRAMES, _MORE = 200, 240


@dataclass(frozen=True)
class Victim:
    """A client under attack.

    Attributes:
        client: name of the client.
        speaker_names: its speakers, in C order.
        speakers: (utterances,) the number of each utterance's speaker.
        texts: the transcripts; None if there are none.
        audio: filterbanks of the utterances.
        sent: features of the same utterances as the client sent them, in the same order.
        recorded: indices of one utterance of each recording, which may occur at several speeds.
    """

    client: str
    speaker_names: list[str]
    speakers: np.ndarray
    texts: list[str] | None
    audio: Utterances
    sent: Utterances
    recorded: np.ndarray


class Window(NamedTuple):
    """Alignment of the frames of features with those of filterbanks.

    Attributes:
        step: frames of filterbanks from one frame of features to the next.
        width: frames of filterbanks that the convolutions see for one frame of features.
    """

    step: int
    width: int

    @property
    def offset(self) -> int:
        """Return the first frame of filterbanks that the first frame of features stands for."""
        return max(0, self.width - self.step) // 2


class Frames(NamedTuple):
    """A batch of features.

    Attributes:
        indices: indices of the utterances.
        batch: the batch they were computed from, or read as.
        features: (B, T, D).
        lengths: (B,) numbers of frames.
    """

    indices: list[int]
    batch: Batch
    features: Tensor
    lengths: Tensor


def require_sent(federation: Federation) -> tuple[Federation, int]:
    """Return the federation, and the round in which its clients sent features.

    Raises:
        UserError: if its method or options send no features, the round is not complete, or its
            model has no posteriors.
    """
    where, method = federation.where, federation.method
    if not isinstance(method, DecoupleFL):
        remedy = "give an experiment of method decouplefl"
        raise UserError("no features are sent in this experiment", path=where, remedy=remedy)
    if not method.stage2:
        remedy = "begin an experiment with method_conf.stage2 above 0"
        raise UserError("no features are sent with stage2: 0", path=where, remedy=remedy)
    if is_seq2seq(federation.experiment.options.model):
        remedy = "give an experiment of criterion ctc"
        raise UserError("no attack on features for criterion seq2seq", path=where, remedy=remedy)
    number = method.stage1 + 1
    if not federation.experiment.round(number).is_done():
        problem = f"features are sent in round {number}, which is not complete"
        remedy = f"run fedtools rounds {federation.experiment.path}"
        raise UserError(problem, path=federation.experiment.path, remedy=remedy)
    return federation, number


def statuses(federation: Federation, number: int, wanted: Sequence[str]) -> dict[str, str]:
    """Return client -> why its features do not count, "" if they do; for all or some clients.

    Raises:
        UserError: for a client that the experiment does not have.
    """
    experiment = federation.experiment
    for client in wanted:
        if not experiment.knows(client):
            remedy = f"known clients: {', '.join(experiment.clients)}"
            problem = f"no client {client!r}"
            raise UserError(problem, path=experiment.path / "clients.txt", remedy=remedy)
    rows = {row.client: row.status for row in read_round(experiment, number)}
    rows.pop(SERVER_ROW, None)
    found = {}
    for client in wanted or experiment.clients:
        status = rows.get(client, "it did not take part")
        if status in COUNTED:
            scp = feature_paths(experiment.round(number).path, client)[1]
            status = "" if scp.exists() else "its features are missing"
        found[client] = status
    return found


def open_victim(
    federation: Federation, number: int, client: str, most: int, text: Path | None = None
) -> Victim:
    """Open what a client sent, and find out which sent utterance is which.

    Args:
        number: the round in which features were sent.
        most: the largest number of utterances, drawn at random.
        text: transcripts; by default those of the train data, which may be labels of a model.

    Raises:
        UserError: if what was sent does not match the client's utterances in the train data.
    """
    corpus, seed = federation.task.need(CORPUS), federation.experiment.seed
    data = corpus.read("train")
    whole = corpus.gather_trained(data, data.client_utterances(client))
    names = whole.names
    round_dir = federation.experiment.round(number).path
    reader = open_sent(federation.experiment, number, client)
    sent = sent_names(whole.audio(0).tobytes(), client, len(names))
    scp = feature_paths(round_dir, client)[1]
    _check(federation, reader, sent, whole, scp)
    if len(names) > most:
        drawn = generator(seed, "attack", client).choice(len(names), most, replace=False)
        names, sent = ([one[index] for index in np.sort(drawn)] for one in (names, sent))
    features = DataDir(round_dir, feats_scp=dict(reader.scp))
    known, numbered = np.unique(speakers_of(data, names), return_inverse=True)
    return Victim(
        client,
        known.tolist(),
        numbered,
        _texts(text or data.path / "text", names, required=text is not None),
        corpus.gather(data, names, labelled=False),
        corpus.gather_sent(features, sent, reader.seals),
        one_of_each(names, unperturbed(data)),
    )


def one_of_each(names: Sequence[str], recordings: Mapping[str, str]) -> np.ndarray:
    """Return indices of one utterance per recording: the one at speed 1, where it exists.

    Args:
        recordings: utterance -> its name at speed 1.
    """
    chosen: dict[str, int] = {}
    for index, name in enumerate(names):
        if recordings[name] not in chosen or recordings[name] == name:
            chosen[recordings[name]] = index
    return np.sort(list(chosen.values()))


def bins_of(federation: Federation) -> int:
    """Return the number of values of a frame of filterbanks."""
    return input_size_of(federation.experiment.options.model)


def window(federation: Federation) -> Window:
    """Return the step and the width of a model's convolutions."""
    models, bins, lengths = federation.task.need(MODELS), bins_of(federation), []
    model = models.build().eval()
    for frames in (_FRAMES, _FRAMES + _MORE):
        speech = torch.zeros(1, frames, bins, device=federation.task.need(DEVICE))
        batch = {"speech": speech, "speech_lengths": torch.tensor([frames])}
        with torch.no_grad():
            lengths.append(models.cut().extract(model, batch)[0].shape[1])
    return Window(_MORE // (lengths[1] - lengths[0]), shortest_input(model))


@torch.no_grad()
def unadapted(
    federation: Federation, audio: Utterances, order: np.random.Generator | None = None
) -> Iterator[Frames]:
    """Yield the initial model's features of filterbanks.

    Args:
        order: shuffles batches, for training; without it, each utterance is a batch by itself, as
            it is when a client sends it.
    """
    federation.task.load(federation.states.initial, 0)
    models = federation.task.need(MODELS)
    plan = audio.batches(order) if order else [[index] for index in range(len(audio))]
    for indices, batch in stream(federation, audio, plan):
        features, lengths = models.cut().extract(models.build().eval(), batch)
        yield Frames(indices, batch, features, lengths)


def as_sent(federation: Federation, sent: Utterances) -> Iterator[Frames]:
    """Yield features as a client sent them."""
    for indices, batch in stream(federation, sent):
        yield Frames(indices, batch, batch["speech"], batch["speech_lengths"])


def vectors(frames: Iterator[Frames], utterances: int) -> np.ndarray:
    """Return mean and standard deviation over the frames of utterances, (utterances, 2 D)."""
    found: np.ndarray | None = None
    for part in frames:
        rows = pooled(part.features, part.lengths).double().cpu().numpy()
        if found is None:
            found = np.zeros((utterances, rows.shape[1]))
        found[part.indices] = rows
    return found


def stream(
    federation: Federation, data: Utterances, plan: list[list[int]] | None = None
) -> Iterator[tuple[list[int], Batch]]:
    """Stream batches with the indices of their utterances, as planned, or of similar length."""
    plan = plan or data.batches()
    return zip(plan, data.stream(plan, federation.task.need(DEVICE)), strict=True)


def _check(
    federation: Federation,
    reader: FeatureReader,
    sent: Sequence[str],
    audio: Utterances,
    where: Path,
) -> None:
    """Raise a `UserError` if sent utterances differ from the train data in names or lengths."""
    remedy = "restore the data that the experiment ran on"
    model = federation.task.need(MODELS).build()
    if set(reader.scp) != set(sent):
        problem = f"the {len(reader.scp)} utterances sent are not the {len(sent)} of the train data"
        raise UserError(problem, path=where, remedy=remedy)
    for name, frames, number in zip(audio.names, audio.frames, sent, strict=True):
        length = reader.num_frames(number)
        if length != positions(model, int(frames)):
            problem = f"{number!r} has {length} frames, which does not match {name!r}"
            raise UserError(problem, path=where, remedy=remedy)


def _texts(path: Path, names: Sequence[str], required: bool) -> list[str] | None:
    """Return the transcripts, even if no client has read them."""
    if not required and not path.exists():
        return None
    texts = read_table(path, values="optional")
    if missing := [name for name in names if name not in texts]:
        raise UserError(f"no entry of utterance {missing[0]!r}", path=path)
    return [texts[name] for name in names]
