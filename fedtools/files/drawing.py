"""Drawings of matplotlib's on disk, all in one style and the same bytes for the same drawing."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from fedtools.files.atomic import atomic_path

# M. Okabe and K. Ito's colours, which the colour-blind tell apart; markers tell the lines apart
# in black and white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"


@contextmanager
def drawing(path: str | Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Yield an empty figure of a size in inches, written to a PNG at the end, in our style.

    The same drawing gives the same bytes; a block that fails writes nothing.
    """
    with matplotlib.rc_context():
        # A matplotlibrc of the user's would make another picture.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "font.size": 9,
                "axes.spines.top": False,
                "axes.spines.right": False,
                # Pale horizontal lines behind what is drawn.
                "axes.grid": True,
                "axes.grid.axis": "y",
                "axes.axisbelow": True,
                "grid.color": "0.9",
                "lines.linewidth": 1.4,
                "lines.markersize": 4,
                "legend.frameon": False,
            }
        )
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=120)
        # Without metadata nothing in the file depends on when and with what it was made; 256
        # colours are enough, and half the size.
        with atomic_path(path) as temporary, Image.open(image) as drawn:
            drawn.convert("RGB").quantize(256).save(temporary, "PNG", optimize=True)


def look(index: int) -> dict[str, str]:
    """The colour and the marker of a line."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def every(rounds: Sized) -> int:
    """How many rounds there are to a marker."""
    return max(1, len(rounds) // 8)
