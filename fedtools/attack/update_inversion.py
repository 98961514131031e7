"""What clients' data were, by what they sent: inputs by gradient matching, tokens by output layers.

`fedtools.attack.matching` recovers inputs: of one step on one item, which the attacker computes as
the client would (the best case, of which papers report), and of what the client really sent, after
all of its steps. Labels and lengths are known, but for a single clip's, which the output layer
tells. `fedtools.attack.bag_of_words` tells tokens. (`fedtools.attack.inversion` is another attack,
on features that clients sent.)

OUT/inversion.tsv        figures, see `fedtools.attack.recovered`
OUT/inversion_parts.tsv  what was attacked, and why something was not
OUT/inversion.png        some spectra: true, recovered, somebody else's
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fedtools.attack.bag_of_words import BIAS, bags, count_tokens, output_layer, scores_of
from fedtools.attack.defences import Defence, Defended, defended
from fedtools.attack.footprints import State
from fedtools.attack.knowledge import ANY, NO_DEFENCE, SEMI
from fedtools.attack.matching import Loss, Plan, Simulation, match, plan_of
from fedtools.attack.options import Inversion
from fedtools.attack.people import People
from fedtools.attack.recovered import (
    CHANCE,
    COLUMNS,
    FREQUENCY,
    Item,
    Judge,
    Measure,
    assigned,
    draw,
    voices,
    words,
)
from fedtools.attack.updates import NotApplicable
from fedtools.attack.victims import Victims, sound_victims
from fedtools.audio.griffin_lim import Front
from fedtools.federation.federation import Federation
from fedtools.files.sections import Bootstrap
from fedtools.files.seeds import seed64
from fedtools.files.tables import write_tsv
from fedtools.methods.base import SHARED
from fedtools.models.asr import input_kind_of
from fedtools.models.copies import copy_of
from fedtools.models.keywords import inputs_of
from fedtools.speaker.resemblyzer import VoiceEncoder
from fedtools.tasks.base import Items, as_configured
from fedtools.tasks.parts import CLIPS, DEVICE, ITEMS, MODELS

PARTS = ("part", "status")
MATCHING, BAG, VOICES = "gradient matching", "bag of tokens", "voices"
ONE, REAL = "one", "real"
SIMULATED, AS_ONE = "real, simulated", "real, as one"
OK, NOT_APPLICABLE = "ok", "not applicable"
_DRAWN = 3


@dataclass(frozen=True)
class Look:
    """What is attacked, and how it is judged.

    Attributes:
        number: the round.
        steps: `ONE`, `REAL` or both.
        defences: beside none, see `fedtools.attack.defences`.
        voices: whether Resemblyzer says who speaks what was recovered.
        resamples: of intervals.
        seed: of everything random.
    """

    number: int
    steps: Sequence[str] = (ONE, REAL)
    defences: Sequence[str] = ()
    voices: bool = False
    resamples: int = Bootstrap.resamples
    seed: int = 0


@dataclass(frozen=True)
class FirstSteps(Victims):
    """What clients would send after one step on one item, as the attacker computes it.

    Attributes:
        take: of a client, what it would send.
    """

    take: Callable[[str], State]

    def states(self, wanted: Sequence[str]) -> Iterator[tuple[str, State]]:
        """See `Victims`."""
        for name in wanted:
            yield name, self.take(name)


@as_configured
def attack(
    federation: Federation, out: Path, options: Inversion, look: Look
) -> list[dict[str, object]]:
    """Attack what clients sent in a round; write the files above.

    Returns:
        the rows of OUT/inversion.tsv.

    Raises:
        UserError: if the round is not complete, or what was sent is gone.
    """
    for defence in look.defences:
        Defence.parse(defence)
    encoder = VoiceEncoder() if look.voices else None
    rows, told = list[dict[str, object]](), dict[str, str]()
    out.mkdir(parents=True, exist_ok=True)
    (out / "inversion.png").unlink(missing_ok=True)
    try:
        world = World(federation, options, look)
    except NotApplicable as error:
        told = dict.fromkeys((MATCHING, BAG), f"{NOT_APPLICABLE}: {error}")
    else:
        for part, run in ((MATCHING, partial(world.match, out, encoder)), (BAG, world.bags)):
            try:
                rows += list(run())
                told[part] = OK
            except NotApplicable as error:
                told[part] = f"{NOT_APPLICABLE}: {error}"
        told |= world.told
    for part, status in told.items():
        if status != OK:
            print(f"{part}: {status}", file=sys.stderr)
    parts = [{"part": part, "status": status} for part, status in told.items()]
    write_tsv(out / "inversion_parts.tsv", PARTS, parts)
    write_tsv(out / "inversion.tsv", COLUMNS, rows)
    return rows


class World:
    """The clients of a round, and what is done to what they sent.

    Args:
        federation: opened.
        options, look: see `attack`.

    Attributes:
        told: why some of it was not done.

    Raises:
        NotApplicable: if clients send no models, or the task knows no items.
    """

    def __init__(self, federation: Federation, options: Inversion, look: Look):
        phase, items = federation.method.phase(look.number), ITEMS.of(federation.task)
        if phase.client is None or phase.sends != SHARED or MODELS.of(federation.task) is None:
            raise NotApplicable(f"in round {look.number} clients send no models")
        if items is None:
            name = federation.experiment.options.task
            raise NotApplicable(f"experiments of task {name} have no items")
        self._federation, self._options, self._look = federation, options, look
        self._items: Items = items(())
        self._victims = sound_victims(federation, [look.number])
        start = federation.states.start(look.number)
        self._start = federation.states.of_kind(SHARED, start)
        for defence in look.defences:
            # It says what is wrong with one.
            defended(federation, self._victims, look.number, defence, look.seed)
        self._people = People(self._items, sorted(self._victims.messages), options, look.seed)
        self._drawn: list[list[np.ndarray]] = []
        self.told: dict[str, str] = {}

    def match(self, out: Path, encoder: VoiceEncoder | None) -> Iterator[dict[str, object]]:
        """Recover inputs, and judge them; rows, and OUT/inversion.png."""
        front = self._front()
        model = self._global_model()
        judge = Judge(partial(self._spectrum, front), self._items.audio, self._people.own)
        simulation = Simulation(copy_of(model))
        for defence in ("", *self._look.defences):
            for steps in self._look.steps:
                states = self._states(simulation, defence, steps)
                found = self._recover(simulation, judge, states, steps)
                if not defence and not self._drawn:
                    self._drawn = self._to_draw(judge, found)
                for how, items, read in found:
                    measures = [*judge.measures(items), self._words(model, items), *read]
                    measures += self._voices(front, encoder, items)
                    for one in measures:
                        yield self._row(MATCHING, defence, how, one)
        draw(out / "inversion.png", self._drawn)

    def bags(self) -> Iterator[dict[str, object]]:
        """Tell tokens by what output layers changed in all real steps; rows."""
        output = output_layer(self._federation, self._federation.states.shared_spec)
        names = sorted(self._victims.messages)
        counts = {
            client: count_tokens(list(map(self._items.labels, self._people.own(client))), output)
            for client in names
        }
        for defence in ("", *self._look.defences):
            states = self._defended(self._victims, defence).states(names)
            scores = {name: scores_of(output, sent, self._start) for name, sent in states}
            found: dict[str, list[tuple[str, float, float, float]]] = {}
            for client, kind, ours, theirs in bags(counts, scores):
                for name, true in (("area", 100.0), ("precision", 100.0), ("counts", 1.0)):
                    measure = {"area": "AUC%", "precision": "AP%", "counts": "counts"}[name]
                    values = getattr(ours, name), getattr(theirs, name), true
                    if not np.isnan(values).any():
                        found.setdefault(f"{kind} {measure}", []).append((client, *values))
            if not found and not defence:
                raise NotApplicable("no client says some tokens more often than others")
            for measure, values in found.items():
                clients = [client for client, *_ in values]
                sums = np.array([one for _, *one in values])
                one = Measure(measure, FREQUENCY, clients, sums, np.ones(len(sums)))
                yield self._row(BAG, defence, REAL, one)

    def _row(self, attack: str, defence: str, steps: str, one: Measure) -> dict[str, object]:
        about = {"attack": attack, "defence": defence or NO_DEFENCE,
                 "attacker": SEMI if defence else ANY, "steps": steps}  # fmt: skip
        return about | one.row(self._people.speaker, self._look.resamples, self._look.seed)

    def _front(self) -> Front | None:
        """How the model's input was made of sound; None: it is not known.

        Raises:
            NotApplicable: if nothing can be recovered of the model's input.
        """
        options = self._federation.experiment.options.model
        if options.get("criterion") == "lfmmi":
            raise NotApplicable("the gradient of LF-MMI cannot be differentiated again")
        kind, bins = self._options.kind, self._options.bins
        if CLIPS.of(self._federation.task):
            found, width = inputs_of(options)
            kind = "clip_mfcc" if found == "mfcc" else found
        else:
            kind = input_kind_of(options) or kind
            width = self._items.audio(next(iter(self._items.owners))).shape[1]
        if kind == "wave":
            raise NotApplicable("the model takes waveforms, of which there is no spectrum")
        return None if kind == "unknown" else Front.of(kind, bins or width)

    def _spectrum(self, front: Front | None, values: np.ndarray) -> np.ndarray:
        values = values[:, : self._options.bins or None]
        return front.energies(values) if front else values

    def _global_model(self) -> torch.nn.Module:
        self._federation.load_result(None, self._look.number - 1)
        return self._federation.task.need(MODELS).build()

    def _loss(self, names: Sequence[str], labels: Sequence[list[int]]) -> Loss:
        return lambda model, inputs: self._items.loss_at(model, names, inputs, labels)

    def _states(
        self, simulation: Simulation, defence: str, steps: str
    ) -> Iterator[tuple[str, State]]:
        """What is seen of the clients under attack."""
        victims = self._victims
        if steps == ONE:
            take = partial(self._first_step, simulation)
            victims = FirstSteps(victims.messages, victims.refused, victims.speakers, take)
        return self._defended(victims, defence).states(self._people.attacked)

    def _defended(self, victims: Victims, defence: str) -> Defended:
        return Defended(victims, Defence.parse(defence), self._start, self._look.seed)

    def _first_step(self, simulation: Simulation, client: str) -> State:
        (name,) = self._people.shortest(client, 1)
        found = simulation.step(
            self._loss([name], [self._items.labels(name)]), [self._tensor(self._items.audio(name))]
        )
        # Of a stack of one.
        return {
            key: value.reshape(self._start[key].shape)
            for key, value in found.items()
            if key in self._start
        }

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        device = self._federation.task.need(DEVICE)
        return torch.from_numpy(values).to(device, torch.get_default_dtype())

    def _recover(
        self,
        simulation: Simulation,
        judge: Judge,
        states: Iterator[tuple[str, State]],
        steps: str,
    ) -> list[tuple[str, list[Item], list[Measure]]]:
        """How each was seen, what was recovered of those that were, and labels that were read."""
        found: dict[str, list[Item]] = {}
        right: dict[str, float] = {}
        training = self._federation.task.need(MODELS).training
        for number, (client, sent) in enumerate(states, 1):
            taken = 1 if steps == ONE else self._victims.messages[client].steps
            known = Plan() if steps == ONE else plan_of(training, taken, self._options.unroll)
            names = self._people.shortest(client, 1 if steps == ONE else self._options.items)
            labels = list(map(self._items.labels, names))
            if steps == ONE and (read := self._read_label(sent)) is not None:
                right[client] = 100.0 * (read == labels[0])
                labels = [read]
            seen = simulation.seen(sent, self._start, taken)
            if not any(value.any() for value in seen.update.values()):
                raise NotApplicable("nothing that training changes is sent")
            title = f"inversion, {steps}, client {number}/{len(self._people.attacked)}"
            lengths = [len(self._items.audio(name)) for name in names]
            scales = tuple(map(self._tensor, self._people.scales(client)))
            seed = seed64(self._look.seed, "inversion", client, steps)
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
        """What was recovered, each with the item of its labels that it has most in common with."""
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
        """The class of the only clip, by the bias of the output layer; None: nothing says it."""
        if not CLIPS.of(self._federation.task):
            return None
        try:
            output = output_layer(self._federation, self._federation.states.shared_spec)
        except NotApplicable:
            return None
        scores = scores_of(output, sent, self._start)
        return [int(output.rows[scores[BIAS].argmax()])] if BIAS in scores else None

    def _read_rightly(self, right: Mapping[str, float]) -> list[Measure]:
        if not right:
            return []
        control = 100 * self._people.most_common()
        sums = np.array([[one, control, 100.0] for one in right.values()])
        return [Measure("label%", CHANCE, list(right), sums, np.ones(len(sums)))]

    def _words(self, model: torch.nn.Module, items: Sequence[Item]) -> Measure:
        """What the global model hears."""
        model.eval()

        def errors(name: str, values: np.ndarray) -> tuple[int, int]:
            return self._items.errors(model, name, self._tensor(values))

        return words(items, errors, self._items.audio, self._federation.facts.rate)

    def _voices(
        self, front: Front | None, encoder: VoiceEncoder | None, items: Sequence[Item]
    ) -> list[Measure]:
        """Who speaks, where that is asked for and can be told."""
        if encoder is None:
            return []
        used = {item.name for item in items}
        rest = {item.client: [one for one in self._people.own(item.client) if one not in used]
                for item in items}  # fmt: skip
        enrolment = {client: own[0] for client, own in rest.items() if own}
        if front is None or len({self._people.speaker[one] for one in enrolment}) < 2:
            why = "there are no two speakers with an item more than those that are recovered"
            why = why if front else "how features were made is not known: set inversion.kind"
            self.told[VOICES] = f"{NOT_APPLICABLE}: {why}"
            return []
        bins = self._options.bins or None

        def embed(values: np.ndarray) -> np.ndarray:
            return encoder.embed(front.sound(values[:, :bins]))

        self.told.setdefault(VOICES, OK)
        return voices(items, embed, self._items.audio, enrolment, self._people.speaker)

    def _to_draw(
        self, judge: Judge, found: Sequence[tuple[str, list[Item], list[Measure]]]
    ) -> list[list[np.ndarray]]:
        items = [item for _, some, _ in found for item in some][:_DRAWN]
        return [
            [judge.of(one.name), judge.spectrum(one.found), judge.of(one.others[0])]
            for one in items
        ]
