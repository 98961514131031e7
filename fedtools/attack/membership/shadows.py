"""Shadow models: models that an attacker trains with and without an utterance.

They come in pairs: for each member and its counterpart in a client's trials, one model is trained
on the one and its twin on the other, so that each utterance is in half of the models, whether it is
a member or not. The rest of the data, up to the amount that the client trains on, is what the
attacker has: the same speaker's other speech, then other people's. The training is the client half
of the experiment's method and begins with the global model, including tensors that clients keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fedtools.attack.membership.candidates import Candidates, Draw
from fedtools.attack.victims import State
from fedtools.client.client import Client
from fedtools.client.unit import Unit
from fedtools.core.errors import UserError
from fedtools.core.seeds import generator
from fedtools.exchange.private import Private
from fedtools.exchange.states import as_array
from fedtools.federation.federation import Federation
from fedtools.methods.base import SHARED
from fedtools.models.training import load_model
from fedtools.tasks.base import Items
from fedtools.tasks.parts import MODELS


def plan(draw: Draw, candidates: Candidates, pairs: int, seed: int) -> list[list[str]]:
    """Return the data of each of a client's shadow models; successive two are a pair."""
    found = []
    for number in range(pairs):
        random = generator(seed, "membership", "shadow", candidates.client, number)
        tried = np.array(candidates.nearest)
        first = random.integers(0, 2, len(tried))
        rest = draw.fill(candidates, draw.size(candidates.client) - len(tried), random)
        for side in (first, 1 - first):
            found.append([*tried[np.arange(len(tried)), side].tolist(), *rest])
    return found


def train(
    federation: Federation, number: int, items: Items, client: str, data: Sequence[str], seed: int
) -> State:
    """Train on some utterances in a client's place, and return what it would send in a round.

    Args:
        number: the round.
        items: all utterances.
        client: client whose place it takes, for methods that treat clients differently.
        data: utterances to train on.
        seed: random seed; the experiment's seed and a client's own data give what that client
            sends.

    Raises:
        UserError: if the training diverged.
    """
    models, phase = federation.task.need(MODELS), federation.method.phase(number)
    assert phase.client_update is not None
    source = items.source(data, client, number, seed)
    model = models.build(1)
    load_model(models.tensors(model), federation.states.start(number))
    with TemporaryDirectory() as folder:
        home = Private(Path(folder) / "shadow", number)
        unit = Unit([client], number, seed, home, [home], federation.states.personal)
        (trained,) = phase.client_update(Client(unit, source, models, model))
    if trained.reason:
        remedy = "train none: --shadows 0"
        raise UserError(f"a shadow model of {client!r} {trained.reason}", remedy=remedy)
    sent = federation.states.of_kind(SHARED, models.tensors(model))
    return {name: as_array(name, value).copy() for name, value in sent.items()}
