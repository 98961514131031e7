"""Newcomers: clients that were not there in training adapt a model to the little that they have."""

from __future__ import annotations

import sys
from pathlib import Path

from fedtools.federation.federation import Federation
from fedtools.federation.init import init
from fedtools.files.errors import UserError
from fedtools.models.adaptation import has_base


def adapt(path: str | Path, data: str | Path, out: str | Path, epochs: int) -> None:
    """Make an experiment in which every client of a data directory adapts for itself.

    It begins with the averaged model of a newcomer. What an experiment's clients keep for
    themselves is trained, all else stays as it is; where they keep nothing, all is trained. Labels
    and optimiser are those of the experiment. There is no speaker-invariant training, for which one
    newcomer's speech is too little: it is said if the experiment has it.

    Args:
        path: an experiment that is complete, after `fedtools average`.
        data: a data directory with features and clients.
        out: the new experiment; `fedtools rounds` trains it.
        epochs: so many rounds of one epoch.

    Raises:
        UserError: if there is no averaged model, or the data are of no use.
    """
    experiment = (federation := Federation(path)).experiment
    start = experiment.path / "model.safetensors"
    if not start.exists():
        raise UserError("missing", path=start, remedy="run fedtools average")
    personal = list(federation.method.personal) or ["*"]
    # No newcomer sends features.
    unused = ("server_labels", "search")
    training = {name: v for name, v in experiment.options.training.items() if name not in unused}
    options = {
        "task": experiment.options.task,
        "model": experiment.options.model,
        "training": training,
        "method_conf": {"personal": personal, "stage1": epochs, "stage2": 0},
        "rounds": epochs,
    }
    assets = {"tokens": str(experiment.path)}
    if has_base(experiment.options.model):
        assets["base"] = str(experiment.path)
    init(
        out,
        method="decouplefl",
        config=options,
        where=experiment.path / "config.yaml",
        data={"train": str(data)},
        assets=assets,
        start=start,
        seed=experiment.seed,
    )
    if getattr(federation.method, "speaker_invariance", 0):
        print(f"{out}: newcomers adapt without speaker-invariant training", file=sys.stderr)
