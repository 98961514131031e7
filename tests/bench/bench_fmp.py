#!/usr/bin/env python3
"""FMP over lists of AMI's size: seconds per setting, from stored scores.

    bench_fmp.py [--utterances 12643] [--hypotheses 20] [--words 8] [--rounds 10] [--turns 3]

63 clients, a vocabulary of 10,000 words, random scores. "simplest": the adaptation of each word of
each hypothesis in a loop over words, as algorithm 1 says it, on some of the utterances and scaled
up; the counts are not even made. "a sweep": `fedtools rescore-sweep` of 100 settings, once, from
files of these lists to the table, word errors counted. In one process of one thread.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from fedtools.data.ark import write_ark
from fedtools.data.datadir import write_table
from fedtools.data.nbest import Hypothesis, write_nbest
from fedtools.federation.fmp.simulation import simulate
from fedtools.federation.fmp.sweep import sweep
from fedtools.lm.reweighting import Lists, ListWeights
from fedtools.lm.stream import groups_of
from fedtools.lm.vocabulary import END, UNKNOWN, Vocabulary, write_unigram
from fedtools.lm.word_scores import Rescored
from fedtools.methods.fmp import FMP
from fedtools.privacy.key import NoiseKey
from fedtools.privacy.releases import Releases

CLIENTS, VOCABULARY, SOME = 63, 10_000, 100
WAYS = {
    "one setting": FMP(),
    "normalised": FMP(normalise=True),
    "refreshed after each utterance": FMP(continuous=True),
    "with noise": FMP(privacy={"mechanism": "laplace"}),
}


def random_lists(utterances: int, hypotheses: int, words: int) -> Lists:
    random = np.random.default_rng(0)
    count = utterances * hypotheses
    size = count * words
    rescored = Rescored(
        vocabulary=Vocabulary([END, UNKNOWN, *(f"w{n}" for n in range(2, VOCABULARY))]),
        unigram=random.integers(0, 100, VOCABULARY),
        unknown=1,
        utterances=[str(number) for number in range(utterances)],
        hypotheses=[""] * count,
        first_hypothesis=np.arange(utterances + 1) * hypotheses,
        first_word=np.arange(count + 1) * words,
        word_ids=random.integers(1, VOCABULARY, size).astype(np.int32),
        log_probs=-random.random(size).astype(np.float32),
        acoustic=-random.random(count),
        lm=-random.random(count),
        num_words=np.full(count, words - 1),
    )
    return Lists(rescored, ListWeights())


def write_stream(lists: Lists, folder: Path) -> None:
    """Write the lists as files; the reference is a hypothesis plus a word that is in none."""
    rescored = lists.rescored
    words, begin = rescored.vocabulary.words, np.random.default_rng(1).integers(0, 3600, CLIENTS)
    rescored.vocabulary.write(folder)
    write_unigram(folder, rescored.vocabulary, rescored.unigram, rescored.unknown)
    owners, text, starts, nbest, scores = {}, {}, {}, {}, {}
    for at in range(len(rescored.utterances)):
        name = f"u{at:06}"
        client = at * CLIENTS // len(rescored.utterances)
        owners[name], starts[name] = f"c{client:02}", str(begin[client] + at)
        first, last = rescored.first_hypothesis[at : at + 2]
        nbest[name] = []
        for rank, index in enumerate(range(first, last), 1):
            ids = rescored.word_ids[slice(*rescored.first_word[index : index + 2])][:-1]
            said = " ".join(words[word] for word in ids)
            nbest[name].append(Hypothesis(rank, -0.1 * rank, rescored.lm[index], said))
        text[name] = f"{nbest[name][at % (last - first)].words} unheard"
        size = slice(*rescored.first_word[[first, last]])
        scores[name] = rescored.log_probs[size, None]
    write_nbest(folder / "nbest.tsv", nbest.items())
    write_table(folder / "nnlm.scp", write_ark(folder / "nnlm.ark", scores.items()))
    for name, table in (("utt2client", owners), ("text", text), ("utt2start", starts)):
        write_table(folder / name, table)


def sweep_seconds(lists: Lists, rounds: int) -> float:
    """Return the seconds of a sweep of 100 settings, starting from its files."""
    varied = {"alpha": [0.0, 0.25, 0.5, 0.7], "sigma": [0.1, 1.0, 5.0, 10.0, 100.0]}
    varied["scale"] = [0.1, 0.2, 0.5, 1.0, 2.0]
    with tempfile.TemporaryDirectory() as folder:
        write_stream(lists, Path(folder))
        begun = time.perf_counter()
        rows = sweep(folder, Path(folder) / "sweep.tsv", {"rounds": rounds}, varied)
        assert len(rows) == 100
        return time.perf_counter() - begun


def simplest(lists: Lists) -> float:
    """Return the seconds for all utterances, extrapolated from a subset."""
    rescored, background = lists.rescored, lists.background.tolist()
    ids, scores = rescored.word_ids.tolist(), rescored.log_probs.tolist()
    begun = time.perf_counter()
    for utterance in range(SOME):
        first, last = rescored.first_hypothesis[utterance : utterance + 2]
        best = -math.inf
        for hypothesis in range(first, last):
            at, to = rescored.first_word[hypothesis : hypothesis + 2]
            total = 0.0
            for place in range(at, to):
                u = background[ids[place]]
                total += scores[place] + 0.5 * math.log((0.25 * u + 0.75 * u) / u)
            best = max(best, total)
    return (time.perf_counter() - begun) * len(rescored.utterances) / SOME


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = (("utterances", 12643), ("hypotheses", 20), ("words", 8), ("rounds", 10), ("turns", 3))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    lists = random_lists(options.utterances, options.hypotheses, options.words)
    edges = np.linspace(0, options.utterances, CLIENTS + 1).astype(int)
    groups = {
        str(number): groups_of(slice(int(edges[number]), int(edges[number + 1])), options.rounds)
        for number in range(CLIENTS)
    }
    slow = [simplest(lists) for _ in range(options.turns)]
    print(f"simplest loop over words: {statistics.median(slow):.1f} s")
    for name, method in WAYS.items():
        taken = []
        for _ in range(options.turns):
            releases = None
            if method.privacy:
                releases = Releases(method.plan(options.rounds), NoiseKey(bytes(32)), "bench")
            begun = time.perf_counter()
            simulate(method, lists, groups, releases)
            taken.append(time.perf_counter() - begun)
        spread = f"{statistics.median(taken):.2f} s ({min(taken):.2f} to {max(taken):.2f})"
        print(f"{name}: {spread}, {statistics.median(slow) / statistics.median(taken):.0f} times")
    print(f"a sweep of 100 settings: {sweep_seconds(lists, options.rounds):.1f} s")


if __name__ == "__main__":
    main()
