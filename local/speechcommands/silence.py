"""Silence: pieces of the recordings of noise, divided among the sets, and clips cut from them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from corpus import SETS, SILENCE, Clip

from fedtools.core.errors import UserError
from fedtools.core.seeds import generator, seed64

# Length of a piece of noise, in clips.
PIECE_CLIPS = 2.0
# Of this many pieces of noise, one is for valid and one for test.
PIECES_TO_ONE = 5


class Piece(NamedTuple):
    """A part of a recording of noise, in milliseconds from its beginning."""

    path: Path
    begin: int
    end: int


def share_noise(
    noise: list[Clip], seed: int, folder: Path, seconds: float
) -> dict[str, list[Piece]]:
    """Cut the recordings into pieces of two clips' length, and divide them among the sets.

    A recording shorter than four clips is one piece, and one shorter than a clip is left out. Valid
    and test have the same share of each recording, as far as whole pieces allow.
    """
    pieces = []
    for recording in sorted(noise, key=lambda recording: recording.path.name):
        milliseconds = int(1000 * recording.seconds)
        count = max(1, int(recording.seconds / (PIECE_CLIPS * seconds)))
        edges = [milliseconds * number // count for number in range(count + 1)]
        long_enough = milliseconds >= round(1000 * seconds)
        own = [Piece(recording.path, *edge) for edge in pairwise(edges) if long_enough]
        own.sort(key=lambda piece: seed64(seed, "noise", piece.path.name, piece.begin))
        pieces += own
    if len(pieces) < len(SETS):
        length = "a second" if seconds == 1 else f"{seconds:g} seconds"
        remedy = f"put {len(SETS)} recordings of {length} or more there, or give --silence false"
        problem = "too little noise for each set to have its own"
        raise UserError(problem, path=folder, remedy=remedy)
    shares: dict[str, list[Piece]] = {name: [] for name in SETS}
    for number, piece in enumerate(pieces):
        shares[{0: "test", 1: "valid"}.get(number % PIECES_TO_ONE, "train")].append(piece)
    return shares


def cut_own_silence(
    words: list[Clip], noise: list[Piece], to_one: int, seed: int, seconds: float
) -> list[Clip]:
    """Cut clips of silence for training clients, each by its client's own clips alone.

    A keyword clip brings a clip of silence with probability 1 / `to_one`, by a key of its name, so
    that no client's silence depends on what others have, as user-level privacy asks for.
    """
    order = sorted(noise, key=lambda piece: (piece.path.name, piece.begin))
    silence, milliseconds = [], round(1000 * seconds)
    for word in words:
        random = generator(seed, "own silence", word.name)
        if random.integers(to_one):
            continue
        piece = order[random.integers(len(order))]
        start = int(random.integers(piece.begin, piece.end - milliseconds + 1)) / 1000
        utterance = f"{word.speaker}-{SILENCE}-{word.name.removeprefix(word.speaker + '-')}"
        silence.append(Clip(utterance, word.speaker, SILENCE, piece.path, seconds, start))
    return silence


def cut_silence(
    name: str, words: list[Clip], noise: list[Piece], count: int, seed: int, seconds: float
) -> list[Clip]:
    """Cut `count` clips of silence for a set, each assigned to the speaker of one of its words.

    No piece is used again before all others are.
    """
    order = sorted(noise, key=lambda piece: seed64(seed, "piece", piece.path.name, piece.begin))
    silence, milliseconds = [], round(1000 * seconds)
    for number in range(count):
        random = generator(seed, "silence", name, number)
        piece = order[number % len(order)]
        start = int(random.integers(piece.begin, piece.end - milliseconds + 1)) / 1000
        speaker = words[random.integers(len(words))].speaker
        utterance = f"{speaker}-{SILENCE}-{name}{number}"
        silence.append(Clip(utterance, speaker, SILENCE, piece.path, seconds, start))
    return silence
