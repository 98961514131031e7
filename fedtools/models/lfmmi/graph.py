"""Graphs of hidden Markov models for lattice-free MMI, with an n-gram of tokens as their prior.

Units are numbers 1, 2, ..: characters, pieces of words or phones. Unit 0, a tokenizer's CTC blank,
is silence here. Unit u has two scores ("pdfs"), 2u for its first frame and 2u + 1 for each further
one, so that it lasts at least one frame (Kaldi's chain topology, Povey et al. 2016), and "ll"
differs from a long "l". Units do not depend on their context (Hadian et al. 2018, "mono").

The n-gram's backoff is an epsilon arc, as in every decoder: it shortens the path's history. All
paths with their weights form a probability distribution over token sequences and durations; every
sequence of tokens has a path, whether it was seen or not.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

SILENCE = 0
START, END = -2, -1  # start and end of a transcript, in n-grams
# Log-probability of staying in a token for another frame. Leaving has the same probability, so that
# all paths through an utterance have the same factor, which does not affect training.
_STAY = math.log(0.5)
History = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Graph:
    """States and arcs; a path starts at an initial state and takes one emitting arc per frame.

    Before an emitting arc, and at the end, it may take one epsilon arc. Epsilon arcs lead from the
    first states to the last ones, which no other arc enters and where no path starts.

    Attributes:
        source, target: states of each arc, int64, (arcs,).
        pdf: pdf whose score of the frame an arc takes, int64, (arcs,); -1 for an epsilon arc.
        weight: natural logarithms, float64, (arcs,).
        initial, final: natural logarithms, float64, (states,); -inf where no path starts or ends.
    """

    source: np.ndarray
    target: np.ndarray
    pdf: np.ndarray
    weight: np.ndarray
    initial: np.ndarray
    final: np.ndarray

    def __post_init__(self):
        between, first = self.pdf < 0, self.stations
        apart = (self.target >= first) == between
        if not apart.all() or (self.source[between] >= first).any():
            raise ValueError("only epsilon arcs may, and must, lead from first states to last ones")

    @cached_property
    def stations(self) -> int:
        """Return the number of states that are not targets of epsilon arcs; they come first."""
        return len(self.final) - len(np.unique(self.target[self.pdf < 0]))

    @cached_property
    def leaving(self) -> list[dict[int, list[tuple[int, int, float]]]]:
        """Return each state's arcs (target, pdf, weight) by the token that they begin.

        The key is 0 for other emitting arcs, and -1 for epsilon arcs.
        """
        found = [defaultdict(list) for _ in self.final]
        arcs = zip(self.source, self.target, self.pdf, self.weight, strict=True)
        for source, target, pdf, weight in arcs:
            token = -1 if pdf < 0 else begun(pdf)
            found[source][token].append((int(target), int(pdf), float(weight)))
        return found

    def closure(self, state: int) -> list[tuple[int, float]]:
        """Return a state and the targets of its epsilon arcs, with the weights to get there."""
        return [(state, 0.0), *((to, weight) for to, _, weight in self.leaving[state].get(-1, ()))]


def begun(pdf: int) -> int:
    """Return the token that begins with a pdf; 0 if the pdf continues a token or is silence."""
    return 0 if pdf % 2 else int(pdf) // 2


class _Arcs:
    """A graph under construction; states are any keys, numbered in order of appearance.

    All paths start at the state `start`.
    """

    def __init__(self, start: object):
        self.numbers: dict[object, int] = {start: 0}
        self.arcs: dict[tuple[int, int, int], float] = {}
        self.final: dict[int, float] = {}

    def state(self, key: object) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def add(self, source: object, target: object, pdf: int, weight: float) -> None:
        """Add an arc, or add to the probability of an arc with the same states and pdf."""
        key = self.state(source), self.state(target), pdf
        self.arcs[key] = np.logaddexp(self.arcs.get(key, -np.inf), weight)

    def end(self, key: object, weight: float) -> None:
        """Add to the probability that paths end at a state."""
        state = self.state(key)
        self.final[state] = np.logaddexp(self.final.get(state, -np.inf), weight)

    def graph(self) -> Graph:
        arcs = np.array(list(self.arcs), dtype=np.int64).reshape(-1, 3).T.copy()
        weight = np.array(list(self.arcs.values()), dtype=np.float64)
        initial, final = np.full((2, len(self.numbers)), -np.inf)
        initial[0] = 0.0
        final[list(self.final)] = list(self.final.values())
        return Graph(*arcs, weight, initial, final)


@dataclass(frozen=True)
class Ngram:
    """An n-gram of tokens; see `estimate`.

    Attributes:
        order: length of the longest n-grams.
        seen: probabilities of the tokens (and END) seen after each history, without those reached
            by backing off. The empty history has all tokens.
        backoff: probability of backing off from each history but the empty one.
    """

    order: int
    seen: dict[History, dict[int, float]]
    backoff: dict[History, float]

    def longest(self, history: History) -> History:
        """Return the longest known suffix of a history."""
        history = history[max(0, len(history) - self.order + 1) :]
        while history not in self.seen:
            history = history[1:]
        return history

    def shorter(self, history: History) -> Iterable[tuple[History, float]]:
        """Yield a known history and those it backs off to, with log-probabilities of backoff."""
        weight = 0.0
        while history:
            yield history, weight
            weight += math.log(self.backoff[history])
            history = self.longest(history[1:])
        yield (), weight

    def probability(self, tokens: Collection[int], history: History) -> float:
        """Return the probability that a history is followed by one of some tokens, or END.

        The sum is over all ways of backing off.
        """
        return sum(
            math.exp(weight) * sum(p for token, p in self.seen[known].items() if token in tokens)
            for known, weight in self.shorter(self.longest(history))
        )


def estimate(
    transcripts: Iterable[Sequence[int]], tokens: int, order: int, max_histories: int
) -> Ngram:
    """Estimate an n-gram with Witten-Bell interpolation (Chen and Goodman 1999, section 2.4).

    For a history h with count c, followed by t different tokens, P(u | h) is count(h, u) / (c + t),
    plus t / (c + t) times the probability after the shorter history; below the empty history, all
    tokens are equally likely. Other discounts need counts of counts, which small alphabets lack.

    Args:
        transcripts: token numbers, from 1 to tokens - 1.
        tokens: one more than the largest number; for a `Tokenizer`, len(tokenizer) - 1, as
            <sos/eos> is never spoken.
        order: 2 to 4 (1 for no history at all).
        max_histories: number of histories of two and more tokens to keep, the most frequent ones;
            others fall back to shorter ones (in the spirit of Kaldi's chain-est-phone-lm).

    Raises:
        ValueError: for a number that is not a token, or if there are no transcripts.
    """
    counts: dict[History, Counter[int]] = defaultdict(Counter)
    for transcript in transcripts:
        line = [START, *_checked(transcript, tokens), END]
        for place in range(1, len(line)):
            for length in range(min(order, place + 1)):
                counts[tuple(line[place - length : place])][line[place]] += 1
    if not counts:
        raise ValueError("no transcripts")
    # Among equal counts shorter ones come first: if a history is kept, its beginning is, too.
    long = [history for history in counts if len(history) > 1]
    long.sort(key=lambda history: (-counts[history].total(), len(history), history))
    seen, backoff = {}, {}
    for history in sorted([h for h in counts if len(h) <= 1] + long[:max_histories]):
        after, total = counts[history], counts[history].total() + len(counts[history])
        seen[history] = {token: after[token] / total for token in sorted(after)}
        backoff[history] = len(after) / total
    rest = backoff.pop(()) / tokens
    seen[()] = {token: seen[()].get(token, 0.0) + rest for token in (END, *range(1, tokens))}
    return Ngram(order, seen, backoff)


def _checked(transcript: Sequence[int], tokens: int) -> list[int]:
    for token in transcript:
        if not 0 < token < tokens:
            raise ValueError(f"{token} is not one of the tokens 1 to {tokens - 1}")
    return [int(token) for token in transcript]


def word_starts(tokens: Sequence[str]) -> set[int]:
    """Return the numbers of tokens that a pause may precede: a space, first pieces of words."""
    return {i for i, token in enumerate(tokens) if token == "<space>" or token.startswith("▁")}


def denominator(ngram: Ngram, pauses: Collection[int] = (), silence: float = 0.5) -> Graph:
    """Return the graph of all token sequences, weighted by an n-gram.

    There is a state for each history at the end of a token, and one for each known history, entered
    by epsilon arcs, to continue from. A pause shortens the history to the last token.

    Args:
        ngram: n-gram of tokens.
        pauses: tokens that may be preceded by silence; silence is always possible before the first
            token and after the last one.
        silence: probability of silence where it is possible; below 1.
    """
    arcs, pauses = _Arcs("start"), frozenset(pauses) | {END}
    speak, wait = math.log1p(-silence), math.log(silence or 1)
    # States are numbered in order of appearance, and targets of epsilon arcs must come last.
    pairs = [(history, token) for history, seen in ngram.seen.items() for token in seen]
    ends = {_after(ngram, history, token): token for history, token in pairs if token != END}
    for history, token in ends.items():
        arcs.add(history, history, 2 * token + 1, _STAY)
    pauses_after = dict.fromkeys([START, *ends.values()] if silence else [])
    for token in pauses_after:
        arcs.add(("silence", token), ("silence", token), 2 * SILENCE + 1, _STAY)
    going_on = {}

    def go_on(state: object, after: str, history: History, weight: float) -> None:
        for known, more in ngram.shorter(ngram.longest(history)):
            arcs.add(state, (after, known), -1, weight + more)
            going_on[after, known] = None

    go_on("start", "start", (START,), speak)
    for history, token in ends.items():
        go_on(history, "token", history, _STAY)
        if silence:
            weight = _STAY + wait + math.log(ngram.probability(pauses, history))
            arcs.add(history, ("silence", token), 2 * SILENCE, weight)
    for token in pauses_after:
        if token == START:
            arcs.add("start", ("silence", token), 2 * SILENCE, wait)
            go_on(("silence", token), "start", (token,), _STAY)
        else:
            weight = _STAY - math.log(ngram.probability(pauses, (token,)))
            go_on(("silence", token), "pause", (token,), weight)
    for state in going_on:
        after, history = state
        for token, probability in ngram.seen[history].items():
            weight = math.log(probability) + (speak if after == "token" and token in pauses else 0)
            if token == END:
                arcs.end(state, weight)
            elif after != "pause" or token in pauses:
                arcs.add(state, _after(ngram, history, token), 2 * token, weight)
    return arcs.graph()


def _after(ngram: Ngram, history: History, token: int) -> History:
    """Return the state of a token that follows a history; it contains at least the token."""
    return ngram.longest((*history, token)) or (token,)


def numerator(denominator: Graph, transcript: Sequence[int]) -> Graph:
    """Return the graph of one transcript: all paths of the denominator for it, with their weights.

    The sum over it is therefore at most the sum over the denominator, for any scores.

    Raises:
        ValueError: for a token that the denominator does not have.
    """
    tokens = [*_checked(transcript, int(denominator.pdf.max()) // 2 + 1), END]
    queue = [(0, int(denominator.initial.argmax()))]
    arcs, queued, leaving = _Arcs(queue[0]), set(queue), denominator.leaving
    for place, state in queue:  # grows
        for through, weight in denominator.closure(state):
            nexts = [(place, arc) for arc in leaving[through].get(0, ())]
            if tokens[place] == END:
                arcs.end((place, state), weight + denominator.final[through])
            else:
                nexts += [(place + 1, arc) for arc in leaving[through].get(tokens[place], ())]
            for following, (target, pdf, more) in nexts:
                key = following, target
                if key not in queued:
                    if not _goes_on(denominator, target, tokens[following]):
                        continue  # a pause where the transcript has none
                    queued.add(key)
                    queue.append(key)
                arcs.add((place, state), key, pdf, weight + more)
    return arcs.graph()


def _goes_on(graph: Graph, state: int, token: int) -> bool:
    """Return whether a token can begin, or a path end, after a state without silence between."""
    after = [state for state, _ in graph.closure(state)]
    ends = token == END and (graph.final[after] > -np.inf).any()
    return bool(ends) or any(token in graph.leaving[state] for state in after if token != END)
