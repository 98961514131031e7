"""Training objectives of speech recognition: CTC on transcripts, or on a teacher's labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from fedtools.client.objective import Objective, State
from fedtools.decode.greedy import greedy
from fedtools.models.acoustic.asr import losses, outputs
from fedtools.models.training import load_model
from fedtools.tasks.asr.data import Batch

# (posteriors, batch) to the tokens of each utterance.
Transcribe = Callable[[tuple[Tensor, Tensor], Batch], list[list[int]]]
# (model, batch) to CTC log posteriors (B, T, tokens) and their numbers of frames (B,).
Posteriors = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]


def greedy_labels(found: tuple[Tensor, Tensor], batch: Batch) -> list[list[int]]:
    """Return the tokens of CTC's best path for each utterance."""
    log_probs, lengths = found
    return greedy(log_probs.cpu().numpy(), lengths.cpu().numpy())


class Transcripts(Objective):
    """The model's criterion, CTC or LF-MMI, on the labels that batches have.

    Args:
        posteriors: how the model sees a batch; by default as filterbanks, from its first layer.
    """

    def __init__(self, posteriors: Posteriors = outputs):
        super().__init__(self._loss)
        self.posteriors = posteriors

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch's utterances, nats, (1,)."""
        batch = self.labelled(batch)
        return losses(model, *self.posteriors(model, batch), batch).mean()[None]


class ContinuousLabels(Transcripts):
    """CTC on labels of a teacher that follows the student: Zhu et al. 2022, equations 5 to 7.

    The teacher sees what the student sees, but without augmentation and dropout; its best token of
    each frame makes the labels, whatever transcripts the batch has.

    Args:
        student: the model that is trained.
        teacher: another model of the same kind, with the student's initial parameters.
        decay: alpha of equation 7.
        keep: whether the teacher is kept from round to round; otherwise each round begins with a
            new one.
        posteriors: see `Transcripts`.
        transcribe: returns the tokens of each utterance from the posteriors and the batch.
        drops: returns whether the utterance of a label is left out, as of a decoder that has lost
            its way; one with an empty label is, too. None keeps all.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        decay: float,
        keep: bool = True,
        posteriors: Posteriors = outputs,
        transcribe: Transcribe = greedy_labels,
        drops: Callable[[list[int]], bool] | None = None,
    ):
        super().__init__(posteriors)
        self.keep, self._transcribe, self._drops = keep, transcribe, drops
        # Client -> utterances since the round began, and how many of them got no label.
        self._labels: dict[int, list[int]] = {}
        self._teacher, self._decay = teacher.eval().requires_grad_(False), decay
        kept, new = teacher.state_dict(), student.state_dict()
        # Each tensor once: models of several clients share tensors.
        places = {value.data_ptr(): name for name, value in kept.items()}
        floats = [name for name in places.values() if kept[name].is_floating_point()]
        self._pairs = [kept[name] for name in floats], [new[name] for name in floats]

    def labelled(self, batch: Batch) -> Batch:
        with torch.no_grad():
            log_probs, lengths = self.posteriors(self._teacher, batch)
        device = log_probs.device
        # A model that diverges is detected by its loss; until then any label will do.
        labels = self._transcribe((log_probs.nan_to_num(), lengths), batch)
        drops = self._drops or (lambda label: False)
        lost = [not label or drops(label) for label in labels]
        for client, without in zip(batch["clients"].tolist(), lost, strict=True):
            seen = self._labels.setdefault(client, [0, 0])
            seen[0] += 1
            seen[1] += without
        if self._drops and not all(lost):
            kept = [row for row, without in enumerate(lost) if not without]
            batch = Batch({name: value[kept] for name, value in batch.items()})
            labels = [labels[row] for row in kept]
        rows = [torch.tensor(one, dtype=torch.long) for one in labels]
        text = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        counts = torch.tensor([len(one) for one in labels])
        return Batch(batch | {"text": text.to(device), "text_lengths": counts.to(device)})

    def after_step(self, model: nn.Module, active: int) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(*self._pairs, 1 - self._decay)

    @property
    def empty_labels(self) -> dict[int, float]:
        return {client: empty / count for client, (count, empty) in sorted(self._labels.items())}

    def state(self) -> State:
        counts = [[client, *counts] for client, counts in sorted(self._labels.items())]
        teacher = self._teacher.state_dict()
        return {"labels": np.array(counts, int).reshape(-1, 3)} | {
            f"teacher.{name}": value for name, value in teacher.items()
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        self._labels = {client: counts for client, *counts in state["labels"].tolist()}
        teacher = {
            name.removeprefix("teacher."): value
            for name, value in state.items()
            if name.startswith("teacher.")
        }
        load_model(self._teacher.state_dict(), teacher)

    def new_round(self) -> None:
        self._labels = {}
