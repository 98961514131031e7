"""Commands of second-pass rescoring that need no neural network: streams, sweeps, FMP's result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from fedtools.cli.app import command
from fedtools.cli.federation import EXPERIMENT, NGPU, open_experiment

STREAM = typer.Argument(..., metavar="STREAM", help="A folder made by fedtools rescore-stream.")
SET = typer.Option([], "--set", metavar="OPTION=VALUE", help="Of FMP, of its privacy, or rounds.")
VARY = typer.Option([], "--vary", metavar="OPTION=A,B,...", help="May come several times.")
CONFIG = typer.Option(None, help="YAML with lists of values by option, ...")
SECTION = typer.Option(None, help="... in this section, such as tuning.scale.")
DRAWS = typer.Option(1, min=1, help="Of the noise of differential privacy.")


def _kinds() -> dict[str, Any]:
    """Name -> type, of all options that a sweep can set."""
    from typing import get_type_hints

    from fedtools.federation.sweep import GROUPS, ROUNDS, SPAN
    from fedtools.files.options import Rounds
    from fedtools.lm.reweighting import Weights
    from fedtools.methods.fmp import FMP, Adaptation
    from fedtools.privacy.options import Privacy

    of_fmp = get_type_hints(FMP, include_extras=True)
    names = [*get_type_hints(Weights), *get_type_hints(Adaptation)]
    privacy = get_type_hints(Privacy, include_extras=True)
    rest = {ROUNDS: Rounds, **{name: of_fmp[name] for name in (GROUPS, SPAN, "doubt")}}
    return {name: of_fmp[name] for name in names} | privacy | rest


def _values(texts: Sequence[str], several: bool) -> dict[str, Any]:
    """OPTION=VALUE or OPTION=A,B,... as YAML has them; a usage error for an unknown option."""
    from fedtools.files.config import checked, override

    known, found = _kinds(), {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in known or not value or name in found:
            names = ", ".join(known)
            raise typer.BadParameter(f"{text!r}: write OPTION=VALUE, of {names}, each once")
        parts = [override({}, [f"{name}={part}"])[name] for part in value.split(",")]
        if len(parts) > 1 and not several:
            raise typer.BadParameter(f"{text!r}: one value")
        parts = [
            checked(name, part, known[name], "--vary" if several else "--set") for part in parts
        ]
        found[name] = parts if several else parts[0]
    return found


def _grid(texts: Sequence[str], config: Path | None, section: str | None) -> dict[str, Any]:
    """The values of each option that is varied: of a section of a YAML file, and of --vary."""
    from fedtools.files.config import checked, lookup, option_error, unknown
    from fedtools.files.errors import UserError

    if (config is None) != (section is None):
        raise typer.BadParameter("goes with --config, and only with it", param_hint="--section")
    found, known, where = {}, _kinds(), f"{config}: {section}"
    listed = lookup(config, section) if config else {}
    if not isinstance(listed, dict):
        raise UserError("must be a mapping of options", path=where)
    for name, values in listed.items():
        if name not in known:
            raise option_error(unknown(name, known), where, name, values)
        if not isinstance(values, list) or not values:
            problem = f"option {name!r} is {values!r}: write a list, such as [1, 2]"
            raise option_error(problem, where, name, values)
        found[name] = [checked(name, value, known[name], where) for value in values]
    found |= _values(texts, True)
    if not found:
        raise typer.BadParameter("nothing to vary", param_hint="--vary")
    return found


@command("rescore-stream", "Rescoring")
def rescore_stream(
    data: Path = typer.Argument(..., metavar="DATA_DIR", help="utt2client, text, segments."),
    rescored: Path = typer.Argument(..., metavar="RESCORED", help="Made by fedtools rescore."),
    out: Path = typer.Argument(..., metavar="STREAM", help="Gets the tables of both."),
) -> None:
    """Join rescored lists with who said them, and when.

    FMP wants both in one folder.

    Reads: DATA_DIR/utt2client, text, utt2spk, and segments or utt2start; RESCORED.

    Writes: STREAM with the tables of both; nnlm.scp and ngram.scp point to the arks of RESCORED.

    Example in egs/ami/rescore1: fedtools rescore-stream data/mini/eval \
        exp/mini/nnlm/seed0/rescored_eval exp/mini/nnlm/seed0/stream_eval
    """
    from fedtools.lm.stream import make_stream

    make_stream(data, rescored, out)
    print(out)


@command("rescore-words", "Rescoring")
def rescore_words(
    stream: Path = STREAM,
    lists: Path = typer.Option(
        None, "--list", metavar="TSV", help="client, phrase; by default what was said first."
    ),
    rounds: int = typer.Option(10, min=1, help="T: what was said in the first of T + 1 groups."),
    most: int = typer.Option(20, min=0, help="Words that the background text has no more often."),
    corrected: bool = typer.Option(
        False, help="What was said as the client has corrected it, the stream's text."
    ),
) -> None:
    """Give clients lists of their own words, to be favoured.

    Nobody is sent them. What lists are made of gets no bonus; of lists that are given, everything
    does. The second pass favours whole phrases, the first pass (`fedtools decode`) each of their
    words.

    Reads: STREAM, or the TSV of --list.

    Writes: STREAM/phrases.tsv; phrases_of, the utterances that lists are made of.

    Example in egs/ami/rescore1: fedtools rescore-words exp/mini/nnlm/seed0/stream_eval --rounds 3 \
        --corrected
    """
    from fedtools.lm.private_words import read_phrases
    from fedtools.lm.stream import PHRASES, list_words, put_words

    if lists and corrected:
        raise typer.BadParameter("goes without --corrected", param_hint="--list")
    if lists:
        put_words(stream, read_phrases(lists))
    else:
        print(f"{stream / PHRASES}: {list_words(stream, rounds, most, corrected)} words")


@command("rescore-sweep", "Rescoring")
def rescore_sweep(
    stream: Path = STREAM,
    out: Path = typer.Argument(..., metavar="TSV", help="A row for each combination."),
    vary: list[str] = VARY,
    config: Path = CONFIG,
    section: str = SECTION,
    fixed: list[str] = SET,
    seed: int = typer.Option(0, min=0, help="Of intervals, and of noise."),
    draws: int = DRAWS,
) -> None:
    """Measure FMP's word error rate for many settings.

    It needs no neural network: scores are stored. Where there is noise, a row is one draw of it.

    Reads: STREAM; a section of the YAML of --config, with lists of values.

    Writes: TSV.

    Example in egs/ami/rescore1: fedtools rescore-sweep exp/mini/nnlm/seed0/stream_eval \
        exp/mini/sweep.tsv --vary scale=0,0.5,1 --set rounds=5
    """
    from fedtools.federation.sweep import sweep
    from fedtools.files.tables import format_table

    grid = _grid(vary, config, section)
    rows = sweep(stream, out, _values(fixed, False), grid, seed, draws)
    columns = list(rows[0])
    print(format_table(columns, [list(row.values()) for row in rows], "r" * len(columns)), end="")


@command("rescore-rows", "Rescoring")
def rescore_rows(
    stream: Path = STREAM,
    data: Path = typer.Argument(..., metavar="DATA_DIR", help="utt2person, utt2meeting."),
    out: Path = typer.Argument(..., metavar="TSV", help="Words and errors of each row and person."),
    config: Path = typer.Option(..., help="YAML with rows: name, and options, ..."),
    section: str = typer.Option("sweeps.rows", help="... in this section."),
    fixed: list[str] = SET,
    static: list[Path] = typer.Option(
        [], help="Kaldi text whose words rows of everybody: static have; may be given again."
    ),
    static_plain: list[Path] = typer.Option([], help="The same of text without utterance ids."),
    without: Path = typer.Option(
        None, help="Words, one a line, such as fillers: score without them, too."
    ),
    seed: int = typer.Option(0, min=0, help="Of noise, and of who stands in for whom."),
) -> None:
    """Measure FMP beside controls, by person.

    Rows are settings of FMP, or have counts of another kind (adapted, posterior, reference), of
    another client, or a fixed unigram.

    Reads: STREAM; DATA_DIR/utt2person and utt2meeting; a section of the YAML of --config; the texts
    of --static and --static-plain; the list of --without.

    Writes: TSV with row, scored (all, without), person, words, errors.

    Example in egs/ami/rescore1: fedtools rescore-rows exp/mini/nnlm/seed0/stream_eval \
        data/mini/eval exp/mini/rows.tsv --config conf/fmp.yaml --set scale=0.5 \
        --static data/mini/train/text --without conf/fillers.txt
    """
    from functools import partial

    from fedtools.federation import rows as work
    from fedtools.files.config import lookup
    from fedtools.files.errors import UserError

    listed = lookup(config, section)
    if not isinstance(listed, dict) or not listed:
        raise UserError("must be a mapping of rows", path=f"{config}: {section}")
    settings = work.read_rows(listed, _values(fixed, False), f"{config}: {section}")
    unigram = None
    if static or static_plain:
        unigram = partial(work.static_unigram, static, plain=static_plain)
    found = work.Rows(stream, data, out, unigram, seed)
    rows = work.write_rows(found, settings, out, without)
    for name in settings:
        own = [row for row in rows if row["row"] == name and row["scored"] == work.ALL]
        words, errors = (sum(int(str(row[key])) for row in own) for key in ("words", "errors"))
        print(f"{name}: WER {100 * errors / max(1, words):.2f} %")


@command("rescore-tune", "Rescoring")
def rescore_tune(
    stream: Path = STREAM,
    out: Path = typer.Argument(..., metavar="YAML", help="Gets the best values."),
    vary: list[str] = VARY,
    config: Path = CONFIG,
    section: str = SECTION,
    fixed: list[str] = SET,
    over: list[str] = typer.Option(
        [], metavar="OPTION=A,B,...", help="Of the mean of errors over these, in place of one."
    ),
    draws: int = DRAWS,
) -> None:
    """Choose FMP's values with the fewest word errors.

    STREAM is of validation data.

    Reads: STREAM; a section of the YAML of --config, with lists of values.

    Writes: YAML.

    Example in egs/ami/rescore1: fedtools rescore-tune exp/mini/nnlm/seed0/stream_dev \
        exp/mini/scale.yaml --vary scale=0,0.5,1 --set rounds=5
    """
    import sys

    from fedtools.federation.sweep import tune

    varied = _grid(vary, config, section)
    best, wer = tune(stream, out, _values(fixed, False), varied, _values(over, True), draws)
    shown = {name: f"{value:g}" if _is_number(value) else value for name, value in best.items()}
    chosen = ", ".join(f"{name} {value}" for name, value in shown.items())
    print(f"{out}: {chosen}, WER {wer:.2f} % on {stream}")
    for name, values in varied.items():
        # There is no use in less than nothing.
        edges = {values[-1], *([values[0]] if values[0] else [])}
        if len(values) > 2 and _is_number(best[name]) and best[name] in edges:
            text = f"warning: {out}: {name} {shown[name]} is at an edge of what was tried"
            print(text, file=sys.stderr)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


@command("rescore-best", "Rescoring")
def rescore_best(
    experiment: Path = EXPERIMENT,
    out: Path = typer.Argument(
        ..., metavar="OUT", help="Gets text; of FMP also marginals.ark and .scp."
    ),
    ngpu: int = NGPU,
) -> None:
    """Write the best hypotheses of all clients' utterances.

    Clients rescore by FMP or by fine-tuned models; the text is for fedtools score.

    Reads: EXP, and the STREAM that it was begun with.

    Writes: OUT/text; of FMP also marginals.ark and .scp.

    Example in egs/ami/rescore1: fedtools rescore-best exp/mini/fmp10/seed0 \
        exp/mini/fmp10/seed0/best
    """
    from fedtools.federation.evaluate import best_text
    from fedtools.files.ark import write_ark
    from fedtools.files.datadir import byte_order, write_table
    from fedtools.tasks.parts import MARGINALS

    federation = open_experiment(experiment, ngpu)
    found = best_text(federation)
    write_table(out / "text", {name: found[name] for name in byte_order(found)})
    if marginals := MARGINALS.of(federation.task):
        rows = marginals()
        ark = write_ark(out / "marginals.ark", ((name, rows[name]) for name in byte_order(rows)))
        write_table(out / "marginals.scp", ark)
    print(out / "text")


@command("privacy", "Privacy")
def privacy(
    experiments: list[Path] = typer.Argument(..., metavar="EXP...", help="Experiments' folders."),
) -> None:
    """Sum up what FMP's releases cost in epsilon.

    The costs are of a word, an utterance and a user. Of several experiments, such as seeds on the
    same data, it adds up what each utterance and each user pays. The numbers depend on the clients'
    data: they are for who runs the experiment.

    Reads: EXP/config.yaml and the record of EXP's releases.

    Writes: EXP/dp.tsv.

    Example in egs/ami/rescore1: fedtools privacy exp/mini/fmp-laplace-utterance-8/seed0
    """
    from fedtools.federation.spending import write_spending
    from fedtools.files.tables import format_table
    from fedtools.privacy.ledger import COLUMNS, LEVELS

    found = write_spending(experiments)
    if len(experiments) == 1:
        cells = [[row[name] for name in COLUMNS] for row in found.rows[0]]
        print(format_table(list(COLUMNS), cells, "rlllrrrrlrrrr"[: len(COLUMNS)]), end="")
        return
    shown = ("mechanism", "unit", "trust", "composition", *LEVELS)
    cells = [
        [path, len(rows) - 1, *(rows[-1][name] for name in shown)]
        for path, rows in zip(experiments, found.rows, strict=True)
    ]
    cells.append(["together", *("",) * 5, *(f"{value:.6g}" for value in found.total)])
    print(format_table(["experiment", "releases", *shown], cells, "lrllllrrr"), end="")
