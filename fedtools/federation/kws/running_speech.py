"""False accepts per hour of keyword models on running speech without keywords."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from fedtools.audio.features import audio_places, client_order
from fedtools.audio.pack import clip_wave
from fedtools.core.errors import UserError
from fedtools.core.progress import counted
from fedtools.core.tables import write_tsv
from fedtools.data.clips import RATE
from fedtools.data.datadir import DataDir
from fedtools.federation.federation import Federation
from fedtools.federation.kws.clip_scores import logits_after
from fedtools.models.keywords import inputs_of
from fedtools.score.detection import AN_HOUR, NEGATIVE, peaks, rejects_at, scores_of
from fedtools.tasks.parts import CLIPS, HEAR

ALARMS = ("utterance", "seconds", "word", "score")
CURVE = ("threshold", "false_rejects", "accepts_an_hour")
COLUMNS = ("round", "utterances", "left_out", "hours", *(f"rejects_at_{one:g}" for one in AN_HOUR))
# Ratio of the numbers of false accepts at successive points of a curve.
STEP = 1.25


@dataclass
class Speech:
    """Speech without keywords: name, data directory, used utterances, and number left out."""

    name: str
    data: DataDir
    utterances: list[str]
    left_out: int
    seconds: float = 0.0


@dataclass
class Listener:
    """A keyword model and its false accepts: utterance, second, word and score."""

    federation: Federation
    alarms: list[tuple[str, float, str, float]] = field(default_factory=list)

    @property
    def classes(self) -> list[str]:
        """Return the classes of the experiment."""
        return self.federation.task.need(CLIPS).classes

    @property
    def kind(self) -> tuple[object, ...]:
        """Return the settings that determine features, which listeners of one kind share."""
        model = self.federation.experiment.options.model
        own = self.federation.experiment.path if model.get("cache_frozen") else None
        return inputs_of(model), self.federation.task.need(CLIPS).samples, own


def speech_without(
    name: str, folder: Path, keywords: Sequence[str], others: Sequence[str]
) -> Speech:
    """Select the utterances of a data directory without keywords or other given words.

    Args:
        name: the name of the speech.
        folder: the data directory.
        keywords, others: words that must not be in the transcripts.

    Raises:
        UserError: if an utterance has no transcript, or no utterance is left.
    """
    data = DataDir.read(folder)
    words = {word.casefold() for word in (*keywords, *others)}
    order = client_order(data)
    for utterance in order:
        if utterance not in data.text:
            problem = f"no transcript of {utterance!r}"
            remedy = "false accepts need transcripts, to exclude utterances with keywords"
            raise UserError(problem, path=data.path / "text", remedy=remedy)
    spoken = {one: {word.strip(".,;:?!\"'()").casefold() for word in data.text[one].split()}
              for one in order}  # fmt: skip
    kept = [one for one in order if not spoken[one] & words]
    if not kept:
        raise UserError("no utterance without a keyword", path=data.path / "text")
    return Speech(name, data, kept, len(order) - len(kept))


def count_false_accepts(
    federations: Sequence[Federation],
    name: str,
    folder: Path,
    *,
    split: str = "test",
    hop_seconds: float = 0.1,
    leave_out: Sequence[str] = (),
) -> list[dict[str, object]]:
    """Count the false accepts of experiments' last models on running speech.

    A window of the length of a clip slides over each utterance, and at most one word is accepted
    within this length. Writes `EXP/alarms_<name>.tsv`, `curve_<name>.tsv` and
    `false_alarms_<name>.tsv`.

    Args:
        federations: federations of keyword spotting, with the same keywords.
        name: the name of the speech in file names.
        folder: a data directory with transcripts.
        split: the clips of keywords on which false rejects are counted.
        hop_seconds: the distance between windows.
        leave_out: words that sound like a keyword; utterances with them are left out too.

    Returns:
        a row for each experiment, see `COLUMNS`.

    Raises:
        UserError: if an experiment has another task, or the keywords differ.
    """
    listeners = [_listener(one) for one in federations]
    keywords = _keywords(listeners[0])
    for one in listeners:
        if _keywords(one) != keywords:
            problem = f"keywords differ from those of {listeners[0].federation.experiment.path}"
            raise UserError(problem, path=one.federation.experiment.path)
    speech = speech_without(name, folder, sorted(keywords), leave_out)
    with federations[0].settings():
        _listen(listeners, speech, max(1, round(hop_seconds * RATE)))
    return [_written(one, speech, split) for one in listeners]


def _listen(listeners: Sequence[Listener], speech: Speech, hop: int) -> None:
    """Slide over all utterances; listeners of one kind share their features."""
    for utterance, wave in _waves(speech):
        speech.seconds += len(wave) / RATE
        features: dict[tuple[object, ...], torch.Tensor] = {}
        for one in listeners:
            if (kind := one.kind) not in features:
                corpus = one.federation.task.need(CLIPS)
                windows = windows_of(wave, corpus.samples, hop)
                features[kind] = corpus.made(torch.from_numpy(windows).float())
            _hear(one, utterance, features[kind], hop)


def windows_of(wave: np.ndarray, samples: int, hop: int) -> np.ndarray:
    """Cut int16 samples (N,) into windows (windows, samples), the last one padded with zeros."""
    count = 1 + max(0, math.ceil((len(wave) - samples) / hop))
    filled = np.zeros((count - 1) * hop + samples, np.int16)
    filled[: len(wave)] = wave
    return np.lib.stride_tricks.sliding_window_view(filled, samples)[::hop].copy()


def _listener(federation: Federation) -> Listener:
    federation.task.need(HEAR)
    federation.load_result(None, federation.experiment.result_round())
    return Listener(federation)


def _keywords(listener: Listener) -> set[str]:
    return set(listener.classes) - set(NEGATIVE)


def _waves(speech: Speech) -> Iterator[tuple[str, np.ndarray]]:
    places = audio_places(speech.data, speech.utterances)
    for utterance in counted(speech.utterances, f"hear {speech.name}", "utterances"):
        yield utterance, clip_wave(*places[utterance]).samples


def _hear(listener: Listener, utterance: str, features: torch.Tensor, hop: int) -> None:
    """Add a model's false accepts in an utterance to its alarms."""
    task = listener.federation.task
    logits = task.need(HEAR)(features).numpy()
    scores, best = scores_of(logits, listener.classes)
    apart = math.ceil(task.need(CLIPS).samples / hop)
    for step in sorted(peaks(scores, apart)):
        word = listener.classes[int(best[step])]
        listener.alarms.append((utterance, step * hop / RATE, word, float(scores[step])))


def _written(listener: Listener, speech: Speech, split: str) -> dict[str, object]:
    """Write the false accepts of an experiment's model; return its row."""
    federation, name = listener.federation, speech.name
    experiment, hours = federation.experiment, speech.seconds / 3600
    number = experiment.result_round()
    clips = federation.task.need(CLIPS).features(split).clips
    scores, _ = scores_of(logits_after(federation, split, number), clips.classes)
    positives = scores[~np.isin(clips.classes, NEGATIVE)[clips.labels]]
    heard = np.array([score for *_, score in listener.alarms])
    cells = ((one, f"{at:.2f}", word, f"{score:.4f}") for one, at, word, score in listener.alarms)
    rows = [dict(zip(ALARMS, row, strict=True)) for row in cells]
    write_tsv(experiment.path / f"alarms_{name}.tsv", ALARMS, rows)
    write_tsv(experiment.path / f"curve_{name}.tsv", CURVE, _curve(positives, heard, hours))
    row: dict[str, object] = {"round": number, "utterances": len(speech.utterances)}
    row |= {"left_out": speech.left_out, "hours": f"{hours:.3f}"}
    for rate in AN_HOUR:
        found = rejects_at(positives, heard, math.floor(rate * hours))
        row[f"rejects_at_{rate:g}"] = f"{found:.4f}"
    write_tsv(experiment.path / f"false_alarms_{name}.tsv", COLUMNS, [row])
    return row


def _curve(positives: np.ndarray, heard: np.ndarray, hours: float) -> Iterator[dict[str, object]]:
    """Yield points of the curve of false rejects in % by false accepts per hour."""
    ordered = np.sort(heard)[::-1]
    allowed = 0
    while allowed < len(ordered):
        rejects = rejects_at(positives, heard, allowed)
        cells = (f"{ordered[allowed]:.4f}", f"{rejects:.4f}", f"{allowed / hours:.4f}")
        yield dict(zip(CURVE, cells, strict=True))
        allowed = max(allowed + 1, math.floor(allowed * STEP))
