"""Rescored N-best lists of simulated speech, shared by several test files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtools.data.ark import write_ark
from fedtools.data.datadir import DataDir, write_table
from fedtools.data.nbest import Hypothesis, write_nbest
from fedtools.lm.vocabulary import Vocabulary, write_unigram

WORDS = [f"w{number:02}" for number in range(30)]
CLIENTS = ("ann", "bob", "cat")


def make_stream(
    folder: Path, utterances: int = 12, hypotheses: int = 4, seed: int = 0, timed: bool = True
) -> Path:
    """Make unsorted utterances of three words, some with wrong first hypotheses.

    Each client has words of its own, and all share words that the background lacks.
    """
    random = np.random.default_rng(seed)
    vocabulary = Vocabulary(["</s>", "<unk>", *WORDS])
    counts = np.array([1000, 3, *(500 // (rank + 1) for rank in range(len(WORDS)))])
    folder.mkdir(parents=True)
    vocabulary.write(folder)
    write_unigram(folder, vocabulary, counts, 3)
    data, lists, scores = DataDir(folder), {}, {}
    for index, client in enumerate(CLIENTS):
        liked = [*WORDS[-3:], *WORDS[5 + 3 * index : 8 + 3 * index]]
        times = random.permutation(utterances)
        for number in range(utterances):
            name = f"{client}-{number:03}"
            said = random.choice([*liked, *WORDS], 3).tolist()
            found = [" ".join(said)]
            while len(found) < hypotheses:
                other = list(said)
                other[random.integers(3)] = str(random.choice([*WORDS, "unheard"]))
                kept = 3 if random.random() < 0.8 else random.integers(0, 3)
                if (one := " ".join(other[:kept])) not in found:
                    found.append(one)
            order = random.permutation(hypotheses)
            if random.random() < 0.5:
                order = [0, *(one for one in order if one)]
            ranked = [found[one] for one in order]
            lists[name] = [
                Hypothesis(rank, -0.2 * rank - 3 * (3 - len(words.split())), -2.0, words)
                for rank, words in enumerate(ranked, 1)
            ]
            size = sum(len(words.split()) + 1 for words in ranked)
            scores[name] = -random.gamma(2.0, 0.5, (size, 1)).astype("f4")
            data.text[name] = found[0]
            data.utt2spk[name] = data.utt2client[name] = client
            if timed:
                begin = 4.0 * times[number]
                data.segments[name] = f"{client}-audio {begin:.2f} {begin + 3:.2f}"
    data.write()
    write_nbest(folder / "nbest.tsv", lists.items())
    write_table(folder / "nnlm.scp", write_ark(folder / "nnlm.ark", sorted(scores.items())))
    return folder
