"""Features of one width and another kind: refused by every command that would take them."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import keywords
import numpy as np
import pytest
import simulated
import soundfile
import yaml
from conftest import inside

from fedtools.data.datadir import DataDir

BINS = 12
MODEL = simulated.CONFIG["model"] | {"input_size": BINS}


def make(root: Path, name: str, *options: str) -> Path:
    """Make a data directory of four short recordings of two clients, and its features."""
    data = DataDir(root / name)
    for number in range(4):
        utterance = f"s{number // 2}-{number}"
        file = root / f"{utterance}.wav"
        noise = np.random.default_rng(number).normal(0, 0.1, 16_000)
        soundfile.write(file, noise, 16_000)
        data.wav_scp[utterance], data.text[utterance] = str(file), "a b"
        data.utt2spk[utterance] = data.utt2client[utterance] = f"s{number // 2}"
    data.write()
    bins = () if "--num-mel-bins" in options else ("--num-mel-bins", str(BINS))
    inside("extract-features", data.path, root / f"ark_{name}", *bins, *options).ok()
    return data.path


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    make(root, "fbank")
    make(root, "mfcc", "--kind", "mfcc")
    make(root, "narrow", "--sample-rate", "8000")
    (root / "exp.yaml").write_text(yaml.safe_dump({**simulated.CONFIG, "model": MODEL}))
    inside("train-tokens", root / "fbank/text", root / "tokens", "--token-type", "char").ok()
    return root


def begin(world: Path, out: Path, train: Path, *more: str | Path):
    return inside(
        *("init", out, "--config", world / "exp.yaml", "--method", "fedavg"),
        *("--asset", f"tokens={world / 'tokens'}", "--data", f"train={train}", *more),
    )


FBANK = f"fbank, sample_rate 16000, num_mel_bins {BINS}"
OTHERS = {
    "mfcc": f"mfcc, sample_rate 16000, num_mel_bins {BINS}",
    "narrow": f"fbank, sample_rate 8000, num_mel_bins {BINS}",
}


@pytest.mark.parametrize("other", OTHERS)
def test_every_command_refuses_features_of_another_kind(world, tmp_path, other):
    """The same utterances, in the same number of values: the kind alone differs."""
    fbank, wrong, exp = world / "fbank", world / other, tmp_path / "exp"
    valid = "--data", f"valid={wrong}"
    said = f"{wrong}/feats.scp: features of another kind: {OTHERS[other]}"
    begin(world, exp, fbank, *valid).fails(1, said, f"{fbank} has {FBANK}")
    assert not exp.exists()
    begin(world, exp, fbank).ok()
    inside("rounds", exp).ok()
    inside("average", exp).fails(1)
    start = exp / "round_0002" / "global.safetensors"
    assert start.exists()
    again = tmp_path / "again"
    begin(world, again, wrong, "--start", start).fails(1, said, f"data of {start} has {FBANK}")
    begin(world, again, fbank, "--start", start).ok()
    shutil.copyfile(start, exp / "model.safetensors")
    said = f"features of another kind: {OTHERS[other]}; the training data of {exp} has {FBANK}"
    inside("decode", exp, wrong, tmp_path / "out").fails(1, said)
    inside("adapt", exp, wrong, tmp_path / "new", "--epochs", "1").fails(1, "another kind")
    inside("decode", exp, fbank, tmp_path / "out").ok()


def test_jobs_with_different_options_are_refused(world, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(world / "fbank", data)
    for job, kind in ((1, "fbank"), (2, "mfcc")):
        own = "--kind", kind, "--num-mel-bins", str(BINS), "--nj", "2", "--job", str(job)
        inside("extract-features", data, tmp_path / "ark", *own).ok()
    merged = inside("merge-features", data, tmp_path / "ark", "--nj", "2")
    merged.fails(1, "features of several kinds", "feats.1.ark", "feats.2.ark")


def test_a_part_of_a_set_keeps_its_kind(world, tmp_path):
    """The file lies beside the archive, so that no command that cuts or joins sets can lose it."""
    mixed = DataDir.read(world / "fbank")
    mixed.path = tmp_path / "mixed"
    other = DataDir.read(world / "mfcc").feats_scp
    mixed.feats_scp = {**mixed.feats_scp, "s1-3": other["s1-3"]}
    mixed.write()
    begin(world, tmp_path / "exp", mixed.path).fails(1, "features of several kinds", "mfcc")


def test_features_without_the_file_fit_any(world, tmp_path):
    """Kaldi's have none; a set beside others of a known kind is named."""
    old = make(tmp_path, "old")
    (kind,) = (tmp_path / "ark_old").glob("*.yaml")
    known = kind.read_text()
    assert yaml.safe_load(known) == {"kind": "fbank", "sample_rate": 16000, "num_mel_bins": BINS}
    kind.unlink()
    exp = tmp_path / "exp"
    assert "warning" not in begin(world, exp, old).ok().err
    assert "features" not in yaml.safe_load((exp / "data.yaml").read_text())["train"]
    # An experiment goes on if the file appears later, or is lost.
    kind.write_text(known)
    assert "features" not in begin(world, exp, old).ok().err
    inside("rounds", exp, "--to", "1").ok()
    inside("decode", exp, world / "mfcc", tmp_path / "out").fails(1, "model.safetensors")
    second = tmp_path / "second"
    begin(world, second, old).ok()
    kind.unlink()
    inside("rounds", second, "--to", "1").ok()
    mixed = begin(world, tmp_path / "third", world / "fbank", "--data", f"valid={old}").ok()
    assert "warning: valid: no feats.*.yaml" in mixed.err


def test_ivectors_of_another_extractor_are_another_kind(world, tmp_path):
    sizes = "--gaussians", "2", "--dimension", "2"
    for seed in ("0", "1"):
        inside("train-ivectors", world / "fbank", tmp_path / seed, *sizes, "--seed", seed).ok()
        made = world / "fbank", tmp_path / seed, tmp_path / f"iv{seed}", tmp_path / f"ark{seed}"
        inside("append-ivectors", *made).ok()
    wrong = world / "mfcc", tmp_path / "0", tmp_path / "x", tmp_path / "y"
    inside("append-ivectors", *wrong).fails(1, "features of another kind: mfcc", "the extractor in")
    wide = "--data", f"valid={tmp_path / 'iv1'}"
    begun = begin(world, tmp_path / "exp", tmp_path / "iv0", *wide)
    begun.fails(1, "features of another kind", "i-vectors of")


def test_a_start_with_other_tokens_is_refused(world, tmp_path):
    """As many tokens in another order: shapes fit."""
    exp = tmp_path / "exp"
    begin(world, exp, world / "fbank").ok()
    shutil.copytree(world / "tokens", tmp_path / "tokens")
    blank, unknown, one, two, *rest = (world / "tokens/tokens.txt").read_text().split("\n")
    swapped = "\n".join([blank, unknown, two, one, *rest])
    (tmp_path / "tokens/tokens.txt").write_text(swapped)
    own = "--asset", f"tokens={tmp_path / 'tokens'}", "--start", exp / "init.safetensors"
    again = inside(
        *("init", tmp_path / "again", "--config", world / "exp.yaml", "--method", "fedavg"),
        *("--data", f"train={world / 'fbank'}", *own),
    )
    again.fails(1, "tokens.txt: not the tokens.txt of the model to start from")


def test_clips_of_other_classes_are_refused_at_init(tmp_path):
    """With `--evaluate`, they were refused after training had begun; as a start's, never."""
    keywords.pack(tmp_path / "train", {"c0": [2, 2, 1, 1], "c1": [1, 1, 2, 2]})
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "train", other)
    names = (other / "classes.txt").read_text().split()
    keywords.pack(tmp_path / "same", {"c0": [1, 1, 1, 1]})
    swapped = "".join(f"{name}\n" for name in [names[1], names[0], *names[2:]])
    (other / "classes.txt").write_text(swapped)
    sums = (other / "sha256sums").read_text().splitlines()
    digest = hashlib.sha256(swapped.encode()).hexdigest()
    lines = [f"{digest}  classes.txt" if one.endswith("  classes.txt") else one for one in sums]
    (other / "sha256sums").write_text("".join(f"{line}\n" for line in lines))
    config = keywords.config_file(tmp_path / "c.yaml")

    def begin(out: str, train: str, *more: str | Path):
        data = "--data", f"train={tmp_path / train}"
        return inside(
            "init", tmp_path / out, "--config", config, "--method", "fedavg", *data, *more
        )

    valid = "--data", f"valid={other}"
    begin("exp", "train", *valid).fails(1, "other/classes.txt: not the classes of the training")
    begin("exp", "train", "--data", f"valid={tmp_path / 'same'}").ok()
    start = "--start", tmp_path / "exp" / "init.safetensors"
    begin("again", "other", *start).fails(1, "not the classes.txt of the model to start from")


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_characters_that_tokens_lack_are_named(world, tmp_path, kind):
    """However few: one letter in a word of the validation text, and a mark on a capital."""
    texts = ["ab ba"] * 4
    data = DataDir.read(world / "fbank")
    data.path, data.text = tmp_path / "train", dict(zip(data.utterances, texts, strict=True))
    data.write()
    vocabulary = ("--vocab-size", "8") if kind == "bpe" else ()
    own = tmp_path / "train/text", tmp_path / "tokens", "--token-type", kind, *vocabulary
    inside("train-tokens", *own).ok()
    data.path, data.text = tmp_path / "valid", {**data.text, "s1-3": "abba qÉa baba <unk>"}
    data.write()
    done = inside(
        *("init", tmp_path / "exp", "--config", world / "exp.yaml", "--method", "fedavg"),
        *("--data", f"train={tmp_path / 'train'}", "--data", f"valid={tmp_path / 'valid'}"),
        *("--asset", f"tokens={tmp_path / 'tokens'}"),
    ).ok()
    (line,) = [one for one in done.err.splitlines() if "lacks" in one]
    assert f"{tmp_path}/valid/text: {tmp_path}/tokens/tokens.txt lacks q, É, so that 1 of 9" in line
