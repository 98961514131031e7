"""Adaptation by newcomers: clients that were not in training adapt a model to little data."""

from __future__ import annotations

import sys
from pathlib import Path

from fedtools.core.errors import UserError
from fedtools.federation.federation import Federation
from fedtools.federation.init import init
from fedtools.models.adapt.adaptation import has_base


def adapt(path: str | Path, data: str | Path, out: str | Path, epochs: int) -> None:
    """Create an experiment in which every client of a data directory adapts a model on its own.

    It starts from the averaged newcomer model of a complete experiment. Only the parameters that
    are personal in that experiment are trained, or all if none are. Labels and optimiser are those
    of the experiment. Speaker-invariant training, for which one newcomer has too little speech, is
    left out with a message.

    Args:
        path: a complete experiment, after `fedtools average`.
        data: a data directory with features and clients.
        out: the new experiment; `fedtools rounds` trains it.
        epochs: the number of rounds, of one epoch each.

    Raises:
        UserError: if there is no averaged model, or the data are unusable.
    """
    experiment = (federation := Federation(path)).experiment
    start = experiment.path / "model.safetensors"
    if not start.exists():
        raise UserError("missing", path=start, remedy="run fedtools average")
    personal = list(federation.method.personal) or ["*"]
    # Newcomers do not send features, so these options do not apply.
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
