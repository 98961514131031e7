"""The options of a pretrained model, in the section `model` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from fedtools.files.config import Positive, Share, from_mapping, option_error
from fedtools.models.adaptation import NETWORK, Adapt


@dataclass(frozen=True)
class Pretrained:
    """What `model: {network: hf, ...}` may say.

    Attributes:
        path: a Hugging Face folder.
        sum: its `Folder.sum`, which `fedtools init` writes.
        adapt: fields of `Adapt`.
        criterion: of speech recognition, what is trained: "ctc", a layer on the encoder; "seq2seq",
            Whisper itself with its decoder and its tokens.
        language: of Whisper of many languages, that of speech whose utt2lang says none.
        window: of Whisper, seconds: silence is put behind an utterance up to a multiple of it. In
            short windows its decoder repeats itself, until it was trained in them. By default 10
            of criterion "seq2seq", otherwise 1.
        head_share: of keywords, see `fedtools.models.keywords.base.Sizes`.
        specaug, specaug_conf: of speech recognition, in ESPnet's keys.
        cache_frozen: the outputs of the layers at the bottom that are all frozen are computed once
            and kept on disk, see `fedtools.files.frozen`.
        cache_dtype: of what is kept.
        cache_limit: megabytes that may be kept, of all splits together.
    """

    network: Literal["hf"]
    path: str
    sum: str | None = None
    adapt: dict[str, Any] = field(default_factory=dict)
    criterion: Literal["ctc", "seq2seq"] = "ctc"
    language: str | None = None
    window: Annotated[int, Ge(1), Le(30)] | None = None
    head_share: Share = 0.0
    specaug: str | None = None
    specaug_conf: dict[str, Any] = field(default_factory=dict)
    cache_frozen: bool = False
    cache_dtype: Literal["float32", "float16"] = "float32"
    cache_limit: Positive = 20_000

    def __post_init__(self) -> None:
        from_mapping(Adapt, self.adapt, "adapt")
        if self.cache_frozen and self.specaug:
            raise ValueError("cache_frozen: specaug changes what would be kept: leave one out")

    @cached_property
    def adaptation(self) -> Adapt:
        """What is trained."""
        return from_mapping(Adapt, self.adapt, "adapt")

    def seconds(self, kind: str, where: str | Path) -> int:
        """The window of a model of this kind; see `Folder.kind`.

        Raises:
            UserError: if one is given for a model that has none.
        """
        if self.window and kind != "whisper":
            raise option_error(f"window: {kind} has none", where, "window", self.window)
        return self.window or (10 if self.criterion == "seq2seq" else 1)


def is_pretrained(config: Mapping[str, Any]) -> bool:
    """Whether the section `model` is of a pretrained model."""
    return config.get("network") == NETWORK


def is_seq2seq(config: Mapping[str, Any]) -> bool:
    """Whether it is of a model with a decoder and tokens of its own."""
    return is_pretrained(config) and config.get("criterion") == "seq2seq"
