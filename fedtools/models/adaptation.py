"""Options: what is trained of a model that was trained before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from fedtools.files.config import AboveZero, Positive

# How the names of an adapter's tensors end: its factors, and what the server adds to the weight.
FACTORS = (".lora_a", ".lora_b")
DELTA = ".lora_delta"

# The name, in an experiment, of the state of the model that is adapted.
BASE = "base.safetensors"
# `network` of a model whose base is a folder.
NETWORK = "hf"

Combine = Literal["mean", "fixed_a", "svd", "residual"]
# Those in which the server needs the products of the factors that clients send.
OF_PRODUCTS = ("svd", "residual")


@dataclass(frozen=True)
class Adapt:
    """What of a pretrained model is trained, beside its head.

    Attributes:
        kind: "lora", adapters of low rank; "bias", all biases; "head", the head alone; "none",
            nothing, the head neither; "full", everything.
        rank, alpha: of LoRA; the adapter's output is multiplied by alpha / rank.
        targets: patterns of the linear layers that get one; a pattern that matches none is one of
            convolutions.
        also: patterns of parameters that are trained as they are, such as "*layer_norm*".
        combine: what the server makes of clients' adapters B_k A_k, whose mean is not the product
            of the means of B_k and A_k: "mean", that product all the same (J. Zhang et al.: FedIT,
            ICASSP 2024); "fixed_a", A is drawn once, the same for all, and neither trained nor
            sent, so that the product is the mean (Y. Sun et al.: FFA-LoRA, ICLR 2024); "svd", the
            product of this rank that is nearest to the mean (J. Bai et al.: FlexLoRA, NeurIPS
            2024); "residual", the means, and what their product lacks is added to the frozen
            weight, so that the sum is the mean; it is sent down whole (R. Singhal et al.:
            FedEx-LoRA, ACL 2025).
    """

    kind: Literal["lora", "bias", "head", "none", "full"] = "lora"
    rank: Positive = 8
    alpha: AboveZero = 16.0
    targets: tuple[str, ...] = ("*",)
    also: tuple[str, ...] = ()
    combine: Combine = "mean"

    def __post_init__(self) -> None:
        if self.combine != "mean" and self.kind != "lora":
            raise ValueError(f"combine: {self.combine} is of kind lora, not {self.kind}")

    def trains(self, name: str) -> bool:
        """Whether a parameter of the model is trained as it is."""
        if self.kind == "full" or (self.kind == "bias" and _is_bias(name)):
            return True
        return any(fnmatchcase(name, pattern) for pattern in self.also)


def _is_bias(name: str) -> bool:
    # Those of recurrent layers are bias_ih and bias_hh.
    return name.rpartition(".")[2].startswith("bias")


def combine_of(model: Mapping[str, Any]) -> Combine:
    """`Adapt.combine` of the section `model` of a configuration."""
    adapt = model.get("adapt")
    # Whether it is one is seen where the section is typed, which knows the file.
    found: Combine = adapt.get("combine", "mean") if isinstance(adapt, Mapping) else "mean"
    return found


def has_base(model: Mapping[str, Any]) -> bool:
    """Whether the section `model` is of a model that adapts what `--start` gave, a `BASE`."""
    return "adapt" in model and model.get("network") != NETWORK
