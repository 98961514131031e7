"""Export of models for ESPnet's `espnet2.bin.asr_inference`, and import of ESPnet's models.

A model folder of ESPnet holds config.yaml and a .pth file of tensors. Only models on features from
disk can be imported: `frontend: null` (ESPnet's feats_type fbank), an encoder, and CTC. Every
option that changes the encoder's input, or the meaning of tokens, is honoured or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtools.core.atomic import atomic_path, atomic_write
from fedtools.core.config import option_error, read_yaml, write_yaml
from fedtools.core.errors import UserError
from fedtools.core.text_files import read_bytes, read_lines
from fedtools.data.symbols import (
    BLANK,
    BPE,
    BPE_MODEL,
    CHAR,
    SPACE,
    WORD,
    check_pieces,
    check_tokens,
    write_tokens,
)
from fedtools.exchange.states import check_spec, save_state, spec_of
from fedtools.models.acoustic.asr import INPUT_SIZE, KEYS, build_model
from fedtools.models.torch_files import load_tensors

# ESPnet's options that are not supported: values that have no effect, and why others are refused.
_REFUSED = {
    "model": (("espnet",), "is another kind of model"),
    "preencoder": ((), "changes what the encoder sees"),
    "postencoder": ((), "adds a network after the encoder"),
    "preprocessor": (("default",), "changes speech or transcripts"),
    "speech_volume_normalize": ((), "changes what the encoder sees"),
    "cleaner": ((), "changes transcripts before they become tokens"),
    "use_lang_prompt": ((False,), "changes what tokens mean"),
    "use_nlp_prompt": ((False,), "changes what tokens mean"),
    "use_adapter": ((False,), "adds tensors to the encoder"),
    "aux_ctc_tasks": (([],), "adds layers of CTC"),
}
# ESPnet's token types to ours; without a g2p, phones are the words of the transcripts.
_TOKEN_TYPES = {"bpe": BPE, "char": CHAR, "word": WORD, "phn": WORD}
# Prefixes of tensors of decoders, which CTC does not need.
_DECODERS = ("decoder.", "joint_network.")


def export_espnet(
    out: str | Path,
    config: Mapping[str, Any],
    state: Mapping[str, np.ndarray],
    tokens: list[str],
    token_type: str,
    bpe_model: bytes | None,
) -> list[Path]:
    """Write a model for ESPnet's `Speech2Text(asr_train_config, asr_model_file)`.

    Args:
        out: folder to create.
        config: the experiment's `model` section.
        state: the state of the full model.
        tokens, token_type, bpe_model: as returned by `fedtools.data.symbols.read_tokens`.

    Returns:
        paths of the configuration and of the model file.
    """
    out = Path(out)
    if config.get("criterion", "ctc") != "ctc":
        raise UserError("ESPnet does not support the model's criterion, lfmmi", path=out)
    out.mkdir(parents=True, exist_ok=True)
    model = {key: config.get(key) for key in KEYS}
    for key in ("specaug_conf", "normalize_conf", "encoder_conf", "ctc_conf"):
        model[key] = dict(config.get(key) or {})
    model["encoder"] = config.get("encoder", "transformer")
    model["input_size"] = config.get("input_size", INPUT_SIZE)
    model["model_conf"] = {"ctc_weight": 1.0} | dict(config.get("model_conf") or {})
    write_tokens(out, tokens, token_type, bpe_model)
    with atomic_write(out / "model.pth", "wb") as file:
        # As an open file: given a path, torch would write the file's name into it.
        torch.save({name: torch.as_tensor(value) for name, value in state.items()}, file)
    units = {
        "token_type": token_type,
        "bpemodel": None if bpe_model is None else str((out / BPE_MODEL).resolve()),
        "non_linguistic_symbols": _symbols(tokens) if token_type == CHAR else None,
        "token_list": list(tokens),
        "frontend": None,
        "frontend_conf": {},
        "decoder": None,
        "decoder_conf": {},
    }
    write_yaml(out / "config.yaml", units | model)
    return [out / "config.yaml", out / "model.pth"]


def import_espnet(config_path: str | Path, model_path: str | Path, out: str | Path) -> list[str]:
    """Import the encoder and the CTC layer of an ESPnet model; names and shapes have to match.

    Writes `OUT/model.safetensors` for `fedtools init --start`, `OUT/model.yaml` for its
    configuration, and the tokens in the format of `fedtools.data.symbols`.

    Returns:
        one sentence for each part that is left out, such as an attention decoder.

    Raises:
        UserError: if the model does not work on features from disk, has an option that is not
            supported, does not fit its own configuration, or is not a file of tensors.
    """
    config_path, model_path, out = Path(config_path), Path(model_path), Path(out)
    config = read_yaml(config_path)
    _check_options(config, config_path)
    tokens, token_type, bpe_model = _tokens_of(config, config_path)
    state = _load_tensors(model_path)
    if not any(name.startswith("ctc.") for name in state):
        remedy = "only models with a CTC layer can be imported"
        raise UserError("no tensor of a CTC layer", path=model_path, remedy=remedy)
    model_config = {key: config[key] for key in KEYS if config.get(key) not in (None, {})}
    model_config["model_conf"] = {}
    out.mkdir(parents=True, exist_ok=True)
    if model_config.get("normalize") == "global_mvn":
        model_config["normalize_conf"] = _statistics(config, state, out, model_path)
    model = build_model(model_config, tokens, str(config_path))
    wanted = spec_of(model.state_dict())
    left_out = [name for name in state if name.startswith(_DECODERS)]
    found = {name: value for name, value in state.items() if name not in set(left_out)}
    check_spec(spec_of(found), wanted, model_path)
    write_tokens(out, tokens, token_type, bpe_model)
    save_state(out / "model.safetensors", found)
    write_yaml(out / "model.yaml", {"model": model_config})
    notes = []
    if left_out:
        kind = "transducer" if config.get("decoder") == "transducer" else "attention decoder"
        notes.append(f"left out: {len(left_out)} tensors of the {kind}; CTC alone is imported")
    if weight := _model_conf(config).get("interctc_weight"):
        notes.append(f"left out: interctc_weight {weight}, the loss of intermediate layers")
    return notes


def _check_options(config: Mapping[str, Any], path: Path) -> None:
    """Raise a `UserError` for an option that is not supported."""
    frontend = config.get("frontend")
    if frontend is not None or config.get("input_size") is None:
        name = "input_size" if frontend is None else "frontend"
        problem = f"{name} {config.get(name)!r}: the model works on waveforms"
        remedy = "only models trained on filterbanks (frontend: null) can be imported"
        raise UserError(problem, path=path, remedy=remedy)
    for name, (harmless, reason) in _REFUSED.items():
        if (value := config.get(name)) is not None and value not in harmless:
            remedy = "such a model cannot be imported"
            raise option_error(f"{name} {value!r} {reason}; {remedy}", path, name, value)
    if _model_conf(config).get("ctc_weight") == 0:
        problem = "ctc_weight 0: a model without CTC cannot be imported"
        raise option_error(problem, path, "ctc_weight")
    if (blank := _model_conf(config).get("sym_blank", BLANK)) != BLANK:
        problem = f"sym_blank {blank!r}: the blank must be {BLANK}"
        raise option_error(problem, path, "sym_blank", blank)


def _model_conf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("model_conf")
    return found if isinstance(found, Mapping) else {}


def _tokens_of(config: Mapping[str, Any], path: Path) -> tuple[list[str], str, bytes | None]:
    """Return the tokens of a configuration, in the form of `fedtools.data.symbols.read_tokens`."""
    name = config.get("token_type", "bpe")
    if name not in _TOKEN_TYPES:
        problem = f"token_type {name!r}: only types {', '.join(_TOKEN_TYPES)} can be imported"
        raise option_error(problem, path, "token_type", name)
    g2p = config.get("g2p")
    if name == "phn" and g2p not in (None, "none"):
        problem = f"g2p {g2p!r} is not supported; only transcripts of phones are read"
        raise option_error(problem, path, "g2p", g2p)
    listed = config.get("token_list")
    if isinstance(listed, str):
        source = _named_file(listed, path)
        tokens = check_tokens(read_lines(source, "put it next to config.yaml"), source)
    elif isinstance(listed, list):
        tokens = check_tokens(listed, path, lines=False)
    else:
        raise option_error("token_list is not a list of tokens", path, "token_list")
    if (token_type := _TOKEN_TYPES[name]) != BPE:
        return tokens, token_type, None
    bpe = config.get("bpemodel")
    if not isinstance(bpe, str):
        raise option_error(f"bpemodel is {bpe!r}, not a file", path, "bpemodel")
    source = _named_file(bpe, path)
    content = read_bytes(source, remedy="put it next to config.yaml")
    check_pieces(content, tokens, source, path)
    return tokens, token_type, content


def _named_file(name: str, path: Path) -> Path:
    """Return a file named in a configuration: at its path if it exists, else next to `path`."""
    return Path(name) if Path(name).exists() else path.parent / Path(name).name


def _symbols(tokens: list[str]) -> list[str] | None:
    """Return ESPnet's non-linguistic symbols: the multi-character tokens among characters."""
    return [token for token in tokens[2:-1] if len(token) > 1 and token != SPACE] or None


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a .pth file, by name."""
    state = load_tensors(path)
    if not isinstance(state, dict):
        raise UserError("not a mapping of names to tensors", path=path)
    for name, value in state.items():
        if not (isinstance(name, str) and torch.is_tensor(value)):
            raise UserError(f"{name!r} is not a tensor", path=path)
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(f"tensor {name!r} has a NaN or infinity", path=path)
    return state


def _statistics(
    config: Mapping[str, Any], state: dict[str, torch.Tensor], out: Path, path: Path
) -> dict[str, Any]:
    """Write the file from which ESPnet reads mean and variance, and return its options.

    Mean and variance are also in the model's state, where they become float32.
    """
    names = ("normalize.mean", "normalize.std")
    if not state.keys() >= set(names):
        raise UserError(f"no {' and '.join(names)}", path=path)
    # They may be float64, the type of the sums in the original statistics file.
    state.update({name: state[name].float() for name in names})
    mean, std = (state[name].double().numpy() for name in names)
    with atomic_path(out / "feats_stats.npz") as temporary, open(temporary, "wb") as file:
        np.savez(file, count=1, sum=mean, sum_square=std**2 + mean**2)
    options = dict(config.get("normalize_conf") or {})
    return options | {"stats_file": str((out / "feats_stats.npz").resolve())}
