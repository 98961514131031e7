"""Sections of a recipe's YAML that commands before any experiment take: types and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

# Not those of `fedtools.files.config`, which imports PyYAML: the command line asks for defaults.
Natural = Annotated[int, Ge(0)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class Tokens:
    """Of `fedtools train-tokens`; BPE needs `vocab_size`, characters have all by default."""

    token_type: Literal["bpe", "char"] = "bpe"
    vocab_size: Annotated[int, Ge(4)] | None = None


@dataclass(frozen=True)
class Ngram:
    """Of `fedtools train-lm`: the longest n-gram."""

    order: Annotated[int, Ge(2), Le(6)] = 4


@dataclass(frozen=True)
class Denominator:
    """Of `fedtools train-denominator`: the longest n-gram of tokens, and how many are kept."""

    order: Annotated[int, Ge(1), Le(4)] = 3
    max_histories: Natural = 2000


@dataclass(frozen=True)
class Ivectors:
    """Of `fedtools train-ivectors`: of its background model, its output and its data."""

    gaussians: Annotated[int, Ge(1), Le(4096)] = 512
    dimension: Annotated[int, Ge(1), Le(1000)] = 100
    hours: NonNegative = 10.0


@dataclass(frozen=True)
class Newcomers:
    """Of `fedtools adapt`."""

    epochs: Positive


SECTIONS: dict[str, type] = {
    "tokens": Tokens,
    "lm": Ngram,
    "denominator": Denominator,
    "ivectors": Ivectors,
    "newcomers": Newcomers,
}
