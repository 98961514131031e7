"""Equal error rates of several attacks, and their differences on the same speakers.

Two rates whose intervals overlap may still differ, since they are of the same people. Speakers are
drawn once for all attacks, with replacement, and each draw gives a rate of every attack and a
difference. Where several seeds are averaged, their rates vary as well, and intervals are over seeds
and speakers (`fedtools.score.crossed`); differences are then paired by seed. A rate without an
error in any draw has the exact binomial interval, of as many independent trials as there are of the
rarer kind. The interval of a difference depends on the draws and the seeds alone: attacks without
an error in any draw do not differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtools.core.errors import UserError
from fedtools.core.recipe_sections import Bootstrap
from fedtools.core.tables import write_tsv
from fedtools.core.text_files import stream_lines
from fedtools.data.datadir import read_table
from fedtools.score.bootstrap import interval, speaker_draws
from fedtools.score.crossed import over_seeds
from fedtools.score.trials import Trials
from fedtools.score.verification import binomial_bounds, drawn_error_rates, equal_error_rate

COLUMNS = (
    "attack", "EER%", "low", "high", "least", "most", "difference", "dlow", "dhigh", "targets",
    "others", "speakers", "seeds",
)  # fmt: skip


class Decided(NamedTuple):
    """Trials decided by an attack: scores and targets, (trials,), and speakers, (trials, 2)."""

    scores: np.ndarray
    targets: np.ndarray
    speakers: np.ndarray


def read_decided(path: Path) -> Decided:
    """Read a file of scores, with trials.<kind> and model2speaker next to it.

    Trials without a score are left out: with defence `mean`, those of models that share an update.

    Raises:
        UserError: if one of the three is missing or malformed, or a score belongs to no trial.
    """
    owners = read_table(path.parent / "model2speaker")
    trials = Trials.read(path.with_name(f"trials.{path.name.rpartition('.')[2]}"), owners)
    pairs = zip(trials.enrolled, trials.test, strict=True)
    places = {pair: place for place, pair in enumerate(pairs)}
    scores: dict[int, float] = {}
    for number, line in enumerate(stream_lines(path), 1):
        try:
            enrolled, test, score = line.split(" ")
            value = float(score)
        except ValueError:
            raise UserError("expected `<model> <model> <score>`", path=path, line=number) from None
        place = places.get((enrolled, test))
        if place is None or place in scores:
            which = "a second score of" if place in scores else "no trial:"
            raise UserError(f"{which} {enrolled} {test}", path=path, line=number)
        scores[place] = value
    scored = np.array(list(scores), int)
    if len(set(trials.targets[scored])) < 2:
        raise UserError("no scores of target trials, or none of non-target trials", path=path)
    return Decided(
        np.array(list(scores.values())), trials.targets[scored], trials.speakers(owners)[scored]
    )


def compare(
    attacks: Sequence[tuple[str, Path]],
    out: Path,
    *,
    resamples: int = Bootstrap.resamples,
    seed: int = 0,
) -> list[dict[str, object]]:
    """Write a table of attacks: rates, and differences from the first, in percentage points.

    Args:
        attacks: names, and files of scores; those of one name are seeds, whose rates are averaged.
        out: the TSV. Columns: 95 % intervals of the rate and of the difference, over speakers, and
            over seeds where there are several; the lowest and the highest rate of a seed. A
            difference of attacks of different numbers of seeds has no interval.
        resamples, seed: number and random seed of the draws.
    """
    names = list(dict.fromkeys(name for name, _ in attacks))
    found = {name: [read_decided(path) for one, path in attacks if one == name] for name in names}
    every = [one for own in found.values() for one in own]
    people = np.unique(np.concatenate([one.speakers.ravel() for one in every]))
    draws = speaker_draws(len(people), resamples, seed, "differences")
    rows: list[dict[str, object]] = []
    base: tuple[np.ndarray, np.ndarray] | None = None
    for name, own in found.items():
        rates = np.array([equal_error_rate(one.scores, one.targets) for one in own])
        drawn = np.stack([_drawn(one, people, draws) for one in own])
        base = base or (rates, drawn)
        cells = {"EER%": rates.mean(), "least": rates.min(), "most": rates.max()}
        fewest = min(min(one.targets.sum(), (~one.targets).sum()) for one in own)
        low, high = _bounds(rates, drawn, len(people))
        if low == high:
            low, high = binomial_bounds(rates.mean() / 100, int(fewest))
        cells["low"], cells["high"] = low, high
        if rows:
            cells["difference"] = rates.mean() - base[0].mean()
            if len(rates) == len(base[0]):
                apart = rates - base[0], drawn - base[1]
                cells["dlow"], cells["dhigh"] = _bounds(*apart, len(people), -100.0)
        shown = {key: "-" if np.isnan(value) else f"{value:.2f}" for key, value in cells.items()}
        counts = {"targets": int(own[0].targets.sum()), "others": int((~own[0].targets).sum())}
        known = {"speakers": len(np.unique(own[0].speakers)), "seeds": len(own)}
        rows.append({**dict.fromkeys(COLUMNS, "-"), "attack": name, **shown, **counts, **known})
    write_tsv(out, COLUMNS, rows)
    return rows


def _bounds(
    values: np.ndarray, drawn: np.ndarray, people: int, least: float = 0.0
) -> tuple[float, float]:
    """Return an interval of the mean of seeds' values in %, over speakers, and seeds if several.

    Args:
        values: (seeds,).
        drawn: (seeds, draws), of the same draws of speakers.
        people: number of speakers.
        least: the least value that there can be; the most is 100.
    """
    mean = drawn.mean(0)
    if len(values) == 1 or np.isnan(mean).all():
        return interval(mean)
    both = np.nanvar(drawn - mean, 1).sum() / (len(values) - 1)
    _, low, high, _ = over_seeds(values, float(np.nanvar(mean)), float(both), people - 1)
    return max(low, least), min(high, 100.0)


def _drawn(one: Decided, people: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return rates of draws in %, (draws,); NaN for fewer than ten people, who are not drawn."""
    if np.isnan(draws).any():
        return np.full(len(draws), np.nan)
    return drawn_error_rates(one.scores, one.targets, np.searchsorted(people, one.speakers), draws)
