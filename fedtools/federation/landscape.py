"""Accuracy between a model and what two clients make of it.

X.-C. Li et al.: Avoid overfitting user specific information in federated keyword spotting,
Interspeech 2022, section 5 and figure 4: theta_0 is a good model; theta_1 is what it becomes after
20 epochs on the clips of an inferior client, theta_2 of a qualified one. The landscape is the
accuracy of theta_0 + gamma_1 (theta_1 - theta_0) + gamma_2 (theta_2 - theta_0). In the second one
theta_1 gives way to a model that ALO trained against it.

Buffers, such as BatchNorm's statistics, are interpolated as parameters are; but a variance never
falls below the smallest of the three models', since an extrapolated one could be negative.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from fedtools.client.fit import Objective
from fedtools.client.place import Place
from fedtools.client.stacks import ClipBatches, cross_entropy
from fedtools.federation.kws import KwsFederation, predict, prepare, tensors_of
from fedtools.files.clips import Clips
from fedtools.files.errors import UserError
from fedtools.files.keyed import generator
from fedtools.files.private import Private
from fedtools.methods.fedkws_ui import Alo, FedKwsUi
from fedtools.models.keywords.base import Network

_LOW, _HIGH = -0.1, 1.1

State = dict[str, Tensor]


@dataclass(frozen=True)
class LandscapeConfig:
    """What decides a landscape.

    Attributes:
        epochs: of each client, on its own clips.
        points: of the grid in each direction, from -0.1 to 1.1.
        clips: the largest number of clips that accuracy is measured on, drawn at random.
        min_clips: clients with fewer are not chosen.
        split: the data that it is measured on.
        alo: the options of ALO, which decide the clients' utilities too.
    """

    epochs: int = 20
    points: int = 13
    clips: int = 500
    min_clips: int = 10
    split: str = "test"
    alo: Alo = field(default_factory=Alo)


@dataclass(frozen=True)
class Client:
    """What ALT says of a client.

    Attributes:
        name: its id.
        clips: their number.
        entropy: of its labels, over log(classes).
        utility: r_k, the harmonic mean of entropy and of clips over those of the largest client.
        ratio: r0 x r_k: its steps over those of FedAvg's clients.
    """

    name: str
    clips: int
    entropy: float
    utility: float
    ratio: float


@dataclass(frozen=True)
class Landscape:
    """Accuracies, in %, on a grid.

    Attributes:
        inferior, qualified: the clients of theta_1 and theta_2.
        gammas: both axes of the grid, (points,).
        accuracy: "overfitted" and "alo" -> (points, points), gamma_1 along the first dimension.
        models: accuracies of theta_0, theta_1, theta_2, and of theta_1 by ALO.
    """

    inferior: Client
    qualified: Client
    gammas: np.ndarray
    accuracy: dict[str, np.ndarray]
    models: dict[str, float]


def landscape(federation: KwsFederation, config: LandscapeConfig) -> Landscape:
    """Train two clients' models from an experiment's last one, and measure what lies between.

    The clients are those of the lowest and the highest utility. Nothing is written into the
    experiment.

    Args:
        federation: its last model is theta_0; its data and training options are used.
        config: the rest.

    Raises:
        UserError: if too few clients have enough clips, or a client's training diverges.
    """
    # Whatever ALO's private model is elsewhere: here it is theta_1, a whole one.
    alo = dataclasses.replace(config.alo, private="model")
    inferior, qualified = choose_clients(federation, config.min_clips, alo)
    federation.load_result(None, federation.experiment.result_round())
    start = _copied(federation.model)
    with tempfile.TemporaryDirectory() as folder:
        first, second, against = (
            train_on(federation, client, config.epochs, Path(folder), by)
            for client, by in ((inferior, None), (qualified, None), (inferior, alo))
        )
    accuracy = _accuracy_on(federation, config)
    # Rounded, so that 0 and 1 are on the grid; and no -0.
    gammas = np.linspace(_LOW, _HIGH, config.points).round(6) + 0.0
    grids = {}
    for name, one in (("overfitted", first), ("alo", against)):
        bar = tqdm(gammas, desc=f"landscape {name}", unit="row", disable=None, leave=False)
        grids[name] = np.array(
            [[accuracy(between(start, one, second, g1, g2)) for g2 in gammas] for g1 in bar]
        )
    models = {"theta_0": start, "theta_1": first, "theta_2": second, "theta_1 by ALO": against}
    figures = {name: accuracy(state) for name, state in models.items()}
    return Landscape(inferior, qualified, gammas, grids, figures)


def client_facts(clips: Clips, method: FedKwsUi, batch_size: int) -> list[Client]:
    """What ALT says of each client, in the order of the clips."""
    names = clips.clients
    facts = prepare(method, clips, batch_size)
    columns = (facts[name].tolist() for name in ("size", "entropy", "utility", "ratio"))
    return [Client(*row) for row in zip(names, *columns, strict=True)]


def choose_clients(
    federation: KwsFederation, min_clips: int, method: FedKwsUi
) -> tuple[Client, Client]:
    """The clients of the lowest and the highest utility of those with enough clips."""
    batch_size = federation.training.batch_size
    clients = client_facts(federation.features("train").clips, method, batch_size)
    enough = [client for client in clients if client.clips >= min_clips]
    if len(enough) < 2:
        raise UserError(
            f"{len(enough)} of {len(clients)} clients have {min_clips} clips",
            path=federation.data_path("train"),
            remedy="ask for fewer, by --min-clips (run.sh: --landscape_clips)",
        )
    by_utility = sorted(enough, key=lambda client: (client.utility, client.name))
    return by_utility[0], by_utility[-1]


def between(start: State, first: State, second: State, g1: float, g2: float) -> State:
    """start + g1 (first - start) + g2 (second - start), tensor by tensor; see the module."""
    found = {}
    for name, value in start.items():
        base, one, two = (state[name].double() for state in (start, first, second))
        # The same sum, but exact where it is one of the three.
        mixed = (1 - g1 - g2) * base + g1 * one + g2 * two
        if name.endswith("running_var"):
            mixed = torch.maximum(mixed, torch.minimum(torch.minimum(base, one), two))
        found[name] = mixed.to(value.dtype)
    return found


def train_on(
    federation: KwsFederation, client: Client, epochs: int, folder: Path, alo: Alo | None
) -> State:
    """What some epochs on a client's clips make of the model that lies in the federation.

    Args:
        folder: receives what the client would keep, such as ALO's private model.
        alo: trains it against the model that comes out without; None trains that one.
    """
    steps = math.ceil(epochs * client.clips / min(client.clips, federation.training.batch_size))
    data = federation.features("train")
    number, seed = federation.experiment.result_round() + 1, federation.experiment.seed
    rows = data.clips.rows(client.name)

    def batches(epochs: int | None, asked: int | None, purpose: str) -> ClipBatches:
        key = seed, number, purpose
        return ClipBatches(data, [client.name], [rows], [asked or steps], federation.training, key)

    stack = Place(
        [client.name],
        number,
        copy.deepcopy(federation.model),
        stacked=True,
        training=federation.training,
        objective=Objective(cross_entropy),
        batches=batches,
        sizes=[client.clips],
        own=[Private(folder, number)],
        seed=seed,
        facts={"steps": np.array([steps]), "utility": np.array([client.utility])},
    )
    if alo:
        (fitted,) = dataclasses.replace(alo, private_steps=steps).train_client(stack)
    else:
        # As ALO trains its private model: the one that it works against is theta_1 itself.
        (fitted,) = stack.fit(purpose="private")
    if fitted.reason:
        raise UserError(
            f"the training of client {client.name!r} diverged",
            path=federation.experiment.path,
            remedy="take an experiment of a lower learning rate",
        )
    return _copied(stack.model)


def _copied(network: Network) -> State:
    return {name: value.detach().clone() for name, value in tensors_of(network).items()}


def _accuracy_on(federation: KwsFederation, config: LandscapeConfig) -> Callable[[State], float]:
    """A function from a model to its accuracy, in %, on some clips, the same every time."""
    data = federation.features(config.split)
    total = len(data.clips.labels)
    draw = generator(federation.experiment.seed, "landscape", config.split)
    chosen = np.sort(draw.choice(total, min(total, config.clips), replace=False))
    mfcc = torch.cat([data.plain(slice(row, row + 1)) for row in chosen])
    labels = torch.from_numpy(data.clips.labels[chosen]).to(mfcc.device)

    def accuracy(state: State) -> float:
        federation.load(state)
        return 100 * float((predict(federation.model, mfcc).argmax(1) == labels).double().mean())

    return accuracy
