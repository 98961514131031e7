"""Measures of how much of an item an attack has recovered, with controls.

Spectra of speech are alike: those of two clips of one word, or of a clip and the mean of others.
That a recovered item correlates with the true one therefore shows nothing by itself. Figures
compare this correlation with that of another speaker's item with the same labels (or, if there is
none, of similar length), and of the mean of the client's items; and they count how often the true
item is the nearest of several candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import linear_sum_assignment

from fedtools.core.drawing import drawing
from fedtools.score.bootstrap import interval, speaker_draws
from fedtools.score.verification import equal_error_rate

COLUMNS = (
    "attack", "defence", "attacker", "steps", "measure", "against", "value", "control", "true",
    "difference", "low", "high", "clients", "speakers", "items",
)  # fmt: skip
OTHERS, MEAN, FREQUENCY, CHANCE = "another's", "client's mean", "frequency", "chance"


@dataclass(frozen=True)
class Item:
    """A recovered item.

    Attributes:
        client: client whose item it is.
        name: name of the true item that it is compared with.
        found: the recovered input of the model, (frames, values).
        others: candidates other than the true item.
        instead: for each candidate, the recovered input that would be compared with it if it were
            the true item; this may be another of several items recovered together.
    """

    client: str
    name: str
    found: np.ndarray
    others: Sequence[str]
    instead: Sequence[np.ndarray]


@dataclass(frozen=True)
class Measure:
    """One measure of some items, as sums and the amounts that they are divided by.

    Attributes:
        name: name of the measure.
        against: name of the control.
        clients: (items,), the client of each item.
        sums: (items, 3): for the recovered item, for the control, and for the true item.
        amounts: (items,), what the sums are divided by, such as words.
    """

    name: str
    against: str
    clients: Sequence[str]
    sums: np.ndarray
    amounts: np.ndarray

    def row(self, speaker: Mapping[str, str], resamples: int, seed: int) -> dict[str, object]:
        """Return columns from "measure" on, with the 95 % interval of the difference by speaker."""
        names, place = np.unique([speaker[one] for one in self.clients], return_inverse=True)
        value, control, true = self.sums.sum(0) / self.amounts.sum()
        draws = speaker_draws(len(names), resamples, seed, "inversion")[:, place]
        apart = self.sums[:, 0] - self.sums[:, 1]
        with np.errstate(invalid="ignore", divide="ignore"):
            low, high = interval((draws @ apart) / (draws @ self.amounts))
        if self.name == "EER%":
            # Each item has the rate of all items, so that draws do not vary.
            low = high = np.nan
        numbers = {"value": value, "control": control, "true": true}
        numbers |= {"difference": value - control, "low": low, "high": high}
        digits = 1 if self.name.endswith("%") else 3
        cells = {key: "-" if np.isnan(one) else f"{one:.{digits}f}" for key, one in numbers.items()}
        counts = {"clients": len(set(self.clients)), "speakers": len(names)}
        about = {"measure": self.name, "against": self.against}
        return {**about, **cells, **counts, "items": len(self.clients)}


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return the correlation of all values of two spectra, less their means over frames.

    The longer spectrum is cut to the length of the other.
    """
    frames = min(len(one), len(other))
    a, b = (part[:frames] - part[:frames].mean(0) for part in (one, other))
    length = np.linalg.norm(a) * np.linalg.norm(b)
    return float((a * b).sum() / length) if length else 0.0


def assigned(found: Sequence[np.ndarray], true: Sequence[np.ndarray]) -> list[int]:
    """Assign to each true spectrum the index of a recovered one, to maximise their correlations.

    The order of items that are recovered together and have the same labels is unknown.
    """
    likeness = [[correlation(one, other) for other in found] for one in true]
    _, columns = linear_sum_assignment(likeness, maximize=True)
    return [int(one) for one in columns]


class Judge:
    """Evaluation of recovered items.

    Args:
        spectrum: returns the spectrum of a model's input, (frames, bins).
        audio: returns an item's true input.
        own: returns the items of a client.
    """

    def __init__(
        self,
        spectrum: Callable[[np.ndarray], np.ndarray],
        audio: Callable[[str], np.ndarray],
        own: Callable[[str], Sequence[str]],
    ):
        self.spectrum, self._audio, self._own = spectrum, audio, own

    def of(self, name: str) -> np.ndarray:
        """Return the spectrum of a true item."""
        return self.spectrum(self._audio(name))

    def measures(self, items: Sequence[Item]) -> Iterator[Measure]:
        """Yield measures of the similarity of recovered items and true ones."""
        clients = [one.client for one in items]
        ones, rows = np.ones(len(items)), []
        for item in items:
            found, true = self.spectrum(item.found), self.of(item.name)
            own = correlation(found, true)
            pairs = zip(item.instead, item.others, strict=True)
            against = [correlation(self.spectrum(one), self.of(other)) for one, other in pairs]
            longer = (self.of(one) for one in self._own(item.client))
            own_items = [one[: len(true)] for one in longer if len(one) >= len(true)]
            # The mean of a client's only item is the item itself.
            mean = correlation(found, np.mean(own_items, 0)) if len(own_items) > 1 else np.nan
            nearest = 100.0 * all(own > other for other in against)
            chance = 100 / (1 + len(against))
            rows.append([own, np.mean(against), mean, nearest, chance])
        own, other, mean, nearest, chance = np.array(rows).T
        yield Measure("correlation", OTHERS, clients, np.stack([own, other, ones], 1), ones)
        if (several := ~np.isnan(mean)).any():
            owners = [client for client, one in zip(clients, several, strict=True) if one]
            sums = np.stack([own, mean, ones], 1)[several]
            yield Measure("correlation", MEAN, owners, sums, ones[several])
        full = np.full_like(ones, 100)
        yield Measure("nearest%", CHANCE, clients, np.stack([nearest, chance, full], 1), ones)


def words(
    items: Sequence[Item],
    errors: Callable[[str, np.ndarray], tuple[int, int]],
    audio: Callable[[str], np.ndarray],
    rate: str,
) -> Measure:
    """Measure what a model recognises in recovered items, in other speakers', and in true ones.

    Args:
        errors: returns the numbers of errors and words for an input in place of an item.
        rate: "wer" or "accuracy".
    """
    sums, amounts = [], []
    for item in items:
        inputs = item.found, audio(item.others[0]), audio(item.name)
        found = [errors(item.name, one) for one in inputs]
        count = found[0][1]
        wrong = [100 * one for one, _ in found]
        sums.append(wrong if rate == "wer" else [100 * count - one for one in wrong])
        amounts.append(count)
    name = "WER%" if rate == "wer" else "accuracy%"
    clients = [one.client for one in items]
    return Measure(name, OTHERS, clients, np.array(sums, float), np.array(amounts, float))


def voices(
    items: Sequence[Item],
    embed: Callable[[np.ndarray], np.ndarray],
    audio: Callable[[str], np.ndarray],
    enrolment: Mapping[str, str],
    speaker: Mapping[str, str],
) -> list[Measure]:
    """Measure how well the speaker is recognised in recovered items, other speakers', true ones.

    All audio is synthesised from features, including the enrolment.

    Args:
        embed: returns the embedding of an input, of length 1.
        enrolment: client -> another item of the client.
        speaker: client -> its speaker.

    Returns:
        how often a client's enrolment is nearer than another speaker's, in %; and the equal error
        rate, in %, without an interval.
    """
    clients = sorted({item.client for item in items} & enrolment.keys())
    items = [item for item in items if item.client in clients]
    known = np.stack([embed(audio(enrolment[one])) for one in clients])
    scores = np.array([
        [known @ embed(one) for one in (item.found, audio(item.others[0]), audio(item.name))]
        for item in items
    ])  # fmt: skip
    people = np.array([speaker[one] for one in clients])
    own = np.array([clients.index(item.client) for item in items])
    targets = np.arange(len(clients)) == own[:, None]
    # Other clients of the same speaker are not in trials.
    rest = people != people[own][:, None]
    below = scores < np.take_along_axis(scores, own[:, None, None], 2)
    shares = 100 * (below & rest[:, None]).sum(2) / rest.sum(1)[:, None]
    owners = [item.client for item in items]
    measure = Measure("speaker%", OTHERS, owners, shares, np.ones(len(items)))
    tried = targets | rest
    rates = [equal_error_rate(scores[:, kind][tried], targets[tried]) for kind in range(3)]
    return [
        measure,
        Measure("EER%", OTHERS, owners, np.tile(rates, (len(owners), 1)), measure.amounts),
    ]


def draw(path: Path, rows: Sequence[Sequence[np.ndarray]]) -> None:
    """Draw true, recovered and other speakers' spectra, each less its mean over frames.

    Args:
        path: the PNG file.
        rows: three spectra, (frames, bins), of each item.
    """
    titles = "true", "recovered", "another's"
    with drawing(path, (6.4, 0.4 + 1.3 * len(rows))) as figure:
        places = figure.subplots(len(rows), 3, squeeze=False)
        for number, (axes, spectra) in enumerate(zip(places, rows, strict=True)):
            widest = 2 * max(float((one - one.mean(0)).std()) for one in spectra[::2]) or 1.0
            for place, one, title in zip(axes, spectra, titles, strict=True):
                shown = (one - one.mean(0)).T
                limits = {"vmin": -widest, "vmax": widest}
                place.imshow(shown, aspect="auto", origin="lower", cmap="RdBu_r", **limits)
                place.set(xticks=[], yticks=[])
                place.grid(False)
                if not number:
                    place.set_title(title, loc="left", fontsize=9)
