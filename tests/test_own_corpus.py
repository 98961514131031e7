"""The keyword recipe's own corpus: what is packed, its unpacked layout, and how it was drawn."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import ROOT, Result
from fakes import google_set
from packed_corpus import WORDS, pack
from scripts import script

CORPUS = ROOT / "egs/speechcommands/kws1/corpus"
RATE = 16_000


def rows(folder: Path) -> list[tuple[str, str, int, int]]:
    header, *lines = (folder / "clips.tsv").read_text().splitlines()
    assert header == "set\tclip\tstart\tsamples"
    fields = (line.split("\t") for line in lines)
    return [(part, clip, int(start), int(samples)) for part, clip, start, samples in fields]


def speaker_of(clip: str) -> str:
    match = re.fullmatch(r"[a-z]+/([0-9a-f]{8})_nohash_\d+\.wav", clip)
    assert match, clip
    return match[1]


def sums_hold(folder: Path) -> set[str]:
    """Check sha256sum's file of a folder, and return the names in it."""
    found = dict(
        reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines()
    )
    for name, digest in found.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    return set(found)


def unpack(packed: Path, out: Path) -> Result:
    return script("unpack_corpus.py", packed, out)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("own") / "of 560 speakers"
    unpack(CORPUS, out).ok()
    return out


@pytest.fixture(scope="module")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("tones") / "packed")


# --- what is packed -------------------------------------------------------------------------------


def test_packed_files_are_whole_and_small():
    files = {path.name for path in CORPUS.iterdir()}
    assert sums_hold(CORPUS) == files - {"SHA256SUMS", "README.md", "LICENSE"}
    assert files >= {f"{word}.opus" for word in WORDS}
    assert sum(path.stat().st_size for path in CORPUS.iterdir()) < 10_000_000
    assert (CORPUS / "LICENSE").read_text().startswith("Attribution 4.0 International")


def test_sets_are_of_different_speakers_by_googles_rule():
    clips = defaultdict(Counter)
    for part, clip, _, samples in rows(CORPUS):
        clips[part][speaker_of(clip)] += 1
        assert google_set(speaker_of(clip)) == part, clip
        assert 0 < samples <= RATE
    speakers = {part: len(sizes) for part, sizes in clips.items()}
    assert speakers == {"train": 300, "valid": 60, "test": 200}
    assert min(clips["train"].values()) == 3
    assert max(clips["test"].values()) <= 6
    totals = {part: sum(sizes.values()) for part, sizes in clips.items()}
    assert totals == {"train": 1778, "valid": 270, "test": 600}
    readme = (CORPUS / "README.md").read_text()
    for part, total in totals.items():
        assert re.search(rf"`{part}` \| {speakers[part]} \| {total:,} \|", readme), part
    names = [clip for _, clip, *_ in rows(CORPUS)]
    assert len(set(names)) == len(names)


def test_clips_of_a_word_follow_one_another():
    ends = Counter[str]()
    for _, clip, start, samples in rows(CORPUS):
        word = clip.split("/")[0]
        assert start == ends[word], clip
        ends[word] += samples
    assert set(ends) == set(WORDS)


# --- unpacking ------------------------------------------------------------------------------------


def test_layout_and_lengths_are_the_original_ones(unpacked: Path):
    lists: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for part, clip, _, samples in rows(CORPUS):
        found = soundfile.info(unpacked / clip)
        assert (found.frames, found.samplerate, found.subtype) == (samples, RATE, "PCM_16"), clip
        lists[part].append(clip)
    for part, name in (("valid", "validation_list.txt"), ("test", "testing_list.txt")):
        assert (unpacked / name).read_text().splitlines() == sorted(lists[part])
    texts = {"validation_list.txt", "testing_list.txt", "README.md", "LICENSE"}
    there = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    clips = {clip for listed in lists.values() for clip in listed}
    assert there == {*clips, *texts, "SHA256SUMS", ".packed"}
    assert sums_hold(unpacked) == there - {"SHA256SUMS", ".packed"}
    # Words are in the middle of nearly all clips, which shows that starts are right.
    shares = []
    for clip in lists["test"]:
        power = np.square(soundfile.read(unpacked / clip)[0])
        shares.append(power[1600:-1600].sum() / power.sum())
    assert np.median(shares) > 0.98 and np.mean(np.array(shares) < 0.5) < 0.05


def test_a_damaged_corpus_is_mended(tones: Path, tmp_path: Path):
    packed, out = shutil.copytree(tones, tmp_path / "packed"), tmp_path / "corpus"
    unpack(packed, out).ok()
    before = {path.relative_to(out): path.read_bytes() for path in out.rglob("*.*")}
    one, other = sorted(out.glob("yes/*.wav"))[:2]
    time = one.stat().st_mtime_ns
    assert "the corpus is complete" in unpack(packed, out).ok().err
    assert one.stat().st_mtime_ns == time

    def damage_and_mend(damage) -> None:
        damage()
        assert "unpacked 144 clips" in unpack(packed, out).ok().err
        assert {path.relative_to(out): path.read_bytes() for path in out.rglob("*.*")} == before
        assert {path.name for path in tmp_path.iterdir()} == {"corpus", "packed"}

    def change() -> None:
        one.write_bytes(one.read_bytes()[:-1] + b"\7")
        other.unlink()

    damage_and_mend(change)
    damage_and_mend((out / "testing_list.txt").unlink)
    damage_and_mend((out / "SHA256SUMS").unlink)
    # Another packed corpus replaces it.
    (packed / "README.md").write_text("another\n")
    table = (packed / "clips.tsv").read_text().splitlines(keepends=True)
    longest = max(i for i, row in enumerate(table) if row.split("\t")[1].startswith("yes"))
    table.pop(longest - 1)
    (packed / "clips.tsv").write_text("".join(table))
    sums = (packed / "SHA256SUMS").read_text().splitlines()
    digest = hashlib.sha256((packed / "clips.tsv").read_bytes()).hexdigest()
    sums = [f"{digest}  clips.tsv" if line.endswith("  clips.tsv") else line for line in sums]
    (packed / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    assert "unpacked 143 clips" in unpack(packed, out).ok().err
    assert (out / "README.md").read_text() == "another\n"


def test_a_folder_that_is_not_its_own_stays(tmp_path: Path):
    own = tmp_path / "corpus" / "yes"
    own.mkdir(parents=True)
    (own / "mine.wav").write_text("mine")
    unpack(CORPUS, own.parent).fails(1, "was not made by this script", "choose another OUT")
    assert (own / "mine.wav").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("yes.opus", lambda data: data[:4000] + b"\0" + data[4001:], "yes.opus: damaged"),
        ("yes.opus", None, "yes.opus: cannot be read"),
        ("clips.tsv", lambda data: data + b"x", "clips.tsv: damaged"),
        ("SHA256SUMS", lambda data: b"no sum\n" + data, "SHA256SUMS:1: not a sum and a name"),
        ("SHA256SUMS", lambda data: data.replace(b"  go", b"  ../go"), "not a sum and a name"),
        ("SHA256SUMS", None, "SHA256SUMS: cannot be read"),
    ],
)
def test_damaged_packed_files_are_one_line(
    tones: Path, tmp_path: Path, name: str, damage, said: str
):
    packed = shutil.copytree(tones, tmp_path / "packed")
    content = (packed / name).read_bytes()
    (packed / name).unlink()
    if damage:
        (packed / name).write_bytes(damage(content))
    unpack(packed, tmp_path / "out").fails(1, said)
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("test\tyes/../../x.wav\t0\t100", "clips.tsv:2: not a clip"),
        ("test\t../0123abcd_nohash_0.wav\t0\t100", "clips.tsv:2: not a clip"),
        ("none\tyes/0123abcd_nohash_0.wav\t0\t100", "clips.tsv:2: not a clip"),
        ("test\tyes/0123abcd_nohash_0.wav\t0\t16001", "clips.tsv:2: not a clip"),
        ("test\tyes/0123abcd_nohash_0.wav\t-1\t100", "clips.tsv:2: "),
        ("test\tyes/0123abcd_nohash_0.wav\t0\t100", "samples at 16000 Hz, not 100"),
    ],
)
def test_tables_with_true_sums_are_not_trusted(tones: Path, tmp_path: Path, row: str, said: str):
    """Whoever can write the table can write its sum."""
    packed = shutil.copytree(tones, tmp_path / "packed")
    (packed / "clips.tsv").write_text(f"set\tclip\tstart\tsamples\n{row}\n")
    digest = hashlib.sha256((packed / "clips.tsv").read_bytes()).hexdigest()
    (packed / "SHA256SUMS").write_text(f"{digest}  clips.tsv\n")
    unpack(packed, tmp_path / "out").fails(1, said)
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


# --- drawing --------------------------------------------------------------------------------------


def make_corpus(folder: Path) -> dict[str, np.ndarray]:
    """Write tones by speakers of all sets, more than are drawn: path -> samples."""
    random, clips = np.random.default_rng(7), {}
    wanted = {"train": 310, "valid": 70, "test": 205}
    found: dict[str, list[str]] = {name: [] for name in wanted}
    number = 0
    while any(len(found[name]) < count for name, count in wanted.items()):
        speaker = hashlib.md5(str(number).encode()).hexdigest()[:8]
        number += 1
        part = google_set(speaker)
        if len(found[part]) == wanted[part]:
            continue
        # The last few of each set say too little.
        few = len(found[part]) >= wanted[part] - 5
        found[part].append(speaker)
        for word in random.permutation(WORDS)[: 2 if few else 8 if part == "valid" else 3]:
            length = int(random.integers(500, 900))
            tone = np.sin(np.arange(length) * random.uniform(0.1, 0.6))
            clips[f"{word}/{speaker}_nohash_{number % 3}.wav"] = np.int16(9000 * tone)
    for clip, wave in clips.items():
        (folder / clip).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / clip, wave, RATE, subtype="PCM_16")
    for part, name in (("valid", "validation_list.txt"), ("test", "testing_list.txt")):
        lines = sorted(clip for clip in clips if google_set(speaker_of(clip)) == part)
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return clips


def test_drawn_packed_and_unpacked(tmp_path: Path):
    """Clips come back at their places, with their lengths, and nearly with their samples."""
    clips = make_corpus(tmp_path / "corpus")
    packed, out = tmp_path / "packed", tmp_path / "out"
    done = script("draw_corpus.py", tmp_path / "corpus", packed).ok().out
    assert done.splitlines() == [
        "train: 900 clips of 300 speakers",
        "valid: 360 clips of 60 speakers",
        "test: 600 clips of 200 speakers",
    ]
    first = {path.name: path.read_bytes() for path in packed.glob("*.tsv")}
    said = Counter(map(speaker_of, clips))
    for _, clip, *_ in rows(packed):
        assert said[speaker_of(clip)] >= 3
    for name in ("LICENSE", "README.md"):
        shutil.copy(CORPUS / name, packed)
    unpack(packed, out).ok()
    levels = []
    for _, clip, *_ in rows(packed):
        wave, _ = soundfile.read(out / clip, dtype="int16")
        assert len(wave) == len(clips[clip])
        error = wave.astype(float) - clips[clip]
        levels.append(10 * np.log10(np.square(clips[clip].astype(float)).sum() / (error**2).sum()))
    # A wrong place would give -3 dB.
    assert np.median(levels) > 6
    # The same speakers again; fewer speakers than are drawn are an error.
    script("draw_corpus.py", tmp_path / "corpus", tmp_path / "again").ok()
    assert (tmp_path / "again/clips.tsv").read_bytes() == first["clips.tsv"]
    small = tmp_path / "corpus/testing_list.txt"
    small.write_text("".join(small.read_text().splitlines(keepends=True)[:100]))
    script("draw_corpus.py", tmp_path / "corpus", tmp_path / "none").fails(
        1, "speakers of test have 3 clips, not 200; give the whole corpus"
    )
    assert not (tmp_path / "none").exists()
