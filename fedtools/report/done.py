"""The training behind a row of a table: computation as papers count it, speech, averaged rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from fedtools.data.datadir import DataDir, read_table
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.ledger import SERVER_ROW, LedgerRow
from fedtools.exchange.states import load_state
from fedtools.methods import make_method
from fedtools.tasks.facts import ALL


def server_share(experiment: Experiment) -> float:
    """Return the share of a model's values that the server trains.

    It is 1, except if the server trains the shared values on features that clients send: Zhu et al.
    (Interspeech 2022) count an epoch of half a model as half an epoch.
    """
    options = experiment.options
    method = make_method(options.method, options.method_conf, experiment.path / "config.yaml")
    numbers = range(1, (method.rounds or options.rounds) + 1)
    if not any(method.phase(number).on_features for number in numbers):
        return 1.0
    shared, whole = (
        sum(value.size for value in load_state(path).values())
        for path in (experiment.round(1).global_state, experiment.init)
    )
    return shared / whole


def seconds_of(experiment: Experiment, rows: Sequence[LedgerRow]) -> float:
    """Return the speech that all training of an experiment went through, in seconds.

    Speech counts once per epoch, of a client or of the server; NaN if the training data is missing
    or does not have the utterances' durations.
    """
    train = experiment.options.data.get("train")
    speech = _speech(Path(train)) if train else {}
    if not speech:
        return math.nan
    # The server has all data, or the features of all whose messages counted.
    whole = math.fsum(speech.values())
    return math.fsum(
        row.server_epochs * whole
        if row.client == SERVER_ROW
        else row.client_epochs * speech.get(row.client, math.nan)
        for row in rows
    )


@lru_cache(maxsize=8)
def _speech(folder: Path) -> Mapping[str, float]:
    """Return client -> seconds of its speech; {} if they are not known."""
    if not (folder / "utt2dur").exists():
        return {}
    clients = ("utt2client",) if (folder / "utt2client").exists() else ()
    data, found = DataDir.read(folder, *clients), dict[str, list[float]]()
    for name, seconds in read_table(folder / "utt2dur").items():
        found.setdefault(data.utt2client.get(name, ALL), []).append(float(seconds))
    return {client: math.fsum(values) for client, values in found.items()}


def rounds_text(averaged: Sequence[Mapping[str, Sequence[int]]]) -> str:
    """Format how many rounds' models were averaged, and which rounds, over clients and seeds.

    Args:
        averaged: for each seed, see `fedtools.federation.evaluations.read_averaged`.
    """
    chosen = []
    for one in averaged:
        # If clients have their own models, the one for all is for newcomers.
        own = [rounds for client, rounds in one.items() if client != ALL]
        chosen += own or list(one.values())
    if not chosen:
        return "-"
    sizes, numbers = {len(one) for one in chosen}, [number for one in chosen for number in one]
    return f"{_span(sizes)} of {_span(numbers)}"


def _span(numbers: Sequence[int] | set[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least}–{most}"


def speech_text(seconds: float) -> str:
    """Format seconds of speech as hours or minutes; a dash for none, or if not known."""
    if not seconds or math.isnan(seconds):
        return "-"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
