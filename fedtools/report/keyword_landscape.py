"""Figure 4 of X.-C. Li et al., Interspeech 2022: accuracy between a model and two clients'."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtools.federation.base import Federation
from fedtools.federation.detection import require_keywords
from fedtools.federation.kws import KwsFederation
from fedtools.federation.landscape import Client, Landscape, LandscapeConfig, landscape
from fedtools.files.tables import format_table, write_tsv
from fedtools.report.keyword_runs import network_title, title_of
from fedtools.report.plots import drawing

COLUMNS = ("panel", "gamma_1", "gamma_2", "accuracy")


def draw_landscape(federation: Federation, picture: Path, config: LandscapeConfig) -> str:
    """Compute a landscape, draw it, and write its values as a .tsv of the same name.

    Args:
        federation: of keyword spotting; its last model is the origin.
        picture: the PNG.
        config: what decides the landscape.

    Returns:
        A table of the four models' accuracies.

    Raises:
        UserError: as of `landscape`, or if the experiment is of another task.
    """
    federation = require_keywords(federation)
    found = landscape(federation, config)
    rows = [
        dict(zip(COLUMNS, (panel, f"{g1:.4f}", f"{g2:.4f}", f"{grid[i, j]:.4f}"), strict=True))
        for panel, grid in found.accuracy.items()
        for i, g1 in enumerate(found.gammas)
        for j, g2 in enumerate(found.gammas)
    ]
    write_tsv(picture.with_suffix(".tsv"), COLUMNS, rows)
    lines = [
        _origin(federation, config),
        f"$\\theta_1$: {_described(found.inferior)}",
        f"$\\theta_2$: {_described(found.qualified)}",
    ]
    _plot(picture, found, "\n".join(lines), f"Accuracy on {config.split} clips (%)")
    models = [[name, f"{accuracy:.2f}"] for name, accuracy in found.models.items()]
    return format_table(["model", "accuracy"], models)


def _origin(federation: KwsFederation, config: LandscapeConfig) -> str:
    """What theta_0 is, how long the clients train, and on how much it is measured."""
    experiment, clips = federation.experiment, federation.features(config.split).clips
    total = len(clips.labels)
    network = network_title(experiment.config["model"]["network"])
    return (
        f"$\\theta_0$: {network}, {len(clips.classes)} classes, "
        f"{title_of(experiment.config['method'])}, seed {experiment.seed}, "
        f"round {experiment.result_round()}; "
        f"clients: {config.epochs} epochs; "
        f"{min(total, config.clips)} of {total} {config.split} clips"
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
