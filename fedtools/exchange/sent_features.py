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

from fedtools.core.errors import UserError
from fedtools.core.seeds import generator
from fedtools.core.untrusted import open_received, received_lines, seal_of, sum_of
from fedtools.data.ark import ONE_BYTE, TWO_BYTES, FeatureReader, write_ark
from fedtools.data.datadir import read_table, write_table
from fedtools.exchange.experiment import Experiment

_COMPRESSION = {32: None, 16: TWO_BYTES, 8: ONE_BYTE}
# Kaldi's names of these formats.
_KINDS = {32: "FM", 16: "CM2", 8: "CM3"}


@dataclass(frozen=True)
class Features:
    """The format of the features that a client sends, and the bounds on them.

    Attributes:
        size: values per frame.
        bits: bits per value on disk: 32, or 16 or 8 in Kaldi's compressed matrices, which quantise
            evenly between the smallest and the largest value of an utterance.
        utterances, frames: the maximum number of each, in total.
        longest: the maximum number of frames of an utterance; attention needs memory quadratic in
            it.
        largest: the maximum magnitude of a value.
    """

    size: int
    bits: int = 32
    utterances: int = 10**6
    frames: int = 10**8
    longest: int = 4000
    largest: float = 1e6


def sent_name(client: str, number: int) -> str:
    """Return the id of a sent utterance, which does not reveal its speaker."""
    return f"{client}-{number:07d}"


def sent_names(secret: bytes, client: str, utterances: int) -> list[str]:
    """Return the ids under which a client sends its utterances, in the order of its data.

    Utterances are sent in the order of these ids, which is independent of the order of the data,
    because data are sorted by speaker.

    Args:
        secret: bytes that only the client has, such as filterbanks that never leave it, so that
            runs are repeatable. The server knows the experiment's seed, and could undo an order
            drawn from that; so can anyone who has the secret.
    """
    digest = hashlib.sha256(secret).hexdigest()
    numbers = generator(0, "features", client, digest).permutation(utterances)
    return [sent_name(client, int(number)) for number in numbers]


def feature_paths(round_dir: Path, client: str) -> tuple[Path, Path]:
    """Return the paths of a client's ark and scp."""
    return round_dir / f"features.{client}.ark", round_dir / f"features.{client}.scp"


def write_features(
    round_dir: Path, client: str, matrices: Iterable[tuple[str, np.ndarray]], bits: int = 32
) -> int:
    """Write utterances and their matrices (T, D) as a client sends them; return their bytes."""
    ark, scp = feature_paths(round_dir, client)
    entries = write_ark(ark, matrices, compress=_COMPRESSION[bits])
    # Only the file name: the message must not reveal the path of the experiment.
    write_table(scp, {utt: f"{ark.name}:{at.rpartition(':')[2]}" for utt, at in entries.items()})
    return ark.stat().st_size + scp.stat().st_size


def check_features(
    round_dir: Path, client: str, bounds: Features, announced: int
) -> tuple[int, int, dict[str, str]]:
    """Read and check all features of a client.

    Args:
        announced: the number of utterances that the client reports.

    Returns:
        Their bytes and frames, and name -> SHA-256 of their files, which `open_sent` compares.

    Raises:
        UserError: if ids, sizes or values are not within bounds, the utterances do not exactly fill
            the ark, or a file changes in the meantime. Overlapping utterances could make a small
            file arbitrarily large in memory, and bytes of no utterance would count without use.
    """
    ark, scp = feature_paths(round_dir, client)
    if announced > bounds.utterances:
        raise UserError(f"{announced} utterances, over {bounds.utterances}", path=scp)
    lines, table = received_lines(scp, announced)
    with open_received(ark) as file:
        seal = seal_of(file)
    # Checked before the lines are parsed, because the table may be large.
    if not lines:
        raise UserError("no utterance", path=scp)
    if len(lines) != announced:
        raise UserError(f"{len(lines)} utterances, {announced} announced", path=scp)
    entries = _entries(lines, ark, scp)
    reader = FeatureReader(entries, {str(ark): seal})
    frames = _check_shapes(reader, client, bounds, scp)
    # Checked before any value is read.
    _check_filled(reader, ark, seal.size, scp)
    for line, utterance in enumerate(entries, 1):
        if np.abs(reader.read(utterance)).max() > bounds.largest:
            problem = f"{utterance!r} has values beyond {bounds.largest:g}"
            raise UserError(problem, path=scp, line=line)
    sums = {path.name: sum_of(path, one) for path, one in ((ark, seal), (scp, table))}
    return seal.size + table.size, frames, sums


def received_bytes(round_dir: Path, client: str) -> int:
    """Return the size on disk of a client's feature files, valid or not.

    Bytes on disk are counted because a sparse file of any size costs its sender nothing.
    """
    found = 0
    for path in feature_paths(round_dir, client):
        with suppress(OSError):
            status = path.lstat()
            if S_ISREG(status.st_mode):
                found += min(status.st_size, 512 * status.st_blocks)
    return found


def _check_shapes(reader: FeatureReader, client: str, bounds: Features, scp: Path) -> int:
    """Check all headers and ids against the bounds and the format; return the number of frames."""
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
    """Raise a `UserError` unless the ark is filled by utterances, each behind its id."""
    end = 0
    for (start, stop), utterance in sorted((reader.extent(one), one) for one in reader.scp):
        # An id is ASCII, and is followed by a space.
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
    """Open the features that a client sent in a complete round.

    Raises:
        UserError: if they have changed since they were checked.
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
            raise UserError("changed since it was written", path=path, remedy=remedy)
    lines, _ = received_lines(scp, Features.utterances, seals[scp])
    return FeatureReader(_entries(lines, ark, scp), {str(ark): seals[ark]})


def _entries(lines: Sequence[str], ark: Path, scp: Path) -> dict[str, str]:
    """Parse the scp: utterance -> "path:offset" in the client's own ark, whatever path it has."""
    entries = {}
    for line, (utterance, value) in enumerate(read_table(scp, lines=lines).items(), 1):
        name, _, offset = value.rpartition(":")
        if name != ark.name or not (offset.isascii() and offset.isdecimal()):
            raise UserError(f"{value[:80]!r} is not in {ark.name}", path=scp, line=line)
        entries[utterance] = f"{ark}:{offset}"
    return entries
