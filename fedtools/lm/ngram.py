"""N-gram language models of words or tokens, estimated by KenLM's lmplz.

A folder holds `<order>gram.arpa`, `<order>gram.bin` (what decoders read), `vocabulary` (one word
or token a line, sorted) and `lm.yaml` (order, unit, and the SHA-256 of the .bin: KenLM maps the
file unchecked, and a damaged one ends the process or gives wrong scores).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedtools.core.atomic import atomic_path, scratch_dir, sha256, write_text
from fedtools.core.config import read_yaml, write_yaml
from fedtools.core.errors import UserError
from fedtools.core.text_files import decode, open_input, stream_lines
from fedtools.data.datadir import byte_order, read_transcripts
from fedtools.data.symbols import UNKNOWN, check_sentence, nfc, warn_of_unknown, words_of
from fedtools.lm.tokens import Tokenizer

UNITS = ("word", "token")
ORDERS = range(2, 7)  # what KenLM is built for


@dataclass(frozen=True)
class NgramFolder:
    """An n-gram on disk; `read` checks that it is whole.

    Attributes:
        path: the folder.
        order: length of the longest n-gram.
        unit: "word" or "token".
        sum: the SHA-256 of `binary`; "" before it is made.
    """

    path: Path
    order: int
    unit: str
    sum: str = ""

    @property
    def arpa(self) -> Path:
        """Return the path of the model as text."""
        return self.path / f"{self.order}gram.arpa"

    @property
    def binary(self) -> Path:
        """Return the path of the model as KenLM's binary file."""
        return self.path / f"{self.order}gram.bin"

    @property
    def vocabulary(self) -> Path:
        """Return the path of the list of its words or tokens."""
        return self.path / "vocabulary"

    @classmethod
    def read(cls, path: str | Path) -> NgramFolder:
        """Find the n-gram in a folder.

        Raises:
            UserError: if a file is missing or damaged, or lm.yaml is not one of `train_ngram`.
        """
        path = Path(path)
        remedy = "make it with fedtools train-lm"
        if not (path / "lm.yaml").exists():
            raise UserError("no lm.yaml: not an n-gram's folder", path=path, remedy=remedy)
        content = read_yaml(path / "lm.yaml")
        folder = cls(path, *(content.get(name) for name in ("order", "unit", "sha256")))
        if folder.order not in ORDERS or folder.unit not in UNITS:
            raise UserError("order or unit is missing", path=path / "lm.yaml", remedy=remedy)
        for file in (folder.binary, folder.vocabulary):
            if not file.exists():
                raise UserError("missing", path=file, remedy=remedy)
        for line, word in enumerate(stream_lines(folder.vocabulary, remedy), 1):
            if word != nfc(word):
                problem = f"{word!r} is not in Unicode's form NFC, as words of texts are"
                remedy = "make it again with fedtools train-lm"
                raise UserError(problem, path=folder.vocabulary, line=line, remedy=remedy)
        if sha256(folder.binary) != folder.sum:
            problem = f"not the file whose sum is in {path / 'lm.yaml'}"
            raise UserError(problem, path=folder.binary, remedy=remedy)
        return folder


@dataclass(frozen=True)
class Perplexity:
    """How well an n-gram predicts a text; the end of each sentence is predicted, too.

    Attributes:
        sentences: the number of sentences.
        units: the number of words (or tokens), without ends of sentences.
        unknown: the number of those that are not in the vocabulary.
        perplexity: over all units and sentence ends, unknown ones scored as <unk>.
        perplexity_known: over the known units and sentence ends.
    """

    sentences: int
    units: int
    unknown: int
    perplexity: float
    perplexity_known: float


def train_ngram(
    texts: Sequence[str | Path],
    folder: str | Path,
    order: int = 4,
    tokenizer: Tokenizer | None = None,
    plain: Sequence[str | Path] = (),
    memory: str = "500M",
) -> NgramFolder:
    """Estimate an n-gram with modified Kneser-Ney smoothing (Heafield et al. 2013).

    If the text is too small for Kneser-Ney's discounts, lmplz's fixed ones are used, with a warning
    on stderr.

    Args:
        texts: Kaldi `text` files, whose utterance ids are left out.
        folder: gets the files named at the top of this module.
        order: 2 to 6.
        tokenizer: for an n-gram of its tokens; None for words.
        plain: texts with one sentence a line and no ids.
        memory: lmplz's limit for sorting, as "500M" or "20%".

    Raises:
        UserError: if KenLM's programs are missing or fail, or the text is empty or damaged.
    """
    lmplz, build_binary = find_program("lmplz"), find_program("build_binary")
    unit = "word" if tokenizer is None else "token"
    target = NgramFolder(Path(folder), order, unit)
    # lm.yaml is written last and shows that the folder is complete.
    (target.path / "lm.yaml").unlink(missing_ok=True)
    with scratch_dir(target.path) as scratch:
        corpus = scratch / "corpus"
        counts = _write_corpus(corpus, read_sentences(texts, plain), tokenizer)
        unknown = counts.pop(UNKNOWN, 0)
        if tokenizer:
            total = unknown + counts.total()
            warn_of_unknown(unknown, total, [*texts, *plain][0], "the tokens", "tokens")
        if not counts:
            raise UserError("no words in the text", path=[*texts, *plain][0])
        with atomic_path(target.arpa) as arpa:
            # --skip_symbols: <unk> may be in transcripts, and what no token covers becomes <unk>.
            options = ["-o", str(order), "-S", memory, "-T", f"{scratch}/", "--skip_symbols"]
            files = ["--text", corpus, "--arpa", arpa, "--discount_fallback"]
            if "Substituting fallback" in _run_program(lmplz, *options, *files):
                cause = "too little text for Kneser-Ney's discounts"
                print(f"lmplz: {cause}: --discount_fallback sets them", file=sys.stderr)
            with atomic_path(target.binary) as binary:
                _run_program(build_binary, "-T", f"{scratch}/", "probing", arpa, binary)
    write_text(target.vocabulary, "".join(f"{word}\n" for word in byte_order(counts)))
    target = replace(target, sum=sha256(target.binary))
    content = {"order": order, "unit": unit, "sha256": target.sum}
    write_yaml(target.path / "lm.yaml", content)
    return target


def perplexity(
    model: NgramFolder,
    texts: Sequence[str | Path],
    tokenizer: Tokenizer | None = None,
    plain: Sequence[str | Path] = (),
) -> Perplexity:
    """Compute the perplexity of a text under an n-gram.

    Args:
        model: the n-gram.
        texts: Kaldi `text` files.
        tokenizer: the one that the n-gram was made with; None for an n-gram of words.
        plain: texts with one sentence a line and no ids.

    Raises:
        UserError: if the text is empty or damaged.
    """
    import kenlm

    ngram = kenlm.Model(str(model.binary))
    sentences = units = unknown = 0
    log10 = log10_known = 0.0
    for words in read_sentences(texts, plain):
        sentence = " ".join(tokenizer.split(" ".join(words)) if tokenizer else words)
        sentences += 1
        units -= 1  # the end of the sentence is scored, but is no unit
        for score, _, is_unknown in ngram.full_scores(sentence):
            units += 1
            log10 += score
            unknown += is_unknown
            log10_known += 0.0 if is_unknown else score
    if not sentences:
        raise UserError("no words in the text", path=[*texts, *plain][0])
    warn_of_unknown(unknown, units, [*texts, *plain][0], model.vocabulary, f"{model.unit}s")
    scored = units + sentences
    return Perplexity(
        sentences,
        units,
        unknown,
        10 ** (-log10 / scored),
        10 ** (-log10_known / (scored - unknown)),
    )


def read_sentences(
    texts: Sequence[str | Path], plain: Sequence[str | Path] = ()
) -> Iterator[list[str]]:
    """Yield the words of every sentence that has any, unknown ones as `<unk>`; Kaldi texts first.

    Raises:
        UserError: naming file and line, if a text cannot be read or has a word that KenLM or
            fedtools reserves.
    """
    for path in texts:
        yield from filter(None, map(words_of, read_transcripts(path).values()))
    for path in plain:
        with open_input(path) as file:
            for line, raw in enumerate(file, 1):
                sentence = decode(raw, path, first_line=line)
                check_sentence(sentence, path, line)
                if words := words_of(sentence):
                    yield words


def find_program(name: str) -> Path:
    """Find one of KenLM's programs: the active environment's own, else the first on PATH.

    Raises:
        UserError: if there is none.
    """
    own = Path(sys.prefix) / "bin"
    if found := shutil.which(name, path=own) or shutil.which(name):
        return Path(found)
    problem = f"KenLM's {name} is neither in {own} nor on PATH"
    raise UserError(problem, remedy="run utils/build_kenlm.sh, which builds it")


def _write_corpus(
    path: Path, sentences: Iterable[list[str]], tokenizer: Tokenizer | None
) -> Counter[str]:
    counts: Counter[str] = Counter()
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for words in sentences:
            units = tokenizer.split(" ".join(words)) if tokenizer else words
            counts.update(units)
            file.write(" ".join(units) + "\n")
    return counts


def _run_program(*command: str | Path) -> str:
    """Run a program and return its stderr; raise a `UserError` if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode == 0:
        return done.stderr
    name = Path(command[0]).name
    # lmplz reports the error in its last line, after a line with the place in its source.
    lines = [line for line in done.stderr.splitlines() if re.search(r"[a-z]{3}", line)]
    reason = lines[-1].strip() if lines else f"exit status {done.returncode}"
    remedy = "give more with --memory" if "memory" in reason.lower() else None
    raise UserError(f"{name} failed: {reason}", remedy=remedy)
