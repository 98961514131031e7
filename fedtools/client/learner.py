"""One place that trains: a client with its private data, or the server with its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedtools.client.data import Utterances
from fedtools.client.train import (
    Checkpoint,
    Fitted,
    Loss,
    Training,
    fit,
    load_optimizer,
    make_optimizer,
    optimizer_state,
)
from fedtools.files.experiment import Experiment
from fedtools.files.states import load_state, save_state

# The count of steps that an optimiser has taken, kept beside its tensors.
_STEPS = "steps"


class Learner:
    """A model and data at one place in one round.

    Attributes:
        name: the client, or "server".
        number: the round.
        model: holds the tensors the round begins with; `fit` trains them in place.
        data: the place's utterances.
    """

    def __init__(
        self,
        experiment: Experiment,
        name: str,
        folder: Path,
        number: int,
        model: nn.Module,
        data: Utterances,
        training: Training,
        loss: Loss,
        epochs: int,
    ):
        self.name = name
        self.number = number
        self.model = model
        self.data = data
        self._experiment = experiment
        self._folder = folder
        self._training = training
        self._loss = loss
        self._epochs = epochs
        self._checkpoint = Checkpoint(folder / "checkpoint.safetensors", (number,))

    def fit(self, *, keep_optimizer: bool = False, loss: Loss | None = None) -> list[Fitted]:
        """Train the model for the epochs of a round.

        Args:
            keep_optimizer: take up the optimiser of the last round, and keep it for the next.
            loss: another loss than the task's, each utterance's value, shape (batch,).

        Returns:
            what it came to: a list of one, as a `fedtools.client.parallel.Stack` has many.

        Raises:
            Diverged: if loss or parameters are no longer finite.
        """
        optimizer = make_optimizer(self.model, self._training)
        before = 0
        if keep_optimizer:
            before = self._load(optimizer)
        fitted = fit(
            self.model,
            optimizer,
            self.data,
            self._training,
            loss or self._loss,
            epochs=self._epochs,
            seed=self._experiment.seed,
            key=(self.number, self.name),
            first_step=before,
            checkpoint=self._checkpoint if self._training.save_interval_steps else None,
            title=f"round {self.number}, {self.name}",
        )
        if keep_optimizer:
            state = optimizer_state(self.model, optimizer)
            state[_STEPS] = np.array(before + fitted.steps, dtype=np.int64)
            folder = self._experiment.personal_dir(self._folder, self.number)
            save_state(folder / "optimizer.safetensors", state)
        return [fitted]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers, not copied."""
        return self.model.state_dict()

    def finish(self) -> None:
        """The round's result is on disk: remove the checkpoint and optimisers of old rounds."""
        self._checkpoint.remove()
        # The last but one must stay: this round is repeated from it if it is killed before .done.
        for path in self._experiment.personal_files(self._folder, "optimizer.safetensors")[:-2]:
            path.unlink()
            if not any(path.parent.iterdir()):
                path.parent.rmdir()

    def _load(self, optimizer) -> int:
        path = self._experiment.last_personal(self._folder, self.number, "optimizer.safetensors")
        if path is None:
            return 0
        state = load_state(path)
        steps = int(state.pop(_STEPS))
        load_optimizer(self.model, optimizer, state)
        return steps
