"""Options of the adaptation of a pretrained model: which part of it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from fedtools.core.config import AboveZero, Positive

# Suffixes of an adapter's tensors: its factors, and the matrix that the server adds to the weight.
FACTORS = (".lora_a", ".lora_b")
DELTA = ".lora_delta"

# Expected norm of a row of A at initialisation, which is uniform within 1 / sqrt(inputs).
ROW_NORM = 3**-0.5

# File in an experiment with the state of the model that is adapted.
BASE = "base.safetensors"
# Value of `network` of a model whose base is a Hugging Face folder.
NETWORK = "hf"

Combine = Literal["mean", "fixed_a", "svd", "residual"]
# Values of `combine` for which the server needs the products of the factors that clients send.
OF_PRODUCTS = ("svd", "residual")


@dataclass(frozen=True)
class Adapt:
    """The part of a pretrained model that is trained, in addition to its head.

    Attributes:
        kind: "lora", low-rank adapters; "bias", all biases; "head", only the head; "none", nothing,
            not even the head; "full", everything.
        rank, alpha: rank and scale of LoRA; the adapter's output is multiplied by alpha / rank.
        targets: patterns of the linear layers that get an adapter; a pattern that matches no linear
            layer selects convolutions. "*" leaves out an output layer that is tied to the table of
            tokens, Whisper's proj_out.
        also: patterns of parameters that are trained as they are, such as "*layer_norm*".
        combine: how the server combines clients' adapters B_k A_k, whose mean is not the product of
            the means of B_k and A_k: "mean", that product nevertheless (J. Zhang et al.: FedIT,
            ICASSP 2024); "fixed_a", A is drawn once, the same for all clients, and neither trained
            nor sent, so that the product is the mean (Y. Sun et al.: FFA-LoRA, ICLR 2024); "svd",
            the product of this rank that is nearest to the mean (J. Bai et al.: FlexLoRA, NeurIPS
            2024); "residual", the means of the factors, and the mean product minus the product of
            means is added to the frozen weight, so that the sum is exact; the server sends this
            matrix at full size (R. Singhal et al.: FedEx-LoRA, ACL 2025).
    """

    kind: Literal["lora", "bias", "head", "none", "full"] = "lora"
    rank: Positive = 8
    alpha: AboveZero = 16.0
    targets: tuple[str, ...] = ("*",)
    also: tuple[str, ...] = ()
    combine: Combine = "mean"

    def __post_init__(self) -> None:
        if self.combine != "mean" and self.kind != "lora":
            raise ValueError(f"combine: {self.combine} requires kind lora, not {self.kind}")

    def trains(self, name: str) -> bool:
        """Return whether a parameter of the model is trained as it is, without an adapter."""
        if self.kind == "full" or (self.kind == "bias" and _is_bias(name)):
            return True
        return any(fnmatchcase(name, pattern) for pattern in self.also)


def _is_bias(name: str) -> bool:
    # Recurrent layers have bias_ih and bias_hh.
    return name.rpartition(".")[2].startswith("bias")


def combine_of(model: Mapping[str, Any]) -> Combine:
    """Return `Adapt.combine` of the section `model` of a configuration."""
    adapt = model.get("adapt")
    # Values are checked where the section is parsed, where the file is known for messages.
    found: Combine = adapt.get("combine", "mean") if isinstance(adapt, Mapping) else "mean"
    return found


def has_base(model: Mapping[str, Any]) -> bool:
    """Return whether the section `model` describes a model that adapts a `BASE`, from `--start`."""
    return "adapt" in model and model.get("network") != NETWORK
