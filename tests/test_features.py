"""Audio to features on disk: values, files, dropped utterances, and refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
from commands import start

from fedtools.audio.features import FeatureConfig, client_order, compute
from fedtools.audio.wave import AudioError, read_wave, resample
from fedtools.core.errors import UserError
from fedtools.data.ark import FeatureReader
from fedtools.data.datadir import DataDir

RATE = 16_000


def sound(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """Return a rising tone in noise, as 16-bit integers."""
    times = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).standard_normal(len(times))
    tone = np.sin(2 * np.pi * (200 + 60 * seed + 500 * times) * times)
    return (3000 * tone + 300 * noise).astype(np.int16)


def kaldi_fbank(samples: np.ndarray, rate: int, num_bins: int, below: float = 0.0) -> np.ndarray:
    """Compute the definitions of Kaldi's feat-functions and mel-computations in float64 numpy."""
    length, shift = rate * 25 // 1000, rate * 10 // 1000
    size = 1 << (length - 1).bit_length()
    count = 1 + (len(samples) - length) // shift
    frames = np.stack([samples[i * shift : i * shift + length] for i in range(count)])
    frames = frames.astype(np.float64) - frames.mean(axis=1, keepdims=True)
    before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    frames = frames - 0.97 * before
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / (length - 1))
    power = np.abs(np.fft.rfft(frames * hann**0.85, size)) ** 2

    def mel(frequency):
        return 1127.0 * np.log(1.0 + frequency / 700.0)

    edges = np.linspace(mel(20.0), mel(rate / 2 - below), num_bins + 2)
    place = mel(np.arange(size // 2) * rate / size)
    rise = (place - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    fall = (edges[2:, None] - place) / (edges[2:] - edges[1:-1])[:, None]
    weights = np.maximum(0.0, np.minimum(rise, fall))
    return np.log(np.maximum(power[:, : size // 2] @ weights.T, np.finfo(np.float32).eps))


def kaldi_mfcc(samples: np.ndarray, rate: int, count: int) -> np.ndarray:
    """Compute Kaldi's mfcc_hires.conf: an orthonormal cosine transform, then its liftering."""
    mels = kaldi_fbank(samples, rate, count, below=400.0)
    number, place = np.arange(count)[:, None], np.arange(count) + 0.5
    cosines = np.cos(np.pi / count * number * place) * np.sqrt(2 / count)
    cosines[0] = np.sqrt(1 / count)
    return mels @ cosines.T * (1 + 11 * np.sin(np.pi * np.arange(count) / 22))


@pytest.fixture
def data(tmp_path) -> Path:
    """Make six utterances of three speakers in every container; b has the first and the last."""
    audio, path = tmp_path / "audio", tmp_path / "data"
    audio.mkdir()
    wav_scp, clients = {}, {}
    kinds = ["wav", "flac", "mp3", "sph", "wav", "flac"]
    for index, kind in enumerate(kinds):
        utt = f"s{index // 2}-u{index}"
        file = audio / f"{utt}.{kind}"
        options = {} if kind == "mp3" else {"subtype": "PCM_16"}
        kind = {"sph": "NIST"}.get(kind, kind.upper())
        soundfile.write(file, sound(0.4 + 0.1 * index, index), RATE, format=kind, **options)
        wav_scp[utt] = str(file)
        clients[utt] = "b" if index in (0, 5) else "a"
    DataDir(
        path,
        wav_scp=wav_scp,
        utt2spk={utt: utt.split("-")[0] for utt in wav_scp},
        text=dict.fromkeys(wav_scp, "SOME WORDS"),
        utt2client=clients,
        others={
            "utt2lang": dict.fromkeys(wav_scp, "en"),
            "spk2gender": dict.fromkeys("s0 s1 s2".split(), "f"),
        },
    ).write()
    return path


def read_all(path: Path) -> dict[str, np.ndarray]:
    scp = DataDir.read(path, "feats.scp").feats_scp
    reader = FeatureReader(scp)
    return {utt: reader.read(utt) for utt in scp}


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def set_audio(data: Path, utt: str, value: str) -> None:
    tables = DataDir.read(data)
    tables.wav_scp[utt] = value
    tables.write()


@pytest.mark.parametrize(("rate", "bins"), [(16_000, 80), (16_000, 23), (8_000, 40)])
def test_filterbanks_are_kaldis(rate, bins):
    samples = sound(0.7, seed=3, rate=rate)
    features = compute((samples / 32768).astype(np.float32), FeatureConfig(bins, rate))
    expected = kaldi_fbank(samples, rate, bins)
    assert features.dtype == np.float32 and features.shape == expected.shape
    np.testing.assert_allclose(features, expected, atol=2e-3)


@pytest.mark.parametrize(
    ("kind", "rate", "most"),
    [("fbank", 16_000, 126), ("fbank", 8_000, 95), ("mfcc", 16_000, 124), ("mfcc", 8_000, 90)],
)
def test_no_more_filters_than_kaldi_takes(cli, data, tmp_path, kind, rate, most):
    """The numbers are the largest for which kaldi-native-fbank 1.23 does not raise an error."""
    options = ("--kind", kind, "--sample-rate", rate, "--num-mel-bins")
    said = f"{most + 1} filters have no frequency at {rate} Hz; give at most {most}"
    cli("extract-features", data, tmp_path / "arks", *options, most + 1).fails(2, said)
    assert not (tmp_path / "arks").exists()
    cli("extract-features", data, tmp_path / "arks", *options, most).ok()


def test_cepstra_are_kaldis(data, tmp_path, cli):
    for rate, count in ((16_000, 40), (8_000, 23)):
        samples = sound(0.5, rate=rate)
        config = FeatureConfig(count, rate, "mfcc")
        found = compute((samples / 32768).astype(np.float32), config)
        np.testing.assert_allclose(found, kaldi_mfcc(samples, rate, count), atol=5e-3)
    options = ("--kind", "mfcc", "--num-mel-bins", "40")
    cli("extract-features", data, tmp_path / "arks", *options).ok()
    whole = DataDir.read(data)
    first = whole.utterances[0]
    features = FeatureReader(whole.feats_scp).read(first)
    np.testing.assert_allclose(features, kaldi_mfcc(sound(0.4), RATE, 40), atol=2e-2)


def test_silence_is_floored_as_in_kaldi():
    features = compute(np.zeros(4000, dtype=np.float32), FeatureConfig())
    np.testing.assert_allclose(features, np.log(np.finfo(np.float32).eps), rtol=1e-6)


def test_frames_need_a_whole_window():
    config = FeatureConfig()
    assert [len(compute(np.zeros(n, np.float32), config)) for n in (0, 399, 400, 559, 560)] == [
        0, 0, 1, 1, 2,
    ]  # fmt: skip


def test_one_command_makes_a_data_directory_with_features(data, tmp_path, cli):
    result = cli("extract-features", data, tmp_path / "ark").ok()
    assert result.out == "kept 6, dropped 0\n"
    features = read_all(data)
    first = next(iter(features))
    np.testing.assert_allclose(features[first], kaldi_fbank(sound(0.4), RATE, 80), atol=2e-3)
    tables = DataDir.read(data)
    assert tables.utt2num_frames == {utt: str(len(m)) for utt, m in features.items()}
    assert tables.utt2dur[first] == "0.400"
    assert all(Path(place.rsplit(":")[0]).is_absolute() for place in tables.feats_scp.values())


def test_the_data_of_one_client_are_contiguous(data, tmp_path, cli):
    cli("extract-features", data, tmp_path / "ark").ok()
    tables = DataDir.read(data)
    by_offset = sorted(tables.feats_scp, key=lambda u: int(tables.feats_scp[u].rsplit(":")[1]))
    assert [tables.utt2client[utt] for utt in by_offset] == ["a"] * 4 + ["b"] * 2
    assert by_offset == client_order(tables)


def test_any_number_of_jobs_gives_the_same_bytes(data, tmp_path, cli):
    cli("extract-features", data, tmp_path / "one").ok()
    alone = read_all(data)
    for job in (3, 1, 2, 4):
        cli("extract-features", data, tmp_path / "four", "--job", job, "--nj", 4).ok()
    assert cli("merge-features", data, tmp_path / "four", "--nj", 4).ok().out.startswith("kept 6,")
    arks = [(tmp_path / "four" / f"feats.{job}.ark").read_bytes() for job in (1, 2, 3, 4)]
    assert b"".join(arks) == (tmp_path / "one/feats.1.ark").read_bytes()
    assert {u: m.tobytes() for u, m in read_all(data).items()} == {
        u: m.tobytes() for u, m in alone.items()
    }


def test_compressed_features_are_close_and_smaller(data, tmp_path, cli):
    cli("extract-features", data, tmp_path / "plain").ok()
    plain = read_all(data)
    cli("extract-features", data, tmp_path / "small", "--compress").ok()
    for utt, matrix in read_all(data).items():
        assert matrix.shape == plain[utt].shape
        assert 0 < np.abs(matrix - plain[utt]).max() < 0.3
    sizes = [(tmp_path / name / "feats.1.ark").stat().st_size for name in ("plain", "small")]
    assert sizes[1] < 0.35 * sizes[0]


def test_unusable_audio_is_dropped_from_every_table_and_counted(data, tmp_path, cli):
    soundfile.write(tmp_path / "short.wav", sound(0.02), RATE)
    (tmp_path / "empty.wav").touch()
    flac = (tmp_path / "audio/s0-u1.flac").read_bytes()
    (tmp_path / "cut.flac").write_bytes(flac[: len(flac) // 2])
    for utt, name in (
        ("s0-u0", "short.wav"), ("s0-u1", "cut.flac"), ("s1-u2", "empty.wav"), ("s1-u3", "gone"),
    ):  # fmt: skip
        set_audio(data, utt, str(tmp_path / name))
    owners = data / "utt2client"
    owners.write_text(owners.read_text().replace("s0-u0 b", "s0-u0 lost"))
    before = contents(data)
    refused = cli("extract-features", data, tmp_path / "ark")
    assert refused.code == 1 and "Traceback" not in refused.err
    assert "kept 2, dropped 4" in refused.err and "--max-drop" in refused.err
    assert contents(data) == before
    done = cli("extract-features", data, tmp_path / "ark", "--max-drop", 0.7).ok()
    assert done.out == (
        "kept 2, dropped 4 (empty file: 1, no such file: 1, too short: 1, unreadable audio: 1)\n"
    )
    assert "gone" in done.err and f"{data}: no usable utterance of lost: left out\n" in done.err
    tables = DataDir.read(data)
    kept = ["s2-u4", "s2-u5"]
    for table in ("wav_scp", "text", "utt2spk", "utt2client", "feats_scp", "utt2dur"):
        assert list(getattr(tables, table)) == kept, table
    assert tables.others == {"utt2lang": dict.fromkeys(kept, "en"), "spk2gender": {"s2": "f"}}
    assert (data / "spk2utt").read_text() == "s2 s2-u4 s2-u5\n"
    # Merging again, as after a kill within the merge, changes nothing.
    after = contents(data)
    cli("merge-features", data, tmp_path / "ark", "--nj", 1, "--max-drop", 0.7).ok()
    assert contents(data) == after


def test_nothing_kept_is_an_error_whatever_the_limit(data, tmp_path, cli):
    for utt in DataDir.read(data).utterances:
        set_audio(data, utt, str(tmp_path / "gone.wav"))
    result = cli("extract-features", data, tmp_path / "ark", "--max-drop", 1)
    assert result.code == 1 and "kept 0, dropped 6 (no such file: 6)" in result.err


def test_a_wave_file_cut_off_by_a_full_disk_is_noticed(tmp_path):
    soundfile.write(tmp_path / "whole.wav", sound(1), RATE)
    raw = (tmp_path / "whole.wav").read_bytes()
    (tmp_path / "cut.wav").write_bytes(raw[:20_000])
    with pytest.raises(AudioError, match="cut off") as caught:
        read_wave(str(tmp_path / "cut.wav"))
    assert caught.value.reason == "unreadable audio"


def test_a_wave_file_written_into_a_pipe_has_no_length_and_is_read(tmp_path):
    soundfile.write(tmp_path / "whole.wav", sound(1), RATE)
    raw = (tmp_path / "whole.wav").read_bytes()
    unknown = b"\xff\xff\xff\x7f"
    (tmp_path / "piped.wav").write_bytes(raw[:4] + unknown + raw[8:40] + unknown + raw[44:])
    samples = read_wave(str(tmp_path / "piped.wav")).samples
    np.testing.assert_array_equal(samples * 32768, sound(1))


def test_impossible_samples_and_rates_are_told(tmp_path):
    samples = sound(0.1) / 32768
    samples[5] = np.nan
    soundfile.write(tmp_path / "nan.wav", samples, RATE, subtype="FLOAT")
    soundfile.write(tmp_path / "slow.wav", sound(0.1), 50)
    for name, said in (("nan.wav", "not finite"), ("slow.wav", "50 Hz")):
        with pytest.raises(AudioError, match=said) as caught:
            read_wave(str(tmp_path / name))
        assert name in str(caught.value)


@pytest.mark.parametrize("units", [32767, 2**31 - 1])
def test_floats_in_the_units_of_integers_are_not_used(data, tmp_path, cli, units):
    """Scipy's own example of a WAV writes floats up to 32767; louder floats than 1 are used."""
    samples = sound(0.6).astype("f4") / 32768
    for utt, factor in (("s0-u0", units), ("s1-u2", 3.0)):
        soundfile.write(tmp_path / f"{utt}.wav", factor * samples, RATE, subtype="FLOAT")
        set_audio(data, utt, str(tmp_path / f"{utt}.wav"))
    told = cli("extract-features", data, tmp_path / "ark", "--max-drop", 0.5).ok()
    assert "dropped 1 (samples far outside of -1 to 1: 1)" in told.out
    assert "s0-u0.wav: a sample of " in told.err
    assert "divide floats in 16-bit units by 32768" in told.err
    assert {"s1-u2"} == {"s0-u0", "s1-u2"} & read_all(data).keys()


@pytest.mark.parametrize("name", ["noise.wav", "noise.raw", "noise.mp3", "folder"])
def test_what_is_no_audio_is_told(tmp_path, name):
    if name == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(bytes(range(256)) * 4)
    with pytest.raises(AudioError) as caught:
        read_wave(str(tmp_path / name))
    assert name in str(caught.value)


def test_two_channels_are_mixed_down_and_counted_once(data, tmp_path, cli):
    left, right = (sound(0.6, seed) / 32768 for seed in (1, 2))
    soundfile.write(tmp_path / "two.wav", np.stack([left, right], 1), RATE, subtype="DOUBLE")
    soundfile.write(tmp_path / "mean.wav", (left + right) / 2, RATE, subtype="DOUBLE")
    soundfile.write(tmp_path / "five.wav", np.zeros((RATE, 5)), RATE)
    set_audio(data, "s0-u0", str(tmp_path / "mean.wav"))
    set_audio(data, "s1-u2", str(tmp_path / "two.wav"))
    set_audio(data, "s2-u4", str(tmp_path / "five.wav"))
    tables = DataDir.read(data)
    tables.segments = {utt: f"{utt} 0 -1" for utt in tables.wav_scp}
    tables.utt2spk["s1-u2b"], tables.segments["s1-u2b"] = "s1", "s1-u2 0.1 0.5"
    tables.text["s1-u2b"], tables.utt2client["s1-u2b"] = "SOME WORDS", "a"
    tables.others["utt2lang"]["s1-u2b"] = "en"
    tables.write()
    for job in (1, 2):
        cli("extract-features", data, tmp_path / "ark", "--job", job, "--nj", 2).ok()
    result = cli("merge-features", data, tmp_path / "ark", "--nj", 2, "--max-drop", 0.5).ok()
    said = "kept 6, dropped 1 (more than two channels: 1); mixed down from stereo: 2"
    assert said in result.out
    found = read_all(data)
    np.testing.assert_array_equal(found["s1-u2"], found["s0-u0"])
    assert DataDir.read(data).utt2dur["s1-u2"] == "0.600"
    assert DataDir.read(data).utt2dur["s1-u2b"] == "0.400"


def test_pipes_are_refused(data, tmp_path, cli):
    set_audio(data, "s0-u0", f"touch {tmp_path}/ran |")
    cli("extract-features", data, tmp_path / "ark").fails(1, "wav.scp:1: ", "pipe")
    assert not (tmp_path / "ran").exists()
    assert not list((tmp_path / "ark").glob("*.scp")) + list((tmp_path / "ark").glob(".*"))


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3"])
def test_a_segment_is_a_slice_of_its_recording(tmp_path, kind):
    file = tmp_path / f"long.{kind}"
    soundfile.write(file, sound(2), RATE)
    whole, rate, channels = read_wave(str(file))
    assert rate == RATE and channels == 1 and whole.dtype == np.float32 and np.abs(whole).max() <= 1
    for begin, end in ((0.0, 0.5), (0.73, 1.31), (1.5, -1), (1.0, 2.4)):
        first, last = int(begin * rate), len(whole) if end == -1 else int(end * rate)
        np.testing.assert_array_equal(read_wave(str(file), begin, end)[0], whole[first:last])
    for begin, end in ((2.5, 3.0), (1.0, 3.0), (0.5, 0.5)):
        with pytest.raises(AudioError) as caught:
            read_wave(str(file), begin, end)
        assert caught.value.reason == "segment outside of its recording"


def test_segments_give_the_features_of_their_samples(tmp_path, cli):
    soundfile.write(tmp_path / "long.wav", sound(2), RATE)
    path = tmp_path / "data"
    DataDir(
        path,
        wav_scp={"rec": str(tmp_path / "long.wav")},
        segments={"s-1": "rec 0.25 1.00", "s-2": "rec 1.00 1.80"},
        utt2spk={"s-1": "s", "s-2": "s"},
    ).write()
    cli("extract-features", path, tmp_path / "ark").ok()
    features = read_all(path)
    expected = kaldi_fbank(sound(2)[4000:16_000], RATE, 80)
    np.testing.assert_allclose(features["s-1"], expected, atol=2e-3)
    (path / "segments").write_text("s-1 rec 0.25 1.00\ns-2 rec 1.80 1.00\n")
    cli("extract-features", path, tmp_path / "ark").fails(1, "segments:2: ")


def test_other_rates_are_resampled(tmp_path):
    times = np.arange(48_000) / 48_000
    wave = 0.5 * np.sin(2 * np.pi * 440 * times) + 0.4 * np.sin(2 * np.pi * 11_000 * times)
    samples = resample(wave.astype(np.float32), 48_000, RATE)
    assert samples.dtype == np.float32 and len(samples) == RATE
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    # 11 kHz is above half the new rate: it must be removed, not aliased.
    np.testing.assert_allclose(samples[500:-500], expected[500:-500], atol=2e-3)


def test_a_sound_has_the_same_features_at_any_rate(data, tmp_path, cli):
    """Equally many frames would hide filters at the positions of another rate."""

    def tones(rate: int) -> np.ndarray:
        times = np.arange(rate // 2) / rate
        sum_of_sines = sum(np.sin(2 * np.pi * pitch * times) for pitch in (500, 1700, 3000))
        return (3000 * sum_of_sines).astype(np.int16)

    rates = {"s0-u0": 8_000, "s1-u2": 48_000}
    for utt, rate in rates.items():
        soundfile.write(tmp_path / f"{utt}.wav", tones(rate), rate)
        set_audio(data, utt, str(tmp_path / f"{utt}.wav"))
    cli("extract-features", data, tmp_path / "ark").ok()
    expected = kaldi_fbank(tones(RATE), RATE, 80)
    loud = expected > expected.max() - 6
    assert 0.1 < loud.mean() < 0.5
    for utt in rates:
        found = read_all(data)[utt]
        assert found.shape == expected.shape
        # Without the ends, which resampling smooths.
        np.testing.assert_allclose(found[2:-2][loud[2:-2]], expected[2:-2][loud[2:-2]], atol=0.1)


def test_telephone_speech_is_used_with_a_warning(data, tmp_path, cli):
    soundfile.write(tmp_path / "phone.wav", sound(0.5, rate=8000), 8000)
    set_audio(data, "s0-u0", str(tmp_path / "phone.wav"))
    result = cli("extract-features", data, tmp_path / "ark").ok()
    assert "warning: 1 utterances were recorded below 16000 Hz" in result.err
    assert len(read_all(data)["s0-u0"]) == 48


def test_merging_refuses_what_does_not_fit(data, tmp_path, cli):
    ark = tmp_path / "ark"
    cli("extract-features", data, ark, "--job", 1, "--nj", 2).ok()
    cli("merge-features", data, ark, "--nj", 2).fails(1, "feats.2.scp", "job 2 of 2")
    cli("merge-features", data, ark, "--nj", 1).fails(1, "no job has utterance")
    cli("extract-features", data, ark, "--job", 2, "--nj", 2, "--num-mel-bins", 40).ok()
    cli("merge-features", data, ark, "--nj", 2).fails(1, "40 values per frame", "same options")
    cli("extract-features", data, ark, "--job", 2, "--nj", 2).ok()
    tables = DataDir.read(data)
    tables.restrict(tables.utterances[1:], tmp_path / "less").write()
    cli("merge-features", tmp_path / "less", ark, "--nj", 2).fails(1, "other data", "s0-u0")
    whole = (ark / "feats.2.ark").read_bytes()
    (ark / "feats.2.ark").write_bytes(whole[:-10])
    cli("merge-features", data, ark, "--nj", 2).fails(1, "feats.2.ark", "s2-u5", "damaged")
    assert not (data / "feats.scp").exists()


@pytest.mark.parametrize(
    "options", [("--nj", 2), ("--job", 3, "--nj", 2), ("--num-mel-bins", 1), ("--job", 0)]
)
def test_wrong_usage_exits_2(data, tmp_path, cli, options):
    cli("extract-features", data, tmp_path / "ark", *options).fails(2)


def test_tables_that_do_not_fit_are_named(data, tmp_path, cli):
    (data / "wav.scp").write_text("".join((data / "wav.scp").read_text().splitlines(True)[1:]))
    cli("extract-features", data, tmp_path / "ark").fails(1, "wav.scp", "s0-u0")
    cli("extract-features", tmp_path / "none", tmp_path / "ark").fails(1, "no such data directory")
    (data / "utt2client").write_text("s0-u0 a\n")
    cli("extract-features", data, tmp_path / "ark").fails(1, "utt2client", "s0-u1")
    with pytest.raises(UserError):
        client_order(DataDir.read(data))


def test_a_killed_job_is_done_again_whole(data, tmp_path, cli):
    soundfile.write(tmp_path / "long.wav", sound(120), RATE)
    tables = DataDir.read(data)
    tables.wav_scp = dict.fromkeys(tables.wav_scp, str(tmp_path / "long.wav"))
    tables.write()
    ark = tmp_path / "ark"
    command = [sys.executable, "-m", "fedtools", "extract-features", str(data), str(ark)]
    process = start(*command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(file.stat().st_size for file in ark.glob(".feats.1.ark.*.tmp")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list(ark.glob(".feats.1.ark.*.tmp")) and not (ark / "feats.1.scp").exists()
    assert not (data / "feats.scp").exists()
    for utt in tables.utterances:
        set_audio(data, utt, str(tmp_path / "audio/s0-u0.wav"))
    cli("extract-features", data, ark).ok()
    assert not list(ark.glob(".*")) and len(read_all(data)) == 6
