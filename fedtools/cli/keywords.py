"""Commands about keyword spotting: clip-scores, detection."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.cli.app import command
from fedtools.cli.federation import NGPU, open_experiment


@command("clip-scores", "Decoding and scoring")
def clip_scores(
    experiments: list[Path] = typer.Argument(metavar="EXP...", help="Of keyword spotting."),
    split: str = typer.Option("test", help="Which data of the experiment: valid, test."),
    ngpu: int = NGPU,
) -> None:
    """Keep what a model says of each clip, and count errors by speaker.

    Of the models of the last five evaluations, whose mean accuracy is the result. A vector is the
    logits of all classes; a clip of silence is a speaker of its own.

    Reads: EXP/round_<number>/global.safetensors and EXP/clients/<client>/; the clips of the split.

    Writes: EXP/scores_<split>/round_<number>.ark and .scp; EXP/speakers_<split>.tsv, which
    differences between methods are made of.

    Example in egs/speechcommands/kws1: fedtools clip-scores exp/mini/keywords/dscnn/fedavg/seed0
    """
    from fedtools.federation.clip_scores import score_clips

    for path in experiments:
        rounds = score_clips(open_experiment(path, ngpu), split)
        print(f"{path}: rounds {' '.join(map(str, rounds))}")


@command("detection", "Decoding and scoring")
def detection(
    experiments: list[Path] = typer.Argument(metavar="EXP...", help="Of keyword spotting."),
    split: str = typer.Option("test", help="Which data of the experiment: valid, test."),
    ngpu: int = NGPU,
) -> None:
    """Measure false accepts and false rejects of keywords.

    After the last round, in %. The classes _silence_ and _unknown_ are negative, all others
    positive. FA: clips of a negative class taken for a positive one. FR: clips of a positive class
    taken for a negative one. Both in % of all clips; beside them FA in % of the negative clips and
    FR in % of the positive ones. There is no threshold.

    Reads: EXP's last model, and the clips of the split.

    Writes: EXP/detection_<split>.tsv.

    Example in egs/speechcommands/kws1: fedtools detection exp/mini/keywords/dscnn/fedavg/seed0
    """
    from fedtools.federation.detection import measure_detection
    from fedtools.files.tables import format_table
    from fedtools.score.detection import COLUMNS, DEFINITION

    rows = {path: measure_detection(open_experiment(path, ngpu), split) for path in experiments}
    cells = [[path, *(row[name] for name in COLUMNS)] for path, row in rows.items()]
    print(format_table(["experiment", *COLUMNS], cells), end="")
    print(f"\n{DEFINITION}")
