"""Commands of the second pass: train-nnlm, rescore, merge-rescored, import-nbest."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from fedtools.cli.app import command
from fedtools.cli.federation import NGPU

NBEST = typer.Argument(..., metavar="NBEST", help="A folder with nbest.tsv.")
NNLM = typer.Argument(..., metavar="NNLM", help="A folder made by fedtools train-nnlm.")
OUT = typer.Argument(..., metavar="OUT", help="Gets nbest.tsv, nnlm.scp, words.txt, unigram.tsv.")
NGRAM = typer.Option(
    None, help="Folder of train-lm on the training text: write ngram.scp for a density ratio."
)
# The same as `fedtools.lm.nbest_scoring.BATCH_BINS`, whose module imports torch.
BATCH_BINS = 4000


@command("train-nnlm", "Language models")
def train_nnlm(
    paths: list[Path] = typer.Argument(
        metavar="[TEXT]... OUT", help="Kaldi text files; the folder to write."
    ),
    plain: list[Path] = typer.Option(
        [], help="Text without utterance ids; may be given several times."
    ),
    valid: list[Path] = typer.Option(..., help="Kaldi text by which the best epoch is chosen."),
    config: Path = typer.Option(
        None, help="YAML file with the options; default: those of the paper."
    ),
    section: str = typer.Option("nnlm", help="Section of the YAML file with the options."),
    start: Path = typer.Option(
        None,
        metavar="NNLM",
        help="A model to continue training; its words are kept, its counts are added to.",
    ),
    seed: int = typer.Option(0, min=0, help="Random seed."),
    ngpu: int = NGPU,
) -> None:
    """Train a neural language model of words.

    The model is ESPnet's TransformerLM, for rescoring.

    Reads: TEXT, and the files of --plain and --valid; the YAML of --config; the folder of --start.

    Writes: OUT/config.yaml, words.txt, unigram.tsv, perplexity.tsv, model.safetensors;
    state.safetensors while it trains.

    Example in egs/ami/rescore1: fedtools train-nnlm data/mini/train/text exp/mini/nnlm/seed0 \
        --plain downloads/ami-mini/background.txt --valid data/mini/dev/text --config \
        conf/mini.yaml
    """
    *texts, out = paths
    if not (texts or plain):
        raise typer.BadParameter("no text: TEXT... OUT, or --plain FILE OUT", param_hint="TEXT")

    from fedtools.cli.federation import device_of
    from fedtools.lm import nnlm_training as work

    training = work.read_options(config, section)
    files = work.Texts(texts, plain, valid)
    history = work.train_nnlm(files, out, training, seed, device_of(ngpu), start)
    best = min(range(len(history)), key=lambda epoch: history[epoch][1])
    print(f"{out}: epoch {best + 1} of {len(history)}, perplexity {history[best][1]:.2f}")


@command("rescore", "Rescoring")
def rescore(
    nbest: Path = NBEST,
    nnlm: Path = NNLM,
    out: Path = OUT,
    ngram: Path = NGRAM,
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

    Reads: NBEST/nbest.tsv; NNLM/config.yaml, words.txt, unigram.tsv and model.safetensors; the
    folder of --ngram.

    Writes: OUT/nnlm.<job>.ark, .scp and .yaml; without --job what merge-rescored writes.

    Example in egs/ami/rescore1: fedtools rescore exp/mini/am/seed0/decode_eval \
        exp/mini/nnlm/seed0 exp/mini/nnlm/seed0/rescored_eval --ngram exp/mini/lm2
    """
    if job is not None and job > nj:
        raise typer.BadParameter(f"more than --nj {nj}", param_hint="--job")
    if job is not None and ngram is not None:
        raise typer.BadParameter("is for merge-rescored, not for --job", param_hint="--ngram")

    from fedtools.cli.federation import device_of
    from fedtools.lm import nbest_scoring as work

    jobs = nj if job else 1
    device = device_of(ngpu)
    part = work.rescore(nbest, nnlm, out, job=job or 1, jobs=jobs, bins=batch_bins, device=device)
    print(part if job else work.merge(nbest, nnlm, out, ngram=ngram))


@command("merge-rescored", "Rescoring")
def merge_rescored(
    nbest: Path = NBEST,
    nnlm: Path = NNLM,
    out: Path = OUT,
    nj: int = typer.Option(..., min=1, help="Number of jobs that fedtools rescore ran."),
    ngram: Path = NGRAM,
) -> None:
    """Merge the scores of all jobs of rescore.

    Reads: OUT/nnlm.<job>.scp; NBEST/nbest.tsv; NNLM; the folder of --ngram.

    Writes: OUT/nbest.tsv, words.txt, unigram.tsv, nnlm.ark, .scp and .yaml; ngram.ark and .scp with
    --ngram.

    Example in egs/ami/rescore1: fedtools merge-rescored exp/mini/am/seed0/decode_eval \
        exp/mini/nnlm/seed0 exp/mini/nnlm/seed0/rescored_eval --nj 2 --ngram exp/mini/lm2
    """
    from fedtools.lm.nbest_scoring import merge

    print(merge(nbest, nnlm, out, nj, ngram))


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
