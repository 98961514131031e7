"""The small worlds that the experiments of tests/net.py start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml

# Modules of tests are imported late, since only processes other than the one that forks may use
# them.


def made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _asr(world: Path) -> None:
    import simulated

    clients = ["au", "en", "in"]
    simulated.data_dir(world / "train", clients, 4)
    simulated.data_dir(world / "valid", clients, 2, seed=1)
    simulated.data_dir(world / "new", ["nz", "sa"], 4, seed=2)
    simulated.config_file(
        world / "config.yaml", rounds=3, clients_per_round=2, training=_saved(simulated.CONFIG)
    )


def _saved(config: dict[str, dict]) -> dict[str, object]:
    """Return training that can be ended between two steps, and goes on from there."""
    return config["training"] | {"save_interval_steps": 2}


def _kws(world: Path) -> None:
    import keyword_world
    import keywords

    keyword_world.make_world(made(world), 16000)
    (world / "valid").symlink_to("test")
    changed = {"rounds": 2, "evaluate_every": 1, "clients_per_round": 4, "keep_updates": True}
    keywords.config_file(world / "config.yaml", **keyword_world.CONFIG | changed)


def _lm(world: Path) -> None:
    import numpy as np
    from rescored_world import WORDS, make_stream

    make_stream(world / "made")
    random = np.random.default_rng(1)
    lines = [" ".join(random.choice(WORDS, 3)) for _ in range(60)]
    (world / "plain").write_text("".join(f"{line}\n" for line in lines))
    sizes = {"embed_unit": 8, "att_unit": 8, "head": 2, "unit": 16, "layer": 1}
    options = {"lm_conf": sizes | {"dropout_rate": 0.1}, "epochs": 1, "optim_conf": {"lr": 0.01}}
    (world / "nnlm.yaml").write_text(yaml.safe_dump({"nnlm": options}))
    (made(world / "weights") / "weights.yaml").write_text("lm_weight: 2.0\nword_score: 0.5\n")
    training = {"optim": "sgd", "optim_conf": {"lr": 0.05}, "batch_sentences": 2}
    config = {"task": "lm", "rounds": 3, "model": options["lm_conf"], "training": training}
    (world / "config.yaml").write_text(yaml.safe_dump(config))


def _rescore(world: Path) -> None:
    (made(world) / "config.yaml").write_text("{task: rescore, rounds: 3}\n")
    (world / "train").symlink_to("../lm/made")


def _counts(world: Path) -> None:
    import counts

    counts.make_world(made(world))
    (world / "train").symlink_to("data")


def _whisper(world: Path) -> None:
    """Make a tiny Whisper, and utterances of whole seconds."""
    import simulated
    from pretrained_models import save_recogniser

    save_recogniser(world / "model", bins=simulated.BINS, max_target_positions=12)
    simulated.data_dir(world / "train", ["ann", "bob", "cat"], 3, log_mel=True)
    training = {"optim": "adamw", "optim_conf": {"lr": 0.01}, "batch_bins": 4000, "num_threads": 1}
    config = {
        "task": "asr",
        "rounds": 2,
        "clients_per_round": 2,
        "model": {"network": "hf", "path": "whisper/model", "adapt": {"rank": 2}},
        "training": {**training, "save_interval_steps": 1},
    }
    (world / "config.yaml").write_text(yaml.safe_dump(config))


def _clips(world: Path) -> None:
    """Make a tiny Whisper of clips, and clips."""
    import keywords
    from pretrained_models import save_whisper

    save_whisper(world / "model")
    keywords.pack(
        world / "train", dict.fromkeys(["ann", "bob", "cat", "dan"], (2, 1, 2, 1)), length=16000
    )
    training = {"optim": "sgd", "optim_conf": {"lr": 0.05}, "batch_size": 2, "stack": 1}
    config = {
        "task": "kws",
        "rounds": 2,
        "clients_per_round": 2,
        "model": {"network": "hf", "path": "clips/model", "adapt": {"rank": 2}},
        "training": {**training, "save_interval_steps": 1},
        "method_conf": {"local_steps": 4},
    }
    (world / "config.yaml").write_text(yaml.safe_dump(config))


def _voices(world: Path) -> None:
    """Make speakers with two clients each, and an indicator for attacks on their models."""
    import simulated

    clients = [f"{speaker}-m{one}" for speaker in ("ann", "bob", "cat", "dan") for one in (1, 2)]
    for name, utterances, seed in (("train", 3, 0), ("valid", 1, 1)):
        simulated.one_speaker_each(simulated.data_dir(world / name, clients, utterances, seed))
    simulated.data_dir(world / "indicator", ["xen", "yan"], 2, seed=5)
    encoder = {"output_size": 12, "contexts": [1, 1, 3, 3]}
    model = {"input_size": simulated.BINS, "encoder": "tdnn", "encoder_conf": encoder}
    training = _saved(simulated.CONFIG)
    simulated.config_file(world / "config.yaml", model=model, rounds=2, training=training)


# Of the state of a model that nothing was trained in, adapters make as much as of any other.
_BASE = "init {0}/begun --config {0}/config.yaml --method centralized --data train={0}/train"
WORLDS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "asr": (
        _asr,
        (
            "train-tokens asr/train/text asr/tokens --token-type char",
            "train-lm asr/train/text asr/lm --order 2",
            f"{_BASE.format('asr')} --asset tokens=asr/tokens",
        ),
    ),
    "kws": (_kws, (_BASE.format("kws"),)),
    "lm": (
        _lm,
        (
            "train-nnlm --plain lm/plain --config lm/nnlm.yaml --valid lm/made/text lm/nnlm",
            "rescore lm/made lm/nnlm lm/rescored",
            "rescore-stream lm/made lm/rescored lm/train",
        ),
    ),
    "rescore": (_rescore, ()),
    "counts": (_counts, ()),
    "whisper": (_whisper, ("train-tokens whisper/train/text whisper/tokens --token-type char",)),
    "clips": (_clips, ()),
    "voices": (_voices, ("train-tokens voices/train/text voices/tokens --token-type char",)),
}
# Options of `init` for all experiments on a world.
INIT = {
    "asr": ("--asset", "tokens=asr/tokens"),
    "lm": ("--asset", "weights=lm/weights", "--start", "lm/nnlm/model.safetensors"),
    "voices": ("--asset", "tokens=voices/tokens"),
}
# Worlds whose cases run without torch.
TORCHLESS = {"counts"}
# A world that has links into another one needs it.
NEEDS = {"rescore": "lm"}
# Methods and tasks of a user, which are found when the package is imported.
PLUGIN = "counts/plugin"
