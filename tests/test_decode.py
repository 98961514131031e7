"""CTC decoding against brute force: all token sequences of a few frames, enumerated."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import kenlm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtools.core.atomic import write_text
from fedtools.core.config import from_mapping
from fedtools.core.errors import UserError
from fedtools.data.nbest import Hypothesis, best_text, write_nbest
from fedtools.decode.beam import BeamOptions, CtcBeamDecoder, alignment_score
from fedtools.decode.greedy import greedy
from fedtools.decode.lists import best_weights
from fedtools.lm.ngram import train_ngram
from fedtools.lm.tokens import SPACE, Tokenizer, train_tokens

# KenLM's scores are powers of ten.
LN10 = math.log(10)
EXHAUSTIVE = {"beam_size": 100_000, "beam_threshold": 1e9, "beam_size_token": 100, "nbest": 5000}


def collapse(path: tuple[int, ...]) -> tuple[int, ...]:
    """Map an alignment to its token sequence, as written in the CTC paper."""
    return tuple(token for token, _ in itertools.groupby(path) if token != 0)


def every_sequence(log_probs: np.ndarray) -> dict[tuple[int, ...], float]:
    """Return token sequence -> score of its best alignment, by enumerating all alignments."""
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
        list(collapse(tuple(one[:length].argmax(1))))
        for one, length in zip(batch, lengths, strict=True)
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

WORDS = ["aa a", "b ab", "a b", "ba aa b", "b b a", "ab a ba", "abb b"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Make a folder with characters, BPE, and n-grams of words and tokens for both."""
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
    """Return words -> (acoustic, lm) for each candidate that fits into the frames."""
    scores = every_sequence(log_probs)
    found = {}
    for words in candidates:
        acoustic = scores.get(tuple(tokenizer.encode(words)))
        if acoustic is not None:
            sentence = " ".join(tokenizer.split(words)) if token else words
            found[words] = (acoustic, lm.score(sentence) * LN10)
    return found


def check(found: list[Hypothesis], expected: dict, options: BeamOptions, count: int) -> None:
    """Check that the list is the oracle's, with the oracle's scores, in the oracle's order."""
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
        log_probs[:, 1] = -50  # <unk> is not in any word
        expected = oracle(tokenizer, candidates, log_probs, lm, token=False)
        found = decoder.decode(log_probs)
        # All candidates: with an exhaustive beam none may be missing.
        check(found, expected, options, len(expected))


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_favoured_words_have_a_bonus(corpus, kind):
    """The bonus orders the whole list; words unknown to the n-gram are found, too."""
    tokenizer = Tokenizer.load(corpus / kind)
    options = BeamOptions(lm_weight=0.7, bonus=2.5, **EXHAUSTIVE)
    favoured = {"ab", "bb"}
    decoder = CtcBeamDecoder.load(tokenizer, corpus / "word", options, favoured)
    lm = kenlm.Model(str(corpus / "word" / "3gram.bin"))
    known = {word for words in WORDS for word in words.split()}
    assert "ab" in known and "bb" not in known
    vocabulary = sorted(known | favoured)
    candidates = [
        " ".join(words) for n in range(6) for words in itertools.product(vocabulary, repeat=n)
    ]
    for seed in range(3):
        log_probs = posteriors(seed, 5, len(tokenizer))
        log_probs[:, 1] = -50
        expected = oracle(tokenizer, candidates, log_probs, lm, token=False)

        def total(words, expected=expected):
            acoustic, score = expected[words]
            return acoustic + 0.7 * score + 2.5 * sum(w in favoured for w in words.split())

        found = decoder.decode(log_probs)
        assert {one.words for one in found} == set(expected)
        totals = [total(one.words) for one in found]
        assert totals == pytest.approx(sorted(totals, reverse=True), abs=1e-4)
        for one in found:
            assert (one.acoustic, one.lm) == pytest.approx(expected[one.words], abs=1e-4)
        assert any("bb" in one.words.split() for one in found)
    # A narrow beam keeps words that it would lose without the bonus.
    narrow = {"beam_size": 3, "beam_size_token": 10, "nbest": 1, "lm_weight": 0.7}
    plain = CtcBeamDecoder.load(tokenizer, corpus / "word", BeamOptions(**narrow))
    helped = CtcBeamDecoder.load(
        tokenizer, corpus / "word", BeamOptions(**narrow, bonus=30.0), ["bb"]
    )
    log_probs = posteriors(7, 6, len(tokenizer))
    assert "bb" in helped.decode(log_probs)[0].words.split()
    assert "bb" not in plain.decode(log_probs)[0].words.split()
    with pytest.raises(UserError, match="lm_weight"):
        BeamOptions(lm_weight=0.0, bonus=1.0)


@pytest.mark.parametrize("kind", ["char", "bpe"])
@pytest.mark.parametrize("lm_weight", [0.0, 0.7])
def test_token_lists_are_exact(corpus, kind, lm_weight):
    tokenizer = Tokenizer.load(corpus / kind)
    options = BeamOptions(lm_weight=lm_weight, **EXHAUSTIVE)
    decoder = CtcBeamDecoder.load(tokenizer, corpus / f"{kind}_lm", options)
    lm = kenlm.Model(str(corpus / f"{kind}_lm" / "3gram.bin"))
    for seed in range(3):
        log_probs = posteriors(seed, 5, len(tokenizer))
        log_probs[:, 1] = -50
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


def long_tokens(ids: list[int], tokens: int, frames: int = 4) -> np.ndarray:
    """Make confident posteriors in which tokens last several frames, and blanks are only where CTC
    needs them."""
    path: list[int] = []
    for token in ids:
        path += [0] * (path[-1:] == [token]) + [token] * frames
    probabilities = np.full((len(path), tokens), 1e-6)
    probabilities[np.arange(len(path)), path] = 1 - 1e-6 * (tokens - 1)
    return np.log(probabilities).astype(np.float32)


@pytest.mark.parametrize("kind", ["char", "bpe"])
@pytest.mark.parametrize("lm", ["word", "token"])
def test_tokens_may_last_long_even_at_the_end_of_a_word(corpus, kind, lm):
    tokenizer = Tokenizer.load(corpus / kind)
    folder = corpus / ("word" if lm == "word" else f"{kind}_lm")
    decoder = CtcBeamDecoder.load(tokenizer, folder, BeamOptions(lm_weight=0.1))
    for words in WORDS:
        ids = tokenizer.encode(words)
        best = decoder.decode(long_tokens(ids, len(tokenizer)))[0]
        assert best.words == words
        blanks = sum(a == b for a, b in itertools.pairwise(ids))
        sure = (4 * len(ids) + blanks) * math.log(1 - 1e-6 * (len(tokenizer) - 1))
        assert best.acoustic == pytest.approx(sure, abs=1e-4)


@pytest.mark.parametrize("lm", ["word", "bpe_lm"])
def test_a_long_utterance(corpus, lm):
    tokenizer = Tokenizer.load(corpus / "bpe")
    words = " ".join(WORDS * 250)
    log_probs = long_tokens(tokenizer.encode(words), len(tokenizer), frames=2)
    assert len(log_probs) > 10_000  # seven minutes at 40 ms
    options = BeamOptions(beam_size=10, beam_size_token=3, lm_weight=0.1, nbest=2)
    assert CtcBeamDecoder.load(tokenizer, corpus / lm, options).decode(log_probs)[0].words == words


@pytest.mark.parametrize("lm", ["word", "bpe_lm"])
def test_nothing_recognised_is_an_empty_hypothesis(corpus, lm):
    tokenizer = Tokenizer.load(corpus / "bpe")
    decoder = CtcBeamDecoder.load(tokenizer, corpus / lm, BeamOptions())
    model = kenlm.Model(str(next((corpus / lm).glob("*.bin"))))
    for frames in (0, 1, 50):
        silence = np.full((frames, len(tokenizer)), -30.0, dtype=np.float32)
        silence[:, 0] = -0.01
        best = decoder.decode(silence)[0]
        assert (best.rank, best.words) == (1, "")
        assert best.acoustic == pytest.approx(-0.01 * frames, abs=1e-5)
        assert best.lm == pytest.approx(model.score("") * LN10, abs=1e-5)


def test_impossible_posteriors_still_give_finite_scores(corpus):
    tokenizer = Tokenizer.load(corpus / "bpe")
    decoder = CtcBeamDecoder.load(tokenizer, corpus / "word", BeamOptions())
    found = decoder.decode(np.full((6, len(tokenizer)), -np.inf, dtype=np.float32))
    assert all(math.isfinite(hypothesis.acoustic) for hypothesis in found)
    with pytest.raises(UserError, match="NaN"):
        decoder.decode(np.full((6, len(tokenizer)), np.nan, dtype=np.float32))
    with pytest.raises(ValueError, match="shape"):
        decoder.decode(np.zeros((6, len(tokenizer) + 1), dtype=np.float32))


def test_the_list_is_ordered_by_its_own_scores(corpus):
    tokenizer = Tokenizer.load(corpus / "bpe")
    options = BeamOptions(lm_weight=0.8, word_score=-0.5)
    decoder = CtcBeamDecoder.load(tokenizer, corpus / "word", options)
    log_probs = posteriors(3, 30, len(tokenizer))
    found = decoder.decode(log_probs)
    assert [hypothesis.rank for hypothesis in found] == list(range(1, 21))
    totals = [hypothesis.total(0.8, -0.5) for hypothesis in found]
    assert totals == sorted(totals, reverse=True)
    for hypothesis in found:
        exact = alignment_score(log_probs, tokenizer.encode(hypothesis.words))
        assert hypothesis.acoustic == pytest.approx(exact, abs=1e-4)
    assert decoder.decode(log_probs) == found


def decode_the_same_again(decoder: CtcBeamDecoder, log_probs: np.ndarray) -> list[Hypothesis]:
    """Decode repeatedly; the list must not depend on memory addresses of the search."""
    kept = []
    for time in range(15):
        kept += [decoder.decode(log_probs), bytearray(977 * time)]
    assert all(found == kept[0] for found in kept[::2])
    return kept[0]


@pytest.mark.parametrize("kind", ["char", "bpe"])
@pytest.mark.parametrize("lm", ["word", "token"])
def test_a_narrow_beam_finds_the_same_again(corpus, kind, lm):
    """flashlight breaks ties by memory addresses, so that no ties may occur."""
    tokenizer = Tokenizer.load(corpus / kind)
    folder = corpus / ("word" if lm == "word" else f"{kind}_lm")
    for beam in (3, 5, 8):
        decoder = CtcBeamDecoder.load(tokenizer, folder, BeamOptions(beam_size=beam, nbest=3))
        for seed in range(6):
            decode_the_same_again(decoder, posteriors(seed, 9, len(tokenizer)))


def test_an_end_within_a_word_is_decided_by_scores(tmp_path):
    """If no hypothesis in a narrow beam can end, the best scores decide the words before."""
    text = tmp_path / "text"
    write_text(text, "".join(f"u{i} {words}\n" for i, words in enumerate(["a ab", "bab a"] * 5)))
    tokenizer = train_tokens([text], tmp_path / "char", "char")
    train_ngram([text], tmp_path / "word", order=2)

    def sure(token: str) -> np.ndarray:
        one = np.full((1, len(tokenizer)), np.log(1e-9), dtype=np.float32)
        one[0, tokenizer.tokens.index(token)] = 0.0
        return one

    options = BeamOptions(beam_size=30, lm_weight=0.0, nbest=30)
    decoder = CtcBeamDecoder.load(tokenizer, tmp_path / "word", options)
    for seed in range(6):
        begun = np.vstack([posteriors(seed, 12, len(tokenizer)), sure(SPACE)])
        # "ba" is only a prefix of "bab", and not a word.
        unfinished = np.vstack([begun, sure("b"), sure("a")])
        found = decode_the_same_again(decoder, unfinished)
        assert decoder.decode(begun)[0].words in [one.words for one in found]


@pytest.mark.parametrize("kind", ["char", "bpe"])
@pytest.mark.parametrize("lm", ["word", "token"])
def test_the_search_maximises_what_the_list_is_ordered_by(corpus, kind, lm):
    """A narrow beam uses flashlight's own scores, with the same weights, of natural logs."""
    tokenizer = Tokenizer.load(corpus / kind)
    folder = corpus / ("word" if lm == "word" else f"{kind}_lm")
    # flashlight scores no words with a token n-gram.
    word_score = 0.7 if lm == "word" else 0.0
    options = BeamOptions(lm_weight=0.8, word_score=word_score, beam_threshold=1e9)
    decoder = CtcBeamDecoder.load(tokenizer, folder, options)
    ngram = kenlm.Model(str(folder / "3gram.bin"))
    log_probs = posteriors(5, 12, len(tokenizer))
    log_probs[:, 1] = -50
    emissions = decoder._emissions(log_probs)
    found = decoder._decoder.decode(emissions.ctypes.data, *emissions.shape)
    assert len(found) > 20
    for one in found[:20]:
        if lm == "word":
            units = [decoder._words[index] for index in one.words if index >= 0]
        else:
            alignment = one.tokens[1 : len(log_probs) + 1]
            units = [tokenizer.tokens[index] for index in collapse(tuple(alignment))]
        weighed = 0.8 * ngram.score(" ".join(units)) * LN10 + word_score * len(units)
        assert one.score == pytest.approx(one.emittingModelScore + weighed, abs=1e-3)


def test_words_that_the_tokens_cannot_spell_are_left_out(corpus, tmp_path):
    tokenizer = Tokenizer.load(corpus / "char")
    binary = corpus / "word" / "3gram.bin"
    write_text(tmp_path / "vocabulary", "a\nzoo\n")
    decoder = CtcBeamDecoder(tokenizer, binary, tmp_path / "vocabulary")
    assert decoder.left_out == ["zoo"]
    write_text(tmp_path / "vocabulary", "zoo\n")
    with pytest.raises(UserError, match="can spell none"):
        CtcBeamDecoder(tokenizer, binary, tmp_path / "vocabulary")


def test_what_does_not_belong_together_is_refused(corpus, tmp_path):
    char = Tokenizer.load(corpus / "char")
    with pytest.raises(UserError, match="is not a token of this model"):
        CtcBeamDecoder.load(char, corpus / "bpe_lm")
    with pytest.raises(UserError, match="not an n-gram's folder"):
        CtcBeamDecoder.load(char, tmp_path)
    vocabulary = corpus / "word" / "vocabulary"
    with pytest.raises(UserError, match="no such n-gram"):
        CtcBeamDecoder(char, tmp_path / "no.bin", vocabulary)
    (tmp_path / "bad.bin").write_bytes(b"\x00nonsense" * 100)
    with pytest.raises(UserError, match="KenLM cannot read it"):
        CtcBeamDecoder(char, tmp_path / "bad.bin", vocabulary)
    write_text(tmp_path / "vocabulary", "a\na\n")
    with pytest.raises(UserError, match="vocabulary:2: 'a' is duplicated"):
        CtcBeamDecoder(char, corpus / "word" / "3gram.bin", tmp_path / "vocabulary")


@pytest.mark.parametrize(
    "bad", [{"beam_size": 0}, {"nbest": 200}, {"beam_threshold": 0.0}, {"lm_weight": math.nan}]
)
def test_options_are_checked(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        from_mapping(BeamOptions, bad, "decode.yaml")


# Weights


def edit_distance(spoken: list[str], found: list[str]) -> int:
    """Compute the edit distance by the textbook's recursion."""
    row = list(range(len(found) + 1))
    for i, a in enumerate(spoken, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(found, 1):
            before, row[j] = row[j], min(before + (a != b), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def test_best_weights_agree_with_trying_all():
    rng = np.random.default_rng(0)
    reference, nbest = {}, {}
    for number in range(30):
        spoken = rng.choice(list("abcd"), 6).tolist()
        hypotheses = []
        for rank in range(1, 6):
            words = [rng.choice(list("abcd")) if rng.random() < 0.3 else word for word in spoken]
            words = words[: rng.integers(4, 7)]
            lm = -2.0 * edit_distance(spoken, words) + rng.normal(0, 1)
            hypotheses.append(Hypothesis(rank, rng.normal(0, 3), lm, " ".join(words)))
        reference[f"u{number:02d}"], nbest[f"u{number:02d}"] = " ".join(spoken), hypotheses
    weights, scores = [0.0, 0.5, 1.0, 4.0], [-1.0, 0.0, 1.0]
    found, wer = best_weights(nbest, reference, weights, scores)

    def errors(lm_weight: float, word_score: float) -> int:
        best = best_text(nbest, lm_weight, word_score)
        return sum(edit_distance(reference[u].split(), best[u].split()) for u in nbest)

    grid = {pair: errors(*pair) for pair in itertools.product(weights, scores)}
    assert (found.lm_weight, found.word_score) == min(grid, key=grid.get)
    assert wer == pytest.approx(min(grid.values()) / 180)
    assert wer < grid[0.0, 0.0] / 180  # the LM is informative, and was used


@pytest.mark.parametrize(("gain", "edge"), [(-6.0, False), (-7.75, True)])
def test_tune_warns_at_an_edge_and_best_path_keeps_what_it_used(cli, tmp_path, gain, edge):
    """The right list has two more words, which pay off from a word score of -gain on."""
    data, out = tmp_path / "data", tmp_path / "dec"
    data.mkdir()
    (data / "text").write_text("a x y z\n")
    found = {"x": 0.0, "x y z": 2 * gain}
    hypotheses = [Hypothesis(n, found[words], -1.0, words) for n, words in enumerate(found, 1)]
    write_nbest(out / "nbest.tsv", [("a", hypotheses)])
    weights = tmp_path / "w.yaml"
    done = cli("tune", out, data, weights).ok()
    assert f"word_score {8.0 if edge else 6.5}, WER 0.00 %" in done.out
    warning = "word score 8: at an edge of the values tried (0 to 5, -4 to 8)"
    assert (warning in done.err) == edge
    cli("best-path", out, "--weights", weights).ok()
    assert (out / "weights.yaml").read_text() == weights.read_text()
    assert (out / "text").read_text() == "a x y z\n"
    cli("best-path", out).ok()
    assert not (out / "weights.yaml").exists()
    assert (out / "text").read_text() == "a x\n"


def test_labels_that_repeat_themselves_are_left_out_and_counted(cli, tmp_path):
    """Words, or the letters of one word; normal sentences with repeated words stay."""
    texts = {
        "a": "we call it bear",
        "b": "the cat " * 40,
        "c": "so it is h" + "a" * 60,
        "d": "no no no no no no no no",
        "e": "one two three four " * 4,
        "f": "is he as tall as i am or is she as tall as he is",
        "g": "",
    }
    lists = [(name, [Hypothesis(1, -1.0, 0.0, text.strip())]) for name, text in texts.items()]
    write_nbest(tmp_path / "dec" / "nbest.tsv", lists)
    plain = cli("best-path", tmp_path / "dec").ok()
    assert plain.out == f"{tmp_path / 'dec' / 'text'}\n"
    every = (tmp_path / "dec" / "text").read_text()
    assert every == "".join(f"{name} {text}".strip() + "\n" for name, text in texts.items())
    found = cli("best-path", tmp_path / "dec", "--drop-loops").ok().out
    assert found == f"{plain.out[:-1]}: 3 of 7 hypotheses repeat themselves, left empty\n"
    kept = {name: "" if name in "bce" else text for name, text in texts.items()}
    found = (tmp_path / "dec" / "text").read_text()
    assert found == "".join(f"{name} {text}".strip() + "\n" for name, text in kept.items())


def test_tune_takes_the_middle_on_a_tie(cli, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text").write_text("a x\n")
    write_nbest(tmp_path / "dec" / "nbest.tsv", [("a", [Hypothesis(1, -1.0, -1.0, "x")])])
    done = cli("tune", tmp_path / "dec", tmp_path / "data", tmp_path / "w.yaml").ok()
    assert "word_score 0.0" in done.out
    assert "warning" not in done.err


def test_best_weights_need_the_same_utterances():
    nbest = {"a": [Hypothesis(1, 0.0, 0.0, "")]}
    with pytest.raises(UserError, match="'b' is missing in the N-best list"):
        best_weights(nbest, {"a": "x", "b": "y"}, [1.0])
    with pytest.raises(UserError, match="'a' is missing in the reference"):
        best_weights(nbest, {}, [1.0])
    assert best_weights(nbest, {"a": "x"}, [1.0])[1] == 1.0
    with pytest.raises(UserError, match="no words"):
        best_weights(nbest, {"a": ""}, [1.0])
