"""Options of attacks: sections of a recipe's YAML, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from fedtools.core.ranges import AboveZero, Natural, Positive

# Where the activations of a TDNN's layer are taken: after its nonlinearity, or after BatchNorm,
# which is the output of Kaldi's layers. For a block of several layers (a transformer's), only its
# output is taken.
Part = Literal["relu", "norm"]
# See `fedtools.attack.speakers.a1`.
Score = Literal["literal", "unit", "cohort"]
# Number of trials of two speakers, in both attacks on models.
_TRIALS = 10_000
# Number of permutations of people's classes, in the attack on attributes: p is 0.01 or more.
PERMUTATIONS = 99
Weight = Annotated[float, Ge(0), Lt(1e9)]


@dataclass(frozen=True)
class A1:
    """Options of attack A1.

    Attributes:
        alpha: weights of the distance between means and of that between deviations in equation 4.
        parts: parts of a TDNN's layers where a recipe takes activations.
        scores: "literal", equation 4 as it is written; "unit", of vectors of unit length, which is
            the other reading of "L2-normalised"; "cohort", cosines that are centred on and
            normalised by other speakers' models.
        others: number of trials of two speakers; 0: all of them.
    """

    alpha: tuple[Weight, Weight] = (1.0, 10.0)
    parts: tuple[Part, ...] = ("relu",)
    scores: tuple[Score, ...] = ("literal",)
    others: Natural = _TRIALS

    def __post_init__(self) -> None:
        if not any(self.alpha):
            raise ValueError("option 'alpha' is [0, 0]: one weight must be above 0")
        if not self.scores or len(set(self.scores)) < len(self.scores):
            raise ValueError("option 'scores' must be some of literal, unit, cohort, each once")


@dataclass(frozen=True)
class A2:
    """Options of attack A2.

    Attributes:
        network: share of the people known to the attacker that the network is trained on; LDA,
            PLDA, cohort and calibration use the other people, whom the network has never seen.
        width: width of the network's layers; the fifth is three times as wide.
        epochs: number of times each model sees each utterance of the Indicator.
        utterances: utterances of a training step, each through all models in memory.
        frames: the largest number of frames of an utterance in a training step.
        rate: learning rate of Adam.
        held: models in memory at a time; a training step uses all of them, so that the number
            changes the trained network.
        dimension: the largest output dimension of LDA; lower where there are few speakers.
        layers: hidden layers that a recipe attacks, each separately.
        others: as in attack A1.
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
    """Options of the attacks on features.

    Attributes:
        utterances: the largest number of utterances of a client, drawn at random.
        epochs: training epochs of the decoder of attack IV.
    """

    utterances: Annotated[int, Ge(2)] = 2000
    epochs: Positive = 20


@dataclass(frozen=True)
class WeightsAttack:
    """Options of the attack on the weights of updates.

    Attributes:
        constant: the first and the last value of a frame, from 1, that are constant in a client's
            input, such as [41, 140] for i-vectors after 40 cepstra; [0, 0]: those that are constant
            in the training data.
        scores: scores kept for each trial: "whole", of all weights together, the regression, and
            the read-out; or "parts", also of each part: half a megabyte for 10,000 trials.
        piece_mb: megabytes of all models' values in memory at a time; as much again is being read.
        others: as in attack A1; also the number of pairs of two speakers in training a regression.
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
    """Options of recipes' attacks on the updates of an experiment.

    Attributes:
        defences: defences of clients; the first is none, which the others are compared with.
        each: the largest number of a client's utterances or clips whose membership is attacked.
        references: the largest number of other clients whose models are references; never more than
            half of all clients.
        shadows: pairs of models that the attacker trains for each client, as the client trains; 0:
            none, and no scores that need models trained on an utterance.
        held: splits of the experiment's data whose utterances nobody trains on.
        permutations: permutations of people's classes, which give the chance level of attributes.
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
    """Options of the inversion of updates.

    Attributes:
        each: the largest number of clients whose items are recovered, drawn at random.
        items: the largest number of a client's items, its shortest, that are recovered together
            from all of its steps.
        iterations: iterations of a search.
        restarts: searches from random inputs, of which the best is kept.
        rate: learning rate of Adam, in deviations of other people's speech.
        total_variation: weight of total variation relative to the distance of directions.
        statistics: weight of the distance of BatchNorm's statistics.
        unroll: the largest number of local steps that are simulated; more steps are treated as one.
        candidates: items among which the true one has to be the nearest, including the true one.
        kind: kind of features of speech recognition, "fbank" or "mfcc", as `extract-features` made
            them; no audio is synthesised from "unknown".
        bins: number of values of a frame, from the first, that are a spectrum; 0: all.
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
    "weights": WeightsAttack,
    "updates": Updates,
    "features": SentFeatures,
    "inversion": Inversion,
}
