"""Cost of a defence: errors of models that clients send behind it, on held-out speech.

    own         each client's own model, as the server receives it, on the client's own speech:
                the personalisation that is left
    newcomers   the next global model, the mean of the models sent, on people who are not clients
                of the round
    everybody   the next global model on both groups together

A client of a split (or a speaker, if the split has no clients) with a model in the round is `own`,
and all others are newcomers. If a speaker has several models, each counts. Errors are pooled;
intervals are over those people, or clients if a split has some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedtools.attack.defences import Defence, State, defended
from fedtools.attack.knowledge import NO_DEFENCE
from fedtools.attack.victims import Victims, sound_victims
from fedtools.audio.perturb import speakers_of
from fedtools.core.errors import UserError
from fedtools.core.progress import counted
from fedtools.core.recipe_sections import Bootstrap
from fedtools.federation.federation import Federation
from fedtools.score.bootstrap import interval, speaker_draws
from fedtools.score.verification import binomial_bounds
from fedtools.server.shares import client_weights
from fedtools.tasks.base import as_configured
from fedtools.tasks.parts import CORPUS, MEASURED

UTILITY = ("defence", "rate", "on", "value", "low", "high", "speakers")
ON = OWN, NEWCOMERS, EVERYBODY = "own", "newcomers", "everybody"
# Name of the rows without updates, with which the benefit of updates is compared.
NOTHING = "nothing sent"
# Numbers of errors, and of words or clips.
Counts = np.ndarray
Measure = Callable[[], Counts]


@as_configured
def utility(
    federation: Federation,
    number: int,
    defences: Sequence[str],
    splits: Sequence[str],
    *,
    resamples: int = Bootstrap.resamples,
    seed: int = 0,
) -> list[dict[str, object]]:
    """Measure what each defence costs, and, in the first rows, the model that the round began with.

    Clients have the weights that the experiment's method gives them. Tensors that stay at clients
    are those of the global model.

    Args:
        number: the round in which models were sent.
        defences: see `fedtools.attack.defences`. `mean` does not change the mean of all clients,
            and so changes nothing for newcomers.
        splits: splits of the experiment's data.
        resamples: draws of people for intervals; of fewer than ten people, an accuracy has the
            exact binomial interval of as many trials, and a WER none.
        seed: random seed of noise, groups and draws.

    Returns:
        rows of `UTILITY`: the WER by greedy search without a language model, or the accuracy, in %;
        "-" if there is nobody to measure on.

    Raises:
        UserError: if a split is missing, or no model was sent.
    """
    for one in defences:
        Defence.parse(one)
    for split in splits:
        federation.task.data_path(split)
    victims = sound_victims(federation, [number])
    if not victims.messages:
        raise UserError("no model is left", path=federation.experiment.path)
    people = _people(federation, victims, splits)
    work = _Work(federation, victims, number, people, seed)
    rows: list[dict[str, object]] = []
    for name in counted([NOTHING, *(one or NO_DEFENCE for one in defences)], "utility", "defences"):
        for on, counts in work.measured(name).items():
            figures = _figures(federation, counts, resamples, seed)
            rows.append({"defence": name, "rate": federation.facts.rate, "on": on, **figures})
    return rows


@dataclass(frozen=True)
class _Person:
    """Person whose speech models are measured on, and the clients with a model of this person."""

    measures: list[Measure]
    clients: list[str]

    def counts(self) -> Counts:
        """Return the counts of the loaded model."""
        return np.sum([measure() for measure in self.measures], axis=0)


def _people(federation: Federation, victims: Victims, splits: Sequence[str]) -> dict[str, _Person]:
    """Return the people of all splits together, or the clients."""
    found: dict[str, _Person] = {}
    for split in splits:
        for name, measure in _measures(federation, split):
            clients = [
                one for one in sorted(victims.messages) if name in (one, victims.speakers.get(one))
            ]
            found.setdefault(name, _Person([], clients)).measures.append(measure)
    return found


def _measures(federation: Federation, split: str) -> Iterator[tuple[str, Measure]]:
    """Yield the people of a split, and functions that measure the loaded model on them."""
    task, facts = federation.task, federation.facts

    def read(found: Mapping[str, object]) -> Counts:
        return np.array([float(str(found[name])) for name in ("errors", facts.counted)])

    if (corpus := CORPUS.of(task)) is None:
        for client in facts.clients(task.data_path(split)):
            yield client, lambda client=client: read(task.measure(split, client))
        return
    data, measured = corpus.read(split), task.need(MEASURED)
    names = data.utterances
    owners = dict(data.utt2client or zip(names, speakers_of(data, names), strict=True))
    for owner in sorted(set(owners.values())):
        own = [name for name in names if owners.get(name) == owner]
        # People without any words have no rate.
        if any(data.text[name].split() for name in own):
            heard = corpus.gather(data, own)
            yield owner, lambda heard=heard: read(measured(heard))


@dataclass
class _Work:
    """Models behind defences, and their errors on people."""

    federation: Federation
    victims: Victims
    number: int
    people: Mapping[str, _Person]
    seed: int

    def measured(self, defence: str) -> dict[str, list[Counts]]:
        """Return the counts of each person, for each of `ON`."""
        own = {name: one for name, one in self.people.items() if one.clients}
        if defence == NOTHING:
            self._load({})
            start = {name: one.counts() for name, one in self.people.items()}
            personal = [len(one.clients) * start[name] for name, one in own.items()]
        else:
            personal = self._personal(own, defence)
            self._load(self._mean(defence))
            start = {name: one.counts() for name, one in self.people.items()}
        strangers = [counts for name, counts in start.items() if name not in own]
        return {OWN: personal, NEWCOMERS: strangers, EVERYBODY: list(start.values())}

    def _personal(self, own: Mapping[str, _Person], defence: str) -> list[Counts]:
        """Return the counts of each client's own model, summed by person."""
        found = dict.fromkeys(own, np.zeros(2))
        owner = {client: name for name, one in own.items() for client in one.clients}
        for client, state in self._states(owner, defence):
            self._load(state)
            found[owner[client]] = found[owner[client]] + own[owner[client]].counts()
        # Without counts, all of a person's models were refused behind the defence.
        return [counts for counts in found.values() if counts[1]]

    def _mean(self, defence: str) -> State:
        """Return the next global model: the weighted mean of the tensors sent."""
        alone = "+".join(part for part in defence.split("+") if not part.startswith("mean="))
        messages = self.victims.messages
        weights = client_weights(self.federation.method, list(messages.values()))
        weight = dict(zip(messages, weights, strict=True))
        total: State = {}
        summed = 0.0
        for client, state in self._states(messages, alone):
            for name, value in state.items():
                total[name] = total.get(name, 0.0) + weight[client] * value.astype(np.float64)
            summed += weight[client]
        if not summed:
            problem = f"defence {defence!r}: no model is left"
            raise UserError(problem, path=self.federation.experiment.path)
        return {name: value / summed for name, value in total.items()}

    def _states(self, clients: Iterable[str], defence: str) -> Iterator[tuple[str, State]]:
        seen = defended(self.federation, self.victims, self.number, defence, self.seed)
        return seen.states(sorted(clients))

    def _load(self, state: State) -> None:
        """Load the model that the round began with, then replace the tensors in `state`."""
        before = self.number - 1
        self.federation.load_result(None, before)
        if state:
            start = self.federation.states.start(self.number)
            self.federation.task.load(start | state, before)


def _figures(
    federation: Federation, counts: Sequence[Counts], resamples: int, seed: int
) -> dict[str, object]:
    """Return the pooled rate of all people, with its interval."""
    if not counts:
        return {**dict.fromkeys(("value", "low", "high"), "-"), "speakers": 0}
    errors, total = np.array(counts).T
    draws = speaker_draws(len(errors), resamples, seed, "utility")
    drawn = 100 * (draws @ errors) / (draws @ total)
    figures = np.array([100 * errors.sum() / total.sum(), *interval(drawn)])
    if federation.facts.sign < 0:
        # For an accuracy, the bounds of the interval change places.
        figures = 100 - figures[[0, 2, 1]]
        if np.isnan(figures[1:]).any():
            # Of too few people to draw from, each is an independent trial at best.
            figures[1:] = binomial_bounds(figures[0] / 100, len(errors))
    cells = ("-" if np.isnan(one) else f"{one:.2f}" for one in figures)
    return {**dict(zip(("value", "low", "high"), cells, strict=True)), "speakers": len(counts)}
