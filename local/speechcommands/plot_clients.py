#!/usr/bin/env python3
"""Draw figure 1 of Li et al., Interspeech 2022: the distribution of clips over clients.

    plot_clients.py CLIPS PNG

draws the labels of some clients of CLIPS, a folder made by `fedtools pack-clips`, and the size and
the entropy of all, coloured by their steps in FedKWS-UI.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from landscape import client_facts
from matplotlib.axes import Axes
from options import config_for, png, whole

from fedtools.client.options import ClipTraining
from fedtools.core.config import from_mapping
from fedtools.core.drawing import COLOURS, drawing
from fedtools.core.errors import exit_with_message
from fedtools.core.seeds import generator
from fedtools.data.clips import Clips
from fedtools.methods.fedkws_ui import FedKwsUi


def draw_clients(options: argparse.Namespace) -> None:
    """Draw the picture that the command line asks for."""
    clips, where = Clips.read(options.clips), options.config or ""
    config = config_for("fedkws_ui", len(clips.classes), options.config)
    method = from_mapping(FedKwsUi, config.get("method_conf"), where)
    training = from_mapping(ClipTraining, config.get("training"), where)
    clients = client_facts(clips, method, training.batch_size)
    draw = generator(options.seed, "plot-clients")
    count = min(options.clients, len(clients))
    chosen = np.sort(draw.choice(len(clients), count, replace=False))
    with drawing(options.picture, (10.4, 4.6)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
        _draw_labels(left, clips, [clips.clients[index] for index in chosen])
        facts = ((client.clips, client.entropy, client.ratio) for client in clients)
        sizes, entropies, ratios = zip(*facts, strict=True)
        points = right.scatter(sizes, entropies, 9, ratios, cmap="viridis", linewidths=0)
        right.set_xlabel("Clips of the client")
        right.set_ylabel("Entropy of its labels / log(classes)")
        right.set_title(f"All {len(clients)} clients, {len(clips.classes)} classes", fontsize=9)
        figure.colorbar(points, ax=right, label="$r_0 \\bar{r}_k$: steps over those of FedAvg")


def _draw_labels(axes: Axes, clips: Clips, chosen: Sequence[str]) -> None:
    classes, largest_circle = len(clips.classes), 110
    counts = np.array(
        [np.bincount(clips.labels[clips.rows(name)], minlength=classes) for name in chosen]
    )
    rows, labels = np.nonzero(counts)
    largest = int(counts.max())
    style = {"color": COLOURS[0], "linewidths": 0}
    axes.scatter(labels, rows, s=largest_circle * counts[rows, labels] / largest, **style)
    for count in sorted({1, (largest + 1) // 2, largest}):
        axes.scatter([], [], s=largest_circle * count / largest, label=str(count), **style)
    axes.set_xticks(range(classes), clips.classes, rotation=90, fontsize=7)
    axes.set_yticks(range(len(chosen)), range(1, len(chosen) + 1), fontsize=7)
    axes.set_ylabel("Client")
    axes.grid(False)
    axes.set_title(f"{len(chosen)} of {len(clips.clients)} clients: clips by label", fontsize=9)
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(title="Clips", labelspacing=0.8, **place)


def main() -> None:
    """Run the command: 0 done, 1 bad input (one line on stderr), 2 wrong usage."""
    parser = argparse.ArgumentParser(description="Draw the distribution of clips over clients.")
    parser.add_argument("clips", type=Path, help="folder made by fedtools pack-clips")
    parser.add_argument("picture", type=png, metavar="PNG", help="the picture to draw")
    shown = "number of clients that are shown label by label (default: 20)"
    parser.add_argument("--clients", type=whole, default=20, metavar="N", help=shown)
    seed = "random seed of the draw of these clients (default: 0)"
    parser.add_argument("--seed", type=int, default=0, help=seed)
    config = "configuration with FedKWS-UI's and training's options (default: the paper's)"
    parser.add_argument("--config", type=Path, metavar="YAML", help=config)
    options = parser.parse_args()
    with exit_with_message("plot_clients.py"):
        draw_clients(options)


if __name__ == "__main__":
    main()
