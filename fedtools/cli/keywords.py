"""Commands about keyword spotting: clip-scores, detection, false-alarms."""

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
    """Keep scores of clips, and count errors by speaker.

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
    FR in % of the positive ones. There is no threshold. A table of their own has the rates at all
    thresholds of the log odds of the most probable keyword, as shares of the clips concerned.

    Reads: EXP's last model, and the clips of the split.

    Writes: EXP/detection_<split>.tsv; EXP/det_<split>.tsv, the points of a DET curve.

    Example in egs/speechcommands/kws1: fedtools detection exp/mini/keywords/dscnn/fedavg/seed0
    """
    from fedtools.federation.detection import measure_detection
    from fedtools.files.tables import format_table
    from fedtools.score.detection import COLUMNS, DEFINITION

    rows = {path: measure_detection(open_experiment(path, ngpu), split) for path in experiments}
    cells = [[path, *(row[name] for name in COLUMNS)] for path, row in rows.items()]
    print(format_table(["experiment", *COLUMNS], cells), end="")
    print(f"\n{DEFINITION}")


@command("false-alarms", "Decoding and scoring")
def false_alarms(
    experiments: list[Path] = typer.Argument(metavar="EXP...", help="Of the same keywords."),
    data: str = typer.Option(
        ..., metavar="NAME=DATA_DIR", help="Speech and its transcripts, and its name in files."
    ),
    split: str = typer.Option("test", help="Clips that false rejects are counted of."),
    hop: float = typer.Option(0.1, min=0.01, max=60, help="Seconds from a window to the next."),
    leave_out: str = typer.Option("", help="Words that sound like keywords: know,write."),
    ngpu: int = NGPU,
) -> None:
    """Count false accepts an hour in running speech.

    A window as long as a clip slides over utterances whose transcripts have no keyword, and no word
    of --leave-out. The score is the log odds of the most probable keyword; within the length of a
    clip at most one word is accepted. False rejects are clips of keywords below the threshold that
    gives so many false accepts an hour; with fewer than one in all of the speech, it gives none.

    Reads: EXP's last model, and the clips of the split; DATA_DIR/wav.scp, segments and text.

    Writes: EXP/false_alarms_<name>.tsv; EXP/curve_<name>.tsv, false rejects (%) by false accepts an
    hour; EXP/alarms_<name>.tsv, what was taken for a word, where, and its score.

    Example in egs/speechcommands/kws1: fedtools false-alarms \
        exp/mini/keywords/dscnn/fedavg/seed0 --data an4=/corpora/an4/test --leave-out know,write
    """
    from fedtools.cli.report import pair
    from fedtools.federation.running_speech import COLUMNS, count_false_accepts
    from fedtools.files.datadir import check_id
    from fedtools.files.tables import format_table

    name, folder = pair(data, "--data", "NAME=DATA_DIR")
    check_id(name, "the name")
    rows = count_false_accepts(
        [open_experiment(path, ngpu) for path in experiments],
        name,
        Path(folder),
        split=split,
        hop_seconds=hop,
        leave_out=[word for word in leave_out.split(",") if word],
    )
    cells = [
        [path, *(row[column] for column in COLUMNS)]
        for path, row in zip(experiments, rows, strict=True)
    ]
    print(format_table(["experiment", *COLUMNS], cells), end="")
