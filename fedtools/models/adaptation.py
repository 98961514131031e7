"""Options: what of a pretrained model is trained."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from fedtools.files.config import AboveZero, Positive


@dataclass(frozen=True)
class Adapt:
    """What of a pretrained model is trained, beside a head that it was given.

    Attributes:
        kind: "lora", adapters of low rank; "bias", all biases; "head", the head alone; "none",
            nothing, the head neither; "full", everything.
        rank, alpha: of LoRA; the adapter's output is multiplied by alpha / rank.
        targets: patterns of the linear layers that get one.
        also: patterns of parameters that are trained as they are, such as "*layer_norm*".
    """

    kind: Literal["lora", "bias", "head", "none", "full"] = "lora"
    rank: Positive = 8
    alpha: AboveZero = 16.0
    targets: tuple[str, ...] = ("*",)
    also: tuple[str, ...] = ()

    def trains(self, name: str) -> bool:
        """Whether a parameter of the model is trained as it is."""
        if self.kind == "full" or (self.kind == "bias" and name.split(".")[-1] == "bias"):
            return True
        return any(fnmatchcase(name, pattern) for pattern in self.also)
