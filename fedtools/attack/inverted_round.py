"""A round whose updates are inverted: who sent what, and what of it is seen behind a defence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedtools.attack.defences import Defence, Defended, defended
from fedtools.attack.knowledge import ANY, NO_DEFENCE, SEMI
from fedtools.attack.options import Inversion
from fedtools.attack.people import People
from fedtools.attack.recovered import Measure
from fedtools.attack.updates import NotApplicable
from fedtools.attack.victims import Victims, sound_victims
from fedtools.federation.federation import Federation
from fedtools.files.sections import Bootstrap
from fedtools.methods.base import SHARED
from fedtools.tasks.base import Items
from fedtools.tasks.parts import DEVICE, ITEMS, MODELS

ONE, REAL = "one", "real"


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


class World:
    """The clients of a round, and what they sent.

    Args:
        federation: opened.
        options: of the attack.
        look: what is attacked.

    Attributes:
        items: of the training data.
        victims: who sent something.
        start: the tensors that they began with, of those that are sent.
        people: whose items are recovered, and compared.

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
        self.federation, self.options, self.look = federation, options, look
        self.items: Items = items(())
        self.victims = sound_victims(federation, [look.number])
        start = federation.states.start(look.number)
        self.start = federation.states.of_kind(SHARED, start)
        for defence in look.defences:
            # It says what is wrong with one.
            defended(federation, self.victims, look.number, defence, look.seed)
        self.people = People(self.items, sorted(self.victims.messages), options, look.seed)

    def seen(self, victims: Victims, defence: str) -> Defended:
        """What is seen of some victims behind a defence; "" is none."""
        return Defended(victims, Defence.parse(defence), self.start, self.look.seed)

    def row(self, attack: str, defence: str, steps: str, one: Measure) -> dict[str, object]:
        """A row of OUT/inversion.tsv."""
        about = {"attack": attack, "defence": defence or NO_DEFENCE,
                 "attacker": SEMI if defence else ANY, "steps": steps}  # fmt: skip
        return about | one.row(self.people.speaker, self.look.resamples, self.look.seed)

    def global_model(self) -> torch.nn.Module:
        """The model that the round began with."""
        self.federation.load_result(None, self.look.number - 1)
        return self.federation.task.need(MODELS).build()

    def tensor(self, values: np.ndarray) -> torch.Tensor:
        """An input, where the model lies."""
        device = self.federation.task.need(DEVICE)
        return torch.from_numpy(values).to(device, torch.get_default_dtype())
