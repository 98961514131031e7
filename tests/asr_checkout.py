"""A checkout of the Common Voice recipe, shared by several test files."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import fakes
import yaml
from conftest import ROOT
from forked import forked

TINY = {
    "tokens": {"token_type": "char", "vocab_size": 32},
    "lm": {"order": 2},
    "model": {
        "input_size": 80,
        "init": "xavier_uniform",
        "normalize": "utterance_mvn",
        "encoder": "transformer",
        "encoder_conf": {
            "output_size": 8,
            "attention_heads": 2,
            "linear_units": 16,
            "num_blocks": 1,
            "dropout_rate": 0.1,
        },
    },
    "training": {
        "labels": "transcripts",
        "optim": "adam",
        "optim_conf": {"lr": 0.001},
        "batch_bins": 60000,
    },
    "rounds": 2,
    "average": 2,
    "decode": {"beam_size": 10, "nbest": 3},
    "baseline": {"rounds": 2},
    "methods": {"fedavg": {"method_conf": {"weighting": "utterances"}}},
}


def make_checkout(folder: Path) -> Path:
    """Make a checkout whose path has blanks; large or fixed files are links to the real ones."""
    root = folder / "a checkout"
    recipe = root / "egs" / "commonvoice" / "asr1"
    shutil.copytree(ROOT / "egs" / "commonvoice" / "asr1", recipe, symlinks=True,
                    ignore=shutil.ignore_patterns("data", "dump", "exp", "downloads"))  # fmt: skip
    for name in ("conf", "fedtools", "local", "utils", "setup.py"):
        (root / name).symlink_to(ROOT / name)
    (recipe / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    # Half a second each, long enough for only these letters: with longer transcripts nothing would
    # be learnt and all models would be equal.
    texts = ("a", "so", "so b")
    clips = [
        replace(clip, sentence=texts[clip.number % 3])
        for clip in fakes.some_clips(speakers=5, each=3)
    ]
    corpus = fakes.common_voice(folder / "a corpus", clips, release=22)
    (folder / "environment").write_text(str(corpus))
    return recipe


def command(recipe: Path, *more: str) -> tuple[list[str], dict[str, str]]:
    """Return the recipe's command line and its environment."""
    corpus = (recipe.parents[3] / "environment").read_text()
    environment = {
        **os.environ,
        "COMMONVOICE": corpus,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    fixed = ["--tag", "fake", "--release", "fake", "--config", "tiny.yaml", "--nj", "2"]
    fixed += ["--seeds", "3", "--split_seed", "3", "--common_sentences", "keep"]
    hours = ["--hours", "0.6,0.2,0.2", "--methods", "client fedavg", "--speeds", "1.0 1.1"]
    return [str(recipe / "run.sh"), *fixed, *hours, *more], forked(environment)
