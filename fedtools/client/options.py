"""Training options for utterances and clips, in addition to those of every model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from fedtools.audio.augment import Augment
from fedtools.core.config import Natural, NonNegative, Positive, Section, from_mapping
from fedtools.models.training import OptimizerName, Training

# Far above any useful value.
MAX_STACK, MAX_END_FRAMES = 1 << 16, 1000


@dataclass(frozen=True)
class UtteranceTraining(Training):
    """Training options of speech recognition.

    Attributes:
        batch_bins: the largest frames x bins of a padded batch.
        accum_grad: batches per step.
        labels: "transcripts", or "continuous": pseudo-labels of a teacher, without transcripts.
        decay: decay of the teacher, alpha in equation 7 of Zhu et al. 2022.
        decay_per: "step", as in the paper, or "epoch": the decay of all steps of an epoch together,
            so that a teacher moves equally far in an epoch of little data and of much data.
        keep_teacher: whether a client keeps its teacher between rounds; otherwise the teacher of
            each round starts from the model that the client received.
        server_labels: labels for the features that clients sent, where the server trains on them:
            "continuous", from a teacher; "beam", fixed ones from a search with the asset `lm` or
            with Whisper's decoder; or "transcripts", an upper bound, since clients would not send
            them.
        search: options of "beam", as in the section `decode` of recipe files; the asset `weights`
            overrides its weights. With Whisper's decoder, a teacher's labels and the error rates of
            rounds are searched for with them, too, but with a beam of one.
        cache_mb: megabytes of features that a process keeps in memory between rounds.
        end_frames: frames of zeros, the log energy of silence in 16 bits, appended to every
            utterance for training, decoding, sent features and attacks.
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
        """Return whether training uses the transcripts of the training data."""
        return "transcripts" in (self.labels, self.server_labels)


@dataclass(frozen=True)
class ClipTraining(Training):
    """Training options of keyword networks.

    Attributes:
        batch_size: clips per step; a client with fewer clips uses all of them.
        stack: clients trained at once; 1 trains them one after the other. It is part of the
            configuration because the order of sums, and so the last bit, depends on it.
        stack_mb: the most megabytes that the activations of a step may need in each process;
            stacks are made smaller to fit.
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
            # A client's steps are counted anew in each round.
            problem = "scheduler: keyword networks would warm up again in each round"
            raise ValueError(f"{problem}; set it to null, and optim_conf.lr to a constant rate")
        # Checks the options here instead of at the first batch.
        _ = self.augmentation

    @cached_property
    def augmentation(self) -> Augment:
        """Return the augmentation of training audio."""
        return from_mapping(Augment, self.augment, "augment")
