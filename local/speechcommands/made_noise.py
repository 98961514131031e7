"""White and pink noise for a corpus whose own recordings of noise are not room noise.

Rule of loudness: every piece, two clips long, has a root mean square that is drawn log-uniformly
between `QUIET` and `LOUD`, independent of the corpus and its clips. The range goes from a silent
room, with only a few of the 16 bits in use, to the level of loud speech. Silence is cut from these
recordings at their own volume, and training adds them to clips with `augment.noise_volume: 1`, so
that both have the same range.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile
from corpus import SILENCE, Clip
from mini import coloured

from fedtools.core.atomic import atomic_path
from fedtools.core.seeds import generator
from fedtools.data.clips import RATE

# Decibels below the full scale of 16 bits: a root mean square of 33, and of 5,827.
QUIET, LOUD = -60.0, -15.0
# Colour -> exponent by which the power falls with frequency.
COLOURS = {"pink": 1.0, "white": 0.0}
RECORDINGS, PIECES = 5, 30
INT16 = np.iinfo(np.int16)
NOTE = (
    "silence, and the noise that training adds, are generated white and pink noise; the root mean "
    "square of each piece of two clips' length is drawn log-uniformly from "
    f"{QUIET:g} to {LOUD:g} dB of full scale, independent of the clips"
)


def make_noise(folder: Path, seed: int, piece_seconds: float) -> list[Clip]:
    """Write `RECORDINGS` recordings of noise of each colour into a folder, of `PIECES` pieces."""
    made = []
    for colour, slope in COLOURS.items():
        for number in range(RECORDINGS):
            name = f"{colour}_{number}"
            random = generator(seed, "made noise", name)
            wave = np.concatenate([_piece(random, slope, piece_seconds) for _ in range(PIECES)])
            path = folder / f"{name}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as temporary:
                soundfile.write(str(temporary), wave, RATE, format="WAV", subtype="PCM_16")
            made.append(Clip(name, "", SILENCE, path, len(wave) / RATE))
    return made


def _piece(random: np.random.Generator, slope: float, seconds: float) -> np.ndarray:
    """Make noise of one random loudness, int16."""
    level = 10 ** (random.uniform(QUIET, LOUD) / 20) * -INT16.min
    wave = level * coloured(random, round(seconds * RATE), slope)
    return np.rint(wave).clip(INT16.min, INT16.max).astype(np.int16)
