"""A round whose updates are inverted: its clients, and their updates behind a defence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedtools.attack.defences import Defence, Defended, defended
from fedtools.attack.knowledge import ANY, NO_DEFENCE, SEMI
from fedtools.attack.options import Inversion
from fedtools.attack.recovery.people import People
from fedtools.attack.recovery.recovered import Measure
from fedtools.attack.updates import NotApplicable
from fedtools.attack.victims import Victims, sound_victims
from fedtools.core.recipe_sections import Bootstrap
from fedtools.federation.federation import Federation
from fedtools.methods.base import SHARED
from fedtools.tasks.base import Items
from fedtools.tasks.parts import DEVICE, ITEMS, MODELS

ONE, REAL = "one", "real"


@dataclass(frozen=True)
class InversionSetup:
    """Round, steps and defences to attack, and options of the figures.

    Attributes:
        number: the round.
        steps: `ONE`, `REAL` or both.
        defences: defences in addition to none, see `fedtools.attack.defences`.
        voices: whether Resemblyzer identifies the speakers of recovered items.
        resamples: number of bootstrap resamples for intervals.
        seed: random seed.
    """

    number: int
    steps: Sequence[str] = (ONE, REAL)
    defences: Sequence[str] = ()
    voices: bool = False
    resamples: int = Bootstrap.resamples
    seed: int = 0


class World:
    """Clients of a round, and what they sent.

    Args:
        federation: opened federation.
        options: options of the attack.
        setup: round, steps and defences to attack.

    Attributes:
        items: items of the training data.
        victims: clients who sent a model.
        start: the tensors that clients began with, of those that they send.
        people: clients whose items are recovered and compared.

    Raises:
        NotApplicable: if clients send no models, or the task has no items.
    """

    def __init__(self, federation: Federation, options: Inversion, setup: InversionSetup):
        phase, items = federation.method.phase(setup.number), ITEMS.of(federation.task)
        if (
            phase.client_update is None
            or phase.sends != SHARED
            or MODELS.of(federation.task) is None
        ):
            raise NotApplicable(f"in round {setup.number} clients send no models")
        if items is None:
            name = federation.experiment.options.task
            raise NotApplicable(f"experiments of task {name} have no items")
        self.federation, self.options, self.setup = federation, options, setup
        self.items: Items = items(())
        self.victims = sound_victims(federation, [setup.number])
        start = federation.states.start(setup.number)
        self.start = federation.states.of_kind(SHARED, start)
        for defence in setup.defences:
            # Raises an error if the defence does not fit the model.
            defended(federation, self.victims, setup.number, defence, setup.seed)
        self.people = People(self.items, sorted(self.victims.messages), options, setup.seed)

    def seen(self, victims: Victims, defence: str) -> Defended:
        """Return victims as they are seen behind a defence; "" is no defence."""
        return Defended(victims, Defence.parse(defence), self.start, self.setup.seed)

    def row(self, attack: str, defence: str, steps: str, one: Measure) -> dict[str, object]:
        """Return a row of OUT/inversion.tsv."""
        about = {"attack": attack, "defence": defence or NO_DEFENCE,
                 "attacker": SEMI if defence else ANY, "steps": steps}  # fmt: skip
        return about | one.row(self.people.speaker, self.setup.resamples, self.setup.seed)

    def global_model(self) -> torch.nn.Module:
        """Return the model that the round began with."""
        self.federation.load_result(None, self.setup.number - 1)
        return self.federation.task.need(MODELS).build()

    def tensor(self, values: np.ndarray) -> torch.Tensor:
        """Return an input as a tensor on the model's device."""
        device = self.federation.task.need(DEVICE)
        return torch.from_numpy(values).to(device, torch.get_default_dtype())
