"""The start of an experiment: a frozen configuration and the first round's shared tensors."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedtools.client.train import Training, load_model
from fedtools.federation.federation import Federation
from fedtools.files.atomic import sha256
from fedtools.files.config import freeze, from_mapping, merge, override, read_yaml
from fedtools.files.datadir import DataDir, check_id, invert
from fedtools.files.errors import UserError
from fedtools.files.experiment import Experiment
from fedtools.files.keyed import seed64
from fedtools.files.states import load_state, save_state, spec_of
from fedtools.lm.tokens import Tokenizer
from fedtools.methods import make_method
from fedtools.methods.base import SHARED
from fedtools.models.asr import build_model


def init(
    path: str | Path,
    *,
    method: str,
    config: Mapping[str, Any],
    where: str | Path,
    train: str,
    valid: str | None,
    tokens: str | Path,
    start: str | Path | None,
    seed: int,
) -> None:
    """Make an experiment: freeze its configuration, and write the first round's shared tensors.

    Args:
        method: a name in `fedtools.methods.METHODS`.
        config: `model`, `training`, and optionally `method_conf`, `clients_per_round`, `rounds`
            (how many by default) and `average` (of how many best).
        where: what `config` was read from, for messages.
        train, valid: data directories; `utt2client` in the first names the clients.
        tokens: the folder that `fedtools train-tokens` made.
        start: a full model to begin with; None draws one from `seed`.

    Raises:
        UserError: for bad options, or if the folder was made with other ones.
    """
    path, tokens = Path(path), Path(tokens)
    for key in ("model", "training"):
        if not isinstance(config.get(key), dict):
            raise UserError(f"section {key!r} is missing", path=where)
    options = dict(config.get("method_conf") or {})
    made = make_method(method, options, where)
    from_mapping(Training, config["training"], where)
    clients = list(invert(DataDir.read(train, "utt2client").utt2client)) if made.has_clients else []
    tokenizer = Tokenizer.load(tokens)
    model_path = Path(start) if start else None
    frozen = {
        "method": method,
        "method_conf": options,
        "seed": seed,
        "clients": [check_id(client, "client", Path(train) / "utt2client") for client in clients],
        "clients_per_round": config.get("clients_per_round"),
        "rounds": _whole(config, "rounds", 1, where),
        "average": _whole(config, "average", 1, where),
        "data": {"train": str(train)} | ({"valid": str(valid)} if valid else {}),
        "tokens": sha256(tokens / "tokens.txt"),
        "start": sha256(model_path) if model_path else None,
        "model": config["model"],
        "training": config["training"],
    }
    torch.manual_seed(seed64(seed, "init"))
    model = build_model(config["model"], tokenizer.tokens, f"{where}: model")
    if model_path:
        load_model(model, load_state(model_path, spec_of(model.state_dict())))
    freeze(path / "config.yaml", frozen)
    for name in ("tokens.txt", "bpe.model"):
        if (tokens / name).exists() and not (path / name).exists():
            shutil.copyfile(tokens / name, path / name)
    experiment = Experiment(path)
    if not experiment.init.exists():
        save_state(experiment.init, model.state_dict())
    if not experiment.global_state(1).exists():
        federation = Federation(path)
        save_state(experiment.global_state(1), federation.of_kind(SHARED, federation.initial))


def _whole(config: Mapping[str, Any], key: str, least: int, where: str | Path) -> int:
    value = config.get(key, least)
    if not isinstance(value, int) or value < least:
        raise UserError(f"option {key!r} is {value!r}, not a whole number from {least}", path=where)
    return value


def read_config(path: Path, section: str | None, settings: Sequence[str]) -> dict[str, Any]:
    """Read the options of an experiment.

    Args:
        path: YAML with `model`, `training`, ...
        section: a mapping in it that is laid over the top level, such as "baseline".
        settings: "a.b=value" changes, made last.

    Raises:
        UserError: if the file is not YAML, or has no such section.
    """
    config = read_yaml(path)
    if section is not None:
        if not isinstance(config.get(section), dict):
            raise UserError(f"no section {section!r}", path=path)
        config = merge(config, config[section])
    return override(config, settings)
