"""Was an utterance in a client's training? By the model that the client sent, and by references.

The attacker knows candidates with their transcripts, the global model, the training, and all that
the clients of a round sent. Other clients' models are references that were not trained on a
candidate; those that were, the attacker trains: see `fedtools.attack.scores` for what is made of
them, `fedtools.attack.trials` for who is tried, `fedtools.attack.shadows` for the training.

A member is tried with an utterance of like length that is none: of the same speaker where another
client has some, or a split that nobody trains on; and, as a control, of anybody else. What does
well on the latter alone knows voices. Models of the same speaker's other speech are references of
their own. Beside all this stands what a classifier tells that sees audio alone: members that it
tells from the others, without a client's model, show no leak.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.attack import shadows
from fedtools.attack.evidence import Evidence
from fedtools.attack.footprints import State
from fedtools.attack.options import Updates
from fedtools.attack.scores import (
    ROUND,
    SPEAKER,
    Key,
    Seen,
    audio_features,
    blind,
    scores_of,
)
from fedtools.attack.trials import ANYBODY, SAME, Draw, Trials
from fedtools.attack.victims import Victims, sound_victims
from fedtools.federation.federation import Federation
from fedtools.files.errors import UserError
from fedtools.files.progress import counted
from fedtools.files.sections import Bootstrap
from fedtools.files.seeds import generator, seed64
from fedtools.files.tables import write_tsv
from fedtools.score.bootstrap import interval, speaker_draws
from fedtools.score.verification import true_positive_rate
from fedtools.tasks.base import Items, as_configured
from fedtools.tasks.parts import ITEMS

# A true-positive rate is told with at least ten times as many others as give one false positive.
RATES = {"TPR@0.1%": 0.001, "TPR@1%": 0.01, "TPR@10%": 0.1}
COLUMNS = (
    "round", "others_of", "attack", "score", "references", "AUC%", "low", "high", *RATES, "clients",
    "speakers", "members", "others",
)  # fmt: skip
BLIND = ("blind", "audio")
# Parts of a cross-validation.
_PARTS = 5


@dataclass(frozen=True)
class Scored:
    """Trials of one kind and their scores: (trials,) each; NaN where an attack has no score."""

    clients: np.ndarray
    members: np.ndarray
    scores: Mapping[Key, np.ndarray]


@as_configured
def attack(
    federation: Federation,
    number: int,
    out: Path,
    *,
    options: Updates = Updates(),
    resamples: int = Bootstrap.resamples,
    seed: int = 0,
) -> list[dict[str, object]]:
    """Attack what clients sent in a round; write OUT/membership.tsv.

    Args:
        number: the round.
        options: members of a client, references, shadow models, and held-out splits.
        resamples: draws of speakers for intervals; with fewer than ten there are none.
        seed: of everything random.

    Returns:
        the rows.
    """
    world = World(federation, number, options, seed)
    rows = []
    for kind, found in world.score().items():
        speakers = np.array([world.speaker[client] for client in found.clients])
        for (name, statistic, references), scores in found.scores.items():
            known = ~np.isnan(scores)
            if not known.any():
                continue
            parts = (scores, found.members, found.clients, speakers)
            figures = judge(*(part[known] for part in parts), resamples, seed)
            about = {"attack": name, "score": statistic, "references": references}
            rows.append({"round": number, "others_of": kind, **about, **figures})
    write_tsv(out / "membership.tsv", COLUMNS, rows)
    tell(rows)
    return rows


class World:
    """The clients of a round, their trials, and what models make of them.

    Args:
        federation: of a task with the parts models and items.
        number: the round.
        options: see `attack`.
        seed: of everything random.

    Attributes:
        trials: by client.
        speaker: client -> the speaker with whom it is drawn for intervals.
    """

    def __init__(self, federation: Federation, number: int, options: Updates, seed: int):
        self._federation, self._number, self._seed = federation, number, seed
        self._items: Items = federation.task.need(ITEMS)(options.held)
        self._victims: Victims = sound_victims(federation, [number])
        clients = sorted(self._victims.messages)
        self._draw = Draw(self._items, clients, options.each, options.references, seed)
        drawn = ((client, self._draw.trials(client)) for client in clients)
        self.trials: dict[str, Trials] = {client: one for client, one in drawn if one}
        if not self.trials:
            raise UserError("no client with members and others", path=federation.experiment.path)
        self.speaker = {
            client: min(one.speakers) if len(one.speakers) == 1 else client
            for client, one in self.trials.items()
        }
        self._pairs = options.shadows
        self._evidence = Evidence(federation, number, self._items)

    def score(self) -> dict[str, Scored]:
        """The scores of all trials, by whose the others are."""
        start = self._evidence.begun([one.items for one in self.trials.values()])
        seen = dict(self._seen(start))
        found = {}
        for kind in (SAME, ANYBODY):
            chosen = {client: one for client, one in self.trials.items() if kind in one.pairs}
            if chosen:
                found[kind] = self._gathered(kind, chosen, seen, start)
        return found

    def _seen(self, start: Mapping[str, float]) -> Iterator[tuple[str, Seen]]:
        found = dict(self._of_clients())
        for client, one in counted(self.trials.items(), "membership: shadows", "clients"):
            items, known = one.items, set(one.population)
            own, had = self._of_shadows(one)
            outside = [found[client, name] for name in one.kin]
            yield (
                client,
                Seen(
                    np.array([start[item] for item in items]),
                    found[client, client],
                    _stacked([found[client, name] for name in one.cohort], len(items)),
                    _stacked([*outside, *np.where(had, np.nan, own)], len(items)),
                    _stacked(np.where(had, own, np.nan), len(items)),
                    np.array([item in known for item in items]),
                ),
            )

    def _of_shadows(self, trials: Trials) -> tuple[np.ndarray, np.ndarray]:
        """What a client's shadow models make of its items, (K, items, 2); which had one of them."""
        items = trials.items
        plans = shadows.plan(self._draw, trials, self._pairs, self._seed)
        states = ((str(at), self._shadow(trials.client, data)) for at, data in enumerate(plans))
        found = [values for _, values in self._evidence.under(states, lambda _: items)]
        had = [np.isin(items, data) for data in plans]
        shape = len(plans), len(items)
        return np.reshape(found, (*shape, 2)), np.reshape(had, (*shape, 1)).astype(bool)

    def _shadow(self, client: str, data: Sequence[str]) -> State:
        own = seed64(self._seed, "membership", "shadow", *data)
        where = self._federation, self._number, self._items
        return shadows.train(*where, client, data, own)

    def _of_clients(self) -> Iterator[tuple[tuple[str, str], np.ndarray]]:
        """Whose trials, under whose model: (items, 2), for clients, cohort and kin."""
        asked: dict[str, list[str]] = {}
        for client, one in self.trials.items():
            for name in dict.fromkeys((client, *one.cohort, *one.kin)):
                asked.setdefault(name, []).append(client)
        # Models of which much is asked come together, so that their gradients are shared.
        names = sorted(asked, key=lambda name: (-len(asked[name]), name))
        states = self._victims.states(names)
        bar = counted(states, "membership: models", "models", len(names))

        def wanted(name: str) -> dict[str, None]:
            return dict.fromkeys(
                item for client in asked[name] for item in self.trials[client].items
            )

        for name, values in self._evidence.under(bar, wanted):
            place = {item: index for index, item in enumerate(wanted(name))}
            for client in asked[name]:
                yield (client, name), values[[place[item] for item in self.trials[client].items]]

    def _gathered(
        self,
        kind: str,
        chosen: Mapping[str, Trials],
        seen: Mapping[str, Seen],
        start: Mapping[str, float],
    ) -> Scored:
        owners, names, folds = [], [], []
        for client, one in chosen.items():
            tried = [item for pair in one.pairs[kind] for item in pair]
            owners += [client] * len(tried)
            names += tried
            folds += [number // 2 % _PARTS for number in range(len(tried))]
        scores: dict[Key, np.ndarray] = {}
        end = 0
        for client, one in chosen.items():
            begin, end = end, end + 2 * len(one.pairs[kind])
            place = {item: index for index, item in enumerate(one.items)}
            at = [place[item] for item in names[begin:end]]
            for key, values in scores_of(seen[client]):
                # Models that had utterances are of the nearest pairs alone.
                if not np.isnan(values[at]).any():
                    scores.setdefault(key, np.full(len(names), np.nan))[begin:end] = values[at]
        clients, members = np.array(owners), np.arange(len(names)) % 2 == 0
        told = self._blind(names, clients, members, np.array(folds), start)
        return Scored(clients, members, {**told, **scores})

    def _blind(
        self,
        names: Sequence[str],
        clients: np.ndarray,
        members: np.ndarray,
        folds: np.ndarray,
        start: Mapping[str, float],
    ) -> dict[Key, np.ndarray]:
        """What audio tells to those who know other speakers' members, and some of the client's."""
        features = np.stack(
            [audio_features(self._items.audio(name), start[name]) for name in names]
        )
        people = sorted({self.speaker[client] for client in clients})
        order = generator(self._seed, "membership", "blind").permutation(len(people))
        part = {people[index]: number % _PARTS for number, index in enumerate(order)}
        found = {}
        if len(people) > 1:
            parts = np.array([part[self.speaker[client]] for client in clients])
            found[(*BLIND, ROUND)] = blind(features, members, clients, parts)
        own = np.full(len(names), np.nan)
        for client in np.unique(clients):
            here = clients == client
            if len(np.unique(folds[here])) > 1:
                own[here] = blind(features[here], members[here], clients[here], folds[here])
        found[(*BLIND, SPEAKER)] = own
        return found


def _stacked(values: Sequence[np.ndarray] | np.ndarray, count: int) -> np.ndarray:
    """(items, models, 2), of no model, too."""
    return np.stack(list(values), 1) if len(values) else np.zeros((count, 0, 2))


def judge(
    scores: np.ndarray,
    members: np.ndarray,
    clients: np.ndarray,
    speakers: np.ndarray,
    resamples: int,
    seed: int,
) -> dict[str, object]:
    """The figures of one attack: pairs are of one client, since each has a threshold of its own.

    Args:
        scores, members, clients, speakers: (trials,).
        resamples, seed: of draws of speakers.

    Returns:
        `COLUMNS` behind the attack's name.
    """
    won, pairs, whose = [], [], []
    for client in np.unique(clients):
        here = clients == client
        count = members[here].sum() * (~members[here]).sum()
        won.append(count * area(scores[here], members[here]) if count else 0.0)
        pairs.append(count)
        whose.append(speakers[here][0])
    names, place = np.unique(whose, return_inverse=True)
    draws = speaker_draws(len(names), resamples, seed, "membership")
    drawn = (draws[:, place] @ np.array(won)) / (draws[:, place] @ np.array(pairs))
    low, high = interval(drawn)
    others = int((~members).sum())
    figures = {"AUC%": sum(won) / sum(pairs), "low": low, "high": high}
    for name, rate in RATES.items():
        enough = others * rate >= 10 * (1 - 1e-12)
        found = true_positive_rate(scores, members, rate) if enough else float("nan")
        figures[name] = found
    cells = {name: "-" if np.isnan(value) else f"{value:.2f}" for name, value in figures.items()}
    counts = {"clients": len(won), "speakers": len(names), "members": int(members.sum())}
    return {**cells, **counts, "others": others}


def area(scores: np.ndarray, members: np.ndarray) -> float:
    """How often a member scores above another item, ties counting half, in %."""
    values, place = np.unique(scores, return_inverse=True)
    own, other = (np.bincount(place[kind], minlength=len(values)) for kind in (members, ~members))
    below = np.cumsum(other) - other / 2
    with np.errstate(invalid="ignore"):
        return float(100 * (own @ below) / (own.sum() * other.sum()))


def tell(rows: Sequence[Mapping[str, object]]) -> None:
    """Say on stderr why a table has rates that are not told."""
    if any(row[name] == "-" for row in rows for name in RATES):
        print(
            "membership: a true-positive rate at a false-positive rate f is told where there are "
            "at least 10 / f others",
            file=sys.stderr,
        )
