"""Commands that score: words and characters, differences, and keywords."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from fedtools.cli.app import command, section_option
from fedtools.cli.federation import NGPU, open_experiment
from fedtools.core.recipe_sections import Bootstrap

DATA_DIR = typer.Argument(
    metavar="DATA_DIR", help="Data directory with text, utt2spk, and utt2client if any."
)
RESAMPLES = section_option(Bootstrap, "resamples", help="Number of bootstrap resamples.")
SEED = typer.Option(0, help="Random seed of the bootstrap.")
TEXT_RULE = typer.Option(
    "none", help="spoken: ignore case, punctuation and how numbers are written."
)


@command("score", "Decoding and scoring")
def score_command(
    data_dir: Path = DATA_DIR,
    hyp_text: Path = typer.Argument(
        metavar="HYP_TEXT", help="Hypotheses as Kaldi text; a line with only an id is an empty one."
    ),
    out_dir: Path = typer.Argument(
        metavar="OUT_DIR", help="Gets score_wer/, score_cer/, wer.tsv and utterances.tsv."
    ),
    text_rule: Literal["none", "spoken"] = TEXT_RULE,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> None:
    """Count word and character errors, with 95 % intervals.

    Errors are counted as by sclite; the tables have a row for each client. For a language written
    without spaces, as given by utt2lang, only characters are counted.

    Reads: DATA_DIR/text, utt2spk, utt2client, utt2lang; HYP_TEXT.

    Writes: OUT_DIR/score_wer/ and score_cer/ with hyp.trn, ref.trn and result.txt; OUT_DIR/wer.tsv
    and utterances.tsv, the errors of each utterance.

    Example in egs/commonvoice/asr1: fedtools score data/mini/test \
        exp/mini/fedavg/seed0/decode_test/text exp/mini/fedavg/seed0/decode_test
    """
    from fedtools.score.wer import score, score_table

    rows = score(data_dir, hyp_text, out_dir, resamples, seed, text_rule)
    print(score_table(rows), end="")


@command("compare", "Decoding and scoring")
def compare_command(
    data_dir: Path = DATA_DIR,
    hyp_a: Path = typer.Argument(metavar="HYP_A", help="Kaldi text of system A's hypotheses."),
    hyp_b: Path = typer.Argument(metavar="HYP_B", help="Kaldi text of system B's hypotheses."),
    out: Path | None = typer.Option(None, help="Also write the table to this TSV file."),
    text_rule: Literal["none", "spoken"] = TEXT_RULE,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> None:
    """Compare two systems' word error rates (MAPSSWE).

    The table has the difference of the two rates and the matched-pair test. For a language written
    without spaces, as given by utt2lang, characters are counted.

    Reads: DATA_DIR/text, utt2spk, utt2client, utt2lang; HYP_A and HYP_B.

    Writes: the TSV of --out.

    Example in egs/commonvoice/asr1: fedtools compare data/mini/test \
        exp/mini/baseline/seed0/decode_test/text exp/mini/fedavg/seed0/decode_test/text
    """
    from fedtools.score.compare import compare, compare_table

    rows = compare(data_dir, hyp_a, hyp_b, resamples, seed, out, text_rule)
    print(f"A = {hyp_a}\nB = {hyp_b}\n")
    print(compare_table(rows), end="")


@command("clip-scores", "Decoding and scoring")
def clip_scores(
    experiments: list[Path] = typer.Argument(
        metavar="EXP...", help="Experiments of keyword spotting."
    ),
    split: str = typer.Option("test", help="Split of the experiment's data: valid, test."),
    ngpu: int = NGPU,
) -> None:
    """Write scores of clips, and count errors by speaker.

    The models are those of the last five evaluations, whose mean accuracy is the experiment's
    result. A score is the vector of the logits of all classes; each clip of silence counts as a
    speaker of its own.

    Reads: EXP/round_<number>/global.safetensors and EXP/clients/<client>/; the clips of the split.

    Writes: EXP/scores_<split>/round_<number>.ark and .scp; EXP/speakers_<split>.tsv and
    errors_<split>.tsv, errors by speaker and by clip, from which differences between methods are
    computed.

    Example in egs/speechcommands/kws1: fedtools clip-scores exp/mini/keywords/dscnn/fedavg/seed0
    """
    from fedtools.federation.kws.clip_scores import score_clips

    for path in experiments:
        rounds = score_clips(open_experiment(path, ngpu), split)
        print(f"{path}: rounds {' '.join(map(str, rounds))}")


@command("detection", "Decoding and scoring")
def detection(
    experiments: list[Path] = typer.Argument(
        metavar="EXP...", help="Experiments of keyword spotting."
    ),
    split: str = typer.Option("test", help="Split of the experiment's data: valid, test."),
    ngpu: int = NGPU,
) -> None:
    """Measure false accepts and false rejects of keywords.

    The model of the last round is measured. The classes _silence_ and _unknown_ are negative, all
    others positive. FA: clips of a negative class that are classified as a positive one. FR: clips
    of a positive class that are classified as a negative one. Both are in % of all clips; further
    columns have FA in % of the negative clips and FR in % of the positive ones. These rates are of
    the most probable class, without a threshold. A DET table has the rates at every threshold on
    the log odds of the most probable keyword, as shares of the negative and of the positive clips.

    Reads: EXP's last model, and the clips of the split.

    Writes: EXP/detection_<split>.tsv; EXP/det_<split>.tsv, the points of a DET curve.

    Example in egs/speechcommands/kws1: fedtools detection exp/mini/keywords/dscnn/fedavg/seed0
    """
    from fedtools.core.tables import format_table
    from fedtools.federation.kws.detection import measure_detection
    from fedtools.score.detection import COLUMNS, DEFINITION

    rows = {path: measure_detection(open_experiment(path, ngpu), split) for path in experiments}
    cells = [[path, *(row[name] for name in COLUMNS)] for path, row in rows.items()]
    print(format_table(["experiment", *COLUMNS], cells), end="")
    print(f"\n{DEFINITION}")


@command("false-alarms", "Decoding and scoring")
def false_alarms(
    experiments: list[Path] = typer.Argument(
        metavar="EXP...", help="Experiments with the same keywords."
    ),
    data: str = typer.Option(
        ..., metavar="NAME=DATA_DIR", help="Speech with transcripts, and its name in file names."
    ),
    split: str = typer.Option("test", help="Split whose clips give the false rejects."),
    hop: float = typer.Option(0.1, min=0.01, max=60, help="Seconds from one window to the next."),
    leave_out: str = typer.Option(
        "", help="Words that sound like keywords, to be left out: know,write."
    ),
    ngpu: int = NGPU,
) -> None:
    """Count false accepts per hour in running speech.

    A window as long as a clip slides over the utterances whose transcripts have no keyword and no
    word of --leave-out. The score is the log odds of the most probable keyword; at most one word is
    accepted within the length of a clip. False rejects are the clips of keywords that score below
    the threshold for a given number of false accepts per hour; if that number means less than one
    false accept in all of the speech, the threshold allows none.

    Reads: EXP's last model, and the clips of the split; DATA_DIR/wav.scp, segments and text.

    Writes: EXP/false_alarms_<name>.tsv; EXP/curve_<name>.tsv, false rejects (%) by false accepts
    per hour; EXP/alarms_<name>.tsv, the place, word and score of each false accept.

    Example in egs/speechcommands/kws1: fedtools false-alarms \
        exp/mini/keywords/dscnn/fedavg/seed0 --data an4=/corpora/an4/test --leave-out know,write
    """
    from fedtools.cli.app import pair
    from fedtools.core.tables import format_table
    from fedtools.data.datadir import check_id
    from fedtools.federation.kws.running_speech import COLUMNS, count_false_accepts

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
