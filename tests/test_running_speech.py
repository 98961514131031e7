"""False accepts per hour: against windows packed as clips, and counts by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from keywords import CLASSES, config_file, pack

from fedtools.core.tables import read_tsv
from fedtools.data.clips import Clip, write_clips
from fedtools.federation.federation import Federation
from fedtools.score.detection import AN_HOUR, NEGATIVE, peaks, rejects_at, scores_of

RATE = 16_000
# Utterance -> transcript; the last three have a keyword, or a word that sounds like one.
SAID = {
    "ann-1": "we say nothing of the kind",
    "ann-2": "short",
    "bob-1": "yesterday was noise",
    "bob-2": "and so on and so forth",
    "bob-3": "he said Yes, twice",
    "bob-4": "NO",
    "eve-1": "I know",
}
SECONDS = {"ann-1": 3.27, "ann-2": 0.4, "bob-1": 2.0, "bob-2": 7.815}


def spoken(folder: Path) -> Path:
    """Make a data directory whose speech is tones, some of them those of keywords."""
    random = np.random.default_rng(1)
    folder.mkdir()
    tables: dict[str, list[str]] = {name: [] for name in ("wav.scp", "text", "utt2spk")}
    for name, words in SAID.items():
        samples = round(SECONDS.get(name, 1.0) * RATE)
        pitch = np.repeat(random.choice([500, 1200, 2400, 3000], 40), RATE // 3)[:samples]
        wave = 3000 * np.sin(2 * np.pi * np.cumsum(pitch) / RATE) + random.normal(0, 300, samples)
        soundfile.write(folder / f"{name}.wav", wave.astype("<i2"), RATE, subtype="PCM_16")
        for table, cell in zip(tables, (folder / f"{name}.wav", words, name[:3]), strict=True):
            tables[table].append(f"{name} {cell}\n")
    for name, lines in tables.items():
        (folder / name).write_text("".join(lines))
    (folder / "spk2utt").write_text("ann ann-1 ann-2\nbob bob-1 bob-2 bob-3 bob-4\neve eve-1\n")
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("running")
    pack(folder / "train", {"tom": [6] * 4, "kim": [3, 2, 6, 6]}, length=RATE)
    pack(folder / "test", {"eve": [3, 3, 9, 9]}, length=RATE)
    config_file(folder / "config.yaml")
    spoken(folder / "speech")
    return folder


def begun(world: Path, cli, exp: Path, seed: int, method: str = "fedavg") -> Path:
    data = [f"--data={split}={world / split}" for split in ("train", "test")]
    options = ("--config", world / "config.yaml", "--method", method, "--seed", seed)
    cli("init", exp, *options, *data).ok()
    cli("rounds", exp).ok()
    return exp


def by_hand(exp: Path, world: Path, folder: Path, hop: int) -> dict[str, list[np.ndarray]]:
    """Return utterance -> logits of its windows, each packed as a separate clip."""
    clips, owner = [], []
    for name, seconds in SECONDS.items():
        wave, _ = soundfile.read(world / "speech" / f"{name}.wav", dtype="int16")
        assert len(wave) == round(seconds * RATE)
        start = 0
        while True:
            clips.append(Clip(f"{name}-{start:06d}", "all", "yes", wave[start : start + RATE]))
            owner.append(name)
            if start + RATE >= len(wave):
                break
            start += hop
    write_clips(folder, clips, CLASSES, [], RATE)
    federation = Federation(exp)
    federation.load_result(None, 3)
    federation.task.clips._path_of = lambda split: folder
    logits, _ = federation.task.logits("windows")
    found: dict[str, list[np.ndarray]] = {name: [] for name in SECONDS}
    for name, row in zip(owner, logits.numpy(), strict=True):
        found[name].append(row)
    return found


def odds(logits: np.ndarray) -> tuple[float, int]:
    """Return the log odds of the most probable keyword, from probabilities."""
    shares = np.exp(logits.astype(float) - logits.max())
    shares /= shares.sum()
    best = max((index for index, name in enumerate(CLASSES) if name not in NEGATIVE),
               key=lambda index: shares[index])  # fmt: skip
    return math.log(shares[best] / (shares.sum() - shares[best])), best


@pytest.mark.parametrize("hop", [0.1, 0.25])
def test_false_accepts_are_those_of_every_window(world, cli, tmp_path, hop):
    exps = [begun(world, cli, tmp_path / f"exp{seed}", seed) for seed in (0, 1)]
    options = ("--data", f"toy={world / 'speech'}", "--hop", hop, "--leave-out", "know,right")
    out = cli("false-alarms", *exps, *options).ok().out
    hours = sum(SECONDS.values()) / 3600
    for exp in exps:
        federation = Federation(exp)
        federation.load_result(None, 3)
        logits, labels = federation.task.logits("test")
        positives = [
            odds(row)[0]
            for row, label in zip(logits.numpy(), labels.tolist(), strict=True)
            if CLASSES[label] not in NEGATIVE
        ]
        expected = []
        windows = by_hand(exp, world, tmp_path / exp.name / "windows", round(hop * RATE))
        for name, rows in windows.items():
            scores = [(*odds(row), step) for step, row in enumerate(rows)]
            taken: list[int] = []
            for score, best, step in sorted(scores, reverse=True):
                # A word is as long as a clip.
                if all(abs(step - other) * hop >= 1 - 1e-9 for other in taken):
                    taken.append(step)
                    expected.append((name, f"{step * hop:.2f}", CLASSES[best], score))
        found = read_tsv(exp / "alarms_toy.tsv", None)
        told = [(row["utterance"], row["seconds"], row["word"]) for row in found]
        assert sorted(told) == sorted(row[:3] for row in expected) and len(told) > 8
        scores = {row[:3]: row[3] for row in expected}
        for row, key in zip(found, told, strict=True):
            assert float(row["score"]) == pytest.approx(scores[key], abs=2e-3)
        (row,) = read_tsv(exp / "false_alarms_toy.tsv", None)
        assert [row[name] for name in ("round", "utterances", "left_out")] == ["3", "4", "3"]
        assert float(row["hours"]) == pytest.approx(hours, abs=5e-4)
        heard = sorted(scores.values(), reverse=True)
        for rate in AN_HOUR:
            # The lowest threshold above all scores that would be too many.
            least = heard[math.floor(rate * hours)]
            rejected = 100 * np.mean([score <= least + 1e-6 for score in positives])
            assert float(row[f"rejects_at_{rate:g}"]) == pytest.approx(rejected, abs=1e-3)
        curve = read_tsv(exp / "curve_toy.tsv", None)
        assert [float(one["accepts_an_hour"]) for one in curve[:3]] == pytest.approx(
            [0, 1 / hours, 2 / hours], abs=1e-3
        )
        rejects = [float(one["false_rejects"]) for one in curve]
        assert rejects == sorted(rejects, reverse=True)
        (line,) = [line for line in out.splitlines() if line.startswith(str(exp))]
        assert line.split()[1:] == list(row.values())


def test_speech_with_keywords_is_left_out_by_its_transcript(world, cli, tmp_path):
    exp = begun(world, cli, tmp_path / "exp", 0)
    cli("false-alarms", exp, "--data", f"toy={world / 'speech'}").ok()
    heard = {row["utterance"] for row in read_tsv(exp / "alarms_toy.tsv", None)}
    # Words with the same beginning are kept.
    assert heard == {"ann-1", "ann-2", "bob-1", "bob-2", "eve-1"}


def test_what_cannot_be_heard_is_told_in_one_line(world, cli, tmp_path):
    exp = begun(world, cli, tmp_path / "exp", 0)

    def told(*said: str, name: str = "toy", folder: Path | None = None, more=()) -> None:
        place = folder or tmp_path / "speech"
        cli("false-alarms", exp, *more, "--data", f"{name}={place}").fails(1, *said)

    told("speech")
    spoken(tmp_path / "speech")
    told("'a/b' is not usable", name="a/b")
    (tmp_path / "speech/text").write_text("".join(f"{name} No\n" for name in SAID))
    told("no utterance without a keyword")
    (tmp_path / "speech/text").write_text("ann-1 a\n")
    told("no transcript of 'ann-2'", "need transcripts")
    pack(tmp_path / "train", {"tom": [3, 3]}, ("up", "yes"))
    pack(tmp_path / "test", {"tom": [3, 3]}, ("up", "yes"))
    config_file(tmp_path / "config.yaml")
    other = begun(tmp_path, cli, tmp_path / "other", 0)
    told("other: keywords differ from those of", more=(other,))
    cli("false-alarms", exp, "--data", "toy").fails(2, "NAME=DATA_DIR")
    assert not list(exp.glob("alarms_*"))


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=30), st.integers(1, 6))
def test_peaks_are_apart_and_every_other_window_has_a_higher_one_near(scores, apart):
    values = np.array(scores)
    found = peaks(values, apart)
    for place, step in enumerate(found):
        assert all(abs(step - other) >= apart for other in found[:place])
    for step in set(range(len(scores))) - set(found):
        assert any(abs(step - one) < apart and values[one] >= values[step] for one in found)


@given(st.lists(st.integers(-5, 5), min_size=1), st.lists(st.integers(-5, 5)), st.integers(0, 12))
def test_false_rejects_are_at_the_lowest_threshold_that_is_allowed(positives, negatives, allowed):
    thresholds = sorted({*positives, *negatives, 9, -9})
    good = [one for one in thresholds if sum(score >= one for score in negatives) <= allowed]
    expected = 100 * np.mean([score < good[0] for score in positives])
    assert rejects_at(np.array(positives), np.array(negatives), allowed) == pytest.approx(expected)


def test_scores_are_log_odds_of_the_most_probable_keyword():
    random = np.random.default_rng(0)
    logits = random.normal(0, 3, (50, 4)).astype("f4")
    scores, best = scores_of(logits, CLASSES)
    for row, score, index in zip(logits, scores, best, strict=True):
        assert (score, index) == (pytest.approx(odds(row)[0]), odds(row)[1])
    # Where 64-bit probabilities are all one, scores still differ.
    sure = scores_of(np.array([[0, 0, 60, 0], [0, 0, 90, 0]]), CLASSES)[0]
    assert sure == pytest.approx([60 - math.log(3), 90 - math.log(3)])
