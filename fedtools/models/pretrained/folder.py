"""A Hugging Face folder on this machine: what it holds, checked before anything of it is built.

Nothing is fetched, nothing is unpickled, and no code of the folder runs: weights are safetensors,
and the architecture is one of `KINDS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtools.files.atomic import sha256
from fedtools.files.errors import UserError
from fedtools.files.text_files import read_text
from fedtools.models.pretrained.options import is_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What each takes: log mel energies, or the waveform itself.
KINDS = {"whisper": "log_mel", "wav2vec2": "wave", "hubert": "wave", "wavlm": "wave"}
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_REMEDY = "give a folder that save_pretrained wrote, or that fedtools import made"


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
        try:
            config = json.loads(read_text(where))
        except ValueError as error:
            raise UserError(f"not JSON: {error}", path=where) from None
        if not isinstance(config, dict) or config.get("model_type") not in KINDS:
            kind = config.get("model_type") if isinstance(config, dict) else None
            problem = f"a model of type {kind!r}, not one of {', '.join(KINDS)}"
            raise UserError(problem, path=where)
        if "auto_map" in config:
            remedy = "take out auto_map: code of a folder is never run"
            raise UserError("the model brings its own code", path=where, remedy=remedy)
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

    def files(self) -> list[Path]:
        """The files of its weights.

        Raises:
            UserError: if one is missing, or they are pickled.
        """
        if (self.path / WEIGHTS).is_file():
            return [self.path / WEIGHTS]
        if (self.path / INDEX).is_file():
            where = self.path / INDEX
            try:
                names = sorted(set(json.loads(read_text(where))["weight_map"].values()))
            except (ValueError, KeyError, AttributeError, TypeError):
                raise UserError("not an index of weights", path=where) from None
            for name in names:
                if Path(str(name)).name != name or not (self.path / name).is_file():
                    remedy = "download the folder again"
                    raise UserError(f"its file {name!r} is missing", path=where, remedy=remedy)
            return [self.path / name for name in names]
        for name in _PICKLED:
            if (self.path / name).exists():
                remedy = "save it as safetensors: pickled weights are never read"
                raise UserError("pickled weights", path=self.path / name, remedy=remedy)
        remedy = "download the folder again"
        raise UserError("missing", path=self.path / WEIGHTS, remedy=remedy)

    @cached_property
    def sum(self) -> str:
        """What tells this model from others: the SHA-256 of weights and configuration."""
        import hashlib

        digest = hashlib.sha256(sha256(self.path / "config.json").encode())
        for file in self.files():
            digest.update(sha256(file).encode())
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
        try:
            model, said = getattr(transformers, names[self.kind]).from_pretrained(
                self.path,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                dtype=torch.float32,
                output_loading_info=True,
                # Masks and dropped layers are drawn from streams of their own.
                **({} if self.kind == "whisper" else {"apply_spec_augment": False}),
            )
        except Exception as error:
            problem = f"no model can be built: {' '.join(str(error).split())[:300]}"
            raise UserError(problem, path=self.path) from None
        lacking = sorted(said["missing_keys"]) + sorted(str(x) for x in said["mismatched_keys"])
        if lacking:
            problem = f"its weights lack {lacking[0]!r}"
            raise UserError(problem, path=self.path, remedy="download the folder again")
        return model.eval()


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
        remedy = "run: pip install 'transformers>=5,<6'"
        raise UserError("models of network hf need transformers", remedy=remedy) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
