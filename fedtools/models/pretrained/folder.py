"""A local Hugging Face folder, checked before any model is built from it.

Nothing is downloaded or unpickled, and no code in the folder runs: weights are safetensors, and the
architecture is one of `KINDS`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtools.core.atomic import sha256_once
from fedtools.core.errors import INSTALL_PRETRAINED, UserError
from fedtools.core.json_files import read_object
from fedtools.core.text_files import open_input
from fedtools.data.clips import RATE
from fedtools.models.pretrained.options import is_pretrained, is_seq2seq
from fedtools.models.pretrained.sizes import check_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Input of each kind of model: log mel energies, or the waveform itself.
KINDS = {"whisper": "log_mel", "wav2vec2": "wave", "hubert": "wave", "wavlm": "wave"}
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
SETTINGS = "generation_config.json"
# Files that folders have in place of safetensors, what they are, and what to do.
_PICKLED = ("pickled weights", "save it as safetensors: pickled weights are never read")
_OTHER = "take the model's safetensors, or save it by save_pretrained from PyTorch"
_OTHERS = (
    ("pytorch_model.bin", *_PICKLED),
    ("pytorch_model*.bin*", *_PICKLED),
    ("tf_model.h5", "weights of TensorFlow", _OTHER),
    ("flax_model.msgpack", "weights of Flax", _OTHER),
    ("*.onnx", "an ONNX model", _OTHER),
    ("*.gguf", "a model in llama.cpp's format", _OTHER),
    ("ggml*.bin", "a model in whisper.cpp's format", _OTHER),
)
_REMEDY = "give a folder that save_pretrained wrote, or that fedtools import made"
_AGAIN = "download the folder again"
# Unsupported keys of config.json: key, problem, remedy.
_REFUSED = (
    ("auto_map", "the model has its own code", "remove auto_map: such code is never run"),
    ("quantization_config", "the weights are quantised", "save the model unquantised"),
    ("add_adapter", "layers above the encoder (add_adapter) are unsupported", "take another model"),
)
# Prefixes, in transformers' names, of weights that have to be in the model.
_PARTS = ("encoder.", "decoder.", "feature_extractor.", "feature_projection.")
# Prefixes of the heads of transformers' classes for CTC and for classification.
_HEADS = ("lm_head.", "projector.", "classifier.")
# Prefixes of names in models that were saved with a head.
PREFIXES = ("model.", "wav2vec2.", "hubert.", "wavlm.")


# transformers would draw masks and dropped layers from its own random generators. With masking
# probabilities of 0, the model has no mask vector, which some folders lack.
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
        config: content of its config.json.
    """

    path: Path
    config: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Folder:
        """Check a folder without building its model.

        Raises:
            UserError: if it holds no model of `KINDS` in safetensors.
        """
        folder = Path(path)
        where = folder / "config.json"
        if (folder / "adapter_config.json").exists():
            remedy = "merge the adapter into its model (peft: merge_and_unload), and save that"
            raise UserError("an adapter, not a model", path=folder, remedy=remedy)
        if not where.is_file():
            raise UserError("no pretrained model here", path=folder, remedy=_remedy(folder))
        config = read_object(where, _AGAIN)
        kind = config.get("model_type")
        if kind is None and (folder / "model.bin").exists():
            remedy = "convert it by fedtools import"
            raise UserError("a CTranslate2 model", path=folder, remedy=remedy)
        if not isinstance(kind, str) or kind not in KINDS:
            problem = f"a model of type {str(kind)[:40]!r}, not one of {', '.join(KINDS)}"
            raise UserError(problem, path=where)
        for key, problem, remedy in _REFUSED:
            if config.get(key):
                raise UserError(problem, path=where, remedy=remedy)
        if type(bins := config.get("num_mel_bins", 80)) is not int or not 1 <= bins <= 256:
            raise UserError(f"num_mel_bins is {bins!r}, not a number of filters", path=where)
        found = cls(folder, config)
        found.files()
        return found

    @property
    def kind(self) -> str:
        """Return the kind of model, a key of `KINDS`."""
        return str(self.config["model_type"])

    @property
    def inputs(self) -> str:
        """Return the kind of input, "log_mel" or "wave"."""
        return KINDS[self.kind]

    @property
    def bins(self) -> int:
        """Return the number of values per input frame."""
        return int(self.config.get("num_mel_bins", 80)) if self.inputs == "log_mel" else 1

    @cached_property
    def normalized(self) -> bool:
        """Return whether the model takes waveforms of zero mean and unit variance.

        Raises:
            UserError: if the model takes another sample rate than 16 kHz.
        """
        where, read = self.path / PREPROCESSOR, {}
        if where.is_file():
            read = read_object(where, _AGAIN)
        elif (self.path / PROCESSOR).is_file():
            # As transformers writes it since version 5.
            where = self.path / PROCESSOR
            read = read_object(where, _AGAIN).get("feature_extractor", {})
            if not isinstance(read, dict):
                raise UserError("feature_extractor is not a JSON object", path=where)
        if (rate := read.get("sampling_rate", RATE)) != RATE:
            raise UserError(f"audio at {rate!r} Hz; only {RATE} Hz is supported", path=where)
        if not isinstance(chosen := read.get("do_normalize", True), bool):
            raise UserError(f"do_normalize is {chosen!r}, neither true nor false", path=where)
        return chosen

    def files(self) -> list[Path]:
        """Return the paths of the weight files.

        Raises:
            UserError: if a file is missing or cut off, or the weights are pickled.
        """
        found = self._named()
        for path in found:
            _check_whole(path)
        return found

    def _named(self) -> list[Path]:
        if (self.path / TENSORS).is_file():
            return [self.path / TENSORS]
        if (self.path / INDEX).is_file():
            where = self.path / INDEX
            names = read_object(where, _AGAIN).get("weight_map")
            if not isinstance(names, dict) or not names:
                raise UserError("not an index of weights", path=where, remedy=_AGAIN)
            for name in (shards := sorted(set(map(str, names.values())))):
                if Path(name).name != name or not name.endswith(".safetensors"):
                    problem = f"{name!r} is not a safetensors file of this folder"
                    raise UserError(problem, path=where, remedy=_REMEDY)
                if not (self.path / name).is_file():
                    raise UserError(f"its file {name!r} is missing", path=where, remedy=_AGAIN)
            return [self.path / name for name in shards]
        for name, problem, remedy in _OTHERS:
            if found := sorted(self.path.glob(name)):
                raise UserError(problem, path=found[0], remedy=remedy)
        raise UserError("missing", path=self.path / TENSORS, remedy=_AGAIN)

    @cached_property
    def size(self) -> int:
        """Return the number of values of a position of the encoder's output."""
        return self._shape("encoder.layer_norm.weight")[0]

    @property
    def outputs(self) -> int:
        """Return the number of tokens of the decoder."""
        return self._shape("decoder.embed_tokens.weight")[0]

    @property
    def longest(self) -> int | None:
        """Return the most frames of an utterance; None for no bound."""
        if self.kind != "whisper":
            return None
        return 2 * self._shape("encoder.embed_positions.weight")[0]

    @cached_property
    def heads(self) -> list[str]:
        """Return the names of the weights of a head above the encoder, which is not used."""
        return sorted(name for name in self._shapes if name.startswith(_HEADS))

    def _shape(self, wanted: str) -> list[int]:
        """Return the shape of a weight, by its name without the prefix of a model with a head.

        Raises:
            UserError: if there is no such weight.
        """
        if wanted not in self._shapes:
            raise UserError(f"its weights lack {wanted!r}", path=self.path, remedy=_AGAIN)
        return self._shapes[wanted]

    @cached_property
    def _shapes(self) -> dict[str, list[int]]:
        """Return the shapes of the weights, by names without the prefix of a model with a head."""
        from safetensors import safe_open

        found = {}
        for path in self.files():
            with safe_open(path, "np") as weights:
                for name in weights.keys():  # noqa: SIM118
                    found[_bare(name)] = weights.get_slice(name).get_shape()
        return found

    @cached_property
    def sum(self) -> str:
        """Return the SHA-256 of weights and configuration, which identifies the model."""
        digest = hashlib.sha256(sha256_once(self.path / "config.json").encode())
        for file in self.files():
            digest.update(sha256_once(file).encode())
        if self.inputs == "wave":
            digest.update(b"normalized" if self.normalized else b"as it is")
        return digest.hexdigest()

    def sum_for(self, search: bool) -> str:
        """Return `sum`, for a model with a search together with that of the search's settings."""
        settings = self.path / SETTINGS
        if not search or not settings.is_file():
            return self.sum
        return hashlib.sha256(f"{self.sum} {sha256_once(settings)}".encode()).hexdigest()

    def load(self) -> PreTrainedModel:
        """Build the model in single precision and evaluation mode, without random masks or drops.

        Raises:
            UserError: if transformers is missing, or the weights do not match the architecture.
        """
        import torch

        transformers = import_transformers()
        check_sizes(self.kind, self.config, self._shapes, self.path / "config.json")
        names = {"whisper": "WhisperForConditionalGeneration", "wav2vec2": "Wav2Vec2Model"}
        names |= {"hubert": "HubertModel", "wavlm": "WavLMModel"}
        quiet = {} if self.kind == "whisper" else _DRAWS_NOTHING
        try:
            # What is drawn after this, such as a head, does not depend on transformers' own draws.
            with torch.random.fork_rng(devices=[]):
                model, info = getattr(transformers, names[self.kind]).from_pretrained(
                    self.path,
                    local_files_only=True,
                    use_safetensors=True,
                    trust_remote_code=False,
                    dtype=torch.float32,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    # Overrides config.json, which may name an implementation to download.
                    attn_implementation="eager" if self.kind == "wavlm" else "sdpa",
                    **quiet,
                )
        except Exception as error:
            problem = f"no model can be built: {' '.join(str(error).split())[:300]}"
            raise UserError(problem, path=self.path) from None
        for name, there, wanted in sorted(info["mismatched_keys"]):
            problem = f"{name!r} has shape {tuple(there)}, but {tuple(wanted)} by config.json"
            raise UserError(problem, path=self.path, remedy=_AGAIN)
        if missing := sorted(info["missing_keys"]):
            raise UserError(f"its weights lack {missing[0]!r}", path=self.path, remedy=_AGAIN)
        if more := sorted(filter(_is_of_model, info["unexpected_keys"])):
            problem = f"its weights have {more[0]!r}, which config.json does not"
            raise UserError(problem, path=self.path, remedy=_AGAIN)
        for name, value in model.state_dict().items():
            if value.is_floating_point() and not value.isfinite().all():
                problem = f"weight {name!r} has a NaN or infinity"
                raise UserError(
                    problem, path=self.path, remedy="take another model, or save it again"
                )
        return model.eval()


def _remedy(folder: Path) -> str:
    """Return what to give in place of a folder without config.json."""
    if not folder.exists():
        return f"nothing is downloaded: {_REMEDY}"
    if folder.is_file():
        return "give its folder, or convert a single file by fedtools import"
    # Newest first; the names of checkpoints end with their steps.
    for pattern, what in (("snapshots/*", "the hub's cache"), ("checkpoint-*", "a Trainer")):
        found = [path for path in folder.glob(pattern) if (path / "config.json").is_file()]
        if found:
            named = max(found, key=lambda path: (len(path.name) * (what == "a Trainer"), path.name))
            return f"a folder of {what}: give the model in it, such as {named}"
    if (folder / "model.bin").exists():
        return "convert it by fedtools import"
    below = sorted(path.parent for path in folder.glob("*/config.json"))
    return f"give the model in it, such as {below[0]}" if below else _REMEDY


def _check_whole(path: Path) -> None:
    """Raise a `UserError` unless a safetensors file has the length in its header."""
    from safetensors import SafetensorError, safe_open

    # Names a file that is missing, or that is a pointer to the file.
    open_input(path).close()
    try:
        with safe_open(path, "np"):
            pass
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        problem = f"not a whole safetensors file: {reason}"
        raise UserError(problem, path=path, remedy=_AGAIN) from None


def _is_of_model(name: str) -> bool:
    """Return whether a weight belongs to a part of the model, not to a head above it."""
    return _bare(name).startswith(_PARTS)


def _bare(name: str) -> str:
    """Return the name of a weight without the prefix of a model with a head."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def open_known(path: str | Path, known: str | None, search: bool = False) -> Folder:
    """Open a folder, and raise a `UserError` if `known` is given and is not its `sum_for`."""
    folder = Folder.open(path)
    if known not in (None, folder.sum_for(search)):
        remedy = "put the original back, or begin another experiment"
        problem = "not the pretrained model that the experiment began with"
        raise UserError(problem, path=folder.path, remedy=remedy)
    return folder


def with_sum(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section `model` of a configuration with the sum of its pretrained model added."""
    if not is_pretrained(model):
        return model
    search = is_seq2seq(model)
    folder = open_known(str(model.get("path", "")), model.get("sum"), search)
    return {**model, "sum": folder.sum_for(search)}


def import_transformers() -> Any:
    """Return the transformers library; raise a `UserError` that says what to install without it."""
    try:
        import transformers
    except ImportError:
        problem = "models of network hf need transformers"
        raise UserError(problem, remedy=INSTALL_PRETRAINED) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
