"""Sections of a recipe's YAML that its run.sh, and commands before an experiment exists, read.

Types, ranges and defaults are here; `fedtools config` checks a section and prints its values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from fedtools.core.ranges import AboveZero, Natural, NonNegative, Positive, Share

Order = Annotated[int, Ge(2), Le(6)]
TokenType = Literal["bpe", "char"]


@dataclass(frozen=True)
class Tokens:
    """Options of `fedtools train-tokens`.

    Attributes:
        token_type: byte pair encoding, or characters.
        vocab_size: number of tokens; needed for BPE, and null is all of the characters.
    """

    token_type: TokenType = "bpe"
    vocab_size: Annotated[int, Ge(4)] | None = None


@dataclass(frozen=True)
class Ngram:
    """Options of `fedtools train-lm`.

    Attributes:
        order: words of the longest n-gram.
    """

    order: Order = 4


@dataclass(frozen=True)
class Denominator:
    """Options of `fedtools train-denominator`.

    Attributes:
        order: tokens of the longest n-gram.
        max_histories: the largest number of histories that are kept.
    """

    order: Annotated[int, Ge(1), Le(4)] = 3
    max_histories: Natural = 2000


@dataclass(frozen=True)
class Ivectors:
    """Options of `fedtools train-ivectors`.

    Attributes:
        gaussians: Gaussians of the background model.
        dimension: values of an i-vector.
        hours: the most hours of speech to train on, drawn at random.
    """

    gaussians: Annotated[int, Ge(1), Le(4096)] = 512
    dimension: Annotated[int, Ge(1), Le(1000)] = 100
    hours: NonNegative = 10.0


@dataclass(frozen=True)
class Bootstrap:
    """Options of all bootstrap intervals; they are in no YAML, since no model depends on them."""

    resamples: Annotated[int, Ge(1), Le(100_000)] = 1000


@dataclass(frozen=True)
class Newcomers:
    """Options of newcomers, speakers without training data, in the recipe asr1.

    Attributes:
        epochs: epochs of adaptation, by `fedtools adapt`.
        seconds: the length of a newcomer's first speech, to which its model is adapted.
    """

    epochs: Positive = 10
    seconds: Annotated[float, Ge(0.1)] = 60


@dataclass(frozen=True)
class Corpus:
    """Options of the recipe asr1: the amounts of speech of clients and server.

    Attributes:
        hours: train, valid and test hours of all clients together, or their ratio.
        server_hours: the same for the server's own data; empty: as `hours`.
        server_fraction: the server's share of the speakers, if clients may have any accent.
    """

    hours: tuple[AboveZero, ...] = (100, 10, 10)
    server_hours: tuple[AboveZero, ...] = ()
    server_fraction: Share = 0.4

    def __post_init__(self) -> None:
        for name, found in (("hours", self.hours), ("server_hours", self.server_hours)):
            if len(found) != 3 and (found or name == "hours"):
                wanted = "three are expected, for train, valid and test"
                raise ValueError(f"option {name!r} has {len(found)} values: {wanted}")


@dataclass(frozen=True)
class Clips:
    """Options of the recipe kws1.

    Attributes:
        clip_seconds: the length of a clip; longer ones are cut, and shorter ones padded.
        min_clips: the minimum number of clips of a client; smaller clients are not trained on.
        paper_min_clips: the same with --split paper.
    """

    clip_seconds: Annotated[float, Ge(0.1), Le(60)] = 1
    min_clips: Positive = 1
    paper_min_clips: Positive = 5


@dataclass(frozen=True)
class Landscape:
    """Options of kws1's figure of the accuracy between a model and the models of two clients.

    Attributes:
        min_clips: the minimum number of clips of either client.
        epochs: epochs of training of each client.
        points: points of the grid, in each direction.
        clips: the maximum number of clips, drawn at random, to measure accuracy on.
    """

    min_clips: Positive = 10
    epochs: Positive = 20
    points: Annotated[int, Ge(2)] = 13
    clips: Positive = 500


@dataclass(frozen=True)
class Rows:
    """Options of the recipe kws1: its rows, and what it makes of them; run.sh's options override.

    Attributes:
        corpus: the corpus if db.sh names none: "mini", synthesised, or "own", in the repository.
        tasks: keywords, words.
        methods: of the rows of clients, and of centralised training.
        seeds: random seeds of training.
        server_clips: numbers of clips of a server that trains alone, a row for each.
        dimension: values of the projection of networks with `normalise: projection`, which is
            fitted on the most of the server's clips.
        figures: figures of stage 6.
    """

    corpus: Literal["mini", "own"] = "mini"
    tasks: tuple[Literal["keywords", "words"], ...] = ("keywords",)
    methods: tuple[str, ...] = ("centralized", "fedavg", "alt", "fedkws_ui")
    seeds: tuple[Natural, ...] = (0,)
    server_clips: tuple[Positive, ...] = ()
    dimension: Positive = 128
    figures: tuple[Literal["clients", "landscape"], ...] = ("clients", "landscape")


@dataclass(frozen=True)
class Rescoring:
    """Options of the recipe rescore1.

    Attributes:
        rounds: T of each federation, the number of rounds in which clients send counts.
        rates: learning rates of federated fine-tuning, one of which validation data choose.
        bonuses: bonuses of private words in the first pass, one of which validation data choose.
        listed: T of the lists of private words, from transcripts of the first of T + 1 groups.
        dp: mechanism of the federation with differential privacy, or none.
        dp_unit: the unit that epsilon protects.
        epsilon: the epsilon of all releases together; smaller values protect more.
        draws: draws of noise for each setting of differential privacy that is tried in memory.
        synthetic_order: order of the n-gram if a synthesiser speaks the corpus' words.
        dev_meetings: meetings of dev that the synthesiser speaks.
    """

    rounds: tuple[Positive, ...] = (1, 2, 5, 10)
    rates: tuple[AboveZero, ...] = (1e-4, 3e-4, 1e-3, 3e-3)
    bonuses: tuple[NonNegative, ...] = (1, 2, 4, 6, 8)
    listed: Positive = 3
    dp: Literal["laplace", "paper", "none"] = "laplace"
    dp_unit: Literal["word", "utterance", "user"] = "utterance"
    epsilon: AboveZero = 8
    draws: Positive = 20
    synthetic_order: Order = 5
    dev_meetings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sets:
    """Options of the recipe attack1: the sets of speakers, and their amounts of speech.

    Attributes:
        partition: the partition of the corpus itself.
        unit: the unit that counts as a speaker.
        hours_g: hours of training speech of the global model.
        seconds_per_model: seconds of training speech of a personalised model.
        valid_share: share of Train-G's utterances that is held out for validation.
        held_seconds: seconds of held-out speech of each speaker in a part, for evaluation.
    """

    partition: Literal["legacy", "speaker-adaptation"] = "speaker-adaptation"
    unit: Literal["person", "talk"] = "person"
    hours_g: AboveZero = 200
    seconds_per_model: AboveZero = 240
    valid_share: Share = 0.02
    held_seconds: NonNegative = 10


@dataclass(frozen=True)
class PretrainedModel:
    """Options of recipes with a pretrained model.

    Attributes:
        whisper: the model that `utils/whisper.sh` fetches if the user names no folder.
    """

    whisper: Literal["none", "tiny.en", "base"] = "none"


@dataclass(frozen=True)
class Estimate:
    """What a recipe says before it starts: measured with this file, all else by default.

    Attributes:
        minutes: time on two idle cores, without set-up and the build of lmplz.
        fetches: what is downloaded, and its size.
        disk_gb: what data/, dump/, exp/ and downloads/ hold at the end.
    """

    minutes: AboveZero | None = None
    fetches: str = "nothing"
    disk_gb: AboveZero | None = None


SECTIONS: dict[str, type] = {
    "estimate": Estimate,
    "pretrained": PretrainedModel,
    "tokens": Tokens,
    "lm": Ngram,
    "denominator": Denominator,
    "ivectors": Ivectors,
    "newcomers": Newcomers,
    "corpus": Corpus,
    "clips": Clips,
    "landscape": Landscape,
    "rows": Rows,
    "rescoring": Rescoring,
    "sets": Sets,
}
