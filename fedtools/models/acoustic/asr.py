"""The acoustic model: ESPnet's convolutions and encoder blocks with CTC, configured by its keys.

Zhu et al. (Interspeech 2022), section 3.1: two convolutions and 14 transformer blocks. ESPnet's
own classes are built directly, since `espnet2.tasks` would import audio packages that are not
needed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import logging
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedtools.core.config import checked, option_error, unknown
from fedtools.core.errors import UserError
from fedtools.models.acoustic.padding import keep_to_own_frames
from fedtools.models.acoustic.padding import positions as positions_of
from fedtools.models.acoustic.tdnn import TdnnEncoder
from fedtools.models.criteria import Criterion, Ctc, LatticeFree
from fedtools.models.pretrained.folder import Folder
from fedtools.models.pretrained.options import is_pretrained, is_seq2seq

if TYPE_CHECKING:
    from fedtools.models.lfmmi.lattice import Lattice

# Values of the keys of a configuration; the first is the default where a model must have one.
_CLASSES = {
    "encoder": {
        "transformer": "espnet2.asr.encoder.transformer_encoder:TransformerEncoder",
        "conformer": "espnet2.asr.encoder.conformer_encoder:ConformerEncoder",
        "branchformer": "espnet2.asr.encoder.branchformer_encoder:BranchformerEncoder",
        "tdnn": "fedtools.models.acoustic.tdnn:TdnnEncoder",
    },
    "normalize": {
        "utterance_mvn": "fedtools.models.acoustic.padding:OwnUtteranceMVN",
        "global_mvn": "espnet2.layers.global_mvn:GlobalMVN",
    },
    "specaug": {"specaug": "espnet2.asr.specaug.specaug:SpecAug"},
    "ctc": {"ctc": "espnet2.asr.ctc:CTC"},
    "model": {
        "model": "espnet2.asr.espnet_model:ESPnetASRModel",
        "adapted": "fedtools.models.adapt.adapted:AdaptedModel",
    },
}
_OPTIONAL = ("normalize", "specaug")
_DEFAULTS = {"model": {"ctc_weight": 1.0, "report_cer": False, "report_wer": False}}
# Long enough for every convolution, and for SpecAugment's masks and warping to have room.
PROBE_FRAMES = 200
# ESPnet's default of input_size, the values per frame.
INPUT_SIZE = 80

# Keys of ESPnet's config.yaml that define a CTC model on features from disk.
KEYS = (
    "input_size",
    "init",
    "specaug",
    "specaug_conf",
    "normalize",
    "normalize_conf",
    "encoder",
    "encoder_conf",
    "ctc_conf",
    "model_conf",
)


# Keys in addition to ESPnet's: the training criterion, and the part that is trained.
_OWN_KEYS = ("criterion", "adapt")
CRITERIA = ("ctc", "lfmmi")


def build_model(
    config: Mapping[str, Any],
    tokens: Sequence[str],
    where: str = "model",
    lattice: Lattice | None = None,
    base: Path | None = None,
) -> nn.Module:
    """Build ESPnet's ASR model with CTC only; parameters are drawn from torch's generator.

    Args:
        config: ESPnet's keys, see `KEYS`.
        tokens: the token list, "<blank>" first.
        where: source of the configuration, for messages.
        lattice: lattice of criterion "lfmmi", whose scores the CTC layer then computes.
        base: state of the model that is adapted, for a model with `adapt`.

    Returns:
        an `espnet2.asr.espnet_model.ESPnetASRModel` without decoder, or a pretrained model; its
        criterion is `model.criterion`, see `fedtools.models.criteria`.

    Raises:
        UserError: for an unknown key, class or argument, or one with which training is impossible.
    """
    if is_pretrained(config):
        return _build_pretrained(config, tokens, where, lattice)
    for key in config:
        if key not in (*KEYS, *_OWN_KEYS):
            raise option_error(unknown(key, (*KEYS, *_OWN_KEYS)), where, key, config[key])
    criterion = criterion_of(config, where)
    if (criterion == "lfmmi") != (lattice is not None):
        remedy = "give --asset denominator=FOLDER with criterion lfmmi, and only with it"
        raise UserError(f"criterion {criterion}", path=where, remedy=remedy)
    input_size = config.get("input_size", INPUT_SIZE)
    if type(input_size) is not int or not 0 < input_size <= 1 << 16:
        problem = f"option 'input_size' is {input_size!r}, not a number of filters"
        raise option_error(problem, where, "input_size", input_size)
    conf = config.get("model_conf")
    if isinstance(conf, Mapping) and (weight := conf.get("interctc_weight")):
        problem = "interctc_weight: losses of intermediate layers are not supported"
        raise option_error(problem, where, "interctc_weight", weight)
    with _quiet():
        encoder = _make(config, "encoder", where, input_size=input_size)
        if not isinstance(encoder, TdnnEncoder):
            keep_to_own_frames(encoder)
        outputs = lattice.outputs if lattice else len(tokens)
        ctc_conf = {"odim": outputs, "encoder_output_size": encoder.output_size()}
        model = _make(
            {**config, "model": "adapted" if "adapt" in config else "model"},
            "model",
            where,
            vocab_size=len(tokens),
            token_list=list(tokens),
            frontend=None,
            specaug=_make(config, "specaug", where),
            normalize=_make(config, "normalize", where),
            preencoder=None,
            encoder=encoder,
            postencoder=None,
            decoder=None,
            ctc=_make(config, "ctc", where, **ctc_conf),
            joint_network=None,
        )
    model.criterion = LatticeFree(model.ctc, lattice) if lattice else Ctc(model.ctc)
    _initialize(model, config.get("init"), where)
    if "adapt" in config:
        from fedtools.models.adapt.adapted import adapt_model

        adapt_model(base, model, config, where)
    _try(model, input_size, where)
    return model


def _build_pretrained(
    config: Mapping[str, Any], tokens: Sequence[str], where: str, lattice: Lattice | None
) -> nn.Module:
    from fedtools.models.pretrained.ctc import PretrainedCtc
    from fedtools.models.pretrained.whisper import Whisper

    if lattice:
        problem = "a denominator requires criterion lfmmi, which models of network hf do not have"
        raise option_error(problem, where, "network")
    if config.get("normalise", "none") != "none":
        problem = "normalise: only heads for keywords have it"
        raise option_error(problem, where, "normalise", config["normalise"])
    specaug = _make(config, "specaug", where)
    if is_seq2seq(config):
        return Whisper(config, where, specaug)
    model = PretrainedCtc(config, len(tokens), where, specaug)
    _try(model, input_size_of(config), where)
    return model


def input_size_of(config: Mapping[str, Any]) -> int:
    """Return the number of values per frame of a model's input."""
    if is_pretrained(config):
        return Folder.open(config.get("path", "")).bins
    size: int = config.get("input_size", INPUT_SIZE)
    return size


def input_kind_of(config: Mapping[str, Any]) -> str | None:
    """Return the kind of features (of `extract-features`) that a model takes; None for any."""
    return Folder.open(config.get("path", "")).inputs if is_pretrained(config) else None


def criterion_of(config: Mapping[str, Any], where: str | Path) -> str:
    """Return the training criterion of a model, one of `CRITERIA`."""
    criterion = config.get("criterion", CRITERIA[0])
    if criterion not in CRITERIA:
        problem = f"criterion: {unknown(str(criterion), CRITERIA)}"
        raise option_error(problem, where, "criterion", criterion)
    return criterion


def log_posteriors(
    model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return CTC log posteriors, natural log: (batch, frames', tokens), and numbers of frames'.

    Args:
        model: the model.
        batch: `speech` (batch, frames, bins), zero-padded, and `speech_lengths`.
    """
    values, lengths = outputs(model, batch)
    return as_posteriors(model, values, lengths), lengths


def outputs(
    model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the criterion's input, CTC log posteriors or LF-MMI scores, and numbers of frames'.

    Arguments and shapes are those of `log_posteriors`.
    """
    features, lengths = represent(model, batch)
    return classify(model, features), lengths


def represent(
    model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the encoder's output for a batch, (batch, frames', size), and numbers of frames'.

    Arguments are those of `log_posteriors`; `hidden`, the output of frozen bottom layers, may
    replace `speech`.
    """
    if "hidden" in batch:
        lengths = batch["speech_lengths"]
        return model.encoder.upper(batch["hidden"], lengths, model.depth), lengths
    # SpecAugment and global_mvn work in place: without the copy, a second pass over the same batch
    # would get another input.
    encoded, lengths, *_ = model.encode(batch["speech"].clone(), batch["speech_lengths"])
    # With intermediate CTC, its layers' outputs come after the encoder's.
    return encoded[0] if isinstance(encoded, tuple) else encoded, lengths


def classify(model: nn.Module, features: torch.Tensor) -> torch.Tensor:
    """Return the criterion's input, (batch, frames', outputs), from the output of `represent`."""
    found: torch.Tensor = model.criterion.classify(features)
    return found


def as_posteriors(model: nn.Module, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the result of `log_posteriors` from that of `outputs`."""
    found: torch.Tensor = model.criterion.posteriors(values, lengths)
    return found


def trained_by(model: nn.Module) -> Criterion:
    """Return a model's training criterion."""
    found: Criterion = model.criterion
    return found


def losses(
    model: nn.Module,
    values: torch.Tensor,
    lengths: torch.Tensor,
    batch: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Return each utterance's loss, natural log, summed over its frames: (batch,).

    Args:
        model: the model.
        values, lengths: the result of `outputs`.
        batch: `text` (batch, tokens; padded with -1) and `text_lengths`.
    """
    return trained_by(model).losses(values, lengths, batch)


def shortest_input(model: nn.Module) -> int:
    """Return the smallest number of frames that the convolutions accept."""
    from espnet.nets.pytorch_backend.transformer.subsampling import check_short_utt

    if shortest := getattr(model.encoder, "shortest", 0):
        return int(shortest)
    embed = getattr(model.encoder, "embed", None)
    return next(frames for frames in range(1, 64) if not check_short_utt(embed, frames)[0])


def positions(model: nn.Module, frames: Any) -> Any:
    """Return how many frames the criterion gets of an input of `frames`, or of an array of them."""
    own = getattr(model.encoder, "positions", None)
    return own(frames) if own else positions_of(model.encoder, frames)


def longest_input(model: nn.Module) -> int | None:
    """Return the largest number of frames that the encoder accepts; None for any."""
    return getattr(model.encoder, "longest", None)


def encoder_kinds(config: Mapping[str, Any]) -> dict[str, type]:
    """Return the classes of a model's encoder, normalisation and SpecAugment by their sections."""
    keys = [key for key in ("encoder", *_OPTIONAL) if key == "encoder" or config.get(key)]
    return {f"model.{key}_conf": _kind_of(config, key) for key in keys}


def _kind_of(config: Mapping[str, Any], key: str) -> type:
    """Return the class that `config[key]` names, or the default one."""
    module, _, attribute = _CLASSES[key][config.get(key) or next(iter(_CLASSES[key]))].partition(
        ":"
    )
    found: type = getattr(importlib.import_module(module), attribute)
    return found


def _make(config: Mapping, key: str, where: str, **given):
    """Build the class named `config[key]` from `given` and `config[key + "_conf"]`."""
    registry = _CLASSES[key]
    name = config.get(key, None if key in _OPTIONAL else next(iter(registry)))
    if name is None and key in _OPTIONAL:
        return None
    if not isinstance(name, str) or name not in registry:
        raise option_error(f"{key}: {unknown(name, registry)}", where, key, name)
    kind = _kind_of({key: name}, key)
    arguments = config.get(f"{key}_conf") or {}
    if not isinstance(arguments, Mapping):
        problem = f"{key}_conf is {arguments!r}, not a mapping of options"
        raise option_error(problem, where, f"{key}_conf", arguments)
    known = [name for name in inspect.signature(kind).parameters if name not in given]
    for argument in arguments:
        if argument not in known:
            problem = f"{key}_conf: {unknown(argument, known)}"
            raise option_error(problem, where, argument, arguments[argument])
    # ESPnet accepts true for 1, and leaves many arguments unchecked until they are used.
    hints = typing.get_type_hints(kind.__init__)
    for argument in arguments.keys() & hints.keys():
        checked(argument, arguments[argument], hints[argument], f"{where}: {key}_conf")
    try:
        return kind(**given, **{**_DEFAULTS.get(key, {}), **arguments})
    except Exception as error:
        problem = _misfit(arguments) if "attention_heads" in known else ""
        problem = f"{key}_conf: {problem or _first_line(error)}"
        raise option_error(problem, where, f"{key}_conf") from None


def _misfit(arguments: Mapping[str, Any]) -> str:
    """Return why the sizes of an encoder do not fit each other, of which ESPnet says nothing."""
    size, heads = arguments.get("output_size", 256), arguments.get("attention_heads", 4)
    if heads < 1 or (size % heads == 0 and size % 2 == 0):
        return ""
    return f"output_size {size} has to be an even multiple of attention_heads ({heads})"


def _try(model: nn.Module, input_size: int, where: str) -> None:
    """Compute one loss, as some bad options fail only then; keep the model and generators as is."""
    before = {name: value.clone() for name, value in model.named_buffers()}
    # With waveforms as input, one position alone needs more samples than the default.
    frames = max(PROBE_FRAMES, getattr(model.encoder, "shortest", 0))
    length, speech = torch.tensor([frames]), torch.zeros(1, frames, input_size)
    text = torch.ones(1, 1, dtype=torch.long)
    with _quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            batch = {"speech": speech, "speech_lengths": length, "text": text}
            batch["text_lengths"] = torch.tensor([1])
            losses(model, *outputs(model, batch), batch)
        except Exception as error:
            problem = f"training fails with these options: {_first_line(error)}"
            raise option_error(problem, where, "model") from None
    for name, value in model.named_buffers():
        value.copy_(before[name])


def _first_line(error: Exception) -> str:
    """Return the first line of an ESPnet error's message, or the error's type."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence ESPnet's notices while it builds a model: users could do nothing about them."""
    # One deprecation warning comes at every forward pass, long after the model is built.
    warnings.filterwarnings("ignore", category=FutureWarning, module="espnet2")
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _initialize(model: nn.Module, init: str | None, where: str) -> None:
    from espnet2.torch_utils.initialize import initialize

    if init is not None:
        try:
            initialize(model, init)
        except Exception:
            problem = f"init: unknown initialisation {init!r}"
            raise option_error(problem, where, "init", init) from None
