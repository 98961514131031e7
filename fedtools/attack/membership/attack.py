"""Membership inference: was an utterance in a client's training data?

The attacker knows candidates with their transcripts, the global model, how clients train, and the
updates of all clients of a round. Other clients' models are references that were not trained on a
candidate; reference models that were trained on it are shadow models of the attacker. Beside this
file, `scores` has the scores, `candidates` the trials, and `shadows` the training of shadow models.

A member is paired with a non-member of similar length: by the same speaker, if another client or a
split that nobody trains on has one; and, as a control, by anybody else. An attack that does well on
the control alone recognises voices. Models of the same speaker's other speech form a second set of
references. A blind classifier of audio alone is reported as well: members that it finds without a
client's model do not show a leak.

Behind a defence, an ignorant attacker has undefended references, of the round and of its own
training, and a semi-informed attacker defended ones (`fedtools.attack.knowledge`). A threshold has
no references, and is reported for the ignorant attacker.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.attack.defences import Defence, Defended, defended
from fedtools.attack.knowledge import ANY, NO_DEFENCE, SEMI, attackers
from fedtools.attack.membership import shadows
from fedtools.attack.membership.candidates import ANYBODY, SAME, Candidates, Draw
from fedtools.attack.membership.evidence import Evidence
from fedtools.attack.membership.scores import (
    NOBODY,
    ROUND,
    SPEAKER,
    Key,
    Seen,
    audio_features,
    blind,
    scores_of,
)
from fedtools.attack.options import Updates
from fedtools.attack.victims import State, Victims, sound_victims
from fedtools.core.errors import UserError
from fedtools.core.progress import counted
from fedtools.core.recipe_sections import Bootstrap
from fedtools.core.seeds import generator, seed64
from fedtools.core.tables import write_tsv
from fedtools.federation.federation import Federation
from fedtools.score.bootstrap import speaker_draws
from fedtools.score.verification import rate_bounds, true_positive_rate
from fedtools.tasks.base import Items, as_configured
from fedtools.tasks.parts import ITEMS

# A rate is reported if there are at least ten times the others that give one false positive.
RATES = {"TPR@0.1%": 0.001, "TPR@1%": 0.01, "TPR@10%": 0.1}
COLUMNS = (
    "round", "others_of", "attack", "defence", "attacker", "score", "references", "AUC%", "low",
    "high", *RATES, "clients", "speakers", "members", "others",
)  # fmt: skip
BLIND = ("blind", "audio")
# Number of parts of a cross-validation.
_PARTS = 5


# The defence, and the attacker: see `fedtools.attack.knowledge`.
Known = tuple[str, str]


@dataclass(frozen=True)
class Scored:
    """Trials of one kind and their scores: (trials,) each; NaN where an attack has no score."""

    clients: np.ndarray
    members: np.ndarray
    scores: Mapping[tuple[Known, Key], np.ndarray]


@dataclass(frozen=True)
class _Version:
    """Evidence of models on utterances, without a defence or with all models behind one defence.

    Attributes:
        clients: (client of the trials, client of the model) -> (items, 2).
        shadows: client -> evidence of its shadow models on its items, (K, items, 2).
    """

    clients: dict[tuple[str, str], np.ndarray]
    shadows: dict[str, np.ndarray]


@as_configured
def attack(
    federation: Federation,
    number: int,
    out: Path,
    *,
    options: Updates = Updates(),
    defences: Sequence[str] = (),
    resamples: int = Bootstrap.resamples,
    seed: int = 0,
) -> list[dict[str, object]]:
    """Attack what clients sent in a round; write OUT/membership.tsv.

    Args:
        number: the round.
        defences: defences to attack in addition to none, see `fedtools.attack.defences`.
        options: members of a client, references, shadow models, and held-out splits.
        resamples: draws of speakers for intervals; for fewer than ten, see `judge`.
        seed: random seed.

    Returns:
        the rows of the table.
    """
    world = World(federation, number, options, seed, defences)
    rows = []
    for kind, found in world.score().items():
        speakers = np.array([world.speaker[client] for client in found.clients])
        for ((defence, attacker), key), scores in found.scores.items():
            known = ~np.isnan(scores)
            if not known.any():
                continue
            parts = (scores, found.members, found.clients, speakers)
            figures = judge(*(part[known] for part in parts), resamples, seed)
            about = dict(zip(("attack", "score", "references"), key, strict=True))
            about |= {"defence": defence, "attacker": attacker}
            rows.append({"round": number, "others_of": kind, **about, **figures})
    write_tsv(out / "membership.tsv", COLUMNS, rows)
    warn_of_missing_rates(rows)
    return rows


class World:
    """Clients of a round, their trials, and the evidence of models on them.

    Args:
        federation: federation of a task with the parts models and items.
        number: the round.
        options: see `attack`.
        seed: random seed.
        defences: see `attack`; without `mean`.

    Attributes:
        candidates: client -> its trials.
        speaker: client -> the speaker with whom it is drawn for intervals.
    """

    def __init__(
        self,
        federation: Federation,
        number: int,
        options: Updates,
        seed: int,
        defences: Sequence[str] = (),
    ):
        self._defences = [one for one in dict.fromkeys(defences) if one != NO_DEFENCE]
        for one in self._defences:
            if Defence.parse(one).mean > 1:
                problem = f"defence {one!r}: membership is attacked in updates of single clients"
                raise UserError(problem, remedy="leave out mean")
        self._federation, self._number, self._seed = federation, number, seed
        self._items: Items = federation.task.need(ITEMS)(options.held)
        self._victims: Victims = sound_victims(federation, [number])
        clients = sorted(self._victims.messages)
        self._draw = Draw(self._items, clients, options.each, options.references, seed)
        drawn = ((client, self._draw.candidates(client)) for client in clients)
        self.candidates: dict[str, Candidates] = {client: one for client, one in drawn if one}
        if not self.candidates:
            raise UserError("no client has members and others", path=federation.experiment.path)
        self.speaker = {
            client: min(one.speakers) if len(one.speakers) == 1 else client
            for client, one in self.candidates.items()
        }
        # The data of each shadow model.
        self._plans = {
            client: shadows.plan(self._draw, one, options.shadows, seed)
            for client, one in self.candidates.items()
        }
        self._evidence = Evidence(federation, number, self._items)

    def score(self) -> dict[str, Scored]:
        """Return the scores of all trials, by the kind of non-members: `SAME` or `ANYBODY`."""
        start = self._evidence.begun([one.items for one in self.candidates.values()])
        versions = self._versions()
        seen = {
            (defence, attacker.name): self._seen(
                start, sent, sent if attacker.learns else versions[NO_DEFENCE]
            )
            for defence, sent in versions.items()
            for attacker in attackers(defence != NO_DEFENCE, enrols=False)
        }
        found = {}
        for kind in (SAME, ANYBODY):
            chosen = {client: one for client, one in self.candidates.items() if kind in one.pairs}
            if chosen:
                found[kind] = self._gathered(kind, chosen, seen, start)
        return found

    def _versions(self) -> dict[str, _Version]:
        """Return the evidence of models by defence; shadow models are trained once."""
        about = self._federation, self._victims, self._number
        behind = {one: defended(*about, one, self._seed) for one in self._defences}
        found = {one: _Version({}, {}) for one in (NO_DEFENCE, *behind)}
        for defence, pair, values in self._of_clients(behind):
            found[defence].clients[pair] = values
        for client, one in counted(self.candidates.items(), "membership: shadows", "clients"):
            # All versions together, so that they share gradients.
            states, items = self._shadows(client, behind), one.items
            seen = dict(self._evidence.under(states, lambda _, items=items: items))
            for defence, version in found.items():
                own = [values for (name, _), values in seen.items() if name == defence]
                version.shadows[client] = np.reshape(own, (len(own), len(items), 2))
        return found

    def _shadows(
        self, client: str, behind: Mapping[str, Defended]
    ) -> Iterator[tuple[tuple[str, int], State]]:
        """Yield a client's shadow models, in all versions."""
        for at, data in enumerate(self._plans[client]):
            own = seed64(self._seed, "membership", "shadow", *data)
            where = self._federation, self._number, self._items
            state = shadows.train(*where, client, data, own)
            yield (NO_DEFENCE, at), state
            for defence, seen in behind.items():
                # Each shadow model has its own noise, which differs from all clients'.
                yield (defence, at), seen.protect(f"{client} shadow {at}", state)

    def _seen(self, start: Mapping[str, float], sent: _Version, known: _Version) -> dict[str, Seen]:
        """Return each client's evidence under its own model and under an attacker's references."""
        found = {}
        for client, one in self.candidates.items():
            items, population = one.items, set(one.population)
            had = [np.isin(items, data) for data in self._plans[client]]
            had = np.reshape(had, (len(had), len(items), 1)).astype(bool)
            own = known.shadows[client]
            outside = [known.clients[client, name] for name in one.kin]
            cohort = [known.clients[client, name] for name in one.cohort]
            found[client] = Seen(
                np.array([start[item] for item in items]),
                sent.clients[client, client],
                _stacked(cohort, len(items)),
                _stacked([*outside, *np.where(had, np.nan, own)], len(items)),
                _stacked(np.where(had, own, np.nan), len(items)),
                np.array([item in population for item in items]),
            )
        return found

    def _of_clients(
        self, behind: Mapping[str, Defended]
    ) -> Iterator[tuple[str, tuple[str, str], np.ndarray]]:
        """Yield defence, (client of the trials, client of the model), and evidence, (items, 2).

        The models are those of each client, its cohort and its kin.
        """
        asked: dict[str, list[str]] = {}
        for client, one in self.candidates.items():
            for name in dict.fromkeys((client, *one.cohort, *one.kin)):
                asked.setdefault(name, []).append(client)
        # Models that are needed for most trials come first, together, so that they share gradients.
        names = sorted(asked, key=lambda name: (-len(asked[name]), name))
        sources = {NO_DEFENCE: self._victims, **behind}

        def states() -> Iterator[tuple[tuple[str, str], State]]:
            for name in counted(names, "membership: models", "models"):
                for defence, source in sources.items():
                    yield from (((defence, name), state) for _, state in source.states([name]))

        def wanted(key: tuple[str, str]) -> dict[str, None]:
            return dict.fromkeys(
                item for client in asked[key[1]] for item in self.candidates[client].items
            )

        for (defence, name), values in self._evidence.under(states(), wanted):
            place = {item: index for index, item in enumerate(wanted((defence, name)))}
            for client in asked[name]:
                own = [place[item] for item in self.candidates[client].items]
                yield defence, (client, name), values[own]

    def _gathered(
        self,
        kind: str,
        chosen: Mapping[str, Candidates],
        seen: Mapping[Known, Mapping[str, Seen]],
        start: Mapping[str, float],
    ) -> Scored:
        owners, names, folds = [], [], []
        for client, one in chosen.items():
            tried = [item for pair in one.pairs[kind] for item in pair]
            owners += [client] * len(tried)
            names += tried
            folds += [number // 2 % _PARTS for number in range(len(tried))]
        clients, members = np.array(owners), np.arange(len(names)) % 2 == 0
        unaided = self._blind(names, clients, members, np.array(folds), start)
        scores = {((NO_DEFENCE, ANY), key): values for key, values in unaided.items()}
        for known, of_clients in seen.items():
            end = 0
            for client, one in chosen.items():
                begin, end = end, end + 2 * len(one.pairs[kind])
                place = {item: index for index, item in enumerate(one.items)}
                at = [place[item] for item in names[begin:end]]
                for key, values in scores_of(of_clients[client]):
                    if known[1] == SEMI and key[2] == NOBODY:
                        # A threshold learns nothing, so the ignorant attacker has its row.
                        continue
                    # Shadow models were trained on the nearest pairs alone.
                    if not np.isnan(values[at]).any():
                        found = scores.setdefault((known, key), np.full(len(names), np.nan))
                        found[begin:end] = values[at]
        return Scored(clients, members, scores)

    def _blind(
        self,
        names: Sequence[str],
        clients: np.ndarray,
        members: np.ndarray,
        folds: np.ndarray,
        start: Mapping[str, float],
    ) -> dict[Key, np.ndarray]:
        """Return blind scores from other speakers' members, and from some of the client's own."""
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
    """Stack evidence of models, or of none, to (items, models, 2)."""
    return np.stack(list(values), 1) if len(values) else np.zeros((count, 0, 2))


def judge(
    scores: np.ndarray,
    members: np.ndarray,
    clients: np.ndarray,
    speakers: np.ndarray,
    resamples: int,
    seed: int,
) -> dict[str, object]:
    """Return the figures of one attack, with AUC over pairs within a client.

    Each client has its own threshold. The interval of the AUC covers that of draws of speakers and,
    because this has no width where members are perfectly apart, the exact binomial one, of as many
    independent pairs as there are of the rarer kind. With fewer than ten speakers it is the
    binomial one of as many independent speakers.

    Args:
        scores, members, clients, speakers: (trials,).
        resamples, seed: number and random seed of draws of speakers.

    Returns:
        the columns from "AUC%" on.
    """
    won, pairs, owners = [], [], []
    for client in np.unique(clients):
        here = clients == client
        count = members[here].sum() * (~members[here]).sum()
        won.append(count * area(scores[here], members[here]) if count else 0.0)
        pairs.append(count)
        owners.append(speakers[here][0])
    names, place = np.unique(owners, return_inverse=True)
    draws = speaker_draws(len(names), resamples, seed, "membership")
    drawn = (draws[:, place] @ np.array(won)) / (draws[:, place] @ np.array(pairs))
    value, others = sum(won) / sum(pairs), int((~members).sum())
    if np.isnan(drawn).any():
        # Of too few people to draw from, each is an independent trial at best.
        low, high = rate_bounds(value, len(names), None)
    else:
        low, high = rate_bounds(value, min(int(members.sum()), others), drawn)
    figures = {"AUC%": value, "low": low, "high": high}
    for name, rate in RATES.items():
        enough = others * rate >= 10 * (1 - 1e-12)
        found = true_positive_rate(scores, members, rate) if enough else float("nan")
        figures[name] = found
    cells = {name: "-" if np.isnan(value) else f"{value:.2f}" for name, value in figures.items()}
    counts = {"clients": len(won), "speakers": len(names), "members": int(members.sum())}
    return {**cells, **counts, "others": others}


def area(scores: np.ndarray, members: np.ndarray) -> float:
    """Return how often a member scores above another item, ties counting half, in %."""
    # scikit-learn's roc_auc_score takes 20 to 75 times as long for each client of each attack.
    values, place = np.unique(scores, return_inverse=True)
    own, other = (np.bincount(place[kind], minlength=len(values)) for kind in (members, ~members))
    below = np.cumsum(other) - other / 2
    with np.errstate(invalid="ignore"):
        return float(100 * (own @ below) / (own.sum() * other.sum()))


def warn_of_missing_rates(rows: Sequence[Mapping[str, object]]) -> None:
    """Report on stderr why some rates are missing from a table."""
    if any(row[name] == "-" for row in rows for name in RATES):
        print(
            "membership: a true-positive rate at a false-positive rate f needs "
            "at least 10 / f non-members",
            file=sys.stderr,
        )
