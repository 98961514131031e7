"""CTC decoding against brute force: every token sequence that a few frames allow, enumerated."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import kenlm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtools.decode.beam import LN10, BeamOptions, CtcBeamDecoder, alignment_score
from fedtools.decode.greedy import greedy
from fedtools.decode.rescore import best_weights
from fedtools.files.atomic import write_text
from fedtools.files.errors import UserError
from fedtools.files.nbest import Hypothesis
from fedtools.lm.ngram import train_ngram
from fedtools.lm.tokens import Tokenizer, train_tokens

EXHAUSTIVE = {"beam_size": 100_000, "beam_threshold": 1e9, "beam_size_token": 100, "nbest": 5000}


def collapse(path: tuple[int, ...]) -> tuple[int, ...]:
    """CTC's map from alignments to token sequences, as written in the paper."""
    return tuple(token for token, _ in itertools.groupby(path) if token != 0)


def every_sequence(log_probs: np.ndarray) -> dict[tuple[int, ...], float]:
    """Token sequence -> score of its best alignment, by enumerating all alignments."""
    frames, tokens = log_probs.shape
    best: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(tokens), repeat=frames):
        score = sum(float(log_probs[t, token]) for t, token in enumerate(path))
        sequence = collapse(path)
        best[sequence] = max(score, best.get(sequence, -math.inf))
    return best


def posteriors(seed: int, frames: int, tokens: int) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, 2, (frames, tokens))
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)


# Greedy


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32), lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4))
def test_greedy_is_the_collapsed_best_path(seed, lengths):
    import torch

    batch = np.stack([posteriors(seed + i, 7, 3) for i in range(len(lengths))])
    expected = [
        list(collapse(tuple(one[:length].argmax(1)))) for one, length in zip(batch, lengths)
    ]
    assert greedy(batch, lengths) == expected
    assert greedy(torch.from_numpy(batch), torch.tensor(lengths)) == expected


def test_greedy_keeps_a_token_repeated_after_a_blank_and_ignores_padding():
    best = [[1, 1, 0, 1, 2, 2], [2, 0, 0, 1, 1, 1]]
    assert greedy(np.eye(3)[best], [6, 3]) == [[1, 1, 2], [2]]


def test_greedy_refuses_a_model_that_diverged():
    batch = np.zeros((1, 4, 3), dtype=np.float32)
    batch[0, 3] = np.nan
    assert greedy(batch, [3]) == [[]]
    with pytest.raises(UserError, match="NaN"):
        greedy(batch, [4])


# Scores


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_alignment_score_is_the_best_alignment(seed):
    log_probs = posteriors(seed, 5, 4)
    scores = every_sequence(log_probs)
    for length in range(4):
        for sequence in itertools.product(range(1, 4), repeat=length):
            expected = scores.get(sequence, -math.inf)
            assert alignment_score(log_probs, sequence) == pytest.approx(expected, abs=1e-5)


# Beam search

WORDS = ["aa a", "b ab", "a b", "ba aa b", "b b a", "ab a ba", "aab b"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with characters, BPE, and n-grams of words and tokens for both."""
    folder = tmp_path_factory.mktemp("decode")
    text = folder / "text"
    write_text(text, "".join(f"u{i:02d} {words}\n" for i, words in enumerate(WORDS * 3)))
    train_ngram([text], folder / "word", order=3)
    for kind, size in (("char", None), ("bpe", 8)):
        tokenizer = train_tokens([text], folder / kind, kind, size)
        train_ngram([text], folder / f"{kind}_lm", 3, tokenizer)
    return folder


def oracle(
    tokenizer: Tokenizer, candidates: list[str], log_probs: np.ndarray, lm: kenlm.Model, token: bool
) -> dict[str, tuple[float, float]]:
    """words -> (acoustic, lm) for each candidate that fits into the frames."""
    scores = every_sequence(log_probs)
    found = {}
    for words in candidates:
        acoustic = scores.get(tuple(tokenizer.encode(words)))
        if acoustic is not None:
            sentence = " ".join(tokenizer.split(words)) if token else words
            found[words] = (acoustic, lm.score(sentence) * LN10)
    return found


def check(found: list[Hypothesis], expected: dict, options: BeamOptions, count: int) -> None:
    """The list is the oracle's, with the oracle's scores, in the oracle's order."""
    weigh = {
        words: acoustic + options.lm_weight * lm + options.word_score * len(words.split())
        for words, (acoustic, lm) in expected.items()
    }
    best = sorted(weigh, key=lambda words: -weigh[words])[:count]
    assert [hypothesis.words for hypothesis in found[:count]] == best
    for rank, hypothesis in enumerate(found, 1):
        acoustic, lm = expected[hypothesis.words]
        assert hypothesis.rank == rank
        assert hypothesis.acoustic == pytest.approx(acoustic, abs=1e-4)
        assert hypothesis.lm == pytest.approx(lm, abs=1e-4)
    assert len({hypothesis.words for hypothesis in found}) == len(found)


@pytest.mark.parametrize("kind", ["char", "bpe"])
@pytest.mark.parametrize("lm_weight, word_score", [(0.0, 0.0), (0.7, 0.0), (0.4, 1.5), (1, -1)])
def test_word_lists_are_exact(corpus, kind, lm_weight, word_score):
    tokenizer = Tokenizer.load(corpus / kind)
    options = BeamOptions(lm_weight=lm_weight, word_score=word_score, **EXHAUSTIVE)
    decoder = CtcBeamDecoder.load(tokenizer, corpus / "word", options)
    lm = kenlm.Model(str(corpus / "word" / "3gram.bin"))
    vocabulary = sorted({word for words in WORDS for word in words.split()})
    candidates = [
        " ".join(words) for n in range(6) for words in itertools.product(vocabulary, repeat=n)
    ]
    for seed in range(4):
        log_probs = posteriors(seed, 5, len(tokenizer))
        log_probs[:, [1, -1]] = -50  # <unk> and <sos/eos>: no word has them
        expected = oracle(tokenizer, candidates, log_probs, lm, token=False)
        found = decoder.decode(log_probs)
        # All that there is: with an exhaustive beam nothing may be missing.
        check(found, expected, options, len(expected))


@pytest.mark.parametrize("kind", ["char", "bpe"])
@pytest.mark.parametrize("lm_weight", [0.0, 0.7])
def test_token_lists_are_exact(corpus, kind, lm_weight):
    tokenizer = Tokenizer.load(corpus / kind)
    options = BeamOptions(lm_weight=lm_weight, **EXHAUSTIVE)
    decoder = CtcBeamDecoder.load(tokenizer, corpus / f"{kind}_lm", options)
    lm = kenlm.Model(str(corpus / f"{kind}_lm" / "3gram.bin"))
    for seed in range(3):
        log_probs = posteriors(seed, 5, len(tokenizer))
        log_probs[:, [1, -1]] = -50
        expected: dict[str, tuple[float, float]] = {}
        for sequence, acoustic in every_sequence(log_probs).items():
            if set(sequence) & {1, len(tokenizer) - 1}:
                continue
            sentence = " ".join(tokenizer.tokens[index] for index in sequence)
            scores = acoustic, lm.score(sentence) * LN10
            words = tokenizer.decode(sequence)
            old = expected.get(words, (-math.inf, 0.0))
            if scores[0] + lm_weight * scores[1] > old[0] + lm_weight * old[1]:
                expected[words] = scores
        found = [h for h in decoder.decode(log_probs) if "<unk>" not in h.words]
        check(found, expected, options, len(expected))
