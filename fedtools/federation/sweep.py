"""Many settings of FMP on the same stored scores: a table of word error rates.

No neural network runs: `fedtools.lm.reweighting.simulate` re-weights what was stored once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from fedtools.files.config import from_mapping
from fedtools.files.datadir import DataDir
from fedtools.files.errors import UserError
from fedtools.files.tables import write_tsv
from fedtools.lm.rescored import Rescored
from fedtools.lm.reweighting import Adaptation, Lists, Weights
from fedtools.lm.stream import Stream, open_stream
from fedtools.lm.talk import simulate
from fedtools.privacy.key import NoiseKey
from fedtools.privacy.options import NONE, Privacy
from fedtools.privacy.plan import Plan
from fedtools.privacy.releases import Releases
from fedtools.score.align import count_errors
from fedtools.score.bootstrap import interval, speaker_draws

FIGURES = ("words", "errors", "wer", "relative", "low", "high", "listed", "missed")
ROUNDS, GROUPS, SPAN = "rounds", "groups", "span"
# Of differential privacy, whose options are varied beside FMP's.
PRIVACY = tuple(one.name for one in fields(Privacy))


class Errors:
    """Word errors of hypotheses, each counted once, when it is asked for.

    Args:
        rescored: the hypotheses.
        text: what was said, by utterance.
    """

    def __init__(self, rescored: Rescored, text: Mapping[str, str]):
        self._hypotheses = rescored.hypotheses
        self._spoken = [text[name].split() for name in rescored.utterances]
        self.words = np.array([len(words) for words in self._spoken])
        self._known = np.full(len(self._hypotheses), -1)

    def of(self, best: np.ndarray) -> np.ndarray:
        """(utterances,) of the best hypotheses, by their numbers among all."""
        for index in np.flatnonzero(self._known[best] < 0):
            said = self._hypotheses[best[index]].split()
            self._known[best[index]] = count_errors(self._spoken[index], said).errors
        return self._known[best]


class Listed:
    """How often words of clients' own lists are said, and missed, after the lists were made.

    Args:
        stream: with lists.
        text: what was said, by utterance.
    """

    def __init__(self, stream: Stream, text: Mapping[str, str]):
        self._hypotheses, self._said = stream.rescored.hypotheses, []
        for client, run in stream.runs.items():
            own = {word for one in (stream.phrases or {}).get(client, []) for word in one.split()}
            for name in stream.rescored.utterances[run]:
                # What a list was made of is no news to it.
                said = [] if name in stream.made_of else text[name].split()
                self._said.append(Counter(word for word in said if word in own))
        self.count = sum(said.total() for said in self._said)

    def missed(self, best: np.ndarray) -> int:
        """Of listed words that were said, how many the best hypotheses lack."""
        return sum(
            (said - Counter(self._hypotheses[hypothesis].split())).total()
            for said, hypothesis in zip(self._said, best, strict=True)
            if said
        )


class Sweep:
    """A stream of rescored lists that settings are tried on.

    Args:
        folder: see `open_stream`; with text.
        fixed: options of `Weights`, `Adaptation`, `Privacy`, "rounds", "groups" and "span" that
            differ from their defaults.
        seed: of noise.
    """

    def __init__(self, folder: str | Path, fixed: Mapping[str, Any], seed: int = 0):
        self.stream = open_stream(folder)
        rescored = self.stream.rescored
        text = DataDir.read(folder, "text").text
        if lacking := [name for name in rescored.utterances if name not in text]:
            raise UserError(f"no entry of utterance {lacking[0]!r}", path=Path(folder) / "text")
        self.errors = Errors(rescored, text)
        self.listed = Listed(self.stream, text)
        self.fixed, self.seed = dict(fixed), seed
        self._lists: dict[Weights, Lists] = {}

    def best(self, options: Mapping[str, Any]) -> np.ndarray:
        """(utterances,) the best hypotheses under some options beside the fixed ones.

        Noise is drawn under a key that the seed gives: nothing is released here.
        """
        chosen = {ROUNDS: 10, GROUPS: "even", **self.fixed, **options}
        weights, adaptation, privacy = (
            from_mapping(
                kind,
                {one.name: chosen[one.name] for one in fields(kind) if one.name in chosen},
                "options",
            )
            for kind in (Weights, Adaptation, Privacy)
        )
        clock = chosen[GROUPS] == "clock"
        if clock and SPAN not in chosen:
            raise UserError("groups: clock needs span, a public number of seconds, such as 3600")
        if weights not in self._lists:
            self._lists = {weights: Lists(self.stream.rescored, weights, self.stream.covered())}
        groups = {
            client: self.stream.groups(client, chosen[ROUNDS], chosen[SPAN] if clock else None)
            for client in self.stream.runs
        }
        releases = None
        if privacy.mechanism != NONE:
            key = NoiseKey(hashlib.sha256(f"sweep {self.seed}".encode()).digest())
            releases = Releases(Plan(privacy, chosen[ROUNDS], not clock), key, "sweep")
        return simulate(self._lists[weights], groups, adaptation, releases)

    def by_client(self, values: np.ndarray) -> np.ndarray:
        """(clients,) sums of (utterances,) values."""
        return np.array([values[part].sum() for part in self.stream.runs.values()])

    def row(self, options: Mapping[str, Any], against: np.ndarray, seed: int) -> dict[str, object]:
        """The figures of some options, `FIGURES`.

        Args:
            against: (clients,) errors of the baseline; the relative change has an interval by
                drawing clients.
        """
        best = self.best(options)
        own = self.by_client(self.errors.of(best))
        words = self.by_client(self.errors.words)
        draws = speaker_draws(len(own), 1000, seed, "sweep")
        low, high = interval(100 * (draws @ own / (draws @ against) - 1))
        return {
            **options,
            "words": words.sum(),
            "errors": own.sum(),
            "wer": f"{100 * own.sum() / words.sum():.2f}",
            "relative": f"{100 * (own.sum() / against.sum() - 1):+.2f}",
            "low": "-" if np.isnan(low) else f"{low:+.2f}",
            "high": "-" if np.isnan(high) else f"{high:+.2f}",
            "listed": self.listed.count,
            "missed": self.listed.missed(best),
        }


def sweep(
    folder: str | Path,
    out: str | Path,
    fixed: Mapping[str, Any],
    varied: Mapping[str, Sequence[Any]],
    seed: int = 0,
) -> list[dict[str, object]]:
    """Try every combination of options; write a row for each.

    Args:
        folder: see `open_stream`; with text.
        out: the table, `varied` and `FIGURES`: WER in %, and its change against no adaptation (all
            else as in `fixed`) in % of that, with a 95 % interval over clients; how many words of
            clients' own lists were said, and missed.
        fixed, varied: options and values; see `Sweep`.
        seed: of intervals and noise.
    """
    tried = Sweep(folder, fixed, seed)
    against = tried.by_client(tried.errors.of(tried.best({"scale": 0.0, "mechanism": NONE})))
    rows = [tried.row(options, against, seed) for options in combinations(varied)]
    write_tsv(out, [*varied, *FIGURES], rows)
    return rows


def combinations(varied: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of values, the last option varying fastest."""
    for values in itertools.product(*varied.values()):
        yield dict(zip(varied, values, strict=True))


def tune(
    folder: str | Path, fixed: Mapping[str, Any], varied: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, Any], float]:
    """The combination with the fewest word errors on validation data, the first of equals.

    Returns:
        the options, and the WER in %.
    """
    tried = Sweep(folder, fixed)
    grid = [
        (options, tried.errors.of(tried.best(options)).sum()) for options in combinations(varied)
    ]
    best, errors = min(grid, key=lambda one: one[1])
    return best, 100 * errors / tried.errors.words.sum()
