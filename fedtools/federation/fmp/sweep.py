"""Sweeps over settings of FMP on the same stored scores, as a table of word error rates.

No neural network runs: `simulation` re-weights scores that were stored once.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedtools.core.config import from_mapping, write_yaml
from fedtools.core.errors import UserError
from fedtools.core.recipe_sections import Bootstrap
from fedtools.core.tables import write_tsv
from fedtools.data.symbols import words_of
from fedtools.federation.fmp.simulation import simulate_draws
from fedtools.lm.reweighting import Lists, ListWeights, warn_of_no_lm
from fedtools.lm.stream import Stream, open_stream, spoken
from fedtools.lm.word_scores import NBEST, Rescored
from fedtools.methods.base import COUNTS
from fedtools.methods.fmp import FMP, Adaptation
from fedtools.privacy.key import NoiseKey, key_path, make_key, read_key
from fedtools.privacy.marginals import PAPER_WARNING
from fedtools.privacy.options import NONE, PAPER, Privacy
from fedtools.privacy.record import Nonce
from fedtools.privacy.releases import Releases
from fedtools.score.align import count_errors
from fedtools.score.bootstrap import interval, speaker_draws
from fedtools.tasks.identity import of_rescored

FIGURES = ("words", "errors", "wer", "relative", "low", "high", "listed", "missed")
DRAW = "draw"
ROUNDS, GROUPS, SPAN = "rounds", "groups", "span"
# The options of differential privacy, which can be varied in addition to FMP's.
PRIVACY = tuple(one.name for one in fields(Privacy))
# Options of the baseline without adaptation, whatever the other options are.
UNADAPTED: dict[str, Any] = {"scale": 0.0, "alpha": 0.0, "beta": 0.0, "doubt": 0.0}
UNADAPTED |= {"mechanism": NONE, GROUPS: "even"}


class Errors:
    """Word errors of hypotheses, each counted once at its first use.

    Args:
        rescored: the hypotheses.
        text: utterance -> reference.
    """

    def __init__(self, rescored: Rescored, text: Mapping[str, str]):
        self._hypotheses = rescored.hypotheses
        self._spoken = [words_of(text[name]) for name in rescored.utterances]
        self.words = np.array([len(words) for words in self._spoken])
        self._known = np.full(len(self._hypotheses), -1)

    def of(self, best: np.ndarray) -> np.ndarray:
        """Return the errors (utterances,) of the best hypotheses, given by their indices."""
        for index in np.flatnonzero(self._known[best] < 0):
            hypothesis = words_of(self._hypotheses[best[index]])
            self._known[best[index]] = count_errors(self._spoken[index], hypothesis).errors
        return self._known.take(best)


class Listed:
    """Counts of clients' listed words that were said, and missed, after the lists were made.

    Args:
        stream: a stream with lists.
        text: utterance -> reference.
    """

    def __init__(self, stream: Stream, text: Mapping[str, str]):
        self._hypotheses, self._listed = stream.rescored.hypotheses, []
        for client, run in stream.runs.items():
            own = {word for one in (stream.phrases or {}).get(client, []) for word in words_of(one)}
            for name in stream.rescored.utterances[run]:
                # Utterances that a list was made of are not counted.
                words = [] if name in stream.made_of else words_of(text[name])
                self._listed.append(Counter(word for word in words if word in own))
        self.count = sum(counts.total() for counts in self._listed)

    def missed(self, best: np.ndarray) -> int:
        """Count the listed words that were said but are not in the best hypotheses."""
        return sum(
            (counts - Counter(words_of(self._hypotheses[hypothesis]))).total()
            for counts, hypothesis in zip(self._listed, best, strict=True)
            if counts
        )


class Setting(NamedTuple):
    """A setting to try: a method, and its number of rounds."""

    method: FMP
    rounds: int


def setting_of(options: Mapping[str, Any]) -> Setting:
    """Create a setting from options of a sweep, with the checks of an experiment.

    Args:
        options: options of `FMP` and of its privacy, and "rounds", if not the defaults.

    Raises:
        UserError: if the options are invalid.
    """
    chosen = dict(options)
    rounds = chosen.pop(ROUNDS, 10)
    privacy = {name: chosen.pop(name) for name in PRIVACY if name in chosen}
    if "release" in privacy:
        chosen["sends"] = privacy.pop("release")
    method = from_mapping(FMP, {**chosen, "privacy": privacy}, "options")
    try:
        method.check("rescore", (COUNTS,), {})
        method.plan(rounds)
    except ValueError as error:
        raise UserError(str(error), path="options") from None
    return Setting(method, rounds)


def settings_of(
    fixed: Mapping[str, Any], varied: Mapping[str, Sequence[Any]]
) -> list[tuple[dict[str, Any], Setting]]:
    """Return every combination of varied options, with its setting including the fixed ones.

    Prints a warning if a setting uses the paper's mechanism.
    """
    found = [
        (options, setting_of({**fixed, **options}))
        for options in (
            dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())
        )
    ]
    if any(one.method.protection.mechanism == PAPER for _, one in found):
        print(f"warning: {PAPER_WARNING}", file=sys.stderr)
    return found


class Sweep:
    """A stream of rescored lists on which to try settings.

    Args:
        folder: a stream with text, see `open_stream`.
        out: the table of results. The nonce of noise is kept in OUT.nonce, so that a repeated sweep
            gives the same table.
        seed: the random seed of noise.
    """

    def __init__(self, folder: str | Path, out: str | Path, seed: int = 0):
        self._folder, self._nonce = Path(folder), Path(f"{out}.nonce")
        self.stream = open_stream(folder)
        rescored = self.stream.rescored
        text = spoken(folder, rescored.utterances)
        self.errors = Errors(rescored, text)
        if not self.errors.words.any():
            remedy = "give a stream with transcripts"
            raise UserError(
                "no words in the transcripts", path=Path(folder) / "text", remedy=remedy
            )
        self.listed = Listed(self.stream, text)
        self.seed = seed
        self._lists: dict[ListWeights, Lists] = {}

    def best(self, setting: Setting) -> np.ndarray:
        """Compute the best hypotheses (utterances,) under a setting and its first noise draw."""
        best: np.ndarray = self.best_of_draws(setting, 1)[0]
        return best

    def best_of_draws(self, setting: Setting, draws: int) -> np.ndarray:
        """Compute the best hypotheses (draws, utterances); without noise there is one draw.

        Noise is drawn under the user's key, as in an experiment, but counts stay in memory. The
        results that are written, errors against the references, are not protected.
        """
        (method, rounds), (lists, groups) = setting, self.clients(setting)
        releases: list[Releases | None] = [None]
        if method.protection.mechanism != NONE:
            plan, adaptation = method.plan(rounds), method.part(Adaptation)
            # `doubt` is not in the label, so that its values are compared under equal noise.
            label = repr((*self._label, method.part(ListWeights), adaptation, plan, method.clock))
            releases = [Releases(plan, self._key, label, draw) for draw in range(1, draws + 1)]
        return simulate_draws(method, lists, groups, releases)[0]

    def clients(self, setting: Setting) -> tuple[Lists, dict[str, list[slice]]]:
        """Return the lists under a setting's weights, and each client's groups of utterances."""
        method, rounds = setting
        weights = method.part(ListWeights)
        if weights not in self._lists:
            self._lists = {weights: Lists(self.stream.rescored, weights, self.stream.covered())}
        groups = {
            client: self.stream.groups(client, rounds, method.clock) for client in self.stream.runs
        }
        return self._lists[weights], groups

    @cached_property
    def _key(self) -> NoiseKey:
        path = key_path()
        make_key(path)
        return read_key(path)

    @cached_property
    def _label(self) -> tuple[str, str, int, dict[str, str]]:
        """Return the noise label without the setting; draw a nonce the first time."""
        nonce = Nonce.kept(self._nonce)
        return "sweep", nonce.text, self.seed, of_rescored(self._folder, False)

    def by_client(self, values: np.ndarray) -> np.ndarray:
        """Sum values (utterances,) by client, (clients,)."""
        return np.array([values[part].sum() for part in self.stream.runs.values()])

    def row(self, best: np.ndarray, against: np.ndarray, seed: int) -> dict[str, object]:
        """Compute the `FIGURES` of best hypotheses.

        Args:
            best: the best hypotheses, (utterances,).
            against: errors of the baseline, (clients,), for the relative change and its bootstrap
                interval over clients.
            seed: the random seed of the interval.
        """
        own = self.by_client(self.errors.of(best))
        words = self.by_client(self.errors.words)
        draws = speaker_draws(len(own), Bootstrap.resamples, seed, "sweep")
        # Without errors of the baseline there is no relative change.
        with np.errstate(divide="ignore", invalid="ignore"):
            change = 100 * (np.divide(own.sum(), against.sum()) - 1)
            low, high = interval(100 * (draws @ own / (draws @ against) - 1))
        signed = [f"{value:+.2f}" if np.isfinite(value) else "-" for value in (change, low, high)]
        return {
            "words": words.sum(),
            "errors": own.sum(),
            "wer": f"{100 * own.sum() / words.sum():.2f}",
            **dict(zip(("relative", "low", "high"), signed, strict=True)),
            "listed": self.listed.count,
            "missed": self.listed.missed(best),
        }


def _warn_of_no_lm(
    tried: Sweep, settings: Sequence[tuple[dict[str, Any], Setting]], folder: str | Path
) -> None:
    """Warn once if settings give weight to a language model without scores in the lists."""
    shared = (one.method.part(ListWeights) for _, one in settings)
    if one := next((weights for weights in shared if 0 < weights.nnlm < 1), None):
        warn_of_no_lm(tried.stream.rescored, one, Path(folder) / NBEST)


def sweep(
    folder: str | Path,
    out: str | Path,
    fixed: Mapping[str, Any],
    varied: Mapping[str, Sequence[Any]],
    seed: int = 0,
    draws: int = 1,
) -> list[dict[str, object]]:
    """Try every combination of options; write a row for each combination and noise draw.

    Args:
        folder: a stream with text, see `open_stream`.
        out: the table, with columns `varied` and `FIGURES`: WER in %; its relative change in %
            against no adaptation with otherwise `fixed` options, with a 95 % interval over clients;
            and the numbers of words of clients' lists that were said, and missed. With several
            draws there is a column `DRAW` before these.
        fixed, varied: options and values; see `setting_of`.
        seed: the random seed of intervals and noise.
        draws: the number of noise draws of each combination with noise.

    Raises:
        UserError: if a combination is invalid; then none is tried.
    """
    settings = settings_of(fixed, varied)
    tried = Sweep(folder, out, seed)
    _warn_of_no_lm(tried, settings, folder)
    against = tried.by_client(tried.errors.of(tried.best(setting_of({**fixed, **UNADAPTED}))))
    rows = [
        {**options, **({DRAW: draw} if draws > 1 else {}), **tried.row(best, against, seed)}
        for options, one in settings
        for draw, best in enumerate(tried.best_of_draws(one, draws), 1)
    ]
    write_tsv(out, [*varied, *([DRAW] if draws > 1 else []), *FIGURES], rows)
    return rows


def tune(
    folder: str | Path,
    out: str | Path,
    fixed: Mapping[str, Any],
    varied: Mapping[str, Sequence[Any]],
    over: Mapping[str, Sequence[Any]] | None = None,
    draws: int = 1,
) -> tuple[dict[str, Any], float]:
    """Write the combination with the fewest word errors on validation data; the first if tied.

    Args:
        folder, out, fixed, varied: see `sweep`.
        over: options and values; errors are averaged over all their combinations ...
        draws: ... and over this number of noise draws.

    Returns:
        the options, and the WER in %.
    """
    settings, chosen = settings_of(fixed, {**varied, **(over or {})}), list(varied)
    tried = Sweep(folder, out)
    _warn_of_no_lm(tried, settings, folder)
    grid: dict[tuple[Any, ...], list[float]] = {}
    for options, one in settings:
        found = [tried.errors.of(best).sum() for best in tried.best_of_draws(one, draws)]
        grid.setdefault(tuple(options[name] for name in chosen), []).append(np.mean(found))
    means = {values: float(np.mean(errors)) for values, errors in grid.items()}
    values = min(means, key=lambda one: means[one])
    best = dict(zip(chosen, values, strict=True))
    write_yaml(out, best)
    return best, 100 * means[values] / tried.errors.words.sum()
