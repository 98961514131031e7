"""CTC beam search with an n-gram language model: N-best lists with separate scores.

The search maximises over hypotheses W with token sequences C(W) (Graves et al. 2006 for the CTC
lattice)

    max over alignments a of C(W): sum over t of log p(a_t | t)     acoustic
        + lm_weight * ln P(W, end of sentence)                      lm
        + word_score * |W|

The search is flashlight's (https://github.com/flashlight/text). Its lexicon decoder differs from
CTC at the ends of words: it lets the last token of a finished word last for one frame only. A
second spelling of each word works around that (see `_insert`), but makes the decoder read `x blank
x` as one token. The search therefore only proposes hypotheses: if the alignment found does not
belong to the words' token sequence, `alignment_score` computes the exact acoustic score. Every
score that leaves this module is exact.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.core.config import AboveZero, NonNegative, Positive
from fedtools.core.errors import UserError
from fedtools.core.text_files import read_words
from fedtools.data.nbest import Hypothesis
from fedtools.data.symbols import SPACE, warn_of_unknown
from fedtools.decode.greedy import refuse_nan
from fedtools.lm.ngram import NgramFolder
from fedtools.lm.tokens import Tokenizer

LN10 = math.log(10.0)
# Floor of log posteriors: below all that matter, and finite, so that every score is finite.
_FLOOR = np.float32(-1e4)
# Used in the search only: prefers a finished word to the same word with its last token continuing,
# which has an equal score. flashlight breaks ties by memory address, so lists varied between runs.
_FINISHED = 1e-6
# Used in the search only: the cost of an unfinished word at the end. If no hypothesis in the beam
# can end, all of them pay it, and keep their order.
_UNFINISHED = np.float32(-1e6)
# Score of what must not happen: far below any sum of floors, and unchanged by adding other scores.
_NEVER = np.float32(-1e30)


@dataclass(frozen=True)
class BeamOptions:
    """Options of the search.

    Attributes:
        beam_size: hypotheses kept from frame to frame; at least 100 for a list of 20.
        beam_threshold: hypotheses this much (natural log) below the best one are dropped.
        beam_size_token: tokens per frame that may extend a hypothesis.
        lm_weight: weight of the language model; both scores are natural logarithms.
        word_score: score added for each word. The search with an n-gram of tokens has no words, so
            that there it only affects the order of the list.
        nbest: hypotheses returned.
        bonus: score (natural log) added for each favoured word, in the search and in the order of
            the list; written scores do not include it.
    """

    beam_size: Positive = 100
    beam_threshold: AboveZero = 20.0
    beam_size_token: Positive = 15
    lm_weight: float = 0.5
    word_score: float = 0.0
    nbest: Positive = 20
    bonus: NonNegative = 0.0

    def __post_init__(self):
        if self.bonus and not self.lm_weight > 0:
            raise UserError("bonus requires an lm_weight above 0: it is added to scores of the LM")
        if self.nbest > self.beam_size:
            problem = f"nbest {self.nbest} is more than beam_size {self.beam_size}"
            remedy = "widen the beam, to about five times nbest"
            raise UserError(problem, remedy=remedy)


class CtcBeamDecoder:
    """Beam search over CTC posteriors with an n-gram of words or of tokens.

    With an n-gram of words, only words of the vocabulary are found, spelled as by the tokenizer;
    with one of tokens, any token sequence.

    Args:
        tokenizer: tokenizer of the tokens that the posteriors are over.
        lm_binary: KenLM's binary (or ARPA) file.
        vocabulary: file of the words, or tokens, that the n-gram was estimated on, one per line.
        options: options of the search.
        unit: unit of the n-gram, "word" or "token".
        favoured: words that get `BeamOptions.bonus`; those missing from the n-gram can be found
            too, with its probability of an unknown word.

    Attributes:
        left_out: words of the vocabulary that the tokens cannot spell.

    Raises:
        UserError: if a file is missing or damaged, or n-gram and tokens do not belong together.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        lm_binary: str | Path,
        vocabulary: str | Path,
        options: BeamOptions = BeamOptions(),
        unit: str = "word",
        favoured: Collection[str] = (),
    ):
        self.tokenizer = tokenizer
        self.options = options
        self.unit = unit
        self.left_out: list[str] = []
        # flashlight begins every utterance with its silence token. An added column that never
        # occurs stands for it instead of a real token; see `_emissions`.
        self._silence = len(tokenizer)
        units = read_words(vocabulary, "make it with fedtools train-lm")
        self._favoured = set(favoured) if options.bonus else set()
        if unit == "word":
            units += sorted(self._favoured.difference(units))
            self._make_word_decoder(units, Path(lm_binary), Path(vocabulary))
        elif self._favoured:
            raise UserError("an n-gram of tokens cannot favour words", path=vocabulary)
        else:
            self._make_token_decoder(units, Path(lm_binary), Path(vocabulary))

    @classmethod
    def load(
        cls,
        tokenizer: Tokenizer,
        folder: str | Path,
        options: BeamOptions = BeamOptions(),
        favoured: Collection[str] = (),
    ) -> CtcBeamDecoder:
        """Make a decoder with the n-gram that `fedtools train-lm` wrote to `folder`."""
        ngram = NgramFolder.read(folder)
        return cls(tokenizer, ngram.binary, ngram.vocabulary, options, ngram.unit, favoured)

    def decode(self, log_probs: np.ndarray) -> list[Hypothesis]:
        """Return the N-best list of one utterance.

        Args:
            log_probs: (frames, tokens) natural logarithms of CTC posteriors.

        Returns:
            1 to `nbest` hypotheses with different words, best total first. If the search finds
            none, one hypothesis without words.

        Raises:
            UserError: if the posteriors have a NaN.
            ValueError: if the posteriors and the tokenizer have different numbers of tokens.
        """
        log_probs = np.maximum(np.asarray(log_probs, dtype=np.float32), _FLOOR)
        if log_probs.ndim != 2 or log_probs.shape[1] != len(self.tokenizer):
            raise ValueError(f"shape {log_probs.shape}, expected (T, {len(self.tokenizer)})")
        refuse_nan(log_probs)
        best: dict[str, Hypothesis] = {}
        for acoustic, lm, words in self._propose(log_probs):
            found = Hypothesis(0, acoustic, lm, words)
            if words not in best or self._total(found) > self._total(best[words]):
                best[words] = found
        if not best:
            blanks = float(log_probs[:, self.tokenizer.blank].sum(dtype=float))
            best[""] = Hypothesis(0, blanks, self._lm_score([]), "")
        ordered = sorted(best.values(), key=lambda h: (-self._total(h), h.words))
        return [
            Hypothesis(rank, h.acoustic, h.lm, h.words)
            for rank, h in enumerate(ordered[: self.options.nbest], 1)
        ]

    def _total(self, hypothesis: Hypothesis) -> float:
        total = hypothesis.total(self.options.lm_weight, self.options.word_score)
        if self._favoured:
            found = sum(word in self._favoured for word in hypothesis.words.split())
            total += self.options.bonus * found
        return total

    def _propose(self, log_probs: np.ndarray) -> Iterator[tuple[float, float, str]]:
        """Yield acoustic score, LM score and words of each hypothesis at the end of the search."""
        if not len(log_probs):
            return
        emissions = self._emissions(log_probs)
        results = self._decoder.decode(emissions.ctypes.data, *emissions.shape)
        for result in results:
            # The alignment has one token per frame, between a start state and an end state.
            alignment = np.asarray(result.tokens[1 : len(log_probs) + 1])
            tokens = _collapse(alignment)
            acoustic = result.emittingModelScore
            if self.unit == "token":
                yield acoustic, result.lmScore * LN10, self.tokenizer.decode(tokens)
                continue
            indices = [index for index in result.words if index >= 0]
            words = " ".join(self._words[index] for index in indices)
            expected = self.tokenizer.encode(words)
            if tokens != expected:
                acoustic = alignment_score(log_probs, expected)
            if acoustic > _NEVER:
                yield acoustic, self._lm_score(indices), words

    def _emissions(self, log_probs: np.ndarray) -> np.ndarray:
        """Return the posteriors in the form that flashlight takes.

        A column that never occurs is added. Where words end with <space>, a frame is added that
        lets the last word end without one.
        """
        frames, tokens = log_probs.shape
        space = self._word_end is not None
        emissions = np.full((frames + space, tokens + 1), _NEVER, dtype=np.float32)
        emissions[:frames, :tokens] = log_probs
        # <sos/eos> is in the token list for ESPnet's sake; CTC has no such token.
        emissions[:, tokens - 1] = _NEVER
        if space:
            emissions[-1, self._word_end] = 0.0
            # Without this cost, the two would tie, and flashlight might keep either.
            emissions[-1, self.tokenizer.blank] = _UNFINISHED
        return emissions

    def _lm_score(self, indices: Sequence[int]) -> float:
        """Return ln P of a sequence of words or tokens, including the end of the sentence."""
        state, log10 = self._lm.start(False), 0.0
        for index in indices:
            state, score = self._lm.score(state, index)
            log10 += score
        return (log10 + self._lm.finish(state)[1]) * LN10

    def _make_word_decoder(self, units: list[str], lm_binary: Path, vocabulary: Path) -> None:
        from flashlight.lib.text import decoder as flashlight

        tokenizer = self.tokenizer
        spaced = tokenizer.token_type == "char" and SPACE in tokenizer.tokens
        self._word_end = tokenizer.tokens.index(SPACE) if spaced else None
        spellings = {}
        for word in units:
            ids = tokenizer.encode(word)
            if tokenizer.unknown in ids or tokenizer.decode(ids) != word:
                self.left_out.append(word)
            else:
                spellings[word] = ids
        warn_of_unknown(len(self.left_out), len(units), vocabulary, "the tokens")
        if not spellings:
            remedy = "make tokens and n-gram from text in the same spelling"
            problem = "the tokens can spell none of its words"
            raise UserError(problem, path=vocabulary, remedy=remedy)
        self._words = list(spellings)
        self._lm = _load_lm(lm_binary, self._words)
        lm = self._lm
        if self._favoured:
            bonus = self.options.bonus / (self.options.lm_weight * LN10)
            numbers = enumerate(self._words)
            lm = _favouring(lm, {n: bonus for n, word in numbers if word in self._favoured})
        trie = flashlight.Trie(len(tokenizer) + 1, self._silence)
        start = lm.start(False)
        for index, word in enumerate(self._words):
            self._insert(trie, spellings[word], index, lm.score(start, index)[1])
        trie.smear(flashlight.SmearingMode.MAX)
        silence = self._silence if self._word_end is None else self._word_end
        scores = {"word_score": self.options.word_score + _FINISHED, "unk_score": -math.inf}
        options = flashlight.LexiconDecoderOptions(**scores, **self._search_options())
        places = (silence, tokenizer.blank, -1)
        # flashlight keeps no reference to what Python made.
        self._guide = lm
        self._decoder = flashlight.LexiconDecoder(options, trie, lm, *places, [], False)

    def _search_options(self) -> dict[str, object]:
        """Return the options that flashlight's two searches share."""
        from flashlight.lib.text.decoder import CriterionType

        given = ("beam_size", "beam_size_token", "beam_threshold")
        return {
            **{name: getattr(self.options, name) for name in given},
            "lm_weight": self.options.lm_weight * LN10,
            "sil_score": 0.0,
            "log_add": False,
            "criterion_type": CriterionType.CTC,
        }

    def _insert(self, trie, ids: list[int], index: int, score: float) -> None:
        """Add a word to the lexicon.

        Characters: <space> ends the word, and may last any number of frames, because flashlight
        treats it as silence. BPE: a second spelling with the last token doubled lets that token
        last longer than one frame, because flashlight ends a word with the first frame of its last
        token and requires no blank before the last token of a spelling.
        """
        if self._word_end is not None:
            trie.insert([*ids, self._word_end], index, score)
        else:
            trie.insert(ids, index, score)
            trie.insert([*ids, ids[-1]], index, score)

    def _make_token_decoder(self, units: list[str], lm_binary: Path, vocabulary: Path) -> None:
        from flashlight.lib.text import decoder as flashlight

        tokens, blank = self.tokenizer.tokens, self.tokenizer.blank
        if strange := set(units).difference(tokens):
            line, token = next(place for place in enumerate(units, 1) if place[1] in strange)
            problem = f"{token!r} is not a token of this model"
            remedy = "train the n-gram with the model's own --tokens"
            raise UserError(problem, path=vocabulary, line=line, remedy=remedy)
        self._word_end = None
        # flashlight may look up the added silence column; no token equals " ".
        self._lm = _load_lm(lm_binary, [*tokens, " "])
        options = flashlight.LexiconFreeDecoderOptions(**self._search_options())
        places = (self._silence, blank)
        self._decoder = flashlight.LexiconFreeDecoder(options, self._lm, *places, [])


def alignment_score(log_probs: np.ndarray, tokens: Sequence[int], blank: int = 0) -> float:
    """Return the log-probability of the best CTC alignment of a token sequence.

    Graves et al. 2006, equations 6 and 7, with a maximum instead of the sum.

    Args:
        log_probs: (frames, tokens) natural logarithms, at least one frame.
        tokens: ids, without blanks.
        blank: id of the blank.

    Returns:
        Natural logarithm; -inf if there are too few frames.
    """
    labels = np.full(2 * len(tokens) + 1, blank)
    labels[1::2] = tokens
    # A transition may skip a state unless that is the blank between two equal tokens.
    skip = np.zeros(len(labels), dtype=bool)
    skip[3::2] = labels[3::2] != labels[1:-2:2]
    best = np.full(len(labels) + 2, -np.inf)  # preceded by two unreachable states
    best[2:4] = log_probs[0, labels[:2]]
    for frame in log_probs[1:]:
        skipped = np.where(skip, best[:-2], -np.inf)
        best[2:] = np.maximum(np.maximum(best[2:], best[1:-1]), skipped) + frame[labels]
    return float(best[-2:].max())


def _collapse(alignment: np.ndarray, blank: int = 0) -> list[int]:
    new = np.ones(len(alignment), dtype=bool)
    new[1:] = alignment[1:] != alignment[:-1]
    return alignment[new & (alignment != blank)].tolist()


def _load_lm(path: Path, entries: Sequence[str]):
    from flashlight.lib.text.decoder.kenlm import KenLM
    from flashlight.lib.text.dictionary import Dictionary

    if not path.is_file():
        raise UserError("no such n-gram", path=path, remedy="make it with fedtools train-lm")
    dictionary = Dictionary()
    for entry in entries:
        dictionary.add_entry(entry)
    try:
        return KenLM(str(path), dictionary)
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[-1]
        problem = f"KenLM cannot read it: {reason}"
        raise UserError(problem, path=path, remedy="make it again") from None


def _favouring(lm, bonus: Mapping[int, float]):
    """Return a language model that adds a bonus (log10, as KenLM's scores) to words by number."""
    from flashlight.lib.text.decoder import LM

    class Favouring(LM):
        def start(self, start_with_nothing):
            return lm.start(start_with_nothing)

        def score(self, state, index):
            state, score = lm.score(state, index)
            return state, score + bonus.get(index, 0.0)

        def finish(self, state):
            return lm.finish(state)

    return Favouring()
