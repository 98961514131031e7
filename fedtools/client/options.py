"""How clients train: what utterances and clips add to the options of any model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from fedtools.audio.augment import Augment
from fedtools.files.config import Natural, NonNegative, Positive, Section, from_mapping
from fedtools.models.training import OptimizerName, Training

# Far above what is of use.
MAX_STACK, MAX_END_FRAMES = 1 << 16, 1000


@dataclass(frozen=True)
class UtteranceTraining(Training):
    """Of speech recognition.

    Attributes:
        batch_bins: the largest frames x bins of a padded batch.
        accum_grad: batches of a step.
        labels: "transcripts", or "continuous" pseudo-labels of a teacher, without transcripts.
        decay: of the teacher, alpha in equation 7 of Zhu et al. 2022.
        decay_per: "step", as in the paper, or "epoch": of all steps of an epoch together, so that a
            teacher moves as far in an epoch of a client's data as in one of all clients' data.
        keep_teacher: whether a client's teacher lives on from round to round; otherwise each round
            begins with what the client was sent.
        server_labels: of features that clients sent, where a server trains on these: "continuous",
            a teacher's; "beam", fixed ones, by a search with the asset `lm` on these features, or
            by Whisper's decoder; or "transcripts", which no client would send: a bound.
        search: how "beam" searches, as the section `decode` of recipes' files says it; the asset
            `weights` has other weights.
        cache_mb: features that a process keeps in memory between rounds.
        end_frames: frames of zeros, a log energy as of silence in 16 bits, behind every utterance's
            own, whatever it is read for: training, decoding, sent features, attacks.
    """

    grad_clip: NonNegative = 5.0
    save_interval_steps: Natural = 500
    batch_bins: Positive = 1_000_000
    accum_grad: Positive = 1
    labels: Literal["transcripts", "continuous"] = "transcripts"
    decay: Annotated[float, Ge(0), Le(1)] = 0.9998
    decay_per: Literal["step", "epoch"] = "step"
    keep_teacher: bool = True
    server_labels: Literal["continuous", "beam", "transcripts"] = "continuous"
    search: Section = field(default_factory=dict)
    cache_mb: Natural = 2000
    end_frames: Annotated[int, Ge(0), Le(MAX_END_FRAMES)] = 0

    @property
    def reads_transcripts(self) -> bool:
        """Whether those of the training data are trained on."""
        return "transcripts" in (self.labels, self.server_labels)


@dataclass(frozen=True)
class ClipTraining(Training):
    """Of keyword networks.

    Attributes:
        batch_size: clips of a step; a client with fewer takes all it has.
        stack: clients trained at once; 1 trains them one after the other. Part of the
            configuration because the order of sums, and with it the last bit, depends on it.
        stack_mb: a stack gets smaller if the activations of a step would need more memory, in each
            process.
        augment: fields of `fedtools.audio.augment.Augment`.
    """

    optim: OptimizerName = "sgd"
    batch_size: Positive = 32
    stack: Annotated[int, Ge(1), Le(MAX_STACK)] = 16
    stack_mb: Positive = 4000
    augment: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheduler is not None:
            # A client's steps are counted from the round that it is sampled in.
            problem = "scheduler: keyword networks would warm up again in each round"
            raise ValueError(f"{problem}; set null, and optim_conf.lr to a rate that stays")
        # A slip is told now, and not when the first batch is made.
        _ = self.augmentation

    @cached_property
    def augmentation(self) -> Augment:
        """What happens to training audio."""
        return from_mapping(Augment, self.augment, "augment")
