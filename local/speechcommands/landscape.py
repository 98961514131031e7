#!/usr/bin/env python3
"""Draw figure 4 of Li et al., Interspeech 2022: accuracy between a model and two clients' models.

    landscape.py EXP PNG

theta_0 is the last model of EXP; theta_1 is this model after some epochs on the clips of the client
of lowest utility, and theta_2 after some on the clips of the client of highest utility (the paper's
clients have 100 and about 250 clips). The landscape is the accuracy of

    theta_0 + gamma_1 (theta_1 - theta_0) + gamma_2 (theta_2 - theta_0).

In the second panel, theta_1 is replaced by a model that ALO trained against it. The values are
written next to the picture, to a .tsv of the same name; the four models' accuracies are printed.

Buffers, such as BatchNorm's statistics, are interpolated like parameters, but variances are bounded
below by the smallest of the three models', since an extrapolated one could be negative.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from options import config_for, png, whole
from runs import network_title, title_of
from torch import Tensor, nn
from tqdm import tqdm

from fedtools.cli.federation import open_experiment
from fedtools.client.client import Client as FederatedClient
from fedtools.client.unit import Unit
from fedtools.core import recipe_sections as sections
from fedtools.core.config import from_mapping, read_section
from fedtools.core.drawing import drawing
from fedtools.core.errors import UserError, exit_with_message
from fedtools.core.seeds import generator
from fedtools.core.tables import format_table, write_tsv
from fedtools.data.clips import Clips
from fedtools.exchange.private import Private
from fedtools.federation.federation import Federation
from fedtools.methods.fedkws_ui import Alo, FedKwsUi
from fedtools.models.training import load_model
from fedtools.tasks.kws.facts import of_clips, prepared
from fedtools.tasks.kws.model import tensors_of
from fedtools.tasks.kws.stacks import ClipSource
from fedtools.tasks.kws.task import predict
from fedtools.tasks.parts import CLIPS, LOGITS, MODELS

COLUMNS = ("panel", "gamma_1", "gamma_2", "accuracy")
_LOW, _HIGH = -0.1, 1.1

State = dict[str, Tensor]


@dataclass(frozen=True)
class Client:
    """ALT's measures of a client.

    Attributes:
        name: the client's id.
        clips: number of its clips.
        entropy: entropy of its labels, divided by log(classes).
        utility: r_k, the harmonic mean of entropy and of clips relative to the largest client's.
        ratio: r0 x r_k, the client's steps relative to those of FedAvg's clients.
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
        gammas: both axes of the grid: (points,).
        accuracy: "overfitted" and "alo" -> (points, points), gamma_1 along the first dimension.
        models: accuracies of theta_0, theta_1, theta_2, and of theta_1 by ALO.
    """

    inferior: Client
    qualified: Client
    gammas: np.ndarray
    accuracy: dict[str, np.ndarray]
    models: dict[str, float]


def landscape(federation: Federation, alo: Alo, options: argparse.Namespace) -> Landscape:
    """Train two clients' models from an experiment's last one, and measure accuracies in between.

    The clients are those of the lowest and the highest utility. Nothing is written into the
    experiment.

    Args:
        federation: the experiment; its last model is theta_0, and its data and training options are
            used.
        alo: the options of ALO, which determine the clients' utilities too.
        options: the command line.

    Raises:
        UserError: if too few clients have enough clips, a client's training diverges, or layers
            are personal.
    """
    if federation.personal:
        problem = "clients have personal layers, so that there is no single model"
        raise UserError(problem, path=federation.where, remedy="give one without personal layers")
    inferior, qualified = choose_clients(federation, options.min_clips, alo)
    federation.load_result(None, federation.experiment.result_round())
    start = _copied(federation.task.need(MODELS).build())
    with tempfile.TemporaryDirectory() as folder:
        first, second, against = (
            train_on(federation, client, options.epochs, Path(folder), by)
            for client, by in ((inferior, None), (qualified, None), (inferior, alo))
        )
    accuracy = _accuracy_on(federation, options.split, options.clips)
    # Rounded, so that 0 and 1 are on the grid; adding 0 turns -0 into 0.
    gammas = np.linspace(_LOW, _HIGH, options.points).round(6) + 0.0
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
    """Return ALT's measures of each client, in the order of the clips."""
    names = clips.clients
    facts = prepared(of_clips(clips).clients, method, batch_size, clips.path).values
    columns = (facts[name].tolist() for name in ("size", "entropy", "utility", "ratio"))
    return [Client(*row) for row in zip(names, *columns, strict=True)]


def choose_clients(
    federation: Federation, min_clips: int, method: FedKwsUi
) -> tuple[Client, Client]:
    """Return the clients of the lowest and the highest utility among those with enough clips."""
    batch_size = federation.task.need(CLIPS).training.batch_size
    clients = client_facts(federation.task.need(CLIPS).features("train").clips, method, batch_size)
    enough = [client for client in clients if client.clips >= min_clips]
    if len(enough) < 2:
        raise UserError(
            f"only {len(enough)} of {len(clients)} clients have at least {min_clips} clips",
            path=federation.task.data_path("train"),
            remedy="lower --min-clips (run.sh: --landscape_clips)",
        )
    by_utility = sorted(enough, key=lambda client: (client.utility, client.name))
    return by_utility[0], by_utility[-1]


def between(start: State, first: State, second: State, g1: float, g2: float) -> State:
    """Compute start + g1 (first - start) + g2 (second - start) by tensor; see the module."""
    found = {}
    for name, value in start.items():
        base, one, two = (state[name].double() for state in (start, first, second))
        # This form is exact where the result is one of the three.
        mixed = (1 - g1 - g2) * base + g1 * one + g2 * two
        if name.endswith("running_var"):
            mixed = torch.maximum(mixed, torch.minimum(torch.minimum(base, one), two))
        found[name] = mixed.to(value.dtype)
    return found


def train_on(
    federation: Federation, client: Client, epochs: int, folder: Path, alo: Alo | None
) -> State:
    """Train the federation's loaded model for some epochs on a client's clips, and return it.

    Args:
        federation: the experiment, with the model to start from.
        client: the client.
        epochs: number of epochs.
        folder: receives the state that the client keeps, such as ALO's private model.
        alo: with this, the model is trained by ALO against the plainly trained one; None: plain
            training.

    Raises:
        UserError: if the training diverges.
    """
    models, corpus = federation.task.need(MODELS), federation.task.need(CLIPS)
    data, training = corpus.features("train"), corpus.training
    steps = math.ceil(epochs * client.clips / min(client.clips, training.batch_size))
    number, seed = federation.experiment.result_round() + 1, federation.experiment.seed
    facts = {"steps": np.array([steps])}
    rows, home = [data.clips.rows(client.name)], Private(folder, number)
    source = ClipSource(data, [client.name], rows, (seed, number), training, facts)
    unit = Unit([client.name], number, seed, home, [home])
    model = copy.deepcopy(models.build())
    trainer = FederatedClient(unit, source, models, model)
    if alo:
        (trained,) = dataclasses.replace(alo, private_steps=steps).client(trainer)
    else:
        # The same purpose, and so random numbers, as ALO's private model, which is thus theta_1.
        (trained,) = trainer.train(purpose="private")
    if trained.reason:
        raise UserError(
            f"the training of client {client.name!r} diverged",
            path=federation.experiment.path,
            remedy="give an experiment with a lower learning rate",
        )
    return _copied(trainer.model)


def _copied(network: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in tensors_of(network).items()}


def _accuracy_on(federation: Federation, split: str, most: int) -> Callable[[State], float]:
    """Return a function that computes a model's accuracy, in %, on a fixed draw of clips."""
    data = federation.task.need(CLIPS).features(split)
    total = len(data.clips.labels)
    draw = generator(federation.experiment.seed, "landscape", split)
    chosen = np.sort(draw.choice(total, min(total, most), replace=False))
    mfcc = torch.cat([data.plain(slice(row, row + 1)) for row in chosen])
    labels = torch.from_numpy(data.clips.labels[chosen]).to(mfcc.device)

    network = federation.task.need(MODELS).build()

    def accuracy(state: State) -> float:
        load_model(tensors_of(network), state)
        return 100 * float((predict(network, mfcc).argmax(1) == labels).double().mean())

    return accuracy


# --- the picture ----------------------------------------------------------------------------------


def draw_landscape(options: argparse.Namespace) -> None:
    """Compute a landscape, draw it, write its values, and print the four models' accuracies."""
    federation = open_experiment(options.experiment, options.ngpu)
    federation.task.need(LOGITS)
    classes = len(federation.task.need(CLIPS).features("train").clips.classes)
    config = config_for("alo", classes, options.config)
    alo = from_mapping(Alo, config.get("method_conf"), options.config or "")
    with federation.settings():
        found = landscape(federation, alo, options)
    rows = [
        dict(zip(COLUMNS, (panel, f"{g1:.4f}", f"{g2:.4f}", f"{grid[i, j]:.4f}"), strict=True))
        for panel, grid in found.accuracy.items()
        for i, g1 in enumerate(found.gammas)
        for j, g2 in enumerate(found.gammas)
    ]
    write_tsv(options.picture.with_suffix(".tsv"), COLUMNS, rows)
    lines = [
        _origin(federation, options),
        f"$\\theta_1$: {_described(found.inferior)}",
        f"$\\theta_2$: {_described(found.qualified)}",
    ]
    _plot(options.picture, found, "\n".join(lines), f"Accuracy on {options.split} clips (%)")
    models = [[name, f"{accuracy:.2f}"] for name, accuracy in found.models.items()]
    print(format_table(["model", "accuracy"], models), end="")


def _origin(federation: Federation, options: argparse.Namespace) -> str:
    """Describe theta_0, the clients' number of epochs, and the clips of the measurement."""
    experiment = federation.experiment
    clips = federation.task.need(CLIPS).features(options.split).clips
    total = len(clips.labels)
    network = network_title(experiment.options.model["network"])
    return (
        f"$\\theta_0$: {network}, {len(clips.classes)} classes, "
        f"{title_of(experiment.options.method)}, seed {experiment.seed}, "
        f"round {experiment.result_round()}; "
        f"clients: {options.epochs} epochs; "
        f"{min(total, options.clips)} of {total} {options.split} clips"
    )


def _described(client: Client) -> str:
    return (
        f"client {client.name}, {client.clips} clips, entropy {client.entropy:.2f}, "
        f"utility {client.utility:.2f}"
    )


def _plot(path: Path, found: Landscape, title: str, measured: str) -> None:
    """Draw figure 4: accuracy between a model and two clients' models, and with ALO."""
    panels = list(found.accuracy.items())
    both = np.concatenate([grid for _, grid in panels])
    low, high = both.min(), max(both.max(), both.min() + 1e-3)
    gammas = found.gammas
    half = (gammas[1] - gammas[0]) / 2
    extent = (gammas[0] - half, gammas[-1] + half) * 2
    names = {"overfitted": "$\\theta_1$", "alo": "$\\hat\\theta_1$ (ALO)"}
    with drawing(path, (9.6, 4.8)) as figure:
        figure.suptitle(title, fontsize=9, wrap=True)
        for axes, (name, grid) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
            axes.grid(False)
            shades = {"vmin": low, "vmax": high, "cmap": "viridis"}
            image = axes.imshow(grid.T, origin="lower", extent=extent, aspect="auto", **shades)
            if grid.min() < grid.max():
                lines = axes.contour(gammas, gammas, grid.T, 8, colors="white", linewidths=0.7)
                axes.clabel(lines, fontsize=7, fmt="%.3g")
            for x, y, text in ((0, 0, "$\\theta_0$"), (1, 0, names[name]), (0, 1, "$\\theta_2$")):
                axes.plot(x, y, "o", color="white", markeredgecolor="black", markersize=6)
                box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
                axes.annotate(text, (x, y), (-6, 8), textcoords="offset points", bbox=box)
            axes.set_xlabel(f"$\\gamma_1$, towards {names[name]}")
        figure.axes[0].set_ylabel("$\\gamma_2$, towards $\\theta_2$")
        figure.colorbar(image, ax=figure.axes, label=measured)


def main() -> None:
    """Run the command: 0 done, 1 bad input (one line on stderr), 2 wrong usage."""
    about = "Draw the accuracy between a model and two clients' models trained from it."
    parser = argparse.ArgumentParser(description=about)
    add = parser.add_argument
    add("experiment", type=Path, metavar="EXP", help="the experiment whose last model is theta_0")
    add("picture", type=png, metavar="PNG", help="the picture; a .tsv is written next to it")

    add("--epochs", type=whole, metavar="N", help="epochs of each of the two clients")
    points = "points of the grid in each direction, from -0.1 to 1.1"
    add("--points", type=whole, metavar="N", help=points)
    clips = "maximum number of clips to measure accuracy on, drawn at random"
    add("--clips", type=whole, metavar="N", help=clips)
    add("--min-clips", type=whole, metavar="N", help="choose from clients with at least N clips")
    add("--split", default="test", help="data of the experiment: valid, test (default)")
    add("--ngpu", type=int, choices=(0, 1), default=0, help="1: compute on a GPU")
    given = "ALO's options, and defaults of the first four options (default: the paper's)"
    add("--config", type=Path, metavar="YAML", help=given)
    options = parser.parse_args()
    if options.points == 1:
        parser.error("--points must be at least 2")
    with exit_with_message("landscape.py"):
        configured = read_section(sections.Landscape, options.config, "landscape")
        for name, value in vars(configured).items():
            if getattr(options, name) is None:
                setattr(options, name, value)
        draw_landscape(options)


if __name__ == "__main__":
    main()
