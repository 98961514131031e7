"""Features that a client sends: features.<client>.ark and .scp in the folder of a round."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

import numpy as np

from fedtools.files.ark import ONE_BYTE, TWO_BYTES, FeatureReader, write_ark
from fedtools.files.datadir import read_table, write_table
from fedtools.files.errors import UserError
from fedtools.files.experiment import Experiment
from fedtools.files.received import open_received, received_lines, seal_of, sum_of
from fedtools.files.seeds import generator

_COMPRESSION = {32: None, 16: TWO_BYTES, 8: ONE_BYTE}
# What Kaldi calls these.
_KINDS = {32: "FM", 16: "CM2", 8: "CM3"}


@dataclass(frozen=True)
class Features:
    """What features a client sends, and the bounds on them.

    Attributes:
        size: values of a frame.
        bits: of a value, as it is written: 32, or 16 or 8 in Kaldi's compressed matrices, whose
            values are evenly spread between the least and the largest of an utterance.
        utterances, frames: the largest number of each, in all.
        longest: frames of an utterance, at most; attention needs memory with their square.
        largest: a value is at most so far from 0.
    """

    size: int
    bits: int = 32
    utterances: int = 10**6
    frames: int = 10**8
    longest: int = 4000
    largest: float = 1e6


def sent_name(client: str, number: int) -> str:
    """What a client calls an utterance that it sends: nothing that tells the speaker."""
    return f"{client}-{number:07d}"


def sent_names(secret: bytes, client: str, utterances: int) -> list[str]:
    """The names under which a client sends its utterances, which are in the order of its data.

    The order of names, in which they are sent, has nothing to do with that of the data, which are
    sorted by speaker.

    Args:
        secret: what only the client has, such as filterbanks that never leave it, so that runs can
            be repeated. The server has the experiment's seed, and could undo an order drawn by it,
            as whoever has the secret can.
    """
    digest = hashlib.sha256(secret).hexdigest()
    numbers = generator(0, "features", client, digest).permutation(utterances)
    return [sent_name(client, int(number)) for number in numbers]


def feature_paths(round_dir: Path, client: str) -> tuple[Path, Path]:
    """The ark and the scp of a client."""
    return round_dir / f"features.{client}.ark", round_dir / f"features.{client}.scp"


def write_features(
    round_dir: Path, client: str, matrices: Iterable[tuple[str, np.ndarray]], bits: int = 32
) -> int:
    """Write utterances and their matrices (T, D) as a client sends them; their bytes."""
    ark, scp = feature_paths(round_dir, client)
    entries = write_ark(ark, matrices, compress=_COMPRESSION[bits])
    # The file's name alone: where the experiment lies is nobody's business.
    write_table(scp, {utt: f"{ark.name}:{at.rpartition(':')[2]}" for utt, at in entries.items()})
    return ark.stat().st_size + scp.stat().st_size


def check_features(
    round_dir: Path, client: str, bounds: Features, announced: int
) -> tuple[int, int, dict[str, str]]:
    """Check a client's features, all of which are read.

    Args:
        announced: the utterances that the client says it has.

    Returns:
        Their bytes and frames, and name -> SHA-256 of their files, by which `open_sent` knows them.

    Raises:
        UserError: if ids, sizes or values are not within bounds, the utterances do not just fill
            the ark, or a file changes meanwhile. Two in the same bytes could make a small file as
            large as one likes, and what is of no utterance would be counted, but read by nobody.
    """
    ark, scp = feature_paths(round_dir, client)
    if announced > bounds.utterances:
        raise UserError(f"{announced} utterances, over {bounds.utterances}", path=scp)
    lines, table = received_lines(scp, announced)
    with open_received(ark) as file:
        seal = seal_of(file)
    # Before anything is made of them: a table may be as long as names may be.
    if not lines:
        raise UserError("no utterance", path=scp)
    if len(lines) != announced:
        raise UserError(f"{len(lines)} utterances, {announced} announced", path=scp)
    entries = _entries(lines, ark, scp)
    reader = FeatureReader(entries, {str(ark): seal})
    frames = _check_shapes(reader, client, bounds, scp)
    # Before any value is read.
    _check_filled(reader, ark, seal.size, scp)
    for line, utterance in enumerate(entries, 1):
        if np.abs(reader.read(utterance)).max() > bounds.largest:
            problem = f"{utterance!r} has values beyond {bounds.largest:g}"
            raise UserError(problem, path=scp, line=line)
    sums = {path.name: sum_of(path, one) for path, one in ((ark, seal), (scp, table))}
    return seal.size + table.size, frames, sums


def received_bytes(round_dir: Path, client: str) -> int:
    """What lies there under a client's name, sound or not, in bytes on the disk.

    A sparse file of any size costs its sender nothing.
    """
    found = 0
    for path in feature_paths(round_dir, client):
        with suppress(OSError):
            status = path.lstat()
            if S_ISREG(status.st_mode):
                found += min(status.st_size, 512 * status.st_blocks)
    return found


def _check_shapes(reader: FeatureReader, client: str, bounds: Features, scp: Path) -> int:
    """Insist on headers and ids within bounds, and the kind that was asked for; all frames."""
    frames = 0
    for line, utterance in enumerate(reader.scp, 1):
        if not re.fullmatch(re.escape(client) + r"-\d{1,9}", utterance, re.ASCII):
            problem = f"utterance {utterance[:80]!r} is not named {sent_name(client, 0)} or so"
            raise UserError(problem, path=scp, line=line)
        length, size = reader.shape(utterance)
        frames += length
        if size != bounds.size or frames > bounds.frames or length > bounds.longest:
            problem = f"{length} frames of {size} values, {frames} in all"
            remedy = f"at most {bounds.longest} and {bounds.frames} of {bounds.size} are taken"
            raise UserError(problem, path=scp, line=line, remedy=remedy)
        kind, wanted = reader.kind(utterance), _KINDS[bounds.bits]
        if kind != wanted:
            problem = f"{utterance!r} is a matrix {kind}, not {wanted} ({bounds.bits} bits a value)"
            raise UserError(problem, path=scp, line=line)
    return frames


def _check_filled(reader: FeatureReader, ark: Path, size: int, scp: Path) -> None:
    """The ark has its utterances one after the other, each behind its name, and nothing else."""
    end = 0
    for (start, stop), utterance in sorted((reader.extent(one), one) for one in reader.scp):
        # Ids are ASCII, and a space follows them.
        begin = start - len(utterance) - 1
        if begin < end:
            problem = f"{utterance!r} begins within another utterance"
            raise UserError(problem, path=scp, line=list(reader.scp).index(utterance) + 1)
        _check_gap(end, begin, ark)
        end = stop
    _check_gap(end, size, ark)


def _check_gap(end: int, begin: int, ark: Path) -> None:
    if begin > end:
        raise UserError(f"{begin - end} bytes of no utterance, at byte {end}", path=ark)


def open_sent(experiment: Experiment, number: int, client: str) -> FeatureReader:
    """The features that a client sent in a complete round.

    Raises:
        UserError: if they are not as they were when they were checked.
    """
    folder = experiment.round(number)
    ark, scp = feature_paths(folder.path, client)
    known, remedy = folder.sums(), f"run fedtools reset --round {number}"
    seals = {}
    for path in (scp, ark):
        if not path.exists():
            raise UserError("missing", path=path, remedy=remedy)
        with open_received(path) as file:
            seals[path] = seal_of(file)
        if known.get(path.name) != sum_of(path, seals[path]):
            raise UserError("not as it was written", path=path, remedy=remedy)
    lines, _ = received_lines(scp, Features.utterances, seals[scp])
    return FeatureReader(_entries(lines, ark, scp), {str(ark): seals[ark]})


def _entries(lines: Sequence[str], ark: Path, scp: Path) -> dict[str, str]:
    """utterance -> "path:offset" in the client's own ark, whatever path the client wrote."""
    entries = {}
    for line, (utterance, value) in enumerate(read_table(scp, lines=lines).items(), 1):
        name, _, offset = value.rpartition(":")
        if name != ark.name or not (offset.isascii() and offset.isdecimal()):
            raise UserError(f"{value[:80]!r} is not in {ark.name}", path=scp, line=line)
        entries[utterance] = f"{ark}:{offset}"
    return entries
