"""Export of models based on a Hugging Face folder, as such a folder or as adapters for peft."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtools.core.atomic import atomic_path, check_new, new_folder, write_text
from fedtools.core.errors import UserError
from fedtools.exchange.states import save_state
from fedtools.models.adapt.adaptation import Adapt
from fedtools.models.adapt.adapters import Trained, merged
from fedtools.models.pretrained.folder import PREFIXES, PREPROCESSOR, TENSORS, Folder
from fedtools.models.torch_files import save_tensors

HEAD = "head.safetensors"
# Files that transformers writes for audio models, in addition to weights and configuration.
_COPIED = (
    PREPROCESSOR,
    "processor_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "vocab.json",
    "merges.txt",
)
# Prefixes of names in encoders of waveforms, here and in transformers.
_WAVE = (
    ("conv_layers.", "feature_extractor.conv_layers."),
    ("pos_conv_embed.", "encoder.pos_conv_embed."),
    ("layers.", "encoder.layers."),
    ("layer_norm.", "encoder.layer_norm."),
    ("embed_layer_norm.", "encoder.layer_norm."),
)
# Names of the factors of the positional convolution's weight: its norm, and its direction.
_CONV = "encoder.pos_conv_embed.conv."
_FACTORS = (
    ("weight_g", "weight_v"),
    ("parametrizations.weight.original0", "parametrizations.weight.original1"),
)
_EMBEDDING, _OUTPUT = "model.decoder.embed_tokens.weight", "proj_out.weight"
# Relative error of an update above which a warning is given.
_LOST = 0.03
# Layers whose weights transformers' WavLM uses directly, so that adapters of them have no effect.
_PASSED = ("q_proj", "k_proj", "v_proj", "out_proj")


def export_folder(
    out: Path,
    folder: Folder,
    model: nn.Module,
    state: Mapping[str, Tensor],
    labels: Iterable[Path],
    as_base: bool = False,
) -> list[str]:
    """Write the complete model, with adapters merged, as a folder that transformers loads.

    Args:
        out: folder to create; it appears only when it is complete.
        folder: the folder that the model was built from.
        model: the model of one client.
        state: its trained tensors, without client dimension.
        labels: files that name the outputs of the head, copied with the head.
        as_base: keep the precision of the base's weights instead of single precision.

    Returns:
        notes on the result, a sentence each.

    Raises:
        UserError: if `out` exists already, or the base's weights have other names.
    """
    check_new(out)
    tensors, untied, lost = _whole(folder, model, as_base)
    with new_folder(out) as new:
        for name in _COPIED:
            if (folder.path / name).is_file():
                shutil.copyfile(folder.path / name, new / name)
        config = dict(folder.config)
        if not as_base:
            config |= {key: "float32" for key in ("dtype", "torch_dtype") if key in config}
        if untied:
            config["tie_word_embeddings"] = False
        write_text(new / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        _save(new / TENSORS, tensors)
        return [*_save_head(out, new, state, labels), *_own_head(folder), *_rounded(lost)]


def export_adapters(
    out: Path,
    folder: Folder,
    model: nn.Module,
    state: Mapping[str, Tensor],
    labels: Iterable[Path],
    how: Adapt,
) -> list[str]:
    """Write the adapters in peft's format, for transformers' class of the base model.

    Args:
        out, folder, model, state, labels: see `export_folder`.
        how: options of the adaptation.

    Returns:
        notes on the result, a sentence each.

    Raises:
        UserError: if `out` exists already, or other tensors than adapters are trained.
    """
    check_new(out)
    remedy = "leave out --adapters: the whole model is written"
    if how.kind != "lora" or how.also or how.combine == "residual":
        more = "also" if how.also else f"combine {how.combine}"
        what = f"kind {how.kind}" if how.kind != "lora" else more
        problem = f"adapt: {what}: peft's files hold only adapters of kind lora"
        raise UserError(problem, path=out, remedy=remedy)
    tensors, places = {}, []
    for path, layer in model.named_modules():
        if isinstance(layer, Trained) and layer.scale:
            place = _theirs(folder.kind, path)
            if folder.kind == "wavlm" and place.endswith(tuple(f"attention.{n}" for n in _PASSED)):
                problem = f"transformers' WavLM ignores an adapter of {place}"
                raise UserError(problem, path=out, remedy=remedy)
            if getattr(layer.layer, "groups", 1) > 1:
                problem = f"peft's adapters differ from ours for {place}, a convolution in groups"
                raise UserError(problem, path=out, remedy=remedy)
            places.append(place)
            for name, factor in zip(("lora_A", "lora_B"), _factors_of(layer), strict=True):
                tensors[f"base_model.model.{place}.{name}.weight"] = factor
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": folder.path.absolute().name,
        "inference_mode": True,
        "r": how.rank,
        "lora_alpha": how.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": places,
    }
    with new_folder(out) as new:
        write_text(new / "adapter_config.json", json.dumps(config, indent=2) + "\n")
        _save(new / "adapter_model.safetensors", tensors)
        return _save_head(out, new, state, labels)


def _factors_of(layer: Trained) -> tuple[Tensor, Tensor]:
    """Return A and B of an adapter; for a convolution, as kernels of its size and of size 1."""
    down, up = (layer.own(name)[0].detach() for name in ("lora_a", "lora_b"))
    around = layer.layer.weight.shape[2:]
    return down.view(len(down), -1, *around), up.view(*up.shape, *(1 for _ in around))


def _theirs(kind: str, name: str) -> str:
    """Return the name of a layer or a tensor in transformers' class of the base model."""
    if kind == "whisper":
        return name if name.startswith("proj_out") else f"model.{name}"
    name = name.removeprefix("encoder.").replace("gru_rel_pos_const.weight", "gru_rel_pos_const")
    for ours, theirs in _WAVE:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _is_head(name: str) -> bool:
    return not name.startswith(("encoder.", "decoder.", "proj_out."))


def _bare(name: str) -> str:
    """Return a name without the prefix that models with a head add."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _own_head(folder: Folder) -> list[str]:
    """Return a note on the base's own head, which a model of transformers would use."""
    if not folder.heads:
        return []
    return [f"the head of {folder.path} ({folder.heads[0]}, ...) is in it as it was, untrained"]


def _rounded(lost: float) -> list[str]:
    """Return a note on what rounding to the precision of the base loses of the update."""
    if not lost:
        return []
    said = f"rounded like the base's weights, the update has a relative error of {100 * lost:.2g} %"
    remedy = "; export without --as-base to keep it" if lost > _LOST else ""
    return [f"{'warning: ' if remedy else ''}{said}{remedy}"]


def _whole(
    folder: Folder, model: nn.Module, as_base: bool
) -> tuple[dict[str, Tensor], bool, float]:
    """Return the base's tensors with trained ones, and what became of them.

    Returns:
        the tensors; whether training untied the output layer; and the norm of what rounding
        changes, relative to the norm of what training changed.
    """
    from safetensors.torch import load_file

    base: dict[str, Tensor] = {}
    for path in folder.files():
        base |= load_file(path)
    there = {_bare(name): name for name in base}
    ours = {_theirs(folder.kind, n): v for n, v in merged(model).items() if not _is_head(n)}
    untied = _OUTPUT in ours and not torch.equal(ours[_OUTPUT], ours[_EMBEDDING])
    found: dict[str, Tensor] = {}
    for name, value in ours.items():
        if (place := there.get(_bare(name))) is not None:
            found[place] = value
        elif name == f"{_CONV}weight":
            found |= _factors(value, base, there)
        elif name != _OUTPUT:
            raise UserError(f"its weights have no {name}", path=folder.path)
        elif untied:
            found[name] = value
    whole: dict[str, Tensor] = {}
    error = change = 0.0
    for name in base | found:
        # An output layer of its own was the table of tokens.
        like = base[name] if name in base else base[there[_bare(_EMBEDDING)]]
        exact = found[name].cpu() if name in found else like
        value = exact
        if value.is_floating_point():
            value = value.to(like.dtype if as_base else torch.float32)
        if name in found:
            if not value.isfinite().all():
                raise UserError(f"{name} has a NaN or infinity as {value.dtype}", path=folder.path)
            error += (value.double() - exact.double()).square().sum().item()
            change += (exact.double() - like.double()).square().sum().item()
        whole[name] = value
    return whole, untied, math.sqrt(error / change) if change else 0.0


def _factors(
    weight: Tensor, base: Mapping[str, Tensor], there: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return norm and direction of the positional convolution's weight, or {} if unchanged."""
    for names in _FACTORS:
        norm, direction = (there.get(_CONV + name) for name in names)
        if norm is not None and direction is not None:
            size = base[norm].float()
            if torch.equal(torch._weight_norm(base[direction].float(), size, 2), weight.cpu()):
                return {}
            return {norm: weight.norm(2, (0, 1), keepdim=True), direction: weight}
    raise UserError(f"the base's weights have no {_CONV}weight")


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # safetensors refuses tied tensors, which share memory.
    own: dict[str, Any] = {
        name: value.cpu().clone().contiguous() for name, value in tensors.items()
    }
    with atomic_path(path) as temporary:
        save_tensors(temporary, own)


def _save_head(
    out: Path, new: Path, state: Mapping[str, Tensor], labels: Iterable[Path]
) -> list[str]:
    head = {name: value for name, value in state.items() if _is_head(name)}
    if not head:
        return []
    save_state(new / HEAD, head)
    for path in labels:
        if path.is_file():
            shutil.copyfile(path, new / path.name)
    return [f"transformers has no place for the head ({', '.join(head)}): it is in {out / HEAD}"]
