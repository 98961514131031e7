"""Reference for attacks on models: their trials, decided by the speech that models learnt from.

No attack on models can be expected to find more about a speaker than the best verifier finds in the
speech. The verifier is an external one, see `fedtools.speaker.resemblyzer`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtools.attack.speakers.verify import judge, write_figures, write_scores
from fedtools.audio.features import audio_places
from fedtools.audio.perturb import unperturbed
from fedtools.audio.wave import read_wave, resample
from fedtools.core.errors import UserError, some
from fedtools.core.progress import Count
from fedtools.core.recipe_sections import Bootstrap
from fedtools.data.ark import write_ark
from fedtools.data.datadir import DataDir, byte_order, invert, write_table
from fedtools.score.trials import Trials
from fedtools.speaker.resemblyzer import RATE, VoiceEncoder, mean_embedding

NAME = "speech"


@dataclass(frozen=True)
class Client:
    """A client's speaker, and the arguments of `read_wave` for each utterance."""

    speaker: str
    utterances: dict[str, tuple[Any, ...]]


def read_clients(folders: Sequence[Path]) -> dict[str, Client]:
    """Read the clients of some data directories that have one speaker each.

    Only utterances at speed 1 are taken.

    Raises:
        UserError: if a table is missing or inconsistent, or a client is in two of the directories.
    """
    clients: dict[str, Client] = {}
    for folder in folders:
        data = DataDir.read(folder)
        for name in ("utt2spk", "utt2client", "wav.scp"):
            if not getattr(data, name.replace(".", "_")):
                raise UserError("missing", path=folder / name)
        own = {utt for utt, name in unperturbed(data).items() if name == utt}
        for client, utts in invert(data.utt2client).items():
            if client in clients:
                problem = f"{client!r} is also a client of another folder"
                raise UserError(problem, path=folder / "utt2client")
            kept = [utt for utt in utts if utt in own]
            speakers = {data.utt2spk[utt] for utt in kept}
            if len(speakers) == 1:
                clients[client] = Client(speakers.pop(), audio_places(data, kept))
    return clients


def embed_clients(
    encoder: VoiceEncoder, clients: Mapping[str, Client], names: Sequence[str]
) -> np.ndarray:
    """Compute embeddings of some clients, means over utterances of length 1: (clients, 256).

    Utterances that are digital silence are left out, and reported on stderr.

    Raises:
        UserError: if audio cannot be read, or a client has nothing but silence.
    """
    rows, silent = [], []
    total = sum(len(clients[name].utterances) for name in names)
    with Count("embed speech", total, "utterances") as bar:
        for name in names:
            found = []
            for utt, place in clients[name].utterances.items():
                samples, rate, _ = read_wave(*place)
                if samples.any():
                    found.append(encoder.embed(resample(samples, rate, RATE)))
                else:
                    silent.append(utt)
                bar.advance()
            if not found:
                raise UserError(f"all speech of client {name!r} is silence")
            rows.append(mean_embedding(found))
    if silent:
        print(f"left out because they are silent: {some(silent)}", file=sys.stderr)
    return np.stack(rows)


def attack(
    folders: Sequence[Path],
    lists: Sequence[Path],
    out: Path,
    *,
    resamples: int = Bootstrap.resamples,
    seed: int = 0,
) -> list[Mapping[str, object]]:
    """Decide lists of trials by the cosine of their models' speech; write OUT/speech.tsv.

    Args:
        folders: data directories of the clients that the models are of.
        lists: lists of trials, `trials.<kind>` as other attacks write them.
        out: directory that also gets the embeddings in speech.ark and .scp, and for each kind the
            scores of trials in speech.<kind> and a DET curve in speech.<kind>.det.tsv.
        resamples, seed: number and random seed of resamples for intervals.

    Returns:
        the rows written.

    Raises:
        UserError: if two lists are of one kind, a model is not of a client with one speaker, or
            Resemblyzer is missing.
    """
    clients = read_clients(folders)
    speakers = {name: client.speaker for name, client in clients.items()}
    trials: dict[str, Trials] = {}
    for path in lists:
        kind = path.name.removeprefix("trials.")
        if kind in trials:
            raise UserError(f"two lists of {kind} trials", path=path, remedy="give one")
        trials[kind] = Trials.read(path, speakers)
    names = byte_order({one for some in trials.values() for one in (*some.enrolled, *some.test)})
    embeddings = embed_clients(VoiceEncoder(), clients, names)
    matrices = ((name, row[None]) for name, row in zip(names, embeddings, strict=True))
    write_table(out / f"{NAME}.scp", write_ark(out / f"{NAME}.ark", matrices))
    matrix = embeddings @ embeddings.T
    rows, rest = [], dict.fromkeys(("layer", "linked%", "singled%", "speakers"), "-")
    for kind, own in trials.items():
        scores = own.scores(matrix, names, names)
        figures = judge(scores, own, speakers, resamples=resamples, seed=seed)
        rows.append({**rest, "scores": "cosine", "trials": kind, **figures})
        write_scores(out / f"{NAME}.{kind}", own, scores)
    return write_figures(out, NAME, rows)
