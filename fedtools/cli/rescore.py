"""Commands that rescore N-best lists, by neural language models and by FMP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import typer

from fedtools.cli.app import command
from fedtools.cli.federation import EXPERIMENT, NGPU, open_experiment

NBEST = typer.Argument(..., metavar="NBEST", help="A folder with nbest.tsv.")
NNLM = typer.Argument(..., metavar="NNLM", help="A folder made by fedtools train-nnlm.")
OUT = typer.Argument(..., metavar="OUT", help="Gets nbest.tsv, nnlm.scp, words.txt, unigram.tsv.")
# The same as `fedtools.lm.nbest_scoring.BATCH_BINS`, whose module imports torch.
BATCH_BINS = 4000
STREAM = typer.Argument(..., metavar="STREAM", help="A folder made by fedtools rescore-stream.")
SET = typer.Option(
    [], "--set", metavar="OPTION=VALUE", help="Set an option of FMP or of its privacy, or rounds."
)
VARY = typer.Option(
    [], "--vary", metavar="OPTION=A,B,...", help="Values to try; may be given several times."
)
CONFIG = typer.Option(None, help="YAML file with lists of values by option, in --section.")
SECTION = typer.Option(None, help="Section of the YAML file, such as tuning.scale.")
DRAWS = typer.Option(1, min=1, help="Number of draws of the noise of differential privacy.")


@command("rescore", "Rescoring")
def rescore(
    nbest: Path = NBEST,
    nnlm: Path = NNLM,
    out: Path = OUT,
    batch_bins: int = typer.Option(
        BATCH_BINS, min=1, help="Maximum size of a batch: hypotheses x words of the longest."
    ),
    job: int = typer.Option(
        None, min=1, help="Score only this one of --nj parts; default: score and join all."
    ),
    nj: int = typer.Option(1, min=1, help="Number of parts for --job."),
    ngpu: int = NGPU,
) -> None:
    """Score every word of N-best lists with a neural model.

    Reads: NBEST/nbest.tsv; NNLM/config.yaml, words.txt, unigram.tsv and model.safetensors.

    Writes: OUT/nnlm.<job>.ark, .scp and .yaml; without --job what merge-rescored writes.

    Example in egs/ami/rescore1: fedtools rescore exp/mini/am/seed0/decode_eval \
        exp/mini/nnlm/seed0 exp/mini/nnlm/seed0/rescored_eval
    """
    if job is not None and job > nj:
        raise typer.BadParameter(f"more than --nj {nj}", param_hint="--job")

    from fedtools.cli.federation import device_of
    from fedtools.lm import nbest_scoring as work

    jobs = nj if job else 1
    device = device_of(ngpu)
    part = work.rescore(nbest, nnlm, out, job=job or 1, jobs=jobs, bins=batch_bins, device=device)
    print(part if job else work.merge(nbest, nnlm, out))


@command("merge-rescored", "Rescoring")
def merge_rescored(
    nbest: Path = NBEST,
    nnlm: Path = NNLM,
    out: Path = OUT,
    nj: int = typer.Option(..., min=1, help="Number of jobs that fedtools rescore ran."),
) -> None:
    """Merge the scores of all jobs of rescore.

    Reads: OUT/nnlm.<job>.scp; NBEST/nbest.tsv; NNLM.

    Writes: OUT/nbest.tsv, words.txt, unigram.tsv, nnlm.ark, .scp and .yaml.

    Example in egs/ami/rescore1: fedtools merge-rescored exp/mini/am/seed0/decode_eval \
        exp/mini/nnlm/seed0 exp/mini/nnlm/seed0/rescored_eval --nj 2
    """
    from fedtools.lm.nbest_scoring import merge

    print(merge(nbest, nnlm, out, nj))


@command("import-nbest", "Rescoring")
def import_nbest(
    form: Literal["kaldi", "espnet"] = typer.Argument(
        ..., metavar="kaldi|espnet", help="The toolkit that made the lists."
    ),
    source: Path = typer.Argument(..., metavar="DIR", help="The output folder of that toolkit."),
    out: Path = typer.Argument(..., metavar="OUT", help="Gets nbest.tsv."),
    acoustic_scale: float = typer.Option(
        1.0, help="Scale of Kaldi's acoustic scores, called acwt there."
    ),
    normalise: Literal["lower", "upper"] = typer.Option(
        None, help="Change words to the case of the neural model's vocabulary."
    ),
    language: str = typer.Option(
        "", help="Language of the words, for --normalise, such as tr, which has two letters i."
    ),
) -> None:
    """Import N-best lists of Kaldi or ESPnet.

    ESPnet's lists have no separate language model score: rescore them with nnlm: 1.

    Reads: for Kaldi, DIR/ac_cost, lm_cost and words_text, with lines `<utterance>-<rank> ...`; for
    ESPnet, DIR/1best_recog, 2best_recog, ..., or DIR/output.1, ... of its logdir.

    Writes: OUT/nbest.tsv.

    Example in egs/ami/rescore1: fedtools import-nbest espnet decode_eval exp/mini/espnet_eval \
        --normalise lower
    """
    from fedtools.data.languages import is_language
    from fedtools.decode.foreign import import_espnet, import_kaldi

    if not 0 < acoustic_scale < float("inf"):
        raise typer.BadParameter("a number over 0", param_hint="--acoustic-scale")
    if language and not is_language(language):
        problem = f"{language!r} is not the code of a known language, such as tr"
        raise typer.BadParameter(problem, param_hint="--language")
    if language and not normalise:
        raise typer.BadParameter("needs --normalise", param_hint="--language")
    if form == "kaldi":
        count = import_kaldi(source, out, acoustic_scale, normalise, language)
    else:
        count = import_espnet(source, out, normalise, language)
    print(f"{out / 'nbest.tsv'}: {count} utterances")
    if form == "espnet":
        print("the lists have no separate language model scores: rescore them with nnlm: 1")


def _kinds() -> dict[str, Any]:
    """Return name -> type for all options that a sweep can set."""
    from typing import get_type_hints

    from fedtools.exchange.options import Rounds
    from fedtools.federation.fmp.sweep import GROUPS, ROUNDS, SPAN
    from fedtools.lm.reweighting import ListWeights
    from fedtools.methods.fmp import FMP, Adaptation
    from fedtools.privacy.options import Privacy

    of_fmp = get_type_hints(FMP, include_extras=True)
    names = [*get_type_hints(ListWeights), *get_type_hints(Adaptation)]
    privacy = get_type_hints(Privacy, include_extras=True)
    rest = {ROUNDS: Rounds, **{name: of_fmp[name] for name in (GROUPS, SPAN, "doubt")}}
    return {name: of_fmp[name] for name in names} | privacy | rest


def _values(texts: Sequence[str], several: bool) -> dict[str, Any]:
    """Parse OPTION=VALUE or OPTION=A,B,... as YAML; raise a usage error for an unknown option."""
    from fedtools.core.config import checked, override

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
    """Return the values of each option to vary, from a section of a YAML file and from --vary."""
    from fedtools.core.config import checked, lookup, option_error, unknown
    from fedtools.core.errors import UserError

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
    out: Path = typer.Argument(..., metavar="STREAM", help="The folder to write."),
) -> None:
    """Add clients and times to rescored N-best lists.

    FMP needs both in one folder.

    Reads: DATA_DIR/utt2client, text, utt2spk, and segments or utt2start; RESCORED.

    Writes: STREAM with the tables of both; nnlm.scp points to the ark of RESCORED.

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
        None,
        "--list",
        metavar="TSV",
        help="Columns client, phrase; default: words of each client's first utterances.",
    ),
    rounds: int = typer.Option(
        10, min=1, help="T: lists are made from the first of T + 1 groups of utterances."
    ),
    most: int = typer.Option(
        20, min=0, help="List words that occur at most this often in the background text."
    ),
    corrected: bool = typer.Option(
        False, help="Take words from the client's corrected transcripts, the stream's text."
    ),
) -> None:
    """Give clients lists of their own words to favour.

    The lists are never sent. Utterances that a list is made from get no bonus; with --list, no
    utterance is excluded. The second pass favours whole phrases, the first pass (`fedtools decode`)
    each of their words.

    Reads: STREAM, or the TSV of --list.

    Writes: STREAM/phrases.tsv; phrases_of, the utterances that lists are made from.

    Example in egs/ami/rescore1: fedtools rescore-words exp/mini/nnlm/seed0/stream_eval --rounds 3 \
        --corrected
    """
    from fedtools.lm.private_words import read_phrases
    from fedtools.lm.stream import PHRASES, list_words, put_words

    if lists and corrected:
        raise typer.BadParameter("cannot be combined with --corrected", param_hint="--list")
    if lists:
        put_words(stream, read_phrases(lists))
    else:
        print(f"{stream / PHRASES}: {list_words(stream, rounds, most, corrected)} words")


@command("rescore-sweep", "Rescoring")
def rescore_sweep(
    stream: Path = STREAM,
    out: Path = typer.Argument(
        ..., metavar="TSV", help="The table to write, a row per combination."
    ),
    vary: list[str] = VARY,
    config: Path = CONFIG,
    section: str = SECTION,
    fixed: list[str] = SET,
    seed: int = typer.Option(0, min=0, help="Random seed of intervals and noise."),
    draws: int = DRAWS,
) -> None:
    """Measure FMP's word error rate for many settings.

    No neural network is run: the scores are stored. With noise, each row is for one draw of it.

    Reads: STREAM; a section of the YAML of --config, with lists of values.

    Writes: TSV.

    Example in egs/ami/rescore1: fedtools rescore-sweep exp/mini/nnlm/seed0/stream_eval \
        exp/mini/sweep.tsv --vary scale=0,0.5,1 --set rounds=5
    """
    from fedtools.core.tables import format_table
    from fedtools.federation.fmp.sweep import sweep

    grid = _grid(vary, config, section)
    rows = sweep(stream, out, _values(fixed, False), grid, seed, draws)
    columns = list(rows[0])
    print(format_table(columns, [list(row.values()) for row in rows], "r" * len(columns)), end="")


@command("rescore-rows", "Rescoring")
def rescore_rows(
    stream: Path = STREAM,
    data: Path = typer.Argument(
        ..., metavar="DATA_DIR", help="Data directory with utt2person and utt2meeting."
    ),
    out: Path = typer.Argument(..., metavar="TSV", help="Words and errors of each row and person."),
    config: Path = typer.Option(..., help="YAML file with the options of each row, in --section."),
    section: str = typer.Option("sweeps.rows", help="Section of the YAML file."),
    fixed: list[str] = SET,
    static: list[Path] = typer.Option(
        [],
        help="Kaldi text from which the fixed unigram (everybody: static) is estimated; may be "
        "given several times.",
    ),
    static_plain: list[Path] = typer.Option(
        [], help="The same as --static, for text without utterance ids."
    ),
    without: Path = typer.Option(
        None, help="List of words, one per line, such as fillers: score also without these words."
    ),
    seed: int = typer.Option(
        0, min=0, help="Random seed of noise, and of the choice of other clients."
    ),
) -> None:
    """Measure FMP and its controls, by person.

    A row of the section is a setting of FMP's options, or a control: counts of another kind
    (adapted, posterior, reference), counts of another client, or a fixed unigram.

    Reads: STREAM; DATA_DIR/utt2person and utt2meeting; a section of the YAML of --config; the texts
    of --static and --static-plain; the list of --without.

    Writes: TSV with row, scored (all, without), person, words, errors.

    Example in egs/ami/rescore1: fedtools rescore-rows exp/mini/nnlm/seed0/stream_eval \
        data/mini/eval exp/mini/rows.tsv --config conf/fmp.yaml --set scale=0.5 \
        --static data/mini/train/text --without conf/fillers.txt
    """
    from functools import partial

    from fedtools.core.config import lookup
    from fedtools.core.errors import UserError
    from fedtools.federation.fmp import rows as work

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
    out: Path = typer.Argument(
        ..., metavar="YAML", help="The file to write, with the best values."
    ),
    vary: list[str] = VARY,
    config: Path = CONFIG,
    section: str = SECTION,
    fixed: list[str] = SET,
    over: list[str] = typer.Option(
        [], metavar="OPTION=A,B,...", help="Average errors over these values instead of fixing one."
    ),
    draws: int = DRAWS,
) -> None:
    """Choose the values of FMP with the fewest word errors.

    STREAM should be of validation data.

    Reads: STREAM; a section of the YAML of --config, with lists of values.

    Writes: YAML.

    Example in egs/ami/rescore1: fedtools rescore-tune exp/mini/nnlm/seed0/stream_dev \
        exp/mini/scale.yaml --vary scale=0,0.5,1 --set rounds=5
    """
    import sys

    from fedtools.federation.fmp.sweep import tune

    varied = _grid(vary, config, section)
    best, wer = tune(stream, out, _values(fixed, False), varied, _values(over, True), draws)
    shown = {name: f"{value:g}" if _is_number(value) else value for name, value in best.items()}
    chosen = ", ".join(f"{name} {value}" for name, value in shown.items())
    print(f"{out}: {chosen}, WER {wer:.2f} % on {stream}")
    for name, values in varied.items():
        # A best value of 0 at the lower edge needs no warning: lower values are useless.
        edges = {values[-1], *([values[0]] if values[0] else [])}
        if len(values) > 2 and _is_number(best[name]) and best[name] in edges:
            text = f"warning: {out}: {name} {shown[name]} is at an edge of the values tried"
            print(text, file=sys.stderr)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


@command("rescore-best", "Rescoring")
def rescore_best(
    experiment: Path = EXPERIMENT,
    out: Path = typer.Argument(
        ..., metavar="OUT", help="Gets text; for FMP also marginals.ark and .scp."
    ),
    ngpu: int = NGPU,
) -> None:
    """Write the best hypotheses of all clients' utterances.

    Clients rescore with FMP or with fine-tuned models; fedtools score takes the text.

    Reads: EXP, and the STREAM that it was created with.

    Writes: OUT/text; for FMP also marginals.ark and .scp.

    Example in egs/ami/rescore1: fedtools rescore-best exp/mini/fmp10/seed0 \
        exp/mini/fmp10/seed0/best
    """
    from fedtools.data.ark import write_ark
    from fedtools.data.datadir import byte_order, write_table
    from fedtools.federation.evaluate import best_text
    from fedtools.tasks.parts import MARGINALS

    federation = open_experiment(experiment, ngpu)
    found = best_text(federation)
    write_table(out / "text", {name: found[name] for name in byte_order(found)})
    if marginals := MARGINALS.of(federation.task):
        rows = marginals()
        ark = write_ark(out / "marginals.ark", ((name, rows[name]) for name in byte_order(rows)))
        write_table(out / "marginals.scp", ark)
    print(out / "text")
