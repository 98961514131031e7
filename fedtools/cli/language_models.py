"""Commands that train tokens, n-grams, denominators and neural language models."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from fedtools.cli.app import command, section_option
from fedtools.cli.federation import NGPU
from fedtools.core.recipe_sections import Denominator, Ngram, Tokens, TokenType

Unit = Literal["word", "token"]


@command("train-tokens", "Language models")
def train_tokens(
    paths: list[Path] = typer.Argument(
        metavar="TEXT... OUT", help="Kaldi text files; the folder to write."
    ),
    token_type: TokenType = section_option(
        Tokens, "token_type", help="SentencePiece BPE, or characters."
    ),
    vocab_size: int = section_option(
        Tokens, "vocab_size", help="Lines of tokens.txt; for char, the maximum, default: no limit."
    ),
) -> None:
    """Train a token list or a SentencePiece model on text.

    Reads: TEXT.

    Writes: OUT/tokens.txt and token_type; bpe.model for bpe.

    Example in egs/commonvoice/asr1: fedtools train-tokens data/mini/server_train/text \
        exp/mini/tokens --token-type char --vocab-size 40
    """
    from fedtools.lm.tokens import train_tokens

    if len(paths) < 2:
        raise typer.BadParameter("at least one text file and the output folder", param_hint="TEXT")
    if token_type == "bpe" and vocab_size is None:
        raise typer.BadParameter("is needed for bpe", param_hint="--vocab-size")
    *texts, out = paths
    tokenizer = train_tokens(texts, out, token_type, vocab_size)
    print(f"{out / 'tokens.txt'}: {len(tokenizer)} tokens ({tokenizer.token_type})")


@command("train-lm", "Language models")
def train_lm(
    paths: list[Path] = typer.Argument(
        metavar="[TEXT]... OUT", help="Kaldi text files; the folder to write."
    ),
    plain: list[Path] = typer.Option(
        [], help="Text without utterance ids; may be given several times."
    ),
    order: int = section_option(Ngram, "order", help="Order of the model, its longest n-gram."),
    unit: Unit = typer.Option("word", help="Unit of the n-grams."),
    tokens: Path = typer.Option(
        None, help="Folder made by fedtools train-tokens, for --unit token."
    ),
    valid: list[Path] = typer.Option(
        [], help="Kaldi text to report the perplexity of; may be given several times."
    ),
    memory: str = typer.Option("500M", help="Memory that lmplz may use for sorting."),
) -> None:
    """Estimate an n-gram model with KenLM's lmplz.

    The perplexity of each text of --valid is printed.

    Reads: TEXT, and the files of --plain and --valid; the folder of --tokens.

    Writes: OUT/<order>gram.arpa, <order>gram.bin, vocabulary, lm.yaml.

    Example in egs/commonvoice/asr1: fedtools train-lm data/mini/server_train/text exp/mini/lm \
        --order 3 --valid data/mini/valid/text
    """
    import re

    *texts, out = paths
    if not (texts or plain):
        raise typer.BadParameter("no text: TEXT... OUT, or --plain FILE OUT", param_hint="TEXT")
    if (unit == "token") != (tokens is not None):
        raise typer.BadParameter("goes with --unit token, and only with it", param_hint="--tokens")
    if not re.fullmatch(r"[1-9]\d*[%bKMGT]", memory):
        raise typer.BadParameter("a number and one of % b K M G T", param_hint="--memory")

    from fedtools.core.tables import format_table
    from fedtools.lm.ngram import perplexity, train_ngram
    from fedtools.lm.tokens import Tokenizer

    tokenizer = None if tokens is None else Tokenizer.load(tokens)
    model = train_ngram(texts, out, order, tokenizer, plain, memory)
    print(f"{model.binary}: {order}-gram of {unit}s")
    if valid:
        rows = []
        for path in valid:
            found = perplexity(model, [path], tokenizer)
            figures = (f"{found.perplexity:.2f}", f"{found.perplexity_known:.2f}")
            rows.append((path, found.sentences, found.units, found.unknown, *figures))
        header = ("text", "sentences", f"{unit}s", "unknown", "perplexity", "without unknown")
        print(format_table(header, rows), end="")


@command("train-denominator", "Language models")
def train_denominator(
    text: Path = typer.Argument(..., metavar="TEXT", help="Kaldi text of the training data."),
    tokens: Path = typer.Argument(
        ..., metavar="TOKENS", help="Folder made by fedtools train-tokens."
    ),
    out: Path = typer.Argument(..., metavar="OUT", help="Gets denominator.safetensors."),
    order: int = section_option(Denominator, "order", help="Longest n-gram of tokens."),
    max_histories: int = section_option(
        Denominator,
        "max_histories",
        help="Maximum number of histories of two or more tokens that are kept.",
    ),
) -> None:
    """Make the denominator graph of LF-MMI from transcripts.

    The graph is an n-gram of tokens; models with model.criterion lfmmi are trained with it.

    Reads: TEXT; TOKENS/tokens.txt, token_type and bpe.model.

    Writes: OUT/denominator.safetensors.

    Example in egs/tedlium3/attack1: fedtools train-denominator data/mini/train_g/text \
        exp/mini/tokens exp/mini/denominator
    """
    from fedtools.core.errors import UserError
    from fedtools.data.datadir import read_transcripts
    from fedtools.lm.tokens import Tokenizer
    from fedtools.models.lfmmi import lattice

    tokenizer = Tokenizer.load(tokens)
    lines = [line for line in read_transcripts(text).values() if line.strip()]
    if not lines:
        raise UserError("no words in the text", path=text)
    transcripts = [tokenizer.encode(line) for line in lines]
    graph = lattice.train_denominator(transcripts, tokenizer.tokens, order, max_histories)
    lattice.save_denominator(out / lattice.FILE, graph)
    print(f"{out / lattice.FILE}: {len(graph.final)} states, {len(graph.pdf)} arcs")


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
    seed: int = typer.Option(0, min=0, help="Random seed."),
    ngpu: int = NGPU,
) -> None:
    """Train a neural language model of words.

    The model is ESPnet's TransformerLM, for rescoring.

    Reads: TEXT, and the files of --plain and --valid; the YAML of --config.

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
    history = work.train_nnlm(files, out, training, seed, device_of(ngpu))
    best = min(range(len(history)), key=lambda epoch: history[epoch][1])
    print(f"{out}: epoch {best + 1} of {len(history)}, perplexity {history[best][1]:.2f}")
