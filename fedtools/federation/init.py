"""The start of an experiment: a frozen configuration and the first round's shared tensors."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtools.federation.tasks import Task, identity_of, task_of
from fedtools.files.atomic import atomic_path, sha256
from fedtools.files.config import freeze, merge, override, read_yaml, unknown
from fedtools.files.datadir import check_id
from fedtools.files.errors import UserError
from fedtools.files.experiment import Experiment
from fedtools.files.keyed import seed64
from fedtools.files.provenance import record
from fedtools.methods import has_clients, make_method

if TYPE_CHECKING:
    import torch

# What else recipes' files hold: variants of the options, and options of other commands.
_SECTIONS = ("networks", "methods", "tasks", "baseline", "tokens", "lm", "decode")


def init(
    path: str | Path,
    *,
    method: str,
    config: Mapping[str, Any],
    where: str | Path,
    train: str,
    valid: str | None,
    test: str | None,
    tokens: str | Path | None,
    start: str | Path | None,
    seed: int,
) -> None:
    """Make an experiment: freeze its configuration, and write the first round's shared tensors.

    Args:
        method: a name in `fedtools.methods.METHODS`.
        config: `model`, `training`, and optionally `task` ("asr", "kws"), `method_conf`,
            `clients_per_round`, `rounds` (how many by default), `average` (of how many best) and
            `keep_updates` (of every client, or only the mean of those who train together).
        where: what `config` was read from, for messages.
        train, valid, test: data directories, of keyword spotting those of `fedtools pack-clips`;
            the first names the clients.
        tokens: the folder that `fedtools train-tokens` made, for "asr".
        start: a full model to begin with; None draws one from `seed`.

    Raises:
        UserError: for bad options, or if the folder was made with other ones.
    """
    path = Path(path)
    task = task_of(config.get("task", "asr"), where)
    files = task.needed(Path(train), Path(tokens) if tokens else None, where)
    # Read whatever the method, since that checks the data.
    clients = [check_id(client, "client", train) for client in task.clients(Path(train))]
    data = {"train": train, "valid": valid, "test": test}
    clients = clients if has_clients(method) else []
    frozen = {
        "method": method,
        **_options(config, len(clients), where),
        "seed": seed,
        "start": sha256(start) if start else None,
        "data": {role: folder for role, folder in data.items() if folder},
        **{file.name: sha256(file) for file in files},
        "clients": clients,
    }
    # Apart from the options: data of the same name can be made again from something else.
    folders = {role: Path(folder) for role, folder in data.items() if folder}
    known = {role: identity_of(folder / task.identity) for role, folder in folders.items()}
    made = ("config.yaml", "data.yaml", "init.safetensors", "round_0001/global.safetensors")
    begun = all((path / name).exists() for name in made)
    # Before anything is frozen: a model that cannot be made leaves nothing behind.
    tensors = {} if begun else _tensors(task, frozen, Path(train), tokens, start, where)
    if not begun:
        record(path)
    freeze(path / "config.yaml", frozen)
    freeze(path / "data.yaml", known, "other data")
    for file in files:
        if not (path / file.name).exists():
            with atomic_path(path / file.name) as temporary:
                shutil.copyfile(file, temporary)
    if not begun:
        _write_states(path, task, tensors)


def _options(config: Mapping[str, Any], clients: int, where: str | Path) -> dict[str, Any]:
    """The options, checked as far as that needs no model."""
    options = {
        "task": config.get("task", "asr"),
        "method_conf": config.get("method_conf") or {},
        "clients_per_round": _sampled(config, clients, where),
        "rounds": _whole(config, "rounds", 1, where),
        "average": _whole(config, "average", 1, where),
        "evaluate_every": _whole(config, "evaluate_every", 1, where),
        "keep_updates": config.get("keep_updates", True),
    }
    if not isinstance(options["keep_updates"], bool):
        problem = f"option 'keep_updates' is {options['keep_updates']!r}, not true or false"
        raise UserError(problem, path=where)
    for key in ("model", "training"):
        if key not in config:
            raise UserError(f"section {key!r} is missing", path=where)
        options[key] = config[key]
    for key in ("model", "training", "method_conf"):
        if not isinstance(options[key], dict):
            raise UserError(f"section {key!r} is {options[key]!r}, not name: value", path=where)
    for key in config:
        if key not in options and key not in _SECTIONS:
            raise UserError(unknown(key, [*options, *_SECTIONS]), path=where)
    return options


def _tensors(
    task: Task,
    options: Mapping[str, Any],
    train: Path,
    tokens: str | Path | None,
    start: str | Path | None,
    where: str | Path,
) -> dict[str, torch.Tensor]:
    """Check the options of method and model, and make the tensors that everybody begins with."""
    import torch

    from fedtools.client.train import load_model
    from fedtools.files.states import load_state, spec_of

    method = make_method(options["method"], options["method_conf"], where)
    try:
        method.check(options["task"], options["model"])
    except ValueError as error:
        raise UserError(str(error), path=where) from None
    torch.manual_seed(seed64(options["seed"], "init"))
    folder = Path(tokens) if tokens else None
    tensors = task.federation_class.begin(options, train, folder, where)
    if start:
        load_model(tensors, load_state(start, spec_of(tensors)))
    return tensors


def _write_states(path: Path, task: Task, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the full model, and of it what the server sends in round 1."""
    from fedtools.files.states import save_state
    from fedtools.methods.base import SHARED

    experiment = Experiment(path)
    if not experiment.init.exists():
        save_state(experiment.init, tensors)
    if not experiment.global_state(1).exists():
        federation = task.federation_class(path)
        save_state(experiment.global_state(1), federation.of_kind(SHARED, federation.initial))


def _whole(config: Mapping[str, Any], key: str, least: int, where: str | Path) -> int:
    value = config.get(key, least)
    if type(value) is not int or value < least:
        raise UserError(f"option {key!r} is {value!r}, not a whole number from {least}", path=where)
    return value


def _sampled(config: Mapping[str, Any], clients: int, where: str | Path) -> int | float | None:
    value = config.get("clients_per_round")
    share = isinstance(value, float) and 0 < value <= 1
    # Without clients nobody is sampled, and the number is of no account.
    if value is None or share or (type(value) is int and 0 < value <= (clients or value)):
        return value
    problem = f"option 'clients_per_round' is {value!r}, no number or share of {clients} clients"
    raise UserError(problem, path=where, remedy="give 10, or 0.1")


def read_config(path: Path, sections: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
    """Read the options of an experiment.

    Args:
        path: YAML with `model`, `training`, ...
        sections: mappings in it that are laid over the top level in this order, such as
            "baseline" or "networks.dscnn"; one that ends in "?" may be missing.
        settings: "a.b=value" changes, made last.

    Raises:
        UserError: if the file is not YAML, or has no such section.
    """
    whole = config = read_yaml(path)
    for section in sections:
        found: Any = whole
        for name in section.removesuffix("?").split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if found is None and section.endswith("?"):
            continue
        if not isinstance(found, dict):
            raise UserError(f"no section {section!r}", path=path)
        config = merge(config, found)
    return override(config, settings)
