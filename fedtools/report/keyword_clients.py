"""Figure 1 of X.-C. Li et al., Interspeech 2022: how clips are spread over clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from fedtools.client.options import ClipTraining
from fedtools.federation.landscape import client_facts
from fedtools.files.clips import Clips
from fedtools.files.config import from_mapping
from fedtools.files.keyed import generator
from fedtools.methods.fedkws_ui import FedKwsUi
from fedtools.report.plots import COLOURS, drawing


def draw_clients(
    folder: str | Path,
    picture: str | Path,
    shown: int,
    seed: int,
    options: Mapping[str, Any],
    where: str | Path,
) -> None:
    """Draw the labels of some clients, and size, entropy and steps of all.

    Args:
        folder: made by `fedtools pack-clips`.
        picture: the PNG.
        shown: how many clients are shown label by label, all if there are fewer.
        seed: decides which.
        options: `method_conf` holds FedKWS-UI's options, and `training` the batch size; the
            paper's where they are not there.
        where: what the options were read from, for messages.

    Raises:
        UserError: if a file is missing or malformed.
    """
    clips = Clips.read(folder)
    method = from_mapping(FedKwsUi, options.get("method_conf"), where)
    training = from_mapping(ClipTraining, options.get("training"), where)
    clients = client_facts(clips, method, training.batch_size)
    draw = generator(seed, "plot-clients")
    count = min(shown, len(clients))
    chosen = np.sort(draw.choice(len(clients), count, replace=False))
    with drawing(picture, (10.4, 4.6)) as figure:
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
