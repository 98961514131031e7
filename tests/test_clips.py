"""Clips in one file: packing, reading, and refusals."""

from __future__ import annotations

import hashlib
import math
import shutil
import subprocess
import tracemalloc
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import pytest
import soundfile
from conftest import fedtools
from damaged import SEEDS, damage, read_or_refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedtools.core.errors import UserError
from fedtools.data.clips import Clip, Clips, write_clips
from fedtools.data.datadir import DataDir, write_table

RATE = 16_000
# Client "b" has a speaker of its own whose utterances lie between those of "a-x" by name.
SAMPLES = {"a-1": 16000, "a-b-1": 9000, "a-c": 20000, "z-1": 16000, "z-2": 1}
SPEAKERS = {"a-1": "a", "a-b-1": "a-b", "a-c": "a", "z-1": "z", "z-2": "z"}
LABELS = {"a-1": "yes", "a-b-1": "no", "a-c": "no", "z-1": "_silence_", "z-2": "yes"}
CLASSES = ["no", "yes", "_silence_"]
INDEX = ["classes.txt", "clients.tsv", "labels.npy"]
FILES = sorted([*INDEX, "clips.npy", "clips.tsv", "noise.npy", "sha256sums"])


def wave(name: str, samples: int) -> np.ndarray:
    """Return full-scale 16-bit noise that depends on the name."""
    return np.random.default_rng([*name.encode()]).integers(-32768, 32768, samples, np.int16)


def expected(name: str) -> np.ndarray:
    row = np.zeros(RATE, np.int16)
    samples = wave(name, SAMPLES[name])[:RATE]
    row[: len(samples)] = samples
    return row


@pytest.fixture
def data(tmp_path) -> Path:
    """Make five clips of three speakers, classes, and two recordings of noise."""
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
    assert clips.sizes.tolist() == [2, 1, 2]
    assert isinstance(clips.labels, np.memmap) and clips.labels.dtype == np.int64
    assert [CLASSES[label] for label in clips.labels] == [LABELS[utt] for utt in clips.utterances]
    assert isinstance(clips.waves, np.memmap) and clips.waves.dtype == np.int16
    np.testing.assert_array_equal(clips.waves, [expected(utt) for utt in clips.utterances])
    both = np.concatenate([wave("noise1", 30_000), wave("noise2", 17_000)])
    np.testing.assert_array_equal(clips.noise, both)
    table = (data / "out" / "clips.tsv").read_text().splitlines()
    assert table[0] == "utterance\tclient\tlabel\tsamples"
    assert table[2:4] == ["a-c\ta\tno\t20000", "a-b-1\ta-b\tno\t9000"]
    assert (data / "out" / "clients.tsv").read_text() == "client\tclips\na\t2\na-b\t1\nz\t2\n"
    for client in ("", "0", "b", "zz"):
        with pytest.raises(UserError, match=f"no clip of client '{client}'"):
            clips.rows(client)


def test_numpy_reads_the_files_too(data, cli):
    cli(*command(data, "--noise", data / "noise.scp")).ok()
    clips = Clips.read(data / "out")
    for name, file in (("waves", "clips"), ("noise", "noise"), ("labels", "labels")):
        path = data / "out" / f"{file}.npy"
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


def test_noise_of_another_rate_is_resampled(data, cli):
    """Otherwise it would sound slower, or faster, and have another length."""
    times = np.arange(48_000) / 24_000
    hum = (0.5 * np.sin(2 * np.pi * 200 * times)).astype(np.float32)
    soundfile.write(data / "audio" / "noise1.wav", hum, 24_000)
    cli(*command(data, "--noise", data / "noise.scp")).ok()
    found = Clips.read(data / "out").noise
    wanted = 16384 * np.sin(2 * np.pi * 200 * np.arange(32_000) / RATE)
    assert len(found) == 32_000 + 17_000
    assert np.abs(found[500:31_500] - wanted[500:31_500]).max() < 50
    np.testing.assert_array_equal(found[32_000:], wave("noise2", 17_000))


def test_the_same_input_gives_the_same_bytes(data, cli):
    cli(*command(data, "--noise", data / "noise.scp")).ok()
    first = contents(data / "out")
    assert sorted(first) == FILES
    check = ["sha256sum", "--check", "sha256sums"]
    told = subprocess.run(check, cwd=data / "out", check=True, stdout=subprocess.PIPE, text=True)
    assert sorted([*told.stdout.split(": OK\n")[:-1], "sha256sums"]) == FILES
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
        ("classes.txt", "yes\n", "no\n", "classes.txt:2: 'no' is duplicated"),
        ("classes.txt", "yes\n", "\n", "classes.txt:2: '' is not one word"),
        ("classes.txt", "no\nyes\n_silence_\n", "", "classes.txt: empty"),
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


def sum_again(folder: Path) -> None:
    """Write checksums of the current index, as if it had been packed like this."""
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in INDEX}
    (folder / "sha256sums").write_text("".join(f"{sums[name]}  {name}\n" for name in sums))


def refused(folder: Path, *said: str) -> None:
    """Check that the clips are refused in one line."""
    with pytest.raises(UserError) as error:
        Clips.read(folder)
    assert all(text in str(error.value) for text in said) and "\n" not in str(error.value)


IDS = st.text("abzAZ019_.+-", min_size=1, max_size=4).filter(lambda name: name[0] not in ".+-")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    owners=st.dictionaries(IDS, st.dictionaries(IDS, st.integers(0, 5), min_size=1), min_size=1),
    classes=st.integers(1, 5),
)
def test_what_is_read_is_what_the_table_says(tmp_path, owners, classes):
    labels = [f"w{number}" for number in range(classes)]
    clips = [
        Clip(f"{client}_{utt}", client, labels[n % classes], wave(utt, n + 1))
        for client, utts in sorted(owners.items())
        for utt, n in sorted(utts.items())
    ]
    write_clips(tmp_path / "out", clips, labels)
    header, *lines = (tmp_path / "out" / "clips.tsv").read_bytes().decode("ascii").splitlines()
    rows = [line.split("\t") for line in lines]
    assert header.split("\t") == ["utterance", "client", "label", "samples"]
    assert rows == [
        [clip.utterance, clip.client, clip.label, str(len(clip.wave))] for clip in clips
    ]

    read, of_client = Clips.read(tmp_path / "out"), Counter(row[1] for row in rows)
    assert read.utterances == [row[0] for row in rows]
    assert [read.classes[label] for label in read.labels] == [row[2] for row in rows]
    assert read.clients == sorted(of_client, key=str.encode)
    assert read.sizes.tolist() == [of_client[client] for client in read.clients]
    for client, entropy in zip(read.clients, read.entropies(), strict=True):
        place = read.rows(client)
        assert [row[1] == client for row in rows] == [
            place.start <= number < place.stop for number in range(len(rows))
        ]
        counts = Counter(row[2] for row in rows if row[1] == client)
        shares = [count / of_client[client] for count in counts.values()]
        wanted = -sum(share * math.log(share) for share in shares) / math.log(max(classes, 2))
        assert entropy == pytest.approx(wanted, abs=1e-12) and math.copysign(1, entropy) == 1


@pytest.mark.parametrize("clients", [1, 4095, 4096, 4097, 9000])
def test_entropies_of_many_clients(tmp_path, clients):
    """Entropies are counted in blocks of clients, and none is lost between two."""
    random = np.random.default_rng(clients)
    edges = np.concatenate([[0], random.integers(1, 9, clients).cumsum()])
    labels, none = random.integers(7, size=edges[-1]), np.zeros(0, np.int16)
    names, classes = [f"c{number:05d}" for number in range(clients)], [*"abcdefg"]
    found = Clips(tmp_path, names, edges, classes, labels, none, none).entropies()
    assert found.shape == (clients,)
    for index in range(clients):
        counts = Counter(labels[edges[index] : edges[index + 1]].tolist()).values()
        wanted = sum(n / sum(counts) * math.log(sum(counts) / n) for n in counts) / math.log(7)
        assert abs(found[index] - wanted) < 1e-12


def test_labels_can_be_written_but_stay_with_the_process(tmp_path):
    # torch warns of arrays that cannot be written, and would copy them.
    folder = packed(tmp_path / "out")
    clips = Clips.read(folder)
    clips.labels[:] = 0
    assert Clips.read(folder).labels.tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("client\tclips", "clips\tclient", "clients.tsv:1: the header"),
        ("a\t2\nz\t1\n", "", "clients.tsv:1: no clients"),
        ("z\t1\n", "", "clients.tsv: 2 clips, but 3 in clips.npy"),
        ("a\t2", "a\t3", "clients.tsv: 4 clips, but 3 in clips.npy"),
        ("a\t2", "a\t0", "clients.tsv:2: 'a\\t0' is not a client and its number of clips"),
        ("a\t2", "a\t02", "clients.tsv:2: 'a\\t02' is not"),
        ("a\t2", "a\t٢", "clients.tsv:2: 'a\\t٢' is not"),
        ("a\t2", "a\t1" + 40 * "0", "clients.tsv:2: 'a\\t10"),
        ("a\t2", "a\t2\n", "clients.tsv:3: '' is not"),
        ("z\t1", "/\t1", "clients.tsv:3: '/\\t1' is not"),
        ("z\t1", "a\t1", "clients.tsv:3: client 'a' is not in order"),
        ("z\t1", "A\t1", "clients.tsv:3: client 'A' is not in order"),
        ("z\t1", "\0\t1", "clients.tsv:3: a NUL byte"),
    ],
)
def test_clients_that_cannot_be_are_refused(tmp_path, old, new, said):
    folder = packed(tmp_path / "out")
    edit(folder / "clients.tsv", old, new)
    for again in (lambda folder: None, sum_again):
        again(folder)
        refused(folder, said)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.array([1, 3, 2]), "labels.npy: clip 1 has label 3 of 3 classes"),
        (np.array([-1, 0, 2]), "labels.npy: clip 0 has label -1 of 3 classes"),
        (np.array([1, 0]), "labels.npy: 2 clips, but 3 in clips.npy"),
        (np.array([1, 0, 2, 0]), "labels.npy: 4 clips, but 3 in clips.npy"),
        (np.array([[1, 0, 2]]), "labels.npy: 1 x 3 integers, n are expected"),
        (np.array([1, 0, 2], np.int16), "labels.npy: damaged: no header of 64-bit integers"),
        (np.array([1, 0, 2], ">i8"), "labels.npy: damaged: no header of 64-bit integers"),
        (np.array([{}, {}, {}]), "labels.npy: damaged: no header of 64-bit integers"),
    ],
)
def test_labels_that_cannot_be_are_refused(tmp_path, labels, said):
    folder = packed(tmp_path / "out")
    np.save(folder / "labels.npy", labels)
    for again in (lambda folder: None, sum_again):
        again(folder)
        refused(folder, said)


def test_what_could_be_but_was_not_packed_is_refused(tmp_path):
    folder = packed(tmp_path / "out")
    before = contents(folder)
    np.save(folder / "labels.npy", np.array([1, 1, 2]))
    refused(folder, "sha256sums: not the file that was packed: labels.npy")
    (folder / "labels.npy").write_bytes(before["labels.npy"])
    for file, old, new in (
        ("clients.tsv", "a\t2\nz\t1", "a\t1\nz\t2"),
        ("clients.tsv", "z\t1", "y\t1"),
        ("classes.txt", "no\nyes\n", "yes\nno\n"),
        ("classes.txt", "yes\n", "yes\nmore\n"),
    ):
        edit(folder / file, old, new)
        refused(folder, f"sha256sums: not the file that was packed: {file}")
        (folder / file).write_bytes(before[file])
    edit(folder / "classes.txt", "yes\n", "")
    refused(folder, "labels.npy: clip 2 has label 2 of 2 classes")


def test_a_folder_without_an_index_is_to_be_packed_again(tmp_path):
    folder = packed(tmp_path / "out")
    (folder / "clients.tsv").unlink()
    refused(folder, "clients.tsv: cannot be read: No such file", "; run fedtools pack-clips again")
    (folder / "labels.npy").unlink()
    refused(folder, "labels.npy: cannot be read: No such file", "; run fedtools pack-clips again")


def test_utterances_are_those_of_the_table_that_was_packed(tmp_path):
    folder = packed(tmp_path / "out")
    table = (folder / "clips.tsv").read_bytes()
    for changed in (
        table.replace(b"a-1", b"a-2"),
        table.replace(b"yes", b"no"),
        table[:-1],
        b"",
        table + b"\xff\n",
    ):
        (folder / "clips.tsv").write_bytes(changed)
        clips = Clips.read(folder)  # no recording uses it
        with pytest.raises(UserError, match=r"not the file that was packed: clips\.tsv"):
            _ = clips.utterances
        (folder / "clips.tsv").write_bytes(table)
        assert clips.utterances == ["a-1", "a-c", "z-1"]
    (folder / "clips.tsv").unlink()
    refused(folder, "clips.tsv: no packed clips; run fedtools pack-clips")


@pytest.mark.parametrize(
    "second",
    [
        ("b-1", "b", "yes", 5),  # is duplicated
        ("b-0", "b", "yes", 5),
        ("b-2", "a", "yes", 5),
        ("b-2", "B", "yes", 5),
        ("b-2", "b", "maybe", 5),
        ("b-2", "b", "yes", 0),
        ("b\t2", "b", "yes", 5),
        ("b-2", "c\n", "yes", 5),
        ("b-2", "c/", "yes", 5),
    ],
)
def test_clips_that_cannot_be_are_not_written(tmp_path, second):
    folder = packed(tmp_path / "out")
    before = contents(folder)
    *names, samples = second
    clips = [Clip("b-1", "b", "no", wave("b-1", 5)), Clip(*names, wave("b-2", samples))]
    with pytest.raises((ValueError, UserError)):
        write_clips(folder, clips, CLASSES)
    assert contents(folder) == before


def test_opening_needs_no_memory_for_each_clip(tmp_path):
    clips, clients = 300_000, 100
    folder = packed(tmp_path / "out")
    np.lib.format.open_memmap(folder / "clips.npy", "w+", "<i2", (clips, RATE))
    np.save(folder / "labels.npy", np.arange(clips) % 3)
    rows = "".join(f"c{number:02d}\t{clips // clients}\n" for number in range(clients))
    (folder / "clients.tsv").write_text(f"client\tclips\n{rows}")
    sum_again(folder)
    tracemalloc.start()
    read = Clips.read(folder)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Briefly, two blocks of the file being hashed.
    assert kept < clips < peak < 3 << 20 and len(read.labels) == clips
    assert read.entropies() == pytest.approx(np.ones(clients), abs=1e-12)


def test_other_arrays_are_refused(tmp_path):
    folder = packed(tmp_path / "out")
    waves = np.load(folder / "clips.npy")
    for array, said in [
        (waves.astype(">i2"), "no header of 16-bit integers"),
        (np.asfortranarray(waves), "no header of 16-bit integers"),
        (waves[:, :8000], "3 x 8000 integers, n x 16000 are expected"),
        (waves[0], "16000 integers, n x 16000 are expected"),
        (waves[:2], "labels.npy: 3 clips, but 2 in clips.npy"),
    ]:
        np.save(folder / "clips.npy", array)
        with pytest.raises(UserError) as error:
            Clips.read(folder)
        assert said in str(error.value)
    np.save(folder / "clips.npy", waves)
    np.save(folder / "noise.npy", waves[0, :100])
    with pytest.raises(UserError, match=r"noise.npy: 100 samples of noise"):
        Clips.read(folder)


@pytest.mark.parametrize("name", [name for name in FILES if name != "clips.tsv"])
def test_a_missing_or_short_or_long_file_is_one_line(tmp_path, name):
    folder = packed(tmp_path / "out")
    content = (folder / name).read_bytes()
    for changed in (content[:-1], content + b"\0\0"):
        (folder / name).write_bytes(changed)
        with pytest.raises(UserError, match=name) as error:
            Clips.read(folder)
        assert "\n" not in str(error.value)
    (folder / name).unlink()
    with pytest.raises(UserError, match=name):
        Clips.read(folder)


@settings(max_examples=300)
@given(name=st.sampled_from(FILES), seed=SEEDS)
def test_no_damage_goes_unseen_but_that_to_sounds(tmp_path_factory, name, seed):
    """Sums are of the index; of millions of clips and of noise only the size is known."""
    whole = tmp_path_factory.getbasetemp() / "whole clips"
    if not whole.exists():
        packed(whole)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "clips"
        shutil.copytree(whole, folder)
        damage(folder / name, seed, *(folder / other for other in FILES))
        found = read_or_refused(lambda: Clips.read(folder), folder)
        if found is None:
            return
        # Lines of sums may change places.
        if name in INDEX:
            assert (folder / name).read_bytes() == (whole / name).read_bytes()
        assert (found.clients, found.labels.tolist()) == (["a", "z"], [1, 0, 2])
        assert found.waves.shape == (3, RATE)
        np.testing.assert_array_equal(found.waves, np.load(folder / "clips.npy"))
        names = read_or_refused(lambda: found.utterances, folder)
        assert names == ["a-1", "a-c", "z-1"] or (
            names is None and name in ("clips.tsv", "sha256sums")
        )


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
    # Stop the writer after the waveforms have their final names, before the table has.
    (folder / "classes.txt").mkdir()
    clips = [Clip(utt, "a", "yes", wave(utt, 5)) for utt in ("a-1", "a-2", "a-3")]
    with pytest.raises(OSError):
        write_clips(folder, clips, CLASSES)
    assert np.load(folder / "clips.npy").shape == (3, RATE)
    with pytest.raises(UserError, match="no packed clips; run fedtools pack-clips"):
        Clips.read(folder)


def test_packing_needs_the_memory_of_a_few_clips(tmp_path):
    one = np.zeros(RATE, np.int16)
    peak, kept = 0, []

    def many():
        nonlocal peak
        for number in range(2000):
            if number % 250 == 0:
                peak = max(peak, psutil.Process().memory_info().rss)
                kept.append(tracemalloc.get_traced_memory()[0])
            yield Clip(f"u{number:04d}", "client", "yes", one)

    start = psutil.Process().memory_info().rss
    tracemalloc.start()
    write_clips(tmp_path / "out", many(), CLASSES)
    tracemalloc.stop()
    # Millions of clips: only labels are kept of each.
    assert kept[-1] - kept[1] < 1500 * 16
    size = (tmp_path / "out" / "clips.npy").stat().st_size
    assert size == 128 + 2000 * 32_000
    assert peak - start < size / 5
    clips = Clips.read(tmp_path / "out")
    assert clips.rows("client") == slice(0, 2000)


def test_the_command_in_a_process_of_its_own(data):
    fedtools(*command(data)).ok()
    edit(data / "data" / "text", "a-c no", "a-c maybe")
    fedtools(*command(data)).fails(1, "fedtools: ")
