"""The options of attacks: sections of a recipe's YAML, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from fedtools.files.ranges import AboveZero, Natural, Positive

# As `fedtools.attack.layers.PARTS`, which imports torch: of a TDNN's layers, affine, relu, what
# follows it, or norm, BatchNorm behind that.
Part = Literal["affine", "relu", "norm"]
# See `fedtools.attack.a1`.
Score = Literal["literal", "unit", "cohort"]
# Trials of two speakers, in either attack on models.
_TRIALS = 10_000
# Of people's classes, in the attack on attributes.
PERMUTATIONS = 20
Weight = Annotated[float, Ge(0), Lt(1e9)]


@dataclass(frozen=True)
class A1:
    """Of attack A1.

    Attributes:
        alpha: weights of the distance of means and of that of deviations in equation 4.
        parts: of a TDNN's layers, where a recipe takes activations.
        scores: "literal", equation 4 as it is written; "unit", of vectors of unit length, which is
            the other reading of "L2-normalised"; "cohort", cosines that other speakers' models
            centre and norm.
        others: trials of two speakers; 0: all there are.
    """

    alpha: tuple[Weight, Weight] = (1.0, 10.0)
    parts: tuple[Part, ...] = ("affine", "relu")
    scores: tuple[Score, ...] = ("literal",)
    others: Natural = _TRIALS

    def __post_init__(self) -> None:
        if not any(self.alpha):
            raise ValueError("option 'alpha' is [0, 0]: one weight must be above 0")
        if not self.scores or len(set(self.scores)) < len(self.scores):
            raise ValueError("option 'scores' must be some of literal, unit, cohort, each once")


@dataclass(frozen=True)
class A2:
    """Of attack A2.

    Attributes:
        network: share of the people whose speakers are known that the network is trained on; LDA,
            PLDA, cohort and calibration are of the others, whom it has never seen.
        width: of the network's layers; the fifth is three times as wide.
        epochs: how often each model meets each utterance of the Indicator.
        utterances: of a step, each through all models that are held.
        frames: of an utterance's difference that a step sees, at most.
        rate: of Adam.
        held: models in memory at a time; a training step is of all of them, so that with another
            number another network is trained.
        dimension: to which LDA brings embeddings, at most; fewer where there are few speakers.
        layers: hidden ones that a recipe looks at, each by an attack of its own.
        others: as of attack A1.
    """

    network: Annotated[float, Gt(0), Lt(1)] = 0.5
    width: Annotated[int, Ge(2)] = 512
    epochs: Positive = 5
    utterances: Positive = 4
    frames: Positive = 200
    rate: AboveZero = 1e-3
    held: Annotated[int, Ge(2)] = 16
    dimension: Annotated[int, Ge(2)] = 150
    layers: tuple[Positive, ...] = (1, 5)
    others: Natural = _TRIALS


@dataclass(frozen=True)
class SentFeatures:
    """Of the attacks on features.

    Attributes:
        utterances: of a client, at most; drawn at random.
        epochs: of the decoder of attack IV.
    """

    utterances: Annotated[int, Ge(2)] = 2000
    epochs: Positive = 20


@dataclass(frozen=True)
class Weights:
    """Of the attack on what clients changed of the weights.

    Attributes:
        constant: the first and the last value of a frame that are the same in all of a client's
            input, from 1, such as [41, 140] of i-vectors behind 40 cepstra; [0, 0]: those that are
            so in the training data.
        scores: which are kept for each trial: "whole", of all weights together, the regression, and
            what is read out; or "parts", of each part, too: half a megabyte for 10,000 trials.
        piece_mb: of all models' values that are in memory at a time; as much is being read.
        others: as of attack A1; and pairs of two speakers that a regression is trained on.
    """

    constant: tuple[Natural, Natural] = (0, 0)
    scores: Literal["whole", "parts"] = "whole"
    piece_mb: Positive = 64
    others: Natural = _TRIALS

    def __post_init__(self) -> None:
        first, last = self.constant
        if any(self.constant) and not 0 < first <= last:
            problem = "must be a first and a last value, from 1"
            raise ValueError(f"option 'constant' is {list(self.constant)}: {problem}")


@dataclass(frozen=True)
class Updates:
    """Of what recipes try on the updates of an experiment.

    Attributes:
        defences: of clients, without any first, which others are compared with.
        each: utterances or clips of a client whose membership is attacked, at most.
        references: other clients whose models are references, at most; never more than half of all.
        shadows: pairs of models that the attacker trains for each client, as the client trains; 0:
            none, and there are no scores of models that had an utterance.
        held: splits of the experiment's data whose utterances nobody trains on.
        permutations: of people's classes, by which it is told what attributes are by chance.
    """

    defences: tuple[str, ...] = (
        "none", "clip=1+noise=0.3", "clip=1+noise=1", "clip=1+noise=3", "bits=8", "bits=4",
        "mean=2", "mean=4",
    )  # fmt: skip
    each: Positive = 20
    references: Positive = 16
    shadows: Natural = 2
    held: tuple[str, ...] = ()
    permutations: Natural = PERMUTATIONS


@dataclass(frozen=True)
class Inversion:
    """Of the inversion of updates.

    Attributes:
        each: clients whose items are recovered, at most; drawn at random.
        items: of a client's, recovered together from all of its steps, at most: the shortest.
        iterations: of a search.
        restarts: of which the best counts.
        rate: of Adam, in deviations of other people's speech.
        total_variation: its weight beside the distance of directions.
        statistics: the weight of BatchNorm's.
        unroll: local steps that are simulated, at most; of more, the change is taken for that of
            one step.
        candidates: items among which the true one has to be the nearest, itself one of them.
        kind: of features of speech recognition, "fbank" or "mfcc", as `extract-features` made them;
            "unknown" gives no sound.
        bins: values of a frame that are of the spectrum, the first ones; 0: all.
    """

    each: Positive = 20
    items: Positive = 4
    iterations: Annotated[int, Ge(8)] = 400
    restarts: Positive = 1
    rate: AboveZero = 0.1
    total_variation: Weight = 0.01
    statistics: Weight = 0.1
    unroll: Natural = 8
    candidates: Annotated[int, Ge(2)] = 10
    kind: Literal["unknown", "fbank", "mfcc"] = "unknown"
    bins: Natural = 0


SECTIONS: dict[str, type] = {
    "a1": A1,
    "a2": A2,
    "weights": Weights,
    "updates": Updates,
    "features": SentFeatures,
    "inversion": Inversion,
}
