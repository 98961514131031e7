"""A Hugging Face folder on this machine: what it holds, checked before anything of it is built.

Nothing is fetched, nothing is unpickled, and no code of the folder runs: weights are safetensors,
and the architecture is one of `KINDS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtools.files.atomic import sha256
from fedtools.files.clips import RATE
from fedtools.files.errors import INSTALL_PRETRAINED, UserError
from fedtools.files.text_files import read_text
from fedtools.models.pretrained.options import is_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What each takes: log mel energies, or the waveform itself.
KINDS = {"whisper": "log_mel", "wav2vec2": "wave", "hubert": "wave", "wavlm": "wave"}
PREPROCESSOR = "preprocessor_config.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_REMEDY = "give a folder that save_pretrained wrote, or that fedtools import made"
_AGAIN = "download the folder again"
# Of config.json, what is not done: key, problem, remedy.
_REFUSED = (
    ("auto_map", "the model brings its own code", "take out auto_map: it is never run"),
    ("quantization_config", "the weights are quantised", "save the model unquantised"),
    ("add_adapter", "layers above the encoder (add_adapter) are not known", "take another model"),
)
# Of transformers' names, what every weight below must be one of the model's.
_PARTS = ("encoder.", "decoder.", "feature_extractor.", "feature_projection.")
# Names of some parts of models that were saved with a head.
PREFIXES = ("model.", "wav2vec2.", "hubert.", "wavlm.")


# Masks and dropped layers would be drawn from streams of transformers' own. Without probabilities
# there is no vector in place of what is masked, which some folders lack.
_DRAWS_NOTHING = {
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}


@dataclass(frozen=True)
class Folder:
    """The folder of a pretrained model.

    Attributes:
        path: the folder.
        config: of its config.json.
    """

    path: Path
    config: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Folder:
        """Look at a folder without building its model.

        Raises:
            UserError: if it holds no model of `KINDS` in safetensors.
        """
        folder = Path(path)
        where = folder / "config.json"
        if not where.is_file():
            raise UserError("no pretrained model here", path=folder, remedy=_REMEDY)
        config = _read_json(where)
        if config.get("model_type") not in KINDS:
            problem = f"a model of type {config.get('model_type')!r}, not one of {', '.join(KINDS)}"
            raise UserError(problem, path=where)
        for key, problem, remedy in _REFUSED:
            if config.get(key):
                raise UserError(problem, path=where, remedy=remedy)
        if type(bins := config.get("num_mel_bins", 80)) is not int or not 1 <= bins <= 256:
            raise UserError(f"num_mel_bins is {bins!r}, no number of filters", path=where)
        if (folder / "adapter_config.json").exists():
            remedy = "merge it into its model, and save that"
            raise UserError("an adapter, not a model", path=folder, remedy=remedy)
        found = cls(folder, config)
        found.files()
        return found

    @property
    def kind(self) -> str:
        """A key of `KINDS`."""
        return str(self.config["model_type"])

    @property
    def inputs(self) -> str:
        """What it takes: "log_mel" or "wave"."""
        return KINDS[self.kind]

    @property
    def bins(self) -> int:
        """Values of a frame of its input."""
        return int(self.config.get("num_mel_bins", 80)) if self.inputs == "log_mel" else 1

    @cached_property
    def normalized(self) -> bool:
        """Whether it takes waveforms of zero mean and unit variance.

        Raises:
            UserError: if it takes another sample rate than 16 kHz.
        """
        where = self.path / PREPROCESSOR
        if not where.is_file():
            # As of transformers.
            return True
        read = _read_json(where)
        if (rate := read.get("sampling_rate", RATE)) != RATE:
            raise UserError(f"audio at {rate!r} Hz; models here take {RATE}", path=where)
        if not isinstance(chosen := read.get("do_normalize", True), bool):
            raise UserError(f"do_normalize is {chosen!r}, neither true nor false", path=where)
        return chosen

    def files(self) -> list[Path]:
        """The files of its weights.

        Raises:
            UserError: if one is missing or cut off, or they are pickled.
        """
        found = self._named()
        for path in found:
            _check_whole(path)
        return found

    def _named(self) -> list[Path]:
        if (self.path / WEIGHTS).is_file():
            return [self.path / WEIGHTS]
        if (self.path / INDEX).is_file():
            where = self.path / INDEX
            names = _read_json(where).get("weight_map")
            if not isinstance(names, dict) or not names:
                raise UserError("not an index of weights", path=where, remedy=_AGAIN)
            for name in (shards := sorted(set(map(str, names.values())))):
                if Path(name).name != name or not name.endswith(".safetensors"):
                    problem = f"{name!r} is no safetensors file of this folder"
                    raise UserError(problem, path=where, remedy=_REMEDY)
                if not (self.path / name).is_file():
                    raise UserError(f"its file {name!r} is missing", path=where, remedy=_AGAIN)
            return [self.path / name for name in shards]
        for name in _PICKLED:
            if (self.path / name).exists():
                remedy = "save it as safetensors: pickled weights are never read"
                raise UserError("pickled weights", path=self.path / name, remedy=remedy)
        raise UserError("missing", path=self.path / WEIGHTS, remedy=_AGAIN)

    @cached_property
    def sum(self) -> str:
        """What tells this model from others: the SHA-256 of weights and configuration."""
        import hashlib

        digest = hashlib.sha256(_sum_of(self.path / "config.json").encode())
        for file in self.files():
            digest.update(_sum_of(file).encode())
        if self.inputs == "wave":
            digest.update(b"normalized" if self.normalized else b"as it is")
        return digest.hexdigest()

    def load(self) -> PreTrainedModel:
        """Build the model in single precision, in evaluation mode, without what draws numbers.

        Raises:
            UserError: without transformers, or if the weights are not those of the architecture.
        """
        import torch

        transformers = import_transformers()
        names = {"whisper": "WhisperForConditionalGeneration", "wav2vec2": "Wav2Vec2Model"}
        names |= {"hubert": "HubertModel", "wavlm": "WavLMModel"}
        quiet = {} if self.kind == "whisper" else _DRAWS_NOTHING
        try:
            model, said = getattr(transformers, names[self.kind]).from_pretrained(
                self.path,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                # Not what config.json may name: an implementation that would be fetched.
                attn_implementation="eager" if self.kind == "wavlm" else "sdpa",
                **quiet,
            )
        except Exception as error:
            problem = f"no model can be built: {' '.join(str(error).split())[:300]}"
            raise UserError(problem, path=self.path) from None
        for name, there, wanted in sorted(said["mismatched_keys"]):
            problem = f"{name!r} is of {tuple(there)} values, {tuple(wanted)} by config.json"
            raise UserError(problem, path=self.path, remedy=_AGAIN)
        if lacking := sorted(said["missing_keys"]):
            raise UserError(f"its weights lack {lacking[0]!r}", path=self.path, remedy=_AGAIN)
        if more := sorted(filter(_is_of_model, said["unexpected_keys"])):
            problem = f"its weights have {more[0]!r}, which config.json has not"
            raise UserError(problem, path=self.path, remedy=_AGAIN)
        return model.eval()


def _sum_of(path: Path) -> str:
    """A file's SHA-256, which a process computes once of what has not changed."""
    stat = path.stat()
    return _hashed(path.resolve(), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=64)
def _hashed(path: Path, *_: int) -> str:
    return sha256(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}", path=path, remedy=_AGAIN) from None
    if not isinstance(read, dict):
        raise UserError("not a JSON object", path=path, remedy=_AGAIN)
    return read


def _check_whole(path: Path) -> None:
    """Raise a `UserError` unless a safetensors file is as long as its header says."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np"):
            pass
    except (SafetensorError, OSError) as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(f"not a whole safetensors file: {said}", path=path, remedy=_AGAIN) from None


def _is_of_model(name: str) -> bool:
    """Whether a weight is of a part that the model has, not of a head above it."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name.startswith(_PARTS)


def open_known(path: str | Path, known: str | None) -> Folder:
    """A folder whose `sum` is known; None: whatever there is."""
    folder = Folder.open(path)
    if known not in (None, folder.sum):
        remedy = "put the original back, or begin another experiment"
        problem = "not the pretrained model that the experiment began with"
        raise UserError(problem, path=folder.path, remedy=remedy)
    return folder


def with_sum(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section `model` of a configuration, with the sum of the pretrained model it names."""
    if not is_pretrained(model):
        return model
    return {**model, "sum": open_known(str(model.get("path", "")), model.get("sum")).sum}


def import_transformers() -> Any:
    """The library; a `UserError` says what to install."""
    try:
        import transformers
    except ImportError:
        problem = "models of network hf need transformers"
        raise UserError(problem, remedy=INSTALL_PRETRAINED) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
