"""A checkout of the keyword recipe, shared by several test files."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import fakes
import yaml
from conftest import ROOT
from forked import forked

TINY = {
    "task": "kws",
    "rounds": 2,
    "evaluate_every": 1,
    "clients_per_round": 3,
    "keep_updates": False,
    "training": {"optim": "sgd", "optim_conf": {"lr": 0.05}, "batch_size": 8, "stack": 2},
    "method_conf": {"local_steps": 2},
    "networks": {
        "dscnn": {"model": {"network": "dscnn", "network_conf": {"channels": 4, "blocks": 1}}}
    },
    "methods": {"centralized": {"method_conf": {"local_steps": 0}}, "fedavg": {}, "fedkws_ui": {}},
    "landscape": {"points": 5, "epochs": 2, "clips": 40},
    "tasks": {"12": {"fedkws_ui": {"method_conf": {"base_ratio": 3.5}}}},
}


def make_checkout(folder: Path) -> Path:
    """Make a checkout whose path has blanks; large or fixed files are links to the real ones."""
    root = folder / "a checkout"
    recipe = root / "egs" / "speechcommands" / "kws1"
    ignored = shutil.ignore_patterns("corpus", "data", "dump", "exp", "downloads")
    shutil.copytree(ROOT / "egs/speechcommands/kws1", recipe, symlinks=True, ignore=ignored)
    for name in ("conf", "fedtools", "local", "utils", "setup.py"):
        (root / name).symlink_to(ROOT / name)
    (recipe / "corpus").symlink_to(ROOT / "egs/speechcommands/kws1/corpus")
    # path.sh is a link to the other recipe's.
    other = root / "egs" / "commonvoice" / "asr1"
    other.mkdir(parents=True)
    (other / "path.sh").symlink_to(ROOT / "egs/commonvoice/asr1/path.sh")
    (recipe / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return recipe


def command(recipe: Path, *more: str) -> tuple[list[str], dict[str, str]]:
    """Return the recipe's command line and its environment; see `asr_checkout.command`."""
    corpus = recipe.parents[3] / "a corpus" / "speech & commands"
    if not corpus.exists():
        made = fakes.speech_commands(corpus.parent, fakes.some_words(train=6, valid=2, test=2))
        made.rename(corpus)
    environment = {
        **os.environ,
        "SPEECHCOMMANDS": str(corpus),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    fixed = ["--tag", "fake", "--release", "fake", "--config", "tiny.yaml", "--seeds", "0"]
    fixed += ["--min_clips", "2", "--landscape_clips", "10", "--tasks", "keywords words"]
    grid = ["--networks", "dscnn", "--methods", "centralized fedavg fedkws_ui"]
    return [str(recipe / "run.sh"), *fixed, *grid, "--ablations", "false", *more], forked(
        environment
    )
