"""Figures of matplotlib in one style; the same figure always gives the same bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from fedtools.core.atomic import atomic_path

# M. Okabe and K. Ito's colours, which colour-blind readers can distinguish; markers distinguish
# lines in black and white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"


@contextmanager
def drawing(path: str | Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Yield an empty figure of a size in inches, in our style, and write it to a PNG at the end.

    The same figure gives the same bytes; a block that fails writes nothing.
    """
    with matplotlib.rc_context():
        # A matplotlibrc of the user would change the picture.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "font.size": 9,
                "axes.spines.top": False,
                "axes.spines.right": False,
                # Pale horizontal lines behind the data.
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
        # Without metadata, the file does not depend on dates and versions; 256 colours suffice, and
        # halve its size.
        with atomic_path(path) as temporary, Image.open(image) as drawn:
            drawn.convert("RGB").quantize(256).save(temporary, "PNG", optimize=True)


def line_style(index: int) -> dict[str, str]:
    """Return the colour and the marker of a line; no pair is repeated in 49 lines."""
    again, colour = divmod(index, len(COLOURS))
    return {"color": COLOURS[colour], "marker": MARKERS[(index + again) % len(MARKERS)]}


def every(rounds: Sized) -> int:
    """Return the number of rounds from one marker to the next."""
    return max(1, len(rounds) // 8)
