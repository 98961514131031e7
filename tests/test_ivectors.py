"""I-vectors next to features: by the commands, on frames drawn from a known model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import inside

from fedtools.data.ark import FeatureReader, write_ark
from fedtools.data.datadir import DataDir
from fedtools.speaker.gmm import Moments, accumulate
from fedtools.speaker.ivector import IvectorExtractor

SIZE, FRAMES = 4, 120
SPEAKERS = [f"s{n:02d}" for n in range(12)]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Make three utterances per speaker, who shifts all frames along one direction."""
    path = tmp_path_factory.mktemp("ivectors") / "data"
    random, table, matrices = np.random.default_rng(0), DataDir(path), []
    centres = random.normal(0, 5, (3, SIZE))
    for index, speaker in enumerate(SPEAKERS):
        for number in range(3):
            name = f"{speaker}-{number}"
            which = random.integers(0, 3, FRAMES)
            own = np.full(SIZE, 0.4 * (index - 5.5))
            matrices.append((name, centres[which] + own + random.normal(0, 1, (FRAMES, SIZE))))
            table.utt2spk[name], table.text[name] = speaker, "a"
            table.utt2client[name] = f"c{index % 2}"
    path.mkdir()
    table.feats_scp = write_ark(path / "feats.ark", matrices)
    table.write()
    options = ("--gaussians", "3", "--dimension", "2")
    done = inside("train-ivectors", path, path.parent / "extractor", *options).ok()
    assert "3 Gaussians, 2 dimensions" in done.out
    return path


def appended(data: Path, out: Path, *more: str) -> dict[str, np.ndarray]:
    arguments = (data, data.parent / "extractor", out, out.with_name(f"{out.name}.arks"))
    inside("append-ivectors", *arguments, *more).ok()
    result = DataDir.read(out)
    assert result.utterances == DataDir.read(data).utterances
    assert result.text and result.utt2client
    reader = FeatureReader(result.feats_scp)
    return {name: reader.read(name) for name in result.utterances}


def test_i_vectors_tell_speakers(data, tmp_path):
    found = appended(data, tmp_path / "out", "--per", "speaker", "--offline")
    vectors = []
    for speaker in SPEAKERS:
        rows = np.concatenate([found[f"{speaker}-{n}"][:, SIZE:] for n in range(3)])
        assert (rows == rows[0]).all() and rows.shape == (3 * FRAMES, 2)
        vectors.append(rows[0])
    before = DataDir.read(data)
    reader = FeatureReader(before.feats_scp)
    for name, matrix in found.items():
        assert np.array_equal(matrix[:, :SIZE], reader.read(name))
    # Along one line, they are in the order of the speakers.
    vectors = np.array(vectors)
    line = np.linalg.svd(vectors - vectors.mean(0))[2][0]
    places = vectors @ line
    assert abs(np.corrcoef(places, np.arange(len(SPEAKERS)))[0, 1]) > 0.99


def test_i_vectors_of_the_utterance_so_far(data, tmp_path):
    """A new vector every ten frames depends only on the frames until then."""
    found = appended(data, tmp_path / "out")
    extractor = IvectorExtractor.load(data.parent / "extractor" / "ivectors.safetensors")
    for name in ("s00-0", "s07-2"):
        frames, vectors = found[name][:, :SIZE], found[name][:, SIZE:]
        for first in range(0, FRAMES, 10):
            sums, _ = accumulate(extractor.ubm, [frames[: first + 1].astype(np.float64)])
            expected = extractor.extract([sums], posterior_scale=0.1)[0]
            np.testing.assert_allclose(
                vectors[first : first + 10], np.tile(expected, (10, 1)), atol=1e-5
            )
    other = appended(data, tmp_path / "every", "--every", "50")
    assert len(np.unique(other["s00-0"][:, SIZE:], axis=0)) == 3


@pytest.fixture(scope="module")
def recorded(data, tmp_path_factory) -> Path:
    """Return the frames with a speaker recorded twice, and s03 divided between two clients."""
    table = DataDir.read(data)
    table.path = tmp_path_factory.mktemp("recorded") / "data"
    table.utt2client = dict.fromkeys(table.utterances, "a") | {"s03-1": "b"}
    for name in table.utterances:
        recording = f"{name[:3]}-{'first' if name[-1] in '02' else 'second'}"
        table.wav_scp[recording] = f"{recording}.wav"
        table.segments[name] = f"{recording} {name[-1]}.0 {name[-1]}.9"
    table.write()
    (table.path.parent / "extractor").symlink_to(data.parent / "extractor")
    return table.path


BEFORE = {
    "recording": {"s00-0": [], "s00-1": [], "s00-2": ["s00-0"], "s03-1": [], "s03-2": ["s03-0"]},
    "speaker": {
        "s00-0": [], "s00-1": ["s00-0"], "s00-2": ["s00-0", "s00-1"], "s03-1": [],
        "s03-2": ["s03-0"],
    },
}  # fmt: skip


@pytest.mark.parametrize("per", BEFORE)
def test_statistics_are_carried_over(recorded, tmp_path, per):
    """Earlier utterances count as if they were part of this one; other speakers' do not."""
    found = appended(recorded, tmp_path / "out", "--per", per)
    extractor = IvectorExtractor.load(recorded.parent / "extractor" / "ivectors.safetensors")
    for name, earlier in BEFORE[per].items():
        history = [found[one][:, :SIZE].astype(np.float64) for one in earlier]
        frames, vectors = found[name][:, :SIZE].astype(np.float64), found[name][:, SIZE:]
        for first in range(0, FRAMES, 30):
            sums, _ = accumulate(extractor.ubm, [*history, frames[: first + 1]])
            expected = extractor.extract([sums], posterior_scale=0.1)[0]
            np.testing.assert_allclose(vectors[first], expected, atol=1e-5)
    # Offline, statistics are of all utterances, including later ones.
    whole = appended(recorded, tmp_path / "whole", "--per", per, "--offline")
    group = ["s00-0", "s00-2"] if per == "recording" else ["s00-0", "s00-1", "s00-2"]
    sums, _ = accumulate(extractor.ubm, [whole[one][:, :SIZE].astype(np.float64) for one in group])
    for one in group:
        expected = np.tile(extractor.extract([sums])[0], (FRAMES, 1))
        np.testing.assert_allclose(whole[one][:, SIZE:], expected, atol=1e-5)
    assert (whole["s03-1"][0, SIZE:] != whole["s03-0"][0, SIZE:]).all()


def test_a_thousand_frames_are_remembered(data, tmp_path):
    """In a long history, the later half of the speaker's speech counts as much as the earlier."""
    table, random = DataDir(tmp_path / "data"), np.random.default_rng(3)
    frames = {"s-0": (1500, 0.0), "s-1": (900, 3.0), "s-2": (50, 0.0)}
    matrices = [
        (name, random.normal(shift, 1, (count, SIZE))) for name, (count, shift) in frames.items()
    ]
    table.utt2spk = dict.fromkeys(frames, "s")
    table.path.mkdir()
    table.feats_scp = write_ark(table.path / "feats.ark", matrices)
    table.write()
    extractor = IvectorExtractor.load(data.parent / "extractor" / "ivectors.safetensors")
    out = tmp_path / "out"
    arguments = (table.path, data.parent / "extractor", out, tmp_path / "arks", "--per", "speaker")
    inside("append-ivectors", *arguments).ok()
    reader = FeatureReader(DataDir.read(out).feats_scp)
    first, second, third = (reader.read(name).astype(np.float64) for name in frames)
    one, two, three = (
        accumulate(extractor.ubm, [some[:, :SIZE]])[0] for some in (first, second, third[:1])
    )
    # 1500 count as 1000; these and 900 again.
    parts = [1000 / 1900 * (2 / 3 * a + b) + c for a, b, c in zip(one, two, three, strict=True)]
    expected = extractor.extract([Moments(*parts)], posterior_scale=0.1)[0]
    np.testing.assert_allclose(third[0, SIZE:], expected, atol=1e-4)
    assert not np.allclose(third[0, SIZE:], first[0, SIZE:], atol=1e-2)


def test_the_same_bytes_and_some_hours_only(data, tmp_path):
    options = ("--gaussians", "3", "--dimension", "2")
    first = (data.parent / "extractor" / "ivectors.safetensors").read_bytes()
    inside("train-ivectors", data, tmp_path / "again", *options).ok()
    assert (tmp_path / "again" / "ivectors.safetensors").read_bytes() == first
    hours = str(FRAMES * 10 / 360_000)
    for seed in ("1", "2"):
        inside(
            "train-ivectors", data, tmp_path / seed, *options, "--hours", hours, "--seed", seed
        ).ok()
    one, other = ((tmp_path / seed / "ivectors.safetensors").read_bytes() for seed in ("1", "2"))
    assert one != other != first


def test_mistakes_are_told(data, tmp_path):
    inside("train-ivectors", data, tmp_path, "--hours", "0").fails(1, "0 frames")
    inside("append-ivectors", data, tmp_path, tmp_path / "o", tmp_path).fails(
        1, "ivectors.safetensors"
    )
    arguments = (data, data.parent / "extractor", data, tmp_path)
    inside("append-ivectors", *arguments).fails(1, "would be overwritten")
    wide = DataDir.read(data, "utt2spk")
    wide.path = tmp_path / "wide"
    wide.feats_scp = write_ark(
        tmp_path / "wide.ark", ((name, np.ones((5, 7))) for name in wide.utterances)
    )
    wide.write()
    arguments = (tmp_path / "wide", data.parent / "extractor", tmp_path / "o", tmp_path)
    inside("append-ivectors", *arguments).fails(1, "7 values", "the extractor is for 4")
