"""Clips in one file: what is packed, what is read, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest
import soundfile
from conftest import fedtools
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedtools.files.clips import Clip, Clips, write_clips
from fedtools.files.datadir import DataDir, write_table
from fedtools.files.errors import UserError

RATE = 16_000
# Client "b" has a speaker of its own whose utterances lie between those of "a-x" by name.
SAMPLES = {"a-1": 16000, "a-b-1": 9000, "a-c": 20000, "z-1": 16000, "z-2": 1}
SPEAKERS = {"a-1": "a", "a-b-1": "a-b", "a-c": "a", "z-1": "z", "z-2": "z"}
LABELS = {"a-1": "yes", "a-b-1": "no", "a-c": "no", "z-1": "_silence_", "z-2": "yes"}
CLASSES = ["no", "yes", "_silence_"]


def wave(name: str, samples: int) -> np.ndarray:
    """Full-scale 16-bit noise of its own for each name."""
    return np.random.default_rng([*name.encode()]).integers(-32768, 32768, samples, np.int16)


def expected(name: str) -> np.ndarray:
    row = np.zeros(RATE, np.int16)
    samples = wave(name, SAMPLES[name])[:RATE]
    row[: len(samples)] = samples
    return row


@pytest.fixture
def data(tmp_path) -> Path:
    """Five clips of three speakers, classes, and two recordings of noise."""
    folder = tmp_path / "audio"
    folder.mkdir()
    lengths = SAMPLES | {"noise1": 30_000, "noise2": 17_000}
    for name, samples in lengths.items():
        soundfile.write(folder / f"{name}.wav", wave(name, samples), RATE, subtype="PCM_16")
    DataDir(
        tmp_path / "data",
        wav_scp={name: str(folder / f"{name}.wav") for name in SAMPLES},
        utt2spk=SPEAKERS,
        text=LABELS,
    ).write()
    (tmp_path / "classes.txt").write_text("".join(f"{label}\n" for label in CLASSES))
    noise = {name: str(folder / f"{name}.wav") for name in ("noise1", "noise2")}
    write_table(tmp_path / "noise.scp", noise)
    return tmp_path


def command(data: Path, *options: str | Path) -> tuple[str | Path, ...]:
    classes = ("--classes", data / "classes.txt")
    return ("pack-clips", data / "data", data / "out", *classes, *options)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_what_is_packed_is_read(data, cli):
    result = cli(*command(data, "--noise", data / "noise.scp")).ok()
    assert result.out.splitlines() == [
        "kept 5, dropped 0",
        "clips  clients  classes  padded  cut  noise",
        "    5        3        3       2    1  2.9 s",
    ]
    clips = Clips.read(data / "out")
    # Speakers are the clients, each in one piece, though their utterances are interleaved.
    assert clips.utterances == ["a-1", "a-c", "a-b-1", "z-1", "z-2"]
    assert clips.clients == ["a", "a-b", "z"]
    assert clips.classes == CLASSES
    assert [clips.rows(client) for client in clips.clients] == [
        slice(0, 2), slice(2, 3), slice(3, 5),
    ]  # fmt: skip
    assert clips.labels.dtype == np.int64
    assert [CLASSES[label] for label in clips.labels] == [LABELS[utt] for utt in clips.utterances]
    assert isinstance(clips.waves, np.memmap) and clips.waves.dtype == np.int16
    np.testing.assert_array_equal(clips.waves, [expected(utt) for utt in clips.utterances])
    both = np.concatenate([wave("noise1", 30_000), wave("noise2", 17_000)])
    np.testing.assert_array_equal(clips.noise, both)
    table = (data / "out" / "clips.tsv").read_text().splitlines()
    assert table[0] == "utterance\tclient\tlabel\tsamples"
    assert table[2:4] == ["a-c\ta\tno\t20000", "a-b-1\ta-b\tno\t9000"]
    with pytest.raises(UserError, match="no clip of client 'b'"):
        clips.rows("b")


def test_numpy_reads_the_files_too(data, cli):
    cli(*command(data, "--noise", data / "noise.scp")).ok()
    clips = Clips.read(data / "out")
    for name in ("waves", "noise"):
        path = data / "out" / {"waves": "clips.npy", "noise": "noise.npy"}[name]
        np.testing.assert_array_equal(np.load(path, allow_pickle=False), getattr(clips, name))
        np.save(data / "saved.npy", getattr(clips, name))
        assert (data / "saved.npy").read_bytes() == path.read_bytes()


def test_clients_may_be_others_than_speakers(data, cli):
    tables = DataDir.read(data / "data")
    tables.utt2client = dict(zip(SAMPLES, "21212", strict=True))
    tables.write()
    cli(*command(data)).ok()
    clips = Clips.read(data / "out")
    assert clips.utterances == ["a-b-1", "z-1", "a-1", "a-c", "z-2"]
    assert clips.clients == ["1", "2"]
    assert clips.noise.shape == (0,) and clips.noise.dtype == np.int16


def test_segments_are_cut_from_their_recordings(data, cli):
    tables = DataDir.read(data / "data")
    tables.wav_scp["noise1"] = str(data / "audio" / "noise1.wav")
    tables.segments = {utt: f"{utt} 0 -1" for utt in SAMPLES}
    tables.segments["z-1"] = "noise1 0.5 1.5"
    tables.segments["z-2"] = "noise1 1.5 -1"
    tables.write()
    cli(*command(data)).ok()
    clips = Clips.read(data / "out")
    noise = wave("noise1", 30_000)
    np.testing.assert_array_equal(clips.waves[3], noise[8000:24000])
    np.testing.assert_array_equal(clips.waves[4], np.pad(noise[24000:], (0, 10_000)))
    np.testing.assert_array_equal(clips.waves[:3], [expected(u) for u in clips.utterances[:3]])


def test_other_sample_rates_are_resampled(data, cli):
    times = np.arange(4000) / 8000
    tone = (0.5 * np.sin(2 * np.pi * 440 * times)).astype(np.float32)
    soundfile.write(data / "audio" / "z-1.wav", tone, 8000)
    result = cli(*command(data)).ok()
    assert "warning: 1 clips were recorded below 16000 Hz" in result.err
    found = Clips.read(data / "out").waves[3]
    wanted = 16384 * np.sin(2 * np.pi * 440 * np.arange(8000) / 16000)
    assert np.abs(found[500:7500] - wanted[500:7500]).max() < 50
    assert not found[8000:].any()


def test_the_same_input_gives_the_same_bytes(data, cli):
    cli(*command(data, "--noise", data / "noise.scp")).ok()
    first = contents(data / "out")
    assert sorted(first) == ["classes.txt", "clips.npy", "clips.tsv", "noise.npy", "sha256sums"]
    subprocess.run(["sha256sum", "--check", "sha256sums"], cwd=data / "out", check=True)
    cli(*command(data, "--noise", data / "noise.scp")).ok()
    assert contents(data / "out") == first


def test_unusable_audio_is_dropped_and_counted(data, cli):
    cli(*command(data)).ok()
    before = contents(data / "out")
    (data / "audio" / "a-c.wav").unlink()
    soundfile.write(data / "audio" / "z-1.wav", np.zeros(0), RATE)
    failed = cli(*command(data, "--max-drop", "0.3"))
    assert failed.code == 1
    last = failed.err.splitlines()[-1]
    assert "kept 3, dropped 2 (no samples: 1, no such file: 1): over 30.0%" in last
    assert "--max-drop" in last
    assert contents(data / "out") == before
    result = cli(*command(data, "--max-drop", "0.4")).ok()
    assert result.out.startswith("kept 3, dropped 2 (no samples: 1, no such file: 1)\n")
    assert "dropped a-c: " in result.err
    clips = Clips.read(data / "out")
    assert clips.utterances == ["a-1", "a-b-1", "z-2"]
    np.testing.assert_array_equal(clips.waves, [expected(utt) for utt in clips.utterances])
    for path in (data / "audio").glob("*.wav"):
        path.unlink()
    assert cli(*command(data, "--max-drop", "1")).code == 1


def test_a_label_that_is_no_class_is_named_with_its_line(data, cli):
    edit(data / "data" / "text", "a-c no", "a-c maybe")
    result = cli(*command(data))
    text = data / "data" / "text"
    result.fails(1, f"{text}:3: the label 'maybe' of 'a-c' is not in", "add it there")
    assert not (data / "out").exists()


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("data/text", "z-2 yes\n", "", "'z-2' has no label"),
        ("data/text", "z-2 yes", "z-2 yes no", "text:5: the label 'yes no'"),
        ("data/wav.scp", "z-1 ", "z-0 ", "'z-1' is missing"),
        ("data/wav.scp", "z-1 /", "z-1 cat /", "a pipe"),
        ("data/utt2spk", "z-2 z", "z-2 ..", "utt2spk:5: speaker '..' is not usable"),
        ("classes.txt", "yes\n", "no\n", "classes.txt:2: 'no' comes twice"),
        ("classes.txt", "yes\n", "\n", "classes.txt:2: '' is not one label"),
        ("classes.txt", "no\nyes\n_silence_\n", "", "no classes"),
        ("noise.scp", "noise2 ", "noise2 ~", "noise.scp:2: the file name"),
        ("noise.scp", "noise2.wav", "none.wav", "none.wav: cannot be read"),
    ],
)
def test_bad_tables_are_refused(data, cli, file, old, new, said):
    edit(data / file, old, new)
    if said == "a pipe":
        edit(data / file, "z-1.wav", "z-1.wav |")
    cli(*command(data, "--noise", data / "noise.scp")).fails(1, said)
    assert not list(data.glob("out/*"))


def test_noise_shorter_than_a_clip_is_refused(data, cli):
    for name in ("noise1", "noise2"):
        soundfile.write(data / "audio" / f"{name}.wav", np.zeros(7999), RATE)
    cli(*command(data, "--noise", data / "noise.scp")).fails(1, "noise.scp: 15998 samples of noise")


def test_usage_errors(data, cli):
    cli("pack-clips", data / "data", data / "out").fails(2, "--classes")
    cli(*command(data, "--max-drop", "2")).fails(2, "--max-drop")


def packed(folder: Path) -> Path:
    clips = [Clip(utt, SPEAKERS[utt], LABELS[utt], wave(utt, 5)) for utt in ("a-1", "a-c", "z-1")]
    write_clips(folder, clips, CLASSES, [np.ones(RATE, np.int16)])
    assert len(Clips.read(folder).utterances) == 3
    return folder


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("clips.tsv", "z-1\tz\t_silence_\t5\n", "", "2 clips, but 3 in clips.npy"),
        ("clips.tsv", "a-c\ta\tno", "a-c\ta\tmaybe", "clips.tsv:3: the label 'maybe'"),
        ("clips.tsv", "a-c\ta\t", "a-1\ta\t", "clips.tsv:3: 'a-1' comes twice"),
        ("clips.tsv", "a-c\ta\t", "a-0\ta\t", "clips.tsv:3: 'a-0' of client 'a' is not in order"),
        ("clips.tsv", "z-1\tz\t", "z-1\tA\t", "clips.tsv:4: 'z-1' of client 'A' is not in order"),
        ("clips.tsv", "z-1\tz\t", "z-1\t/\t", "clips.tsv:4: client '/' is not usable"),
        ("clips.tsv", "\tno\t5", "\tno\t-5", "clips.tsv:3: samples is '-5'"),
        ("clips.tsv", "\tno\t5", "\tno\t0", "clips.tsv:3: a clip of 0 samples"),
        ("clips.tsv", "\tno\t5", "\tno", "clips.tsv:3: 3 fields"),
        ("clips.tsv", "client", "speaker", "clips.tsv:1: the header"),
        ("classes.txt", "yes\n", "", "clips.tsv:2: the label 'yes'"),
        # Nothing is wrong with these, but they are not what was packed.
        ("clips.tsv", "a-c\ta\tno", "a-c\ta\tyes", "not the file that was packed: clips"),
        ("classes.txt", "yes\n", "yes\nmore\n", "not the file that was packed: classes"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path, file, old, new, said):
    folder = packed(tmp_path / "out")
    edit(folder / file, old, new)
    with pytest.raises(UserError) as error:
        Clips.read(folder)
    assert said in str(error.value)


def test_other_arrays_are_refused(tmp_path):
    folder = packed(tmp_path / "out")
    waves = np.load(folder / "clips.npy")
    for array, said in [
        (waves.astype(np.float32), "no header of 16-bit samples"),
        (waves.astype(">i2"), "no header of 16-bit samples"),
        (np.asfortranarray(waves), "no header of 16-bit samples"),
        (np.array([{}, {}, {}]), "no header of 16-bit samples"),
        (waves[:, :8000], "3 x 8000 samples, n x 16000 are expected"),
        (waves[0], "16000 samples, n x 16000 are expected"),
        (waves[:2], "3 clips, but 2 in clips.npy"),
    ]:
        np.save(folder / "clips.npy", array)
        with pytest.raises(UserError) as error:
            Clips.read(folder)
        assert said in str(error.value)
    np.save(folder / "clips.npy", waves)
    np.save(folder / "noise.npy", waves[0, :100])
    with pytest.raises(UserError, match=r"noise.npy: 100 samples of noise"):
        Clips.read(folder)


@pytest.mark.parametrize(
    "name", ["clips.npy", "clips.tsv", "classes.txt", "noise.npy", "sha256sums"]
)
def test_a_missing_or_short_or_long_file_is_one_line(tmp_path, name):
    folder = packed(tmp_path / "out")
    content = (folder / name).read_bytes()
    for changed in (content[:-1], content[:5], b"", content + b"\0\0"):
        (folder / name).write_bytes(changed)
        with pytest.raises(UserError, match=name) as error:
            Clips.read(folder)
        assert "\n" not in str(error.value)
    (folder / name).unlink()
    with pytest.raises(UserError, match=name):
        Clips.read(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(place=st.integers(0, 127), new=st.binary(min_size=1, max_size=20))
def test_a_damaged_header_is_never_a_traceback(tmp_path, place, new):
    folder = tmp_path / "out"
    if not folder.exists():
        packed(folder)
        (tmp_path / "good.npy").write_bytes((folder / "clips.npy").read_bytes())
    content = bytearray((tmp_path / "good.npy").read_bytes())
    content[place : place + len(new)] = new
    (folder / "clips.npy").write_bytes(content)
    try:
        assert Clips.read(folder).waves.shape == (3, RATE)
    except UserError as error:
        assert "clips.npy" in str(error)


def test_a_writer_that_stops_leaves_the_old_clips(tmp_path):
    folder = packed(tmp_path / "out")
    before = contents(folder)

    def broken():
        yield Clip("a-1", "a", "yes", wave("a-1", 5))
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write_clips(folder, broken(), CLASSES)
    assert contents(folder) == before


def test_new_waveforms_are_never_read_with_the_old_table(tmp_path):
    folder = packed(tmp_path / "out")
    (folder / "classes.txt").unlink()
    # Stops the writer after the waveforms have got their names, before the table has.
    (folder / "classes.txt").mkdir()
    clips = [Clip(utt, "a", "yes", wave(utt, 5)) for utt in ("a-1", "a-2", "a-3")]
    with pytest.raises(OSError):
        write_clips(folder, clips, CLASSES)
    assert np.load(folder / "clips.npy").shape == (3, RATE)
    with pytest.raises(UserError, match="no packed clips; run fedtools pack-clips"):
        Clips.read(folder)


def test_packing_needs_the_memory_of_a_few_clips(tmp_path):
    one = np.zeros(RATE, np.int16)
    peak = 0

    def many():
        nonlocal peak
        for number in range(2000):
            if number % 250 == 0:
                peak = max(peak, psutil.Process().memory_info().rss)
            yield Clip(f"u{number:04d}", "client", "yes", one)

    start = psutil.Process().memory_info().rss
    write_clips(tmp_path / "out", many(), CLASSES)
    size = (tmp_path / "out" / "clips.npy").stat().st_size
    assert size == 128 + 2000 * 32_000
    assert peak - start < size / 5
    clips = Clips.read(tmp_path / "out")
    assert clips.rows("client") == slice(0, 2000)


def test_the_command_in_a_process_of_its_own(data):
    fedtools(*command(data)).ok()
    edit(data / "data" / "text", "a-c no", "a-c maybe")
    fedtools(*command(data)).fails(1, "fedtools: ")
