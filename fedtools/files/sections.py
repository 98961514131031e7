"""Sections of a recipe's YAML that its run.sh and commands before any experiment take.

Types, ranges and defaults are here; `fedtools config` checks a section and prints of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from fedtools.files.ranges import AboveZero, Natural, NonNegative, Positive, Share

Order = Annotated[int, Ge(2), Le(6)]
TokenType = Literal["bpe", "char"]


@dataclass(frozen=True)
class Tokens:
    """Of `fedtools train-tokens`; BPE needs `vocab_size`, characters have all by default."""

    token_type: TokenType = "bpe"
    vocab_size: Annotated[int, Ge(4)] | None = None


@dataclass(frozen=True)
class Ngram:
    """Of `fedtools train-lm`: the longest n-gram."""

    order: Order = 4


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
class Bootstrap:
    """Of all intervals by the bootstrap; of no YAML, since no model depends on it."""

    resamples: Annotated[int, Ge(1), Le(100_000)] = 1000


@dataclass(frozen=True)
class Newcomers:
    """Of speakers that no training has heard, in the recipe asr1.

    Attributes:
        epochs: of adaptation, by `fedtools adapt`.
        seconds: of its own speech to which a newcomer's model is adapted, the first.
    """

    epochs: Positive = 10
    seconds: Annotated[float, Ge(0.1)] = 60


@dataclass(frozen=True)
class Corpus:
    """Of the recipe asr1: how much speech is whose.

    Attributes:
        hours: train, valid and test hours of all clients together, or their ratio.
        server_hours: the same of the server's own data; none: as `hours`.
        server_fraction: of the speakers, who are the server's, where clients' accents are any.
    """

    hours: tuple[AboveZero, ...] = (100, 10, 10)
    server_hours: tuple[AboveZero, ...] = ()
    server_fraction: Share = 0.4

    def __post_init__(self) -> None:
        for name, found in (("hours", self.hours), ("server_hours", self.server_hours)):
            if len(found) != 3 and (found or name == "hours"):
                said = "three are wanted, for train, valid and test"
                raise ValueError(f"option {name!r} has {len(found)} values: {said}")


@dataclass(frozen=True)
class Clips:
    """Of the recipe kws1.

    Attributes:
        clip_seconds: the length of a clip: longer ones are cut, and shorter ones filled up.
        min_clips: smaller clients are left out of training.
        paper_min_clips: the same with --split paper.
    """

    clip_seconds: Annotated[float, Ge(0.1), Le(60)] = 1
    min_clips: Positive = 1
    paper_min_clips: Positive = 5


@dataclass(frozen=True)
class Landscape:
    """Of kws1's figure of the accuracy between a model and what two clients make of it.

    Attributes:
        min_clips: the clients are of those with so many clips.
        epochs: of each client.
        points: of the grid, in each direction.
        clips: accuracy is measured on so many at most, drawn at random.
    """

    min_clips: Positive = 10
    epochs: Positive = 20
    points: Annotated[int, Ge(2)] = 13
    clips: Positive = 500


@dataclass(frozen=True)
class Rescoring:
    """Of the recipe rescore1.

    Attributes:
        rounds: T, how often clients send their counts, of each federation.
        rates: of federated fine-tuning, of which validation data choose one.
        bonuses: of private words in the first pass, of which validation data choose one.
        listed: private words are of the transcripts of the first of so many + 1 groups.
        dp: mechanism of the federation with differential privacy, or none.
        dp_unit: what epsilon is promised for.
        epsilon: of all its releases together; a small one protects more.
        draws: of noise, for each setting of differential privacy that is tried in memory.
        density_order: of the n-gram of the density ratio.
        synthetic_order: of the n-gram where a synthesiser speaks the corpus' words.
        dev_meetings: of dev, which it speaks.
    """

    rounds: tuple[Positive, ...] = (1, 2, 5, 10)
    rates: tuple[AboveZero, ...] = (1e-4, 3e-4, 1e-3, 3e-3)
    bonuses: tuple[NonNegative, ...] = (1, 2, 4, 6, 8)
    listed: Positive = 3
    dp: Literal["laplace", "paper", "none"] = "laplace"
    dp_unit: Literal["word", "utterance", "user"] = "utterance"
    epsilon: AboveZero = 8
    draws: Positive = 20
    density_order: Order = 2
    synthetic_order: Order = 5
    dev_meetings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sets:
    """Of the recipe attack1: who is in which set, and with how much speech.

    Attributes:
        partition: of the corpus itself.
        unit: what a speaker is.
        hours_g: of speech that the global model is trained on.
        seconds_per_model: of speech that a personalised model is trained on.
        valid_share: of Train-G's utterances, to tune by and to measure.
        held_seconds: of speech of a part's speaker that none of its models has, to measure on.
    """

    partition: Literal["legacy", "speaker-adaptation"] = "speaker-adaptation"
    unit: Literal["person", "talk"] = "person"
    hours_g: AboveZero = 200
    seconds_per_model: AboveZero = 240
    valid_share: Share = 0.02
    held_seconds: NonNegative = 10


@dataclass(frozen=True)
class PretrainedModel:
    """Of recipes: the model that `utils/whisper.sh` fetches where the user names no folder."""

    whisper: Literal["none", "tiny.en", "base"] = "none"


SECTIONS: dict[str, type] = {
    "pretrained": PretrainedModel,
    "tokens": Tokens,
    "lm": Ngram,
    "denominator": Denominator,
    "ivectors": Ivectors,
    "newcomers": Newcomers,
    "corpus": Corpus,
    "clips": Clips,
    "landscape": Landscape,
    "rescoring": Rescoring,
    "sets": Sets,
}
