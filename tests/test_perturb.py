"""Speed perturbation: names and tables in Kaldi's form, and its effect on a sine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import ROOT, run

from fedtools.audio.perturb import speakers_of
from fedtools.data.ark import FeatureReader
from fedtools.data.datadir import DataDir, read_table, write_table

VALIDATE = ROOT / "utils/validate_data_dir.py"
RATE, HERTZ, SECONDS = 16_000, 1000.0, 2.0
SPEEDS = {"sp0.9-": 0.9, "": 1.0, "sp1.1-": 1.1}
UTTERANCES = ["a-1", "a-2", "b-1"]


def write(path: Path, **tables: dict[str, str]) -> None:
    path.mkdir()
    for name, table in tables.items():
        lines = sorted(f"{key} {value}\n" for key, value in table.items())
        (path / name.replace("_scp", ".scp")).write_text("".join(lines))


@pytest.fixture
def data(tmp_path) -> Path:
    """Make three utterances of a sine, with two speakers, and one client per speaker."""
    times = np.arange(round(SECONDS * RATE)) / RATE
    sine = (0.3 * np.sin(2 * np.pi * HERTZ * times)).astype(np.float32)
    for utt in UTTERANCES:
        soundfile.write(str(tmp_path / f"{utt}.wav"), sine, RATE)
    write(
        tmp_path / "data",
        wav_scp={utt: str(tmp_path / f"{utt}.wav") for utt in UTTERANCES},
        text={utt: f"words of {utt}" for utt in UTTERANCES},
        utt2spk={utt: utt[0] for utt in UTTERANCES},
        spk2utt={"a": "a-1 a-2", "b": "b-1"},
        utt2client={utt: f"client_{utt[0]}" for utt in UTTERANCES},
        client2utt={"client_a": "a-1 a-2", "client_b": "b-1"},
        utt2dur=dict.fromkeys(UTTERANCES, f"{SECONDS:.3f}"),
        spk2gender={"a": "f", "b": "m"},
    )
    return tmp_path / "data"


def test_names_and_tables(cli, data, tmp_path):
    cli("perturb-speed", data, tmp_path / "sp").ok()
    run(VALIDATE, "--no-feats", tmp_path / "sp").ok()
    found = DataDir.read(tmp_path / "sp")
    expected = [f"{prefix}{utt}" for prefix in SPEEDS for utt in UTTERANCES]
    assert found.utterances == sorted(expected)
    for prefix, speed in SPEEDS.items():
        for utt in UTTERANCES:
            name = f"{prefix}{utt}"
            assert found.utt2spk[name] == f"{prefix}{utt[0]}"
            assert found.utt2client[name] == f"client_{utt[0]}"
            assert found.text[name] == f"words of {utt}"
            assert float(found.utt2dur[name]) == pytest.approx(SECONDS / speed, abs=6e-4)
            assert found.others["utt2uniq"][name] == utt
            assert float(found.others["utt2speed"][name]) == speed
    # A person is the same at every speed.
    people = speakers_of(found, found.utterances)
    assert people == [found.others["utt2uniq"][name][0] for name in found.utterances]
    assert speakers_of(DataDir.read(data), UTTERANCES) == [utt[0] for utt in UTTERANCES]
    assert found.others["spk2gender"]["sp1.1-b"] == "m"
    # Tables of an earlier run are removed.
    cli("perturb-speed", data, tmp_path / "sp", "--speeds", "0.95").ok()
    assert list(read_table(tmp_path / "sp" / "text")) == [f"sp0.95-{u}" for u in UTTERANCES]


def peak_hertz(features: np.ndarray) -> float:
    """Return the centre frequency of the mel filter with the most energy."""
    low, high = (1127.0 * np.log(1.0 + hertz / 700.0) for hertz in (20.0, RATE / 2))
    centres = np.linspace(low, high, features.shape[1] + 2)[1:-1]
    return float(700.0 * (np.exp(centres[features.mean(0).argmax()] / 1127.0) - 1.0))


@pytest.mark.parametrize("with_durations", [True, False])
def test_a_sine_is_higher_and_shorter(cli, data, tmp_path, with_durations):
    if not with_durations:
        (data / "utt2dur").unlink()
    cli("perturb-speed", data, tmp_path / "sp").ok()
    # Narrow filters: 0.9 and 1.1 differ by several.
    cli("extract-features", tmp_path / "sp", tmp_path / "ark", "--num-mel-bins", 126).ok()
    run(VALIDATE, tmp_path / "sp").ok()
    reader = FeatureReader(read_table(tmp_path / "sp" / "feats.scp"))
    durations = read_table(tmp_path / "sp" / "utt2dur")
    for prefix, speed in SPEEDS.items():
        features = reader.read(f"{prefix}a-2")
        assert peak_hertz(features) == pytest.approx(speed * HERTZ, rel=0.015)
        frames = 1 + (SECONDS / speed - 0.025) // 0.01
        assert len(features) == pytest.approx(frames, abs=1)
        assert float(durations[f"{prefix}a-2"]) == pytest.approx(SECONDS / speed, abs=6e-4)
    # At speed 1 nothing is resampled: features are byte-identical to those of the data.
    cli("extract-features", data, tmp_path / "plain", "--num-mel-bins", 126).ok()
    plain = FeatureReader(read_table(data / "feats.scp")).read("b-1")
    np.testing.assert_array_equal(reader.read("b-1"), plain)


def test_segments_are_cut_before_the_speed_is_changed(cli, data, tmp_path):
    wav = str(tmp_path / "a-1.wav")
    write(
        tmp_path / "cut",
        wav_scp={"a-tape": wav},
        segments={"a-x": "a-tape 0.5 1.5"},
        text={"a-x": "one"},
        utt2spk={"a-x": "a"},
        spk2utt={"a": "a-x"},
    )
    cli("perturb-speed", tmp_path / "cut", tmp_path / "sp", "--speeds", "0.5 2").ok()
    assert read_table(tmp_path / "sp" / "segments")["sp0.5-a-x"] == "sp0.5-a-tape 0.5 1.5"
    cli("extract-features", tmp_path / "sp", tmp_path / "ark").ok()
    run(VALIDATE, tmp_path / "sp").ok()
    assert read_table(tmp_path / "sp" / "utt2dur") == {"sp0.5-a-x": "2.000", "sp2-a-x": "0.500"}


@pytest.mark.parametrize("speeds", ["0", "-1", "nan", "1e0", "x", "3", "0.9 0.90"])
def test_bad_speeds_are_refused(cli, data, tmp_path, speeds):
    cli("perturb-speed", data, tmp_path / "sp", f"--speeds={speeds}").fails(1, "speed ")
    assert not (tmp_path / "sp").exists()


def test_what_cannot_be_perturbed(cli, data, tmp_path):
    cli("perturb-speed", data, tmp_path / "sp", "--speeds", " ").fails(2, "--speeds")
    cli("perturb-speed", data, data).fails(1, "would be overwritten")
    cli("perturb-speed", data, tmp_path / "sp").ok()
    cli("perturb-speed", tmp_path / "sp", tmp_path / "again").fails(1, "perturbed already")
    (data / "wav.scp").unlink()
    cli("perturb-speed", data, tmp_path / "none").fails(1, "wav.scp: missing")


def test_a_damaged_table_of_speeds_is_refused(cli, data, tmp_path):
    cli("perturb-speed", data, tmp_path / "sp").ok()
    table = tmp_path / "sp" / "utt2speed"
    table.write_text(table.read_text().replace("sp0.9-a-1 0.9", "sp0.9-a-1 9"))
    cli("extract-features", tmp_path / "sp", tmp_path / "ark").fails(1, "'sp0.9-a-1' is '9'")


def test_clips_of_perturbed_data_are_refused(cli, data, tmp_path):
    """pack-clips reads one second of audio and would ignore the speed."""
    cli("perturb-speed", data, tmp_path / "sp").ok()
    (tmp_path / "classes.txt").write_text("words\n")
    packed = tmp_path / "packed"
    cli("pack-clips", tmp_path / "sp", packed, "--classes", tmp_path / "classes.txt").fails(
        1, "utt2speed"
    )


def test_a_volume_multiplies_samples(cli, data, tmp_path):
    """Log energies change by twice the factor's logarithm; C order and speed stay."""
    cli("perturb-speed", data, tmp_path / "sp", "--speeds", "1.0 1.1").ok()
    for seed in ("3", "3", "4"):
        cli("perturb-volume", tmp_path / "sp", tmp_path / f"v{seed}", "--seed", seed).ok()
    volumes = {seed: read_table(tmp_path / f"v{seed}" / "utt2volume") for seed in ("3", "4")}
    assert volumes["3"] != volumes["4"] and len(set(volumes["3"].values())) == 6
    assert all(0.125 <= float(volume) <= 2 for volume in volumes["3"].values())
    for name in ("sp", "v3"):
        cli("extract-features", tmp_path / name, tmp_path / "arks" / name).ok()
    plain, loud = (DataDir.read(tmp_path / name) for name in ("sp", "v3"))
    for utt in plain.utterances:
        before, after = (FeatureReader(one.feats_scp).read(utt) for one in (plain, loud))
        # Near the sine, far above the floor of energies.
        at = before.mean(0).argmax()
        expected = 2 * np.log(float(volumes["3"][utt]))
        np.testing.assert_allclose((after - before)[:, at], expected, atol=1e-3)
    cli("perturb-volume", tmp_path / "v3", tmp_path / "again").fails(1, "perturbed already")
    cli("perturb-volume", data, data).fails(1, "would be overwritten")
    cli("perturb-volume", data, tmp_path / "x", "--low", "0").fails(2, "--low")
    write_table(tmp_path / "v3" / "utt2volume", volumes["3"] | {"a-1": "loud"})
    done = cli("extract-features", tmp_path / "v3", tmp_path / "arks" / "v3")
    done.fails(1, "utt2volume", "the volume of 'a-1' is 'loud'")
