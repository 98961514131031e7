"""ESPnet's own model files: `espnet2.bin.asr_inference` decodes ours, and theirs begin ours.

A model folder of ESPnet holds config.yaml and a .pth of tensors. Only what works on features from
disk can be taken over: `frontend: null` (ESPnet's feats_type fbank), an encoder, and CTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtools.files.atomic import atomic_path, atomic_write, write_text
from fedtools.files.config import option_error, read_yaml, write_yaml
from fedtools.files.errors import UserError
from fedtools.files.lines import open_input, read_bytes
from fedtools.files.states import check_spec, save_state, spec_of
from fedtools.models.asr import INPUT_SIZE, KEYS, build_model


def export_espnet(
    out: str | Path,
    config: Mapping[str, Any],
    state: Mapping[str, np.ndarray],
    tokens: list[str],
    bpe_model: bytes | None,
) -> list[Path]:
    """Write a model as ESPnet's `Speech2Text(asr_train_config, asr_model_file)` reads it.

    Args:
        out: the folder to be made.
        config: the experiment's `model` section.
        state: the full model.
        tokens: the token list.
        bpe_model: SentencePiece's model, None for characters.

    Returns:
        the configuration and the model file.
    """
    out = Path(out)
    if config.get("criterion", "ctc") != "ctc":
        raise UserError("ESPnet has no model of criterion lfmmi, which this one is", path=out)
    out.mkdir(parents=True, exist_ok=True)
    model = {key: config.get(key) for key in KEYS}
    for key in ("specaug_conf", "normalize_conf", "encoder_conf", "ctc_conf"):
        model[key] = dict(config.get(key) or {})
    model["encoder"] = config.get("encoder", "transformer")
    model["input_size"] = config.get("input_size", INPUT_SIZE)
    model["model_conf"] = {"ctc_weight": 1.0} | dict(config.get("model_conf") or {})
    if bpe_model is not None:
        with atomic_write(out / "bpe.model", "wb") as file:
            file.write(bpe_model)
    write_text(out / "tokens.txt", "".join(f"{token}\n" for token in tokens))
    with atomic_write(out / "model.pth", "wb") as file:
        # Not by its name, which torch would write into the file.
        torch.save({name: torch.as_tensor(value) for name, value in state.items()}, file)
    units = {
        "token_type": "char" if bpe_model is None else "bpe",
        "bpemodel": None if bpe_model is None else str((out / "bpe.model").resolve()),
        "token_list": list(tokens),
        "frontend": None,
        "frontend_conf": {},
        "decoder": None,
        "decoder_conf": {},
    }
    write_yaml(out / "config.yaml", units | model)
    return [out / "config.yaml", out / "model.pth"]


def import_espnet(config_path: str | Path, model_path: str | Path, out: str | Path) -> list[str]:
    """Take over the encoder and the CTC layer of an ESPnet model; strictly, by name and shape.

    Writes `OUT/model.safetensors` for `fedtools init --start`, `OUT/model.yaml` for its
    configuration, `OUT/tokens.txt`, and `OUT/bpe.model` if there is one.

    Returns:
        names of tensors that are left out, all of them an attention decoder's.

    Raises:
        UserError: if the model cannot work on features from disk, or does not fit its own
            configuration, or is no file of tensors.
    """
    config_path, model_path, out = Path(config_path), Path(model_path), Path(out)
    config = read_yaml(config_path)
    if config.get("frontend") is not None:
        problem = f"frontend {config['frontend']!r} works on waveforms"
        remedy = "only models trained on filterbanks (frontend: null) can be taken over"
        raise UserError(problem, path=config_path, remedy=remedy)
    tokens = config.get("token_list")
    if not isinstance(tokens, list) or not all(
        isinstance(token, str) and token and "\n" not in token for token in tokens
    ):
        problem = "token_list is not a list of tokens"
        raise option_error(problem, config_path, "token_list")
    state = _load_tensors(model_path)
    model_config = {key: config[key] for key in KEYS if config.get(key) not in (None, {})}
    model_config["model_conf"] = {}
    out.mkdir(parents=True, exist_ok=True)
    if model_config.get("normalize") == "global_mvn":
        model_config["normalize_conf"] = _statistics(config, state, out, model_path)
    model = build_model(model_config, tokens, str(config_path))
    wanted = spec_of(model.state_dict())
    left_out = [name for name in state if name.startswith("decoder.")]
    found = {name: value for name, value in state.items() if name not in set(left_out)}
    check_spec(spec_of(found), wanted, model_path)
    bpe = config.get("bpemodel")
    if config.get("token_type") == "bpe":
        if not isinstance(bpe, str):
            raise option_error(f"bpemodel is {bpe!r}, not a file", config_path, "bpemodel")
        source = Path(bpe) if Path(bpe).exists() else config_path.parent / Path(bpe).name
        content = read_bytes(source, remedy="put it beside config.yaml")
        with atomic_write(out / "bpe.model", "wb") as file:
            file.write(content)
    write_text(out / "tokens.txt", "".join(f"{token}\n" for token in tokens))
    save_state(out / "model.safetensors", found)
    write_yaml(out / "model.yaml", {"model": model_config})
    return left_out


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .pth file, by their names."""
    with open_input(path) as file:
        try:
            # Nothing but tensors: a pickle could run anything.
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"not a file of tensors: {reason}", path=path) from None
    if not isinstance(state, dict):
        raise UserError("not a mapping of names to tensors", path=path)
    for name, value in state.items():
        if not (isinstance(name, str) and torch.is_tensor(value)):
            raise UserError(f"{name!r} is no tensor", path=path)
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(f"tensor {name!r} has a NaN or infinity", path=path)
    return state


def _statistics(
    config: Mapping[str, Any], state: Mapping[str, torch.Tensor], out: Path, path: Path
) -> dict[str, Any]:
    """ESPnet reads mean and variance from a file, though they are in the model: write that file."""
    try:
        mean, std = (state[f"normalize.{name}"].double().numpy() for name in ("mean", "std"))
    except KeyError:
        raise UserError("no normalize.mean and normalize.std", path=path) from None
    with atomic_path(out / "feats_stats.npz") as temporary, open(temporary, "wb") as file:
        np.savez(file, count=1, sum=mean, sum_square=std**2 + mean**2)
    options = dict(config.get("normalize_conf") or {})
    return options | {"stats_file": str((out / "feats_stats.npz").resolve())}
