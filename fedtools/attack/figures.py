"""The figures of attacks, with intervals over speakers."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedtools.score.bootstrap import MIN_SPEAKERS, interval, speaker_draws

COLUMNS = (
    "client",
    "attack",
    "measure",
    "value",
    "low",
    "high",
    "chance",
    "speakers",
    "utterances",
)
_UNKNOWN = (math.nan, math.nan)


class Figure(NamedTuple):
    """One measure of one attack; NaN is what is not known.

    `low` and `high` bound a 95 % interval; `chance` is what vectors that know nothing would give;
    `speakers` and `utterances` are those that the value is a mean over.
    """

    attack: str
    measure: str
    value: float
    low: float
    high: float
    chance: float
    speakers: int
    utterances: int

    def row(self, client: str) -> dict[str, object]:
        """The columns of `COLUMNS`, written out: % and dB with two digits, others with four."""
        digits = 2 if self.measure.endswith("%") or "dB" in self.measure else 4
        numbers = {name: getattr(self, name) for name in ("value", "low", "high", "chance")}
        cells = {
            name: "-" if math.isnan(value) else f"{value:.{digits}f}"
            for name, value in numbers.items()
        }
        return {"client": client, **self._asdict(), **cells}


class Speakers:
    """The speakers of some utterances, and draws of them with replacement.

    Args:
        numbers: (utterances,) the speaker of each, from 0.
        resamples: number of draws.
        seed: the draws are a function of the seed and the name.
        name: of the client.
    """

    def __init__(self, numbers: np.ndarray, resamples: int, seed: int, name: str):
        self.numbers = numbers
        self.count = int(numbers.max()) + 1
        self.draws = speaker_draws(self.count, resamples, seed, name)

    def bounds(self, values: np.ndarray, speakers: int) -> tuple[float, float]:
        """The interval of (draws,) values; unknown if they are of too few speakers."""
        return _UNKNOWN if speakers < MIN_SPEAKERS else interval(values)

    def ratio(
        self,
        attack: str,
        measure: str,
        sums: np.ndarray,
        counts: np.ndarray,
        chance: float = math.nan,
        factor: float = 1.0,
    ) -> Figure:
        """A sum over utterances over a count, e.g. errors over words.

        Args:
            sums, counts: (utterances,); speakers and utterances with a count of 0 are not counted.
            factor: 100 makes percent.
        """
        by_speaker = [
            np.bincount(self.numbers, one, minlength=self.count) for one in (sums, counts)
        ]
        with np.errstate(divide="ignore", invalid="ignore"):
            value = factor * float(np.divide(sums.sum(), counts.sum()))
            drawn = factor * np.divide(*(self.draws @ one for one in by_speaker))
        speakers = int((by_speaker[1] > 0).sum())
        bounds = self.bounds(np.where(np.isfinite(drawn), drawn, np.nan), speakers)
        value = value if math.isfinite(value) else math.nan
        return Figure(attack, measure, value, *bounds, chance, speakers, int((counts > 0).sum()))
