"""Speed and volume perturbation of data directories: `fedtools perturb-speed`, `perturb-volume`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedtools.core.errors import UserError
from fedtools.core.seeds import generator
from fedtools.data.datadir import DataDir

# Tables that `extract-features` reads; without them it uses the audio unchanged.
SPEED_TABLE = "utt2speed"
VOLUME_TABLE = "utt2volume"
# Speech is unintelligible beyond these factors; the bounds also catch a misplaced decimal point.
SLOWEST, FASTEST = 0.5, 2.0


def perturb_speed(data_dir: str | Path, out_dir: str | Path, speeds: Sequence[str]) -> DataDir:
    """Write every utterance at every speed to one data directory.

    T. Ko, V. Peddinti, D. Povey, S. Khudanpur: Audio augmentation for speech recognition,
    Interspeech 2015; names as in Kaldi's perturb_data_dir_speed_3way.sh: at speed 0.9 utterances,
    speakers and recordings are prefixed with "sp0.9-", at speed 1 they keep their names. Clients
    stay the same. wav.scp and segments still refer to the original audio, because a pipe through
    sox would have to be run by every reader of the directory; the speed is in `utt2speed`, and
    `extract-features` applies it. Tables of features are left out; `utt2uniq` is added.

    Args:
        data_dir: a data directory with wav.scp.
        out_dir: another directory; tables of an earlier run there are removed.
        speeds: factors as they appear in names, such as "0.9".

    Raises:
        UserError: if a factor is no number from 0.5 to 2 or is duplicated, or the directory is
            perturbed already or would be overwritten.
    """
    data, out = DataDir.read(data_dir), Path(out_dir)
    factors = _factors(speeds)
    if out.exists() and out.samefile(data.path):
        raise UserError("would be overwritten", path=out, remedy="name another directory")
    if SPEED_TABLE in data.others:
        raise UserError("perturbed already", path=data.path / SPEED_TABLE)
    if not data.wav_scp:
        raise UserError("missing", path=data.path / "wav.scp", remedy="perturbation needs audio")
    parts = [_at_speed(data, speed, factor) for speed, factor in factors.items()]
    result, _ = DataDir.combine(out, parts)
    result.write(remove_others=True)
    return result


def speed_of(data: DataDir, utt: str) -> float:
    """Return the speed factor of an utterance; 1 if it has none."""
    text = data.others.get(SPEED_TABLE, {}).get(utt, "1")
    try:
        return _factor(text)
    except ValueError:
        problem = f"the speed of {utt!r} is {text!r}, not a number from {SLOWEST} to {FASTEST}"
        raise UserError(problem, path=data.path / SPEED_TABLE) from None


def perturb_volume(
    data_dir: str | Path, out_dir: str | Path, low: float, high: float, seed: int
) -> DataDir:
    """Write a data directory with a random volume for each utterance, in `utt2volume`.

    As in Kaldi's perturb_data_dir_volume.sh, samples are multiplied by a factor drawn uniformly
    from `low` to `high`; here, `extract-features` multiplies them, and nothing is clipped.

    Raises:
        UserError: if the volume is perturbed already, or the directory would be overwritten.
    """
    data, out = DataDir.read(data_dir), Path(out_dir)
    if out.exists() and out.samefile(data.path):
        raise UserError("would be overwritten", path=out, remedy="name another directory")
    if VOLUME_TABLE in data.others:
        raise UserError("perturbed already", path=data.path / VOLUME_TABLE)
    volumes = {
        utt: f"{generator(seed, 'volume', utt).uniform(low, high):.6f}" for utt in data.utterances
    }
    others = {name: table for name, table in data.others.items() if not name.endswith(".scp")}
    others[VOLUME_TABLE] = volumes
    result = replace(data, path=out, utt2num_frames={}, feats_scp={}, others=others)
    result.write(remove_others=True)
    return result


def volume_of(data: DataDir, utt: str) -> float:
    """Return the volume factor of an utterance; 1 if it has none."""
    text = data.others.get(VOLUME_TABLE, {}).get(utt, "1")
    try:
        volume = float(text)
    except ValueError:
        volume = math.nan
    if not 0 < volume < math.inf:
        problem = f"the volume of {utt!r} is {text!r}, not a number over 0"
        raise UserError(problem, path=data.path / VOLUME_TABLE)
    return volume


def speakers_of(data: DataDir, names: Sequence[str]) -> list[str]:
    """Return the speakers of some utterances, without the prefixes of perturbed speeds."""
    speeds = data.others.get(SPEED_TABLE, {})
    return [
        data.utt2spk.get(name, "").removeprefix(f"sp{speeds[name]}-" if name in speeds else "")
        for name in names
    ]


def unperturbed(data: DataDir) -> dict[str, str]:
    """Return utterance -> its name at speed 1, which all copies of a recording share."""
    speeds = data.others.get(SPEED_TABLE, {})
    return {
        name: name.removeprefix(f"sp{speeds[name]}-" if name in speeds else "")
        for name in data.utterances
    }


def _factors(speeds: Sequence[str]) -> dict[str, float]:
    factors: dict[str, float] = {}
    for speed in speeds:
        try:
            factor = _factor(speed)
        except ValueError:
            problem = f"speed {speed!r} is not a number from {SLOWEST} to {FASTEST}"
            raise UserError(problem, remedy="give for example --speeds '0.9 1.0 1.1'") from None
        if factor in factors.values():
            raise UserError(f"speed {speed} is duplicated")
        factors[speed] = factor
    return factors


def _factor(text: str) -> float:
    factor = float(text)
    # Only digits and a point, because the text becomes part of names.
    if not (text.isascii() and text.replace(".", "").isdigit() and SLOWEST <= factor <= FASTEST):
        raise ValueError
    return factor


def _at_speed(data: DataDir, speed: str, factor: float) -> DataDir:
    prefix = "" if factor == 1 else f"sp{speed}-"

    def named(table: dict[str, str], *, value: bool = False) -> dict[str, str]:
        return {f"{prefix}{key}": f"{prefix * value}{text}" for key, text in table.items()}

    others = {
        name: named(table) for name, table in data.others.items() if not name.endswith(".scp")
    }
    # As in Kaldi, utt2uniq links the utterances that are copies of one recording.
    unique = named(data.others.get("utt2uniq", {utt: utt for utt in data.utterances}))
    speeds = {f"{prefix}{utt}": speed for utt in data.utterances}
    return replace(
        data,
        utt2spk=named(data.utt2spk, value=True),
        wav_scp=named(data.wav_scp),
        # The value of a segment begins with the name of its recording.
        segments=named(data.segments, value=True),
        text=named(data.text),
        utt2dur={
            f"{prefix}{utt}": f"{_seconds(seconds) / factor:.3f}"
            for utt, seconds in data.utt2dur.items()
        },
        utt2client=named(data.utt2client),
        utt2num_frames={},
        feats_scp={},
        others={**others, "utt2uniq": unique, SPEED_TABLE: speeds},
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise UserError(f"utt2dur: {text!r} is not a number", remedy="make it again")
    return seconds
