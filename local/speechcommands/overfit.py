#!/usr/bin/env python3
"""Measure whether private models overfit: their accuracy on their client's clips and on others.

    overfit.py EXP...

EXP are experiments of FedKWS-UI and ALO whose clients have kept private models. The shared model is
measured on the same clips for comparison. Writes EXP/private.tsv with one row: means over randomly
drawn clients of accuracies in %, on clips without training's augmentation.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from options import whole
from runs import PRIVATE
from torch import Tensor

from fedtools.cli.federation import open_experiment
from fedtools.core.errors import UserError, exit_with_message
from fedtools.core.seeds import generator
from fedtools.core.tables import format_table, write_tsv
from fedtools.exchange.states import spec_of
from fedtools.federation.federation import Federation
from fedtools.models.training import load_model
from fedtools.tasks.base import as_configured
from fedtools.tasks.kws.model import tensors_of
from fedtools.tasks.kws.task import predict
from fedtools.tasks.parts import CLIPS, MODELS

FILE = "private.tsv"


@as_configured
def measure(federation: Federation, most: int, clips: int) -> dict[str, object]:
    """Measure accuracies of private models and of the shared one, as a row of `PRIVATE`.

    Raises:
        UserError: if no client has kept a private model.
    """
    experiment, corpus = federation.experiment, federation.task.need(CLIPS)
    number = experiment.result_round()
    federation.load_result(None, number)
    network = federation.task.need(MODELS).build()
    views = tensors_of(network)
    shared = {name: value.detach().clone() for name, value in views.items()}
    kept = [one for one in experiment.clients if experiment.own(one, number + 1).has("private")]
    if not kept:
        remedy = "give an experiment of FedKWS-UI or ALO, with a lambda"
        raise UserError("no client has kept a private model", path=experiment.path, remedy=remedy)
    draw = generator(experiment.seed, "overfit")
    chosen = [kept[index] for index in draw.permutation(len(kept))[:most]]
    total = len(corpus.features("test").clips.labels)
    others = np.sort(draw.permutation(total)[:clips])
    found = []

    def accuracy(mfcc: Tensor, labels: np.ndarray) -> float:
        return 100 * float((predict(network, mfcc).argmax(1).cpu().numpy() == labels).mean())

    for client in chosen:
        rows = corpus.features("train").clips.rows(client)
        own = corpus.plain("train", rows), corpus.features("train").clips.labels[rows]
        test = corpus.plain("test", slice(0, total))[others]
        of_test = test, corpus.features("test").clips.labels[others]
        values = []
        for state in (experiment.own(client, number + 1).load("private", spec_of(views)), shared):
            load_model(views, state or {})
            values += [accuracy(*own), accuracy(*of_test)]
        found.append(values)
    means = [f"{value:.2f}" for value in np.mean(found, 0)]
    return dict(zip(PRIVATE, (number, len(chosen), *means), strict=True))


def main() -> None:
    """Run the command: 0 done, 1 bad input (one line on stderr), 2 wrong usage."""
    parser = argparse.ArgumentParser(description="Measure whether private models overfit.")
    add = parser.add_argument
    add("experiments", type=Path, nargs="+", metavar="EXP", help="experiments of FedKWS-UI or ALO")
    clients = "maximum number of clients (default: 100)"
    add("--clients", type=whole, default=100, metavar="N", help=clients)
    clips = "maximum number of test clips (default: 300)"
    add("--clips", type=whole, default=300, metavar="N", help=clips)
    add("--ngpu", type=int, choices=(0, 1), default=0, help="1: compute on a GPU")
    options = parser.parse_args()
    with exit_with_message("overfit.py"):
        cells = []
        for path in options.experiments:
            row = measure(open_experiment(path, options.ngpu), options.clients, options.clips)
            write_tsv(path / FILE, PRIVATE, [row])
            cells.append([path, *row.values()])
    print(format_table(["experiment", *PRIVATE], cells), end="")


if __name__ == "__main__":
    main()
