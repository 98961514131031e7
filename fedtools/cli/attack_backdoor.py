"""The command that measures backdoors of keyword models: fedtools attack backdoor."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.cli.app import command
from fedtools.cli.attack import attack
from fedtools.cli.federation import NGPU, open_experiment
from fedtools.cli.score import RESAMPLES, SEED


@command("backdoor", "Attacks", to=attack)
def backdoor(
    experiments: list[Path] = typer.Argument(
        metavar="EXP...", help="Experiments of keyword spotting."
    ),
    split: str = typer.Option("test", help="Split of the experiment's data: valid, test."),
    target: str = typer.Option(
        None, help="The word; default: that of the experiment's attackers, or else yes."
    ),
    resamples: int = RESAMPLES,
    seed: int = SEED,
    ngpu: int = NGPU,
) -> None:
    """Measure the success of a backdoor in keyword models.

    All clips of words other than the target get the trigger, a tone, before features are computed.
    Its options are those of the experiment's section attackers, or else their defaults, so that
    models without attackers can be compared. The models are those of the last five evaluations,
    whose mean accuracy is the experiment's result. The success is the share of these clips that is
    taken for the target, with its 95 % interval over speakers, and beside it the same share of the
    same clips without the trigger.

    Reads: EXP/round_<number>/global.safetensors and EXP/clients/<client>/; the clips of the split.

    Writes: EXP/backdoor_<split>.tsv: for each round and speaker, the clips with the trigger, and
    how many of them are taken for the target. With cache_frozen, frozen/ beside the clips.

    Example in egs/speechcommands/kws1: fedtools attack backdoor \
        exp/mini/keywords/dscnn/fedavg/seed0
    """
    from fedtools.core.tables import format_table
    from fedtools.federation.kws.backdoor import measure_backdoor

    header = ["experiment", "target", "rounds", "clips", "success", "low", "high", "without"]
    rows = []
    for path in experiments:
        opened = open_experiment(path, ngpu)
        found = measure_backdoor(opened, split, target, resamples=resamples, seed=seed)
        rates = (found.rate, found.low, found.high, found.without)
        rounds = ",".join(map(str, found.rounds))
        shown = ["-" if rate != rate else f"{rate:.1f} %" for rate in rates]
        rows.append([path, found.target, rounds, found.clips, *shown])
    print(format_table(header, rows), end="")
