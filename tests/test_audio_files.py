"""Recordings in wave arks, as written by kaldiio and ESPnet's format_wav_scp."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import soundfile
from conftest import ROOT, run

from fedtools.audio.wave import AudioError, read_wave
from fedtools.core.errors import UserError
from fedtools.data.ark import FeatureReader
from fedtools.data.audio_files import AudioPlace, audio_place, open_entry
from fedtools.data.datadir import DataDir
from fedtools.data.validate import validate_data_dir

RATE = 16_000
UTTS = ["s0-u0", "s0-u1", "s1-u2", "s1-u3"]


def sound(seed: int, seconds: float = 0.6) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(round(seconds * RATE))
    return (1000 * noise).astype(np.int16)


def sounds() -> dict[str, np.ndarray]:
    return {utt: sound(seed, 0.4 + seed / 10) for seed, utt in enumerate(UTTS)}


def write_data(folder: Path, wav_scp: dict[str, str]) -> Path:
    speakers = {utt: utt.split("-")[0] for utt in wav_scp}
    DataDir(
        folder,
        wav_scp=wav_scp,
        utt2spk=speakers,
        utt2client=dict(speakers),
        text=dict.fromkeys(wav_scp, "SOME WORDS"),
    ).write()
    return folder


def write_files(folder: Path) -> Path:
    """Write data whose audio is in files, one for each utterance."""
    wav_scp = {}
    for utt, samples in sounds().items():
        wav_scp[utt] = str(folder / f"{utt}.wav")
        soundfile.write(wav_scp[utt], samples, RATE, subtype="PCM_16")
    return write_data(folder / "files", wav_scp)


def write_ark(folder: Path, **options) -> dict[str, str]:
    """Write the same audio in an ark, with kaldiio's scp."""
    ark, scp = folder / "wav.ark", folder / "wav.scp"
    arrays = {utt: (RATE, samples) for utt, samples in sounds().items()}
    kaldiio.save_ark(str(ark), arrays, scp=str(scp), **options)
    return dict(line.split(" ", 1) for line in scp.read_text().splitlines())


def validated(data: Path):
    return run(sys.executable, ROOT / "utils" / "validate_data_dir.py", "--no-feats", data)


def features(cli, data: Path) -> dict[str, np.ndarray]:
    ark = data.with_name(f"{data.name} ark")
    cli("extract-features", data, ark).ok()
    reader = FeatureReader(DataDir.read(data, "feats.scp").feats_scp)
    return {utt: reader.read(utt) for utt in UTTS}


KINDS = {
    "WAV": {},
    "AUDIO wav": {"write_function": "soundfile"},
    "AUDIO flac": {"write_function": "soundfile", "write_kwargs": {"format": "flac"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_ark_gives_the_features_of_the_files(tmp_path, cli, kind):
    wav_scp = write_ark(tmp_path, **KINDS[kind])
    mark = b"RIFF" if kind == "WAV" else b"AUDIO"
    for spec in wav_scp.values():
        path, offset = spec.rsplit(":", 1)
        assert Path(path).read_bytes()[int(offset) :].startswith(mark)
    data = write_data(tmp_path / "ark", wav_scp)
    validated(data).ok()
    expected = features(cli, write_files(tmp_path))
    found = features(cli, data)
    for utt in UTTS:
        np.testing.assert_array_equal(found[utt], expected[utt])
    found = DataDir.read(data)
    assert found.utt2dur == {utt: f"{0.4 + seed / 10:.3f}" for seed, utt in enumerate(UTTS)}


@pytest.mark.parametrize("kind", KINDS)
def test_segments_of_a_recording_in_an_ark(tmp_path, kind):
    spec = write_ark(tmp_path, **KINDS[kind])["s1-u2"]
    found = read_wave(spec, 0.2, 0.5).samples
    np.testing.assert_array_equal(found * 32768, sounds()["s1-u2"][3200:8000])


def test_a_recording_of_fifty_samples_in_an_ark(tmp_path):
    """Its length takes one byte after the mark."""
    ark, scp = tmp_path / "wav.ark", tmp_path / "wav.scp"
    samples = np.arange(50, dtype=np.int16)
    found = {"a": (RATE, samples)}
    kaldiio.save_ark(str(ark), found, scp=str(scp), write_function="soundfile")
    spec = scp.read_text().split(" ", 1)[1].strip()
    offset = int(spec.rpartition(":")[2])
    assert ark.read_bytes()[offset : offset + 6] == b"AUDIO\x01"
    np.testing.assert_array_equal(read_wave(spec).samples * 32768, samples)


def test_a_recording_in_an_ark_has_less_than_two_gigabytes(tmp_path):
    ark, longest = tmp_path / "wav.ark", 2**31 - 1

    def announce(length):
        ark.write_bytes(b"AUDIO\x04" + length.to_bytes(4, "little"))
        os.truncate(ark, 10 + length)
        return AudioPlace(ark, 0)

    file, *extent = open_entry(announce(longest))
    file.close()
    assert extent == [10, longest]
    with pytest.raises(UserError, match="a damaged header"):
        open_entry(announce(longest + 1))


def test_what_is_no_audio_in_an_ark_is_refused_by_both(tmp_path, cli):
    wav_scp = write_ark(tmp_path)
    kaldiio.save_ark(
        str(tmp_path / "feats.ark"), {"a": np.zeros((9, 3), np.float32)}, scp=str(tmp_path / "f")
    )
    matrix = (tmp_path / "f").read_text().split(" ", 1)[1].strip()
    raw = (tmp_path / "wav.ark").read_bytes()
    (tmp_path / "cut.ark").write_bytes(raw[: len(raw) // 8])
    flac = io.BytesIO()
    soundfile.write(flac, sound(0), RATE, format="FLAC")
    (tmp_path / "flac.ark").write_bytes(b"a " + flac.getvalue())
    first = wav_scp["s0-u0"].rsplit(":", 1)[1]
    for spec, said in (
        (matrix, "matrix"),
        (f"{tmp_path}/wav.ark:7", "no audio"),
        (f"{tmp_path}/wav.ark:999999999", "the file has"),
        (f"{tmp_path}/cut.ark:{first}", "cut off"),
        (f"{tmp_path}/flac.ark:2", "FLAC of unknown length"),
        (f"{tmp_path}/gone.ark:2", "not there|No such file"),
    ):
        with pytest.raises(AudioError, match=said) as caught:
            read_wave(spec)
        assert caught.value.reason == ("no such file" if "gone" in spec else "unreadable audio"), (
            spec
        )
        data = write_data(tmp_path / "bad", {**wav_scp, "s0-u1": spec})
        with pytest.raises(UserError, match=r"wav\.scp:2: .*'s0-u1'"):
            validate_data_dir(data, feats=False)
        assert "kept 3, dropped 1" in cli("extract-features", data, tmp_path / "ark").err


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("sox x.wav -t wav - |", "a pipe"),
        ("~/x.wav", "the file name"),
        ("wav.ark:12[0:100]", "a range of an ark"),
    ],
)
def test_what_names_no_place_is_refused(spec, said):
    with pytest.raises(UserError, match=r"wav\.scp:3: ") as caught:
        audio_place(spec, "wav.scp", 3)
    assert said in str(caught.value)


def test_two_files_in_one_line_are_refused(tmp_path):
    for name in ("a.wav", "b.wav"):
        soundfile.write(tmp_path / name, sound(0), RATE)
    with pytest.raises(UserError, match="2 files, one for each channel"):
        audio_place(f"{tmp_path}/a.wav {tmp_path}/b.wav")


def test_a_file_whose_name_ends_like_a_place_is_that_file(tmp_path):
    soundfile.write(tmp_path / "at 12:30", sound(0), RATE, format="WAV")
    assert len(read_wave(str(tmp_path / "at 12:30")).samples) == len(sound(0))
