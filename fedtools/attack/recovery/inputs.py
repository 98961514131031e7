"""Recovery of inputs from the updates of a round, by gradient matching, and its figures.

Inputs are recovered from one step on one item, which the attacker computes as the client would: the
best case, which papers report; and from what the client really sent, after all of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from fedtools.attack.recovery.bag_of_words import BIAS, output_layer, scores_of
from fedtools.attack.recovery.griffin_lim import Front
from fedtools.attack.recovery.inverted_round import ONE, World
from fedtools.attack.recovery.matching import Loss, Plan, Simulation, match, plan_of
from fedtools.attack.recovery.recovered import (
    CHANCE,
    Item,
    Judge,
    Measure,
    assigned,
    voices,
    words,
)
from fedtools.attack.updates import NotApplicable
from fedtools.attack.victims import State, Victims
from fedtools.core.seeds import seed64
from fedtools.models.acoustic.asr import input_kind_of
from fedtools.models.adapt.copies import copy_of
from fedtools.models.keywords import inputs_of
from fedtools.speaker.resemblyzer import VoiceEncoder
from fedtools.tasks.parts import CLIPS, MODELS

MATCHING, VOICES = "gradient matching", "voices"
SIMULATED, AS_ONE = "real, simulated", "real, as one"
_DRAWN = 3


@dataclass(frozen=True)
class FirstSteps(Victims):
    """Victims with simulated messages: what clients would send after one step on one item.

    Attributes:
        take: returns what a client would send.
    """

    take: Callable[[str], State]

    def states(self, wanted: Sequence[str]) -> Iterator[tuple[str, State]]:
        """Yield simulated states; see `Victims.states`."""
        for name in wanted:
            yield name, self.take(name)


class Recovery:
    """Recovery of inputs, and its evaluation.

    Args:
        world: the round.
        encoder: encoder that identifies speakers; None: speakers are not identified.

    Attributes:
        drawn: spectra of some items: true, recovered, and another speaker's.
        silent: why speakers are not identified; "" if they are, or if there is no encoder.
    """

    def __init__(self, world: World, encoder: VoiceEncoder | None):
        self._world, self._encoder = world, encoder
        self._items, self._people, self._options = world.items, world.people, world.options
        self.drawn: list[list[np.ndarray]] = []
        self.silent = ""

    def rows(self) -> Iterator[dict[str, object]]:
        """Recover inputs, evaluate them, and yield rows of the table.

        Raises:
            NotApplicable: if nothing can be recovered.
        """
        front = self._front()
        model = self._world.global_model()
        judge = Judge(partial(self._spectrum, front), self._items.audio, self._people.own)
        simulation, any_found = Simulation(copy_of(model)), False
        for defence in ("", *self._world.setup.defences):
            for steps in self._world.setup.steps:
                states = self._states(simulation, defence, steps)
                found = self._recover(simulation, judge, states, steps)
                if not defence and not self.drawn:
                    self.drawn = self._to_draw(judge, found)
                for how, items, read in found:
                    any_found = True
                    measures = [*judge.measures(items), self._words(model, items), *read]
                    measures += self._voices(front, items)
                    for one in measures:
                        yield self._world.row(MATCHING, defence, how, one)
        if not any_found:
            raise NotApplicable("nothing that training changes is sent")

    def _front(self) -> Front | None:
        """Return how the model's input was computed from audio; None if this is not known.

        Raises:
            NotApplicable: if the model's input cannot be recovered.
        """
        options = self._world.federation.experiment.options.model
        if options.get("criterion") == "lfmmi":
            raise NotApplicable("the gradient of LF-MMI cannot be differentiated")
        kind, bins = self._options.kind, self._options.bins
        if CLIPS.of(self._world.federation.task):
            found, width = inputs_of(options)
            kind = "clip_mfcc" if found == "mfcc" else found
        else:
            kind = input_kind_of(options) or kind
            width = self._items.audio(next(iter(self._items.owners))).shape[1]
        if kind == "wave":
            raise NotApplicable("the model takes waveforms, not spectra")
        return None if kind == "unknown" else Front.of(kind, bins or width)

    def _spectrum(self, front: Front | None, values: np.ndarray) -> np.ndarray:
        values = values[:, : self._options.bins or None]
        return front.energies(values) if front else values

    def _loss(self, names: Sequence[str], labels: Sequence[list[int]]) -> Loss:
        return lambda model, inputs: self._items.loss_at(model, names, inputs, labels)

    def _states(
        self, simulation: Simulation, defence: str, steps: str
    ) -> Iterator[tuple[str, State]]:
        """Return the states that the attacker sees of the clients under attack."""
        victims = self._world.victims
        if steps == ONE:
            take = partial(self._first_step, simulation)
            victims = FirstSteps(victims.messages, victims.refused, victims.speakers, take)
        return self._world.seen(victims, defence).states(self._people.attacked)

    def _first_step(self, simulation: Simulation, client: str) -> State:
        names = self._people.shortest(client, 1)
        if not names:
            # The client has nothing to train on, and is only part of other clients' means.
            return dict(self._world.start)
        inputs = [self._world.tensor(self._items.audio(name)) for name in names]
        found = simulation.step(self._loss(names, list(map(self._items.labels, names))), inputs)
        # Parameters may have the leading axis of a stack of one.
        return {
            key: value.reshape(self._world.start[key].shape)
            for key, value in found.items()
            if key in self._world.start
        }

    def _recover(
        self,
        simulation: Simulation,
        judge: Judge,
        states: Iterator[tuple[str, State]],
        steps: str,
    ) -> list[tuple[str, list[Item], list[Measure]]]:
        """Return kind of steps, recovered items, and measures of the labels that were read."""
        found: dict[str, list[Item]] = {}
        right: dict[str, float] = {}
        training = self._world.federation.task.need(MODELS).training
        for number, (client, sent) in enumerate(states, 1):
            taken = 1 if steps == ONE else self._world.victims.messages[client].steps
            known = Plan() if steps == ONE else plan_of(training, taken, self._options.unroll)
            names = self._people.shortest(client, 1 if steps == ONE else self._options.items)
            labels = list(map(self._items.labels, names))
            if steps == ONE and (read := self._read_label(sent)) is not None:
                right[client] = 100.0 * (read == labels[0])
                labels = [read]
            seen = simulation.seen(sent, self._world.start, taken)
            if not any(value.any() for value in seen.update.values()):
                # The model did not change, or no tensor that changes is sent.
                continue
            title = f"inversion, {steps}, client {number}/{len(self._people.attacked)}"
            lengths = [len(self._items.audio(name)) for name in names]
            scales = tuple(map(self._world.tensor, self._people.scales(client)))
            seed = seed64(self._world.setup.seed, "inversion", client, steps)
            loss, plan = self._loss(names, labels), known or Plan()
            inputs = match(
                simulation, loss, seen, plan, lengths, scales, self._options, seed, title
            )
            how = ONE if steps == ONE else SIMULATED if known else AS_ONE
            values = [one.double().cpu().numpy() for one in inputs]
            found.setdefault(how, []).extend(self._items_of(judge, client, names, values))
        return [(how, items, self._read_rightly(right) if how == ONE else [])
                for how, items in found.items()]  # fmt: skip

    def _items_of(
        self, judge: Judge, client: str, names: Sequence[str], found: Sequence[np.ndarray]
    ) -> list[Item]:
        """Return recovered items, each assigned to the most similar true item with its labels."""
        others = {name: self._people.others(name) for name in names}
        most = min(map(len, others.values()))
        instead: dict[str, list[np.ndarray]] = {name: [] for name in names}
        labels = [self._items.labels(name) for name in names]
        for compared in [names, *zip(*(others[name][:most] for name in names), strict=True)]:
            for label in {tuple(one) for one in labels}:
                group = [at for at, one in enumerate(labels) if tuple(one) == label]
                order = assigned(
                    [judge.spectrum(found[at]) for at in group],
                    [judge.of(compared[at]) for at in group],
                )
                for at, chosen in zip(group, order, strict=True):
                    instead[names[at]].append(found[group[chosen]])
        return [
            Item(client, name, instead[name][0], others[name][:most], instead[name][1:])
            for name in names
        ]

    def _read_label(self, sent: State) -> list[int] | None:
        """Return the class of a single clip from the bias of the output layer; None if unknown."""
        if not CLIPS.of(self._world.federation.task):
            return None
        try:
            output = output_layer(self._world.federation, self._world.federation.states.shared_spec)
        except NotApplicable:
            return None
        scores = scores_of(output, sent, self._world.start)
        return [int(output.rows[scores[BIAS].argmax()])] if BIAS in scores else None

    def _read_rightly(self, right: Mapping[str, float]) -> list[Measure]:
        if not right:
            return []
        control = 100 * self._people.most_common()
        sums = np.array([[one, control, 100.0] for one in right.values()])
        return [Measure("label%", CHANCE, list(right), sums, np.ones(len(sums)))]

    def _words(self, model: torch.nn.Module, items: Sequence[Item]) -> Measure:
        """Measure what the global model recognises."""
        model.eval()

        def errors(name: str, values: np.ndarray) -> tuple[int, int]:
            return self._items.errors(model, name, self._world.tensor(values))

        return words(items, errors, self._items.audio, self._world.federation.facts.rate)

    def _voices(self, front: Front | None, items: Sequence[Item]) -> list[Measure]:
        """Measure how well speakers are identified, if there is an encoder and audio."""
        if (encoder := self._encoder) is None:
            return []
        used = {item.name for item in items}
        rest = {item.client: [one for one in self._people.own(item.client) if one not in used]
                for item in items}  # fmt: skip
        enrolment = {client: own[0] for client, own in rest.items() if own}
        if front is None or len({self._people.speaker[one] for one in enrolment}) < 2:
            why = "fewer than two speakers have an item that is not recovered"
            why = why if front else "the kind of features is not known: set inversion.kind"
            self.silent = why
            return []
        bins = self._options.bins or None

        def embed(values: np.ndarray) -> np.ndarray:
            return encoder.embed(front.sound(values[:, :bins]))

        return voices(items, embed, self._items.audio, enrolment, self._people.speaker)

    def _to_draw(
        self, judge: Judge, found: Sequence[tuple[str, list[Item], list[Measure]]]
    ) -> list[list[np.ndarray]]:
        items = [item for _, some, _ in found for item in some][:_DRAWN]
        return [
            [judge.of(one.name), judge.spectrum(one.found), judge.of(one.others[0])]
            for one in items
        ]
