"""`fedtools rescore`: N-best lists scored by a neural language model, each word once.

Batches are cut from all lists, whatever the number of jobs, and a job scores its share of them:
the same scores come out, to the last bit, for any number of jobs.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedtools.core.atomic import atomic_write, sha256
from fedtools.core.config import read_yaml, write_yaml
from fedtools.core.errors import UserError
from fedtools.core.progress import Count
from fedtools.core.text_files import open_input
from fedtools.data.ark import FeatureReader, write_ark
from fedtools.data.datadir import byte_order, write_table
from fedtools.data.nbest import Hypothesis, read_nbest
from fedtools.data.symbols import warn_of_unknown
from fedtools.lm.nnlm import MODEL, Nnlm, require_model
from fedtools.lm.prefixes import make_tree, score_tree
from fedtools.lm.vocabulary import (
    UNIGRAM,
    UNKNOWN_ID,
    WORDS,
    Vocabulary,
    read_unigram,
    write_unigram,
)
from fedtools.lm.word_scores import MADE_FROM, NBEST, NNLM, check_same, encode_all, read_scp
from fedtools.models.training import torch_settings

# Default limit of a batch: near the fastest on one thread, with little memory.
BATCH_BINS = 4000
_DECODE = "make it with fedtools decode, merge-nbest or import-nbest"


def rescore(
    nbest_dir: Path,
    nnlm_dir: Path,
    out: Path,
    *,
    job: int = 1,
    jobs: int = 1,
    bins: int = BATCH_BINS,
    device: str = "cpu",
) -> Path:
    """Score one job's share of the lists to `OUT/nnlm.<job>.ark` and `.scp`.

    The sums of what they were made from are kept next to them, in `nnlm.<job>.yaml`; files that
    were made from the same lists, model and batches are not made again, and others are replaced.

    Args:
        nbest_dir: has nbest.tsv.
        nnlm_dir: made by `train_nnlm`.
        job, jobs: the number of this job, from 1, and the number of jobs.
        bins: see `batches`.

    Returns:
        the scp.

    Raises:
        UserError: if lists or model are missing or damaged, or a score is not finite.
    """
    path = out / f"nnlm.{job}.scp"
    if _is_merged(out, nbest_dir, nnlm_dir, bins):
        return out / NNLM
    origin = {"job": f"{job} of {jobs}", "batch_bins": bins, **_origin(nbest_dir, nnlm_dir)}
    made_from = path.with_suffix(".yaml")
    if path.exists() and made_from.exists() and read_yaml(made_from) == origin:
        return path
    path.unlink(missing_ok=True)
    lists = _read_lists(nbest_dir)
    nnlm = Nnlm.open(nnlm_dir, device)
    sentences = _sentences(nnlm.vocabulary, lists, nbest_dir / NBEST)
    _warn(nnlm, sentences, nbest_dir / NBEST, nnlm_dir)
    cut = list(batches([list(map(len, ids)) for ids in sentences.values()], bins))
    share = cut[len(cut) * (job - 1) // jobs : len(cut) * job // jobs]
    names = list(sentences)
    parts = ({names[i]: sentences[names[i]] for i in batch} for batch in share)
    total = sum(len(ids) for batch in share for i in batch for ids in sentences[names[i]])
    scores: dict[str, np.ndarray] = {}
    # Jobs run at the same time, and threads of several jobs would wait for each other.
    with Count(f"rescore {nbest_dir.name}", total, "words") as progress, torch_settings(1):
        for name, found in (pair for part in parts for pair in score(nnlm, part)):
            if not np.isfinite(found).all():
                problem = f"a log-probability of {name!r} is NaN or infinite"
                raise UserError(problem, path=nnlm_dir, remedy="train the model again")
            scores[name] = found
            progress.advance(len(found))
    columns = ((name, scores[name][:, None]) for name in byte_order(scores))
    entries = write_ark(path.with_suffix(".ark"), columns)
    write_yaml(made_from, origin)
    write_table(path, entries)
    return path


def score(nnlm: Nnlm, sentences: dict[str, list[list[int]]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the scores of a batch: each utterance with (words,) float32, hypothesis by hypothesis.

    Args:
        sentences: utterance -> ids of its hypotheses' words, with the ends.
    """
    flat = [ids for hypotheses in sentences.values() for ids in hypotheses]
    # Rounding can lift the probability of an almost certain word above 1.
    found = np.minimum(score_tree(nnlm.network, make_tree(flat, nnlm.vocabulary.start)), 0)
    begin = 0
    for name, hypotheses in sentences.items():
        end = begin + sum(map(len, hypotheses))
        yield name, found[begin:end]
        begin = end


def _warn(nnlm: Nnlm, sentences: dict[str, list[list[int]]], path: Path, model: Path) -> None:
    """Warn if many words are unknown, or if some are and the training text had no `<unk>`."""
    flat = [word for hypotheses in sentences.values() for ids in hypotheses for word in ids[:-1]]
    count = flat.count(UNKNOWN_ID)
    warn_of_unknown(count, len(flat), path, model / WORDS)
    if count and not nnlm.unigram[UNKNOWN_ID]:
        problem = f"{count} of {len(flat)} words are <unk>, which the training text lacks"
        remedy = "train the model with a larger min_count, or a smaller vocab_size"
        print(f"warning: {path}: {problem}; {remedy}", file=sys.stderr)


def batches(sizes: Sequence[Sequence[int]], bins: int) -> Iterator[list[int]]:
    """Cut utterances into batches of lists of about the same length.

    Args:
        sizes: for each utterance, the numbers of words of its hypotheses, `</s>` included.
        bins: the most hypotheses x words of the longest in a batch; a single utterance may have
            more.

    Yields:
        indices of utterances; each is in one batch.
    """
    longest = [max(lengths) for lengths in sizes]
    batch: list[int] = []
    rows = 0
    for index in sorted(range(len(sizes)), key=longest.__getitem__):
        more = rows + len(sizes[index])
        if batch and more * longest[index] > bins:
            yield batch
            batch, more = [], len(sizes[index])
        batch.append(index)
        rows = more
    if batch:
        yield batch


def merge(nbest_dir: Path, nnlm_dir: Path, out: Path, jobs: int = 1) -> Path:
    """Join the jobs' scores into a folder that `open_rescored` reads, and remove the parts.

    Returns:
        the folder.

    Raises:
        UserError: if a job's scores are missing, or come from other lists or another model.
    """
    _origin(nbest_dir, nnlm_dir)  # gives the clearest error if one of them is missing
    lists, vocabulary = _read_lists(nbest_dir), Vocabulary.read(nnlm_dir)
    if not _is_merged(out, nbest_dir, nnlm_dir):
        (out / NNLM).unlink(missing_ok=True)
        entries, bins = _read_parts(nbest_dir, nnlm_dir, out, jobs)
        check_same(entries, list(lists), out / NNLM)
        # Byte by byte: its sum later shows that these are the lists that were scored.
        with atomic_write(out / NBEST, "wb") as file, open_input(nbest_dir / NBEST) as source:
            shutil.copyfileobj(source, file)
        vocabulary.write(out)
        write_unigram(out, vocabulary, *read_unigram(nnlm_dir, vocabulary))
        reader = FeatureReader(entries)
        scp = write_ark(out / "nnlm.ark", ((name, reader.read(name)) for name in lists))
        write_yaml(out / MADE_FROM, {"batch_bins": bins, **_origin(nbest_dir, nnlm_dir)})
        write_table(out / NNLM, scp)
    for part in out.glob("nnlm.[0-9]*.*"):
        part.unlink()
    return out


def _is_merged(out: Path, nbest_dir: Path, nnlm_dir: Path, bins: int | None = None) -> bool:
    """Return whether the folder holds the scores of these lists by this model.

    With `bins`, they must also have been computed in these batches.
    """
    made_from = out / MADE_FROM
    if not all((out / name).exists() for name in (NNLM, NBEST, WORDS, UNIGRAM, made_from)):
        return False
    found = read_yaml(made_from)
    same = found.pop("batch_bins", None) == bins or bins is None
    return same and found == _origin(nbest_dir, nnlm_dir)


def _read_parts(
    nbest_dir: Path, nnlm_dir: Path, out: Path, jobs: int
) -> tuple[dict[str, str], int]:
    """Return utterance -> where its scores are, of all jobs, and the batches' `bins`."""
    entries: dict[str, str] = {}
    origin, bins = _origin(nbest_dir, nnlm_dir), set()
    for job in range(1, jobs + 1):
        scp, made_from = (out / f"nnlm.{job}.{end}" for end in ("scp", "yaml"))
        remedy = f"run fedtools rescore --job {job} --nj {jobs} again"
        if not (scp.exists() and made_from.exists()):
            raise UserError("missing", path=scp, remedy=remedy)
        found = read_yaml(made_from)
        bins.add(found.pop("batch_bins", None))
        if found != {"job": f"{job} of {jobs}", **origin} or len(bins) > 1:
            problem = "the scores of other lists, jobs or batches, or by another model"
            raise UserError(problem, path=scp, remedy=remedy)
        entries |= read_scp(scp)
    return entries, bins.pop()


def _origin(nbest_dir: Path, nnlm_dir: Path) -> dict[str, str]:
    """Return the sums of the files that scores depend on."""
    require_model(nnlm_dir)
    if not (nbest_dir / NBEST).exists():
        raise UserError(f"no {NBEST}", path=nbest_dir, remedy=_DECODE)
    files = [nbest_dir / NBEST, *(nnlm_dir / name for name in (MODEL, WORDS, UNIGRAM))]
    return {path.name: sha256(path) for path in files}


def _read_lists(nbest_dir: Path) -> dict[str, list[Hypothesis]]:
    path = nbest_dir / NBEST
    lists = read_nbest(path)
    if not lists:
        raise UserError("empty", path=path, remedy=_DECODE)
    return lists


def _sentences(
    vocabulary: Vocabulary, lists: dict[str, list[Hypothesis]], path: Path
) -> dict[str, list[list[int]]]:
    """Return utterance -> the word ids of its hypotheses, with the ends."""
    flat = [one for hypotheses in lists.values() for one in hypotheses]
    ids, lengths = encode_all(vocabulary, flat, path)
    words, rows, begin = ids.tolist(), [], 0
    for length in lengths:
        rows.append(words[begin : begin + length])
        begin += length
    made = iter(rows)
    return {name: [next(made) for _ in hypotheses] for name, hypotheses in lists.items()}
