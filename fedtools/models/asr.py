"""The acoustic model: ESPnet's convolutions and encoder blocks with CTC, in ESPnet's keys.

Zhu et al. (Interspeech 2022), section 3.1: two convolutions and 14 transformer blocks. ESPnet's
own classes are built directly: `espnet2.tasks` would import audio packages that are not needed.
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

from fedtools.files.config import checked, option_error, unknown
from fedtools.files.errors import UserError
from fedtools.models.criteria import Ctc, LatticeFree
from fedtools.models.padding import keep_to_own_frames
from fedtools.models.pretrained.folder import Folder
from fedtools.models.pretrained.options import is_pretrained, is_seq2seq
from fedtools.models.tdnn import TdnnEncoder

if TYPE_CHECKING:
    from fedtools.models.lfmmi.lattice import Lattice

# What a key of the configuration may name; the first where a model must have one.
_CLASSES = {
    "encoder": {
        "transformer": "espnet2.asr.encoder.transformer_encoder:TransformerEncoder",
        "conformer": "espnet2.asr.encoder.conformer_encoder:ConformerEncoder",
        "branchformer": "espnet2.asr.encoder.branchformer_encoder:BranchformerEncoder",
        "tdnn": "fedtools.models.tdnn:TdnnEncoder",
    },
    "normalize": {
        "utterance_mvn": "fedtools.models.padding:OwnUtteranceMVN",
        "global_mvn": "espnet2.layers.global_mvn:GlobalMVN",
    },
    "specaug": {"specaug": "espnet2.asr.specaug.specaug:SpecAug"},
    "ctc": {"ctc": "espnet2.asr.ctc:CTC"},
    "model": {
        "model": "espnet2.asr.espnet_model:ESPnetASRModel",
        "adapted": "fedtools.models.adapted:AdaptedModel",
    },
}
_OPTIONAL = ("normalize", "specaug")
_DEFAULTS = {"model": {"ctc_weight": 1.0, "report_cer": False, "report_wer": False}}
# Long enough for every convolution, and for SpecAugment's masks and warping to have room.
TRIAL_FRAMES = 200
# ESPnet's default of input_size: values of a frame.
INPUT_SIZE = 80

# The keys of ESPnet's config.yaml that make a CTC model on features from disk.
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


# Beside ESPnet's keys: what a model is trained with, CTC or lattice-free MMI; and which part.
_OWN_KEYS = ("criterion", "adapt")
CRITERIA = ("ctc", "lfmmi")


def build_model(
    config: Mapping[str, Any],
    tokens: Sequence[str],
    where: str = "model",
    lattice: Lattice | None = None,
    base: Path | None = None,
) -> nn.Module:
    """Build ESPnet's ASR model with CTC alone; parameters are drawn from torch's generator.

    Args:
        config: ESPnet's keys, see `KEYS`.
        tokens: the token list, "<blank>" first.
        where: what the configuration was read from, for messages.
        lattice: of criterion "lfmmi"; the layer of CTC then has its scores.
        base: of a model with `adapt`: the state of the model that is adapted.

    Returns:
        an `espnet2.asr.espnet_model.ESPnetASRModel` without decoder, or a pretrained one; what it
        is trained with is `model.criterion`, see `fedtools.models.criteria`.

    Raises:
        UserError: for an unknown key, class or argument, or one with which nothing can be trained.
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
        problem = f"option 'input_size' is {input_size!r}, no number of filters"
        raise option_error(problem, where, "input_size", input_size)
    conf = config.get("model_conf")
    if isinstance(conf, Mapping) and (weight := conf.get("interctc_weight")):
        problem = "interctc_weight: no loss of intermediate layers is trained"
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
        from fedtools.models.adapted import adapt_model

        adapt_model(base, model, config, where)
    _try(model, input_size, where)
    return model


def _build_pretrained(
    config: Mapping[str, Any], tokens: Sequence[str], where: str, lattice: Lattice | None
) -> nn.Module:
    from fedtools.models.pretrained.ctc import PretrainedCtc
    from fedtools.models.pretrained.whisper import Whisper

    if lattice:
        problem = "a denominator is of criterion lfmmi, which models of network hf have not"
        raise option_error(problem, where, "network")
    specaug = _make(config, "specaug", where)
    if is_seq2seq(config):
        return Whisper(config, where, specaug)
    model = PretrainedCtc(config, len(tokens), where, specaug)
    _try(model, input_size_of(config), where)
    return model


def input_size_of(config: Mapping[str, Any]) -> int:
    """Values of a frame of a model's input."""
    if is_pretrained(config):
        return Folder.open(config.get("path", "")).bins
    size: int = config.get("input_size", INPUT_SIZE)
    return size


def input_kind_of(config: Mapping[str, Any]) -> str | None:
    """The kind of features that a pretrained model takes, of `extract-features`; None: any."""
    return Folder.open(config.get("path", "")).inputs if is_pretrained(config) else None


def criterion_of(config: Mapping[str, Any], where: str | Path) -> str:
    """What a model is trained with, one of `CRITERIA`."""
    criterion = config.get("criterion", CRITERIA[0])
    if criterion not in CRITERIA:
        problem = f"criterion: {unknown(str(criterion), CRITERIA)}"
        raise option_error(problem, where, "criterion", criterion)
    return criterion


def log_posteriors(
    model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log posteriors as of CTC, natural log: (batch, frames', tokens), and numbers of frames'.

    Args:
        batch: `speech` (batch, frames, bins), zero-padded, and `speech_lengths`.
    """
    values, lengths = outputs(model, batch)
    return as_posteriors(model, values, lengths), lengths


def outputs(
    model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the criterion is of, and numbers of frames': CTC's log posteriors, or LF-MMI's scores.

    Arguments and shapes as of `log_posteriors`.
    """
    features, lengths = represent(model, batch)
    return classify(model, features), lengths


def represent(
    model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the encoder makes of a batch: (batch, frames', size), and numbers of frames'.

    Arguments as of `log_posteriors`; or `hidden`, what a frozen bottom made of `speech`.
    """
    if "hidden" in batch:
        lengths = batch["speech_lengths"]
        return model.encoder.upper(batch["hidden"], lengths, model.depth), lengths
    # SpecAugment and global_mvn work in place: without the copy a second pass over the same batch
    # would see another input.
    encoded, lengths, *_ = model.encode(batch["speech"].clone(), batch["speech_lengths"])
    # With intermediate CTC, its layers' outputs come after the encoder's.
    return encoded[0] if isinstance(encoded, tuple) else encoded, lengths


def classify(model: nn.Module, features: torch.Tensor) -> torch.Tensor:
    """What the criterion is of, of what `represent` gave: (batch, frames', outputs)."""
    found: torch.Tensor = model.criterion.classify(features)
    return found


def as_posteriors(model: nn.Module, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """What `log_posteriors` gives, of what `outputs` gave."""
    found: torch.Tensor = model.criterion.posteriors(values, lengths)
    return found


def losses(
    model: nn.Module,
    values: torch.Tensor,
    lengths: torch.Tensor,
    batch: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """The criterion of each utterance, natural log, summed over its frames: shape (batch,).

    Args:
        values, lengths: what `outputs` gave.
        batch: `text` (batch, tokens; padded with -1) and `text_lengths`.
    """
    found: torch.Tensor = model.criterion.losses(values, lengths, batch)
    return found


def shortest_input(model: nn.Module) -> int:
    """The smallest number of frames that the convolutions still accept."""
    from espnet.nets.pytorch_backend.transformer.subsampling import check_short_utt

    if shortest := getattr(model.encoder, "shortest", 0):
        return int(shortest)
    embed = getattr(model.encoder, "embed", None)
    return next(frames for frames in range(1, 64) if not check_short_utt(embed, frames)[0])


def longest_input(model: nn.Module) -> int | None:
    """The largest number of frames that the encoder accepts; None: any."""
    return getattr(model.encoder, "longest", None)


def _make(config: Mapping, key: str, where: str, **given):
    """Build the class that `config[key]` names, `given` arguments and `config[key + "_conf"]`."""
    registry = _CLASSES[key]
    name = config.get(key, None if key in _OPTIONAL else next(iter(registry)))
    if name is None and key in _OPTIONAL:
        return None
    if not isinstance(name, str) or name not in registry:
        raise option_error(f"{key}: {unknown(name, registry)}", where, key, name)
    module, _, attribute = registry[name].partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    arguments = config.get(f"{key}_conf") or {}
    if not isinstance(arguments, Mapping):
        problem = f"{key}_conf is {arguments!r}, not a mapping of options"
        raise option_error(problem, where, f"{key}_conf", arguments)
    known = [name for name in inspect.signature(kind).parameters if name not in given]
    for argument in arguments:
        if argument not in known:
            problem = f"{key}_conf: {unknown(argument, known)}"
            raise option_error(problem, where, argument, arguments[argument])
    # ESPnet takes true for 1, and leaves many arguments to whoever uses them.
    hints = typing.get_type_hints(kind.__init__)
    for argument in arguments.keys() & hints.keys():
        checked(argument, arguments[argument], hints[argument], f"{where}: {key}_conf")
    try:
        return kind(**given, **{**_DEFAULTS.get(key, {}), **arguments})
    except Exception as error:
        raise option_error(f"{key}_conf: {_first_line(error)}", where, f"{key}_conf") from None


def _try(model: nn.Module, input_size: int, where: str) -> None:
    """Compute one loss: some odd options show only then. Model and generators stay as they are."""
    before = {name: value.clone() for name, value in model.named_buffers()}
    # Of waveforms a position alone has more samples.
    frames = max(TRIAL_FRAMES, getattr(model.encoder, "shortest", 0))
    length, speech = torch.tensor([frames]), torch.zeros(1, frames, input_size)
    text = torch.ones(1, 1, dtype=torch.long)
    with _quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            batch = {"speech": speech, "speech_lengths": length, "text": text}
            batch["text_lengths"] = torch.tensor([1])
            losses(model, *outputs(model, batch), batch)
        except Exception as error:
            problem = f"no model can be trained with these options: {_first_line(error)}"
            raise option_error(problem, where, "model") from None
    for name, value in model.named_buffers():
        value.copy_(before[name])


def _first_line(error: Exception) -> str:
    """ESPnet checks types and values by several exceptions; the user needs one line."""
    said = str(error).splitlines()
    return said[0] if said else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence ESPnet's notices while it builds: nothing in them could be mended by a user."""
    # One deprecation comes at every forward pass, long after the building.
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
