"""The keyword recipe with user-level privacy: a projection, rows by epsilon, their page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from commands import run
from keyword_checkout import TINY, command, make_checkout
from pretrained_models import save_whisper
from safetensors.numpy import load_file

HEAD = {"network": "hf", "cache_frozen": True, "adapt": {"kind": "head"}}
CONFIG = TINY | {
    "clients_per_round": None,
    "training": TINY["training"]
    | {"augment": {"time_shift_ms": 0, "noise_volume": 0.0, "noise_probability": 0.0}},
    "pretrained": {"whisper": "tiny.en"},
    "rows": {"server_clips": [8], "dimension": 3},
    "networks": {
        "head": {"model": {**HEAD, "normalise": "projection"}},
        "layer_norm": {"model": {**HEAD, "normalise": "layer"}},
    },
    "methods": {
        "centralized": {"method_conf": {"local_steps": 0}},
        "dpfedavg": {"method_conf": {"local_steps": 1}},
    },
    "grid": {
        "head": {
            "dpfedavg.epsilon=8": "0",
            "dpfedavg.epsilon=2,clip=0.2": "0",
            "centralized.server_clips=8": "0",
        },
        "layer_norm": {"dpfedavg.epsilon=8": "0"},
    },
}
WORDS = "yes,no,up,down"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the recipe's folder after a run of all stages."""
    folder = tmp_path_factory.mktemp("private")
    recipe = make_checkout(folder)
    (recipe / "private.yaml").write_text(yaml.safe_dump(CONFIG))
    whisper = save_whisper(folder / "whisper")
    words, environment = command(recipe, "--config", "private.yaml", "--pretrained", str(whisper))
    words += ["--networks", "head layer_norm", "--methods", "dpfedavg centralized"]
    words += ["--whole_grid", "true", "--tasks", "keywords", "--keywords", WORDS]
    words += ["--silence", "own", "--unknown", "false", "--figures", "none"]
    environment = {**environment, "FEDTOOLS_NOISE_KEY": str(folder / "noise.key")}
    run(*words, env=environment, cwd=recipe).ok()
    return recipe


def test_the_projection_is_that_of_the_servers_clips(finished: Path):
    told = yaml.safe_load((finished / "exp/fake/keywords/projection/projection.yaml").read_text())
    assert (told["clips"], told["data"]) == (8, "dump/fake/keywords/server8")
    whole = load_file(finished / "exp/fake/keywords/projection/projection.safetensors")
    assert whole["map"].shape == (3, 32)
    for row in ("dpfedavg.epsilon=8", "centralized.server_clips=8"):
        path = finished / "exp/fake/keywords/head" / row / "seed0"
        own = load_file(path / "projection.safetensors")
        assert all(np.array_equal(own[name], whole[name]) for name in whole)
    path = finished / "exp/fake/keywords/layer_norm/dpfedavg.epsilon=8/seed0"
    assert not (path / "projection.safetensors").exists()


def test_rows_have_the_privacy_that_they_are_called_by(finished: Path):
    page = (finished / "exp/fake/RESULTS.md").read_text()
    assert "user-level privacy, task keywords" in page
    assert (finished / "exp/fake/RESULTS-fake-privacy-keywords.png").exists()
    for row, epsilon, clip in (("epsilon=8", 8, 0.1), ("epsilon=2,clip=0.2", 2, 0.2)):
        path = finished / f"exp/fake/keywords/head/dpfedavg.{row}/seed0"
        plan = yaml.safe_load((path / "privacy.yaml").read_text())
        assert 0.99 * epsilon < plan["epsilon"] <= epsilon and plan["clip"] == clip
        config = yaml.safe_load((path / "config.yaml").read_text())
        # The projection was fitted on the validation clips.
        assert set(config["data"]) == {"train", "test"}
