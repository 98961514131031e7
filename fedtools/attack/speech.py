"""What speech itself tells: the trials of models, decided by the audio that each was trained on.

No attack on models is asked to find more of a speaker than the best verifier finds in the speech.
The verifier is none of ours, see `fedtools.speaker.resemblyzer`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtools.attack.verify import judge, write_figures, write_scores
from fedtools.audio.features import audio_places
from fedtools.audio.wave import read_wave, resample
from fedtools.files.ark import write_ark
from fedtools.files.datadir import DataDir, byte_order, invert, write_table
from fedtools.files.errors import UserError, some
from fedtools.files.perturb import unperturbed
from fedtools.files.progress import Count
from fedtools.files.sections import Bootstrap
from fedtools.score.trials import Trials
from fedtools.speaker.resemblyzer import RATE, VoiceEncoder, mean_embedding

NAME = "speech"


@dataclass(frozen=True)
class Client:
    """Who speaks a client's utterances, and where they are: the arguments of `read_wave`."""

    speaker: str
    utterances: dict[str, tuple[Any, ...]]


def read_clients(folders: Sequence[Path]) -> dict[str, Client]:
    """The clients of some data directories who have one speaker each.

    Of a recording that is there at many speeds, the one at speed 1 is taken.

    Raises:
        UserError: if a table is missing or does not fit, or a client is in two of the directories.
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
                problem = f"{client!r} is a client of another folder, too"
                raise UserError(problem, path=folder / "utt2client")
            kept = [utt for utt in utts if utt in own]
            speakers = {data.utt2spk[utt] for utt in kept}
            if len(speakers) == 1:
                clients[client] = Client(speakers.pop(), audio_places(data, kept))
    return clients


def embed_clients(
    encoder: VoiceEncoder, clients: Mapping[str, Client], names: Sequence[str]
) -> np.ndarray:
    """The embeddings of some clients, (clients, 256), each of length 1: means over utterances.

    Utterances that are digital silence are left out, and named.

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
        print(f"left out, as they are silence: {some(silent)}", file=sys.stderr)
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
        folders: data directories, whose clients the models are.
        lists: trials, `trials.<kind>` as other attacks write them.
        out: gets also the embeddings in speech.ark and .scp, and of each kind a score for each
            trial, and a DET curve, in speech.<kind> and speech.<kind>.det.tsv.
        resamples, seed: of intervals.

    Returns:
        the rows that were written.

    Raises:
        UserError: if two lists are of one kind, a model is no client with one speaker, or there is
            no Resemblyzer.
    """
    clients = read_clients(folders)
    speakers = {name: client.speaker for name, client in clients.items()}
    trials: dict[str, Trials] = {}
    for path in lists:
        kind = path.name.removeprefix("trials.")
        if kind in trials:
            raise UserError(f"two lists of {kind} trials", path=path, remedy="name another one")
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
