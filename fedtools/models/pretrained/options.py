"""The options of a pretrained model, in the section `model` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from fedtools.files.config import Share, from_mapping
from fedtools.models.adaptation import Adapt

NETWORK = "hf"


@dataclass(frozen=True)
class Pretrained:
    """What `model: {network: hf, ...}` may say.

    Attributes:
        path: a Hugging Face folder.
        sum: its `Folder.sum`, which `fedtools init` writes.
        adapt: fields of `Adapt`.
        head_share: of keywords, see `fedtools.models.keywords.base.Sizes`.
        specaug, specaug_conf: of speech recognition, in ESPnet's keys.
    """

    network: Literal["hf"]
    path: str
    sum: str | None = None
    adapt: dict[str, Any] = field(default_factory=dict)
    head_share: Share = 0.0
    specaug: str | None = None
    specaug_conf: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from_mapping(Adapt, self.adapt, "adapt")

    @cached_property
    def adaptation(self) -> Adapt:
        """What is trained."""
        return from_mapping(Adapt, self.adapt, "adapt")


def is_pretrained(config: Mapping[str, Any]) -> bool:
    """Whether the section `model` is of a pretrained model."""
    return config.get("network") == NETWORK
