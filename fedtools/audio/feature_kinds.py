"""The kind of features in archives, in a small file beside each archive.

    ARK_DIR/feats.1.ark     features
    ARK_DIR/feats.1.yaml    kind, sample_rate, num_mel_bins; ivectors, if these are appended

Features of another kind or sample rate can have the same width, and no value tells them apart.
Features without such a file, such as Kaldi's, are of an unknown kind, which fits any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedtools.core.config import from_mapping, read_yaml, write_yaml
from fedtools.core.errors import UserError

_REMEDY = "extract all features again with the same options"


@dataclass(frozen=True)
class FeatureConfig:
    """Options of feature extraction.

    All others are Kaldi's defaults (25 ms Povey windows every 10 ms, pre-emphasis 0.97, from 20 Hz
    to half the sample rate), except that there is no dither.

    Attributes:
        kind: "fbank", natural logs of mel energies; or "mfcc", as many cepstra as mel filters, as
            in the mfcc_hires.conf of Kaldi's recipes (no energy, up to 400 Hz below half the rate);
            or the input of pretrained models: "log_mel", see `fedtools.audio.log_mel`, or "wave",
            the samples themselves, one per frame.
        ivectors: the SHA-256 of the extractor of i-vectors that are appended; "" without any.
    """

    num_mel_bins: int = 80
    sample_rate: int = 16_000
    kind: str = "fbank"
    ivectors: str = ""

    def __str__(self) -> str:
        values = "" if self.kind == "wave" else f", num_mel_bins {self.num_mel_bins}"
        vectors = f", i-vectors of {self.ivectors[:16]}" if self.ivectors else ""
        return f"{self.kind}, sample_rate {self.sample_rate}{values}{vectors}"


def write_kind(file: Path, config: FeatureConfig | None) -> None:
    """Write the kind of features beside their archive, or of an extractor's; None: not known."""
    path = file.with_suffix(".yaml")
    if config is None:
        path.unlink(missing_ok=True)
    else:
        write_yaml(path, {name: value for name, value in vars(config).items() if value != ""})


def kind_beside(file: Path) -> FeatureConfig | None:
    """Read the kind that `write_kind` wrote beside a file; None if there is none."""
    path = file.with_suffix(".yaml")
    return from_mapping(FeatureConfig, read_yaml(path), path) if path.is_file() else None


def kind_of(places: Mapping[str, str], table: Path) -> FeatureConfig | None:
    """Return the kind of some features; None if it is not known.

    Args:
        places: utterance -> place in an archive, as feats.scp has them.
        table: their table, for messages.

    Raises:
        UserError: if they are of several kinds, or a file beside an archive is malformed.
    """
    archives = dict.fromkeys(place.rpartition(":")[0] for place in places.values())
    found: dict[FeatureConfig, str] = {}
    for archive in archives:
        if archive.endswith(".ark") and (kind := kind_beside(Path(archive))):
            found.setdefault(kind, archive)
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        problem = f"features of several kinds: {one} ({first}), and {other} ({second})"
        raise UserError(problem, path=table, remedy=_REMEDY)
    return next(iter(found), None)


def check_same(found: object, wanted: object, of_what: str, table: Path) -> None:
    """Raise a `UserError` if two kinds of features differ; an unknown kind, None, fits any.

    Args:
        found: the kind of the features that `table` lists.
        of_what: where features of the kind `wanted` are from, for the message.
    """
    if found and wanted and found != wanted:
        problem = f"features of another kind: {found}; {of_what} has {wanted}"
        raise UserError(problem, path=table, remedy="extract them with the same options")
