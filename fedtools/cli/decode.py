"""Commands that use models: decode, merge-nbest, tune, best-path, export, import."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtools.cli.app import command
from fedtools.cli.federation import NGPU, open_experiment

if TYPE_CHECKING:
    from fedtools.federation.federation import Federation

DECODE_DIR = typer.Argument(..., metavar="DECODE_DIR", help="A folder made by fedtools decode.")


@command("decode", "Decoding and scoring")
def decode(
    experiment: Path = typer.Argument(..., metavar="EXP", help="The experiment's folder."),
    data: Path = typer.Argument(
        ..., metavar="DATA_DIR", help="The data directory to decode; needs feats.scp."
    ),
    out: Path = typer.Argument(..., metavar="DECODE_DIR", help="The folder for the N-best lists."),
    model: str = typer.Option("average", help="The model to use: average, start, or round:N."),
    lm: Path = typer.Option(
        None, help="N-gram for beam search, made by fedtools train-lm; default: greedy search."
    ),
    config: Path = typer.Option(None, help="YAML with a section decode: beam_size, nbest, ..."),
    phrases: Path = typer.Option(
        None, metavar="TSV", help="Columns client, phrase: words to favour, by client; needs --lm."
    ),
    bonus: float = typer.Option(
        2.0, min=0, help="Bonus for each word of --phrases, as a natural logarithm."
    ),
    job: int = typer.Option(
        None, min=1, help="Decode only this one of --nj parts; default: decode and merge all."
    ),
    nj: int = typer.Option(1, min=1, help="Number of parts for --job."),
    ngpu: int = NGPU,
) -> None:
    """Decode each client's utterances into N-best lists.

    If clients have personal models, each client's utterances are decoded with its own model.

    Reads: EXP/model.safetensors and EXP/clients/<client>/model.safetensors; DATA_DIR/feats.scp and
    utt2client; the folder of --lm; the files of --config and --phrases.

    Writes: DECODE_DIR/nbest.<job>.tsv and .yaml; without --job also nbest.tsv.

    Example in egs/commonvoice/asr1: fedtools decode exp/mini/fedavg/seed0 data/mini/test \
        exp/mini/fedavg/seed0/decode_test --lm exp/mini/lm --config conf/mini.yaml
    """
    import re

    from fedtools.decode.lists import merge
    from fedtools.federation.asr import decode as work

    if not re.fullmatch(r"average|start|round:\d+", model):
        raise typer.BadParameter("average, start, or round:N", param_hint="--model")
    if job is not None and job > nj:
        raise typer.BadParameter(f"more than --nj {nj}", param_hint="--job")
    federation = open_experiment(experiment, ngpu)
    if phrases and not lm:
        raise typer.BadParameter("needs --lm", param_hint="--phrases")
    search = work.read_search(federation, lm, config, phrases, bonus)
    work.decode(federation, data, out, search, model=model, job=job or 1, jobs=nj if job else 1)
    if job is None:
        print(merge(out, data, 1))


@command("cross", "Decoding and scoring")
def cross(
    data: Path = typer.Argument(
        ..., metavar="DATA_DIR", help="Data directory with features, transcripts and clients."
    ),
    out: Path = typer.Argument(..., metavar="TABLE", help="The TSV to write."),
    experiments: list[str] = typer.Argument(
        ...,
        metavar="NAME=EXP...",
        help="Experiments; {} is the method's title, and those with the same name are seeds.",
    ),
    ngpu: int = NGPU,
) -> None:
    """Measure each client's model on each client's data.

    The table has the WER of a greedy search; experiments without personal models are left out.

    Reads: EXP/clients/<client>/model.safetensors; DATA_DIR/feats.scp, text and utt2client.

    Writes: TABLE.

    Example in egs/commonvoice/asr1: fedtools cross data/mini/test \
        exp/mini/decouplefl/seed0/cross.tsv '{}=exp/mini/decouplefl/seed0'
    """
    from fedtools.cli.report import pair
    from fedtools.federation.asr import cross as work

    pairs = [pair(text, "NAME=EXP", "NAME=EXP") for text in experiments]
    opened = [(name, open_experiment(Path(exp), ngpu)) for name, exp in pairs]
    if not work.cross(opened, data, out):
        print("no personal models: nothing to compare", file=sys.stderr)
        return
    print(out)


@command("merge-cross", "Decoding and scoring")
def merge_cross(
    out: Path = typer.Argument(..., metavar="TABLE", help="The TSV to write."),
    parts: list[Path] = typer.Argument(
        ..., metavar="PART...", help="Tables written by fedtools cross; missing ones are left out."
    ),
    plot: Path = typer.Option(None, help="Draw a map for each name into this PNG."),
) -> None:
    """Merge the tables of all jobs of cross.

    Reads: PART....

    Writes: TABLE, unless all parts are missing; the PNG of --plot.

    Example in egs/commonvoice/asr1: fedtools merge-cross exp/mini/cross.tsv \
        exp/mini/decouplefl/seed0/cross.tsv --plot exp/mini/cross.png
    """
    from fedtools.federation.asr.cross import merge, read_cross

    if not merge(parts, out):
        print("no personal models: nothing to compare", file=sys.stderr)
        return
    if plot is not None:
        from fedtools.report.plots import plot_cross

        plot_cross(plot, read_cross(out))
    print(out)


@command("merge-nbest", "Decoding and scoring")
def merge_nbest(
    out: Path = DECODE_DIR,
    data: Path = typer.Argument(..., metavar="DATA_DIR", help="The decoded data directory."),
    nj: int = typer.Option(..., min=1, help="Number of jobs that fedtools decode ran."),
) -> None:
    """Merge the N-best lists of all jobs of decode.

    Reads: DECODE_DIR/nbest.<job>.tsv; DATA_DIR/utt2spk.

    Writes: DECODE_DIR/nbest.tsv.

    Example in egs/commonvoice/asr1: fedtools merge-nbest exp/mini/fedavg/seed0/decode_test \
        data/mini/test --nj 3
    """
    from fedtools.decode.lists import merge

    print(merge(out, data, nj))


@command("tune", "Decoding and scoring")
def tune(
    out: Path = DECODE_DIR,
    data: Path = typer.Argument(
        ..., metavar="DATA_DIR", help="Data directory whose text is the reference."
    ),
    weights: Path = typer.Argument(..., metavar="WEIGHTS", help="The YAML file to write."),
) -> None:
    """Choose LM weight and word score on validation data.

    The chosen values give the lowest WER when the N-best lists are re-ranked with them.

    Reads: DECODE_DIR/nbest.tsv; DATA_DIR/text.

    Writes: WEIGHTS.

    Example in egs/commonvoice/asr1: fedtools tune exp/mini/fedavg/seed0/decode_valid \
        data/mini/valid exp/mini/fedavg/seed0/weights.yaml
    """
    from fedtools.decode.lists import tune as choose

    print(choose(out, data, weights))


@command("best-path", "Decoding and scoring")
def best_path(
    out: Path = DECODE_DIR,
    weights: Path = typer.Option(
        None, help="YAML file made by fedtools tune; default: take rank 1 of each list."
    ),
    drop_loops: bool = typer.Option(
        False,
        "--drop-loops",
        help="Write an empty transcript for a hypothesis that repeats itself. For training labels.",
    ),
) -> None:
    """Write the best hypothesis of every N-best list.

    A decoder such as Whisper's may repeat a few words until the hypothesis ends. In scoring, such
    a hypothesis is kept like any other; for training labels, see --drop-loops.

    Reads: DECODE_DIR/nbest.tsv; the YAML of --weights.

    Writes: DECODE_DIR/text, and weights.yaml with --weights.

    Example in egs/commonvoice/asr1: fedtools best-path exp/mini/fedavg/seed0/decode_test \
        --weights exp/mini/fedavg/seed0/weights.yaml
    """
    from fedtools.decode.lists import best_path as best

    print(best(out, weights, drop_loops))


@command("export", "Federation")
def export(
    experiment: Path = typer.Argument(
        ..., metavar="EXP", help="The experiment, after fedtools average."
    ),
    out: Path = typer.Argument(..., metavar="OUT", help="The folder to write."),
    client: str = typer.Option(
        None, help="Client whose model is exported, if clients have personal models."
    ),
    adapters: bool = typer.Option(
        False, "--adapters", help="For network hf: export LoRA's adapters alone, as peft's files."
    ),
    as_base: bool = typer.Option(
        False, "--as-base", help="For network hf: use the precision of the base, not float32."
    ),
) -> None:
    """Export an averaged model to ESPnet or transformers.

    An adapted model is exported whole, with its adapters merged into the weights.

    Reads: EXP/model.safetensors, or EXP/clients/<client>/model.safetensors; EXP/config.yaml and
    tokens or classes.txt; for network hf, the folder that config.yaml names.

    Writes: OUT/config.yaml, model.pth and tokens. For network hf, a folder of the same kind as the
    base: OUT/config.json, model.safetensors and the other files of such a folder, and in
    head.safetensors a head that transformers does not know. With --adapters, adapter_config.json
    and adapter_model.safetensors instead of the model.

    Example in egs/commonvoice/asr1: fedtools export exp/mini/fedavg/seed0 exp/mini/espnet
    """
    from fedtools.core.errors import UserError
    from fedtools.data.symbols import read_tokens
    from fedtools.federation.evaluate import has_average, load_average
    from fedtools.federation.federation import Federation
    from fedtools.models.acoustic.espnet import export_espnet
    from fedtools.models.adapt.adaptation import has_base
    from fedtools.models.adapt.adapters import merged
    from fedtools.models.pretrained.options import is_pretrained
    from fedtools.tasks.parts import CORPUS, MODELS

    if adapters and as_base:
        raise typer.BadParameter("cannot be combined with --adapters", param_hint="--as-base")
    federation = Federation(experiment)
    config = federation.experiment.options.model
    if client is not None and not (federation.personal and has_average(federation, client)):
        remedy = "name a client that has one, or leave out --client"
        raise UserError(f"client {client!r} has no averaged model", path=experiment, remedy=remedy)
    if is_pretrained(config):
        load_average(federation, client or "")
        _export_pretrained(federation, out, adapters, as_base)
        return
    if adapters or as_base:
        option = "--adapters" if adapters else "--as-base"
        raise typer.BadParameter("is for models of network hf", param_hint=option)
    corpus = federation.task.need(CORPUS)
    load_average(federation, client or "")
    model = federation.task.need(MODELS).build()
    for path in export_espnet(
        out,
        config,
        merged(model) if has_base(config) else model.state_dict(),
        *read_tokens(experiment),
    ):
        print(path)
    if ends := corpus.training.end_frames:
        note = f"the model expects {ends} frames of zeros after every utterance (end_frames)"
        print(f"{note}: append them to the features that ESPnet decodes", file=sys.stderr)


def _export_pretrained(federation: Federation, out: Path, adapters: bool, as_base: bool) -> None:
    """Write the model of an experiment that began with a Hugging Face folder."""
    from fedtools.core.config import from_mapping
    from fedtools.data.symbols import BPE_MODEL, TOKEN_TYPE, TOKENS
    from fedtools.models.pretrained.export import export_adapters, export_folder
    from fedtools.models.pretrained.folder import open_known
    from fedtools.models.pretrained.options import Pretrained, is_seq2seq
    from fedtools.tasks.parts import MODELS

    options = from_mapping(Pretrained, federation.experiment.options.model, "model")
    search = is_seq2seq(federation.experiment.options.model)
    folder = open_known(options.path, options.sum, search)
    models = federation.task.need(MODELS)
    names = ("classes.txt", TOKENS, BPE_MODEL, TOKEN_TYPE)
    labels = [federation.experiment.path / name for name in names]
    model = models.build()
    if adapters:
        state = models.tensors(model)
        notes = export_adapters(out, folder, model, state, labels, options.adaptation)
    else:
        notes = export_folder(out, folder, model, models.tensors(model), labels, as_base)
    print(out / ("adapter_model.safetensors" if adapters else "model.safetensors"))
    for sentence in notes:
        print(sentence, file=sys.stderr)


@command("import", "Federation")
def import_(
    sources: list[Path] = typer.Argument(
        ...,
        metavar="SOURCE...",
        help="ESPnet's config.yaml and .pth file; or a CTranslate2 folder of Whisper; or OpenAI's "
        ".pt file of Whisper.",
    ),
    out: Path = typer.Argument(..., metavar="OUT", help="The folder to write."),
    tokenizer: Path | None = typer.Option(
        None, metavar="FOLDER", help="Folder with tokenizer.json, which an OpenAI .pt file lacks."
    ),
) -> None:
    """Import a model of ESPnet or Whisper.

    ESPnet's encoder and CTC layer are imported, for fedtools init --start. Whisper is imported
    whole, as a Hugging Face folder: exactly from float32, float16 and bfloat16, and as precisely as
    possible from CTranslate2's int8.

    Reads: SOURCE; for Whisper, in SOURCE or --tokenizer, tokenizer.json and generation_config.json
    or config.json.

    Writes: OUT/model.safetensors. For ESPnet, model.yaml (the section model of a configuration) and
    tokens; for Whisper, config.json, generation_config.json, preprocessor_config.json,
    tokenizer.json and tokenizer_config.json.

    Example in egs/commonvoice/asr1: fedtools import exp/mini/espnet/config.yaml \
        exp/mini/espnet/model.pth exp/mini/imported
    """
    if len(sources) > 2:
        raise typer.BadParameter("give one SOURCE, or two for ESPnet", param_hint="SOURCE")
    if len(sources) == 2:
        if tokenizer is not None:
            problem = "is for OpenAI's .pt files, and two SOURCEs are ESPnet's"
            raise typer.BadParameter(problem, param_hint="--tokenizer")
        from fedtools.models.acoustic.espnet import import_espnet

        notes = import_espnet(*sources, out)
    else:
        from fedtools.models.pretrained.whisper_import import import_whisper

        notes = import_whisper(*sources, out, tokenizer)
    for sentence in notes:
        print(sentence)
    print(out / "model.safetensors")
