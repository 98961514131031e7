"""The options of a pretrained model, in the section `model`, and of the search with its decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from fedtools.core.config import (
    AboveZero,
    Natural,
    Positive,
    Share,
    from_mapping,
    option_error,
)
from fedtools.models.adapt.adaptation import NETWORK, Adapt

# Files of a projection, in the folder of the asset of this name and in an experiment.
ASSET = "projection"
PROJECTION, FITTED = "projection.safetensors", "projection.yaml"


@dataclass(frozen=True)
class Pretrained:
    """Options of the section `model: {network: hf, ...}`.

    Attributes:
        network: "hf", for a pretrained model.
        path: a Hugging Face folder.
        sum: the folder's `Folder.sum`, which `fedtools init` writes.
        adapt: fields of `Adapt`.
        criterion: for speech recognition, "ctc", a layer on the encoder; or "seq2seq", Whisper
            itself with its decoder and its tokens.
        language: for multilingual Whisper, the language of speech without one in utt2lang.
        window: for Whisper, seconds; silence is appended to an utterance up to a multiple of it. In
            short windows, Whisper's decoder repeats itself unless it was trained on them. The
            default is 10 for criterion "seq2seq", and 1 otherwise.
        normalise: for keywords, what the head's input goes through: "layer", a layer normalisation
            without parameters; "projection", the mean and the whitening of `fedtools
            fit-projection`, from the asset `projection`. Neither is trained or sent.
        specaug, specaug_conf: for speech recognition, with ESPnet's keys.
        cache_frozen: compute the outputs of the frozen layers at the bottom once, and cache them on
            disk, see `fedtools.exchange.layer_cache`.
        cache_dtype: type of the cached outputs.
        cache_limit: largest size of the outputs in megabytes, for all splits together.
    """

    network: Literal["hf"]
    path: str
    sum: str | None = field(default=None, metadata={"set_by": "fedtools init"})
    adapt: dict[str, Any] = field(default_factory=dict)
    criterion: Literal["ctc", "seq2seq"] = "ctc"
    language: str | None = None
    window: Annotated[int, Ge(1), Le(30)] | None = None
    normalise: Literal["none", "layer", "projection"] = "none"
    specaug: str | None = None
    specaug_conf: dict[str, Any] = field(default_factory=dict)
    cache_frozen: bool = False
    cache_dtype: Literal["float32", "float16"] = "float32"
    cache_limit: Positive = 20_000

    def __post_init__(self) -> None:
        from_mapping(Adapt, self.adapt, "adapt")
        if self.cache_frozen and self.specaug:
            raise ValueError("cache_frozen: specaug changes the cached outputs: leave one out")

    @cached_property
    def adaptation(self) -> Adapt:
        """Return the options that select the trained part."""
        return from_mapping(Adapt, self.adapt, "adapt")

    @property
    def is_head_on_cache(self) -> bool:
        """Return whether only the head is trained, if at all, on cached outputs of the encoder."""
        frozen = self.adaptation.kind in ("head", "none") and not self.adaptation.also
        return self.cache_frozen and frozen

    def seconds(self, kind: str, where: str | Path) -> int:
        """Return the window, in seconds, of a model of this kind (see `Folder.kind`).

        Raises:
            UserError: if a window is given for a kind of model without one.
        """
        if self.window and kind != "whisper":
            raise option_error(f"window: {kind} has no window", where, "window", self.window)
        return self.window or (10 if self.criterion == "seq2seq" else 1)


@dataclass(frozen=True)
class Generation:
    """Options of the search with Whisper's decoder.

    The last four are Whisper's own (Radford et al., ICML 2023, section 4.5), under its names.

    Attributes:
        beam: beam size; 1 is greedy search.
        nbest: number of hypotheses that are written, at most `beam`.
        no_repeat_ngram_size: what repeats itself is searched for again, so that no sequence of this
            many tokens comes twice (of letters, where a letter is several tokens); 0 keeps it.
        temperatures: while a hypothesis repeats itself or is improbable, another one is sampled, at
            each of these temperatures in turn; the same for an utterance each time.
        compression_ratio_threshold: a text that zlib makes shorter than this many times repeats
            itself, too; see `fedtools.decode.repetition`. None: any text.
        logprob_threshold: mean log probability of the tokens below which a hypothesis is
            improbable. None: none is.
        no_speech_threshold: probability of no speech above which an improbable hypothesis is
            replaced by the empty one. None: none is.
    """

    beam: Annotated[int, Ge(1), Le(100)] = 5
    nbest: Positive = 1
    no_repeat_ngram_size: Natural = 4
    temperatures: tuple[AboveZero, ...] = ()
    compression_ratio_threshold: AboveZero | None = 2.4
    logprob_threshold: Annotated[float, Le(0)] | None = -1.0
    no_speech_threshold: Share | None = None

    def __post_init__(self) -> None:
        if self.nbest > self.beam:
            raise ValueError(f"nbest {self.nbest} is more than beam {self.beam}")


def is_pretrained(config: Mapping[str, Any]) -> bool:
    """Return whether the section `model` describes a pretrained model."""
    return config.get("network") == NETWORK


def is_seq2seq(config: Mapping[str, Any]) -> bool:
    """Return whether the section `model` describes a model with its own decoder and tokens."""
    return is_pretrained(config) and config.get("criterion") == "seq2seq"


def part_kinds(model: Mapping[str, Any]) -> dict[str, type]:
    """Return the classes of the options of a pretrained model, and of what is trained of a model.

    Returns:
        the name of a section of an experiment's options -> its class.
    """
    if is_pretrained(model):
        return {"model": Pretrained, "model.adapt": Adapt}
    return {"model.adapt": Adapt} if "adapt" in model else {}
