#!/usr/bin/env python3
"""Scoring N-best lists by a TransformerLM of the FMP paper's size: ours over simpler ways.

    bench_rescore.py [--words 10000] [--bins 4000] [--turns 3] [--device cuda]

Lists as decoders leave them: a third of a sentence's words have one or two rivals (a tenth of them
no word at all), each at a random cost; a list is the cheapest combinations of one to three changes.
They share as many prefixes as lists of our own decoder (sentences and posteriors of
bench_decode.py: 0.44 of the prefixes are distinct in 20-best lists of 14 words, 0.35 of 28 words,
0.27 in 100-best lists of 71 words). Random weights, one thread.

"ours" scores each distinct prefix once; "masked" does so too, with a mask over all nodes in the
place of rows of paths; "batched" runs ESPnet's forward pass on padded batches of hypotheses of
about the same length, "alone" on one hypothesis after the other. All give the same scores. Prints
CPU seconds, also of a million words, and ratios to ours of the same turn: their median, least and
largest. On a GPU it is ours alone, in seconds of the clock.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

from fedtools.core.tables import format_table
from fedtools.lm import prefixes
from fedtools.lm.nbest_scoring import batches
from fedtools.lm.nnlm_network import NnlmOptions, build_nnlm, pad

# Utterances, hypotheses, words.
SETS = ((24, 20, 10), (8, 20, 30), (1, 100, 75))


def lists(utterances: int, size: int, length: int, words: int, seed: int) -> list[list[list[int]]]:
    """Return distinct hypotheses of each utterance, as ids with the end."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(utterances):
        best = (rng.zipf(1.3, length) % (words - 1) + 1).tolist()
        changes = []
        for at in rng.choice(length, length // 3 + 2, replace=False).tolist():
            for _ in range(rng.integers(1, 3)):
                word = [int(rng.integers(1, words))] if rng.random() < 0.9 else []
                changes.append((rng.exponential(), at, word))
        combined = []
        for number in range(4):
            for chosen in itertools.combinations(sorted(changes)[:20], number):
                if len({at for _, at, _ in chosen}) == number:
                    combined.append((sum(cost for cost, _, _ in chosen), chosen))
        kept = {}
        for _, chosen in sorted(combined):
            other = {at: word for _, at, word in chosen}
            parts = [other.get(at, [word]) for at, word in enumerate(best)]
            kept[tuple(word for part in parts for word in part)] = None
        found.append([[*hypothesis, 0] for hypothesis in list(kept)[:size]])
    return found


def ours(model, nbest, words: int, bins: int) -> np.ndarray:
    """Score as `fedtools rescore` does."""
    sizes = [[len(ids) for ids in hypotheses] for hypotheses in nbest]
    found: list[np.ndarray] = [np.empty(0)] * len(nbest)
    for batch in batches(sizes, bins):
        sentences = [ids for index in batch for ids in nbest[index]]
        scores = prefixes.score_tree(model, prefixes.make_tree(sentences, words))
        ends = np.cumsum([sum(sizes[index]) for index in batch])[:-1]
        for index, part in zip(batch, np.split(scores, ends), strict=True):
            found[index] = part
    return np.concatenate(found)


@torch.no_grad()
def padded(model, sentences: list[list[int]], words: int) -> list[np.ndarray]:
    """Run ESPnet's forward pass on one batch."""
    inputs, targets = pad(sentences, words)
    # The start symbol is not a word and has no probability.
    scores = model(inputs, None)[0][..., :-1].log_softmax(-1)
    chosen = scores.gather(2, targets.clamp(min=0)[..., None])[..., 0].numpy()
    return [row[: len(ids)] for row, ids in zip(chosen, sentences, strict=True)]


def alone(model, nbest, words: int, bins: int) -> np.ndarray:
    """Score one hypothesis after the other."""
    return np.concatenate([padded(model, [ids], words)[0] for one in nbest for ids in one])


def batched(model, nbest, words: int, bins: int) -> np.ndarray:
    """Score batches of hypotheses sorted by length."""
    flat = [ids for hypotheses in nbest for ids in hypotheses]
    found: list[np.ndarray] = [np.empty(0)] * len(flat)
    for batch in batches([[len(ids)] for ids in flat], bins):
        parts = padded(model, [flat[index] for index in batch], words)
        for index, part in zip(batch, parts, strict=True):
            found[index] = part
    return np.concatenate(found)


@torch.no_grad()
def masked(model, nbest, words: int, bins: int) -> np.ndarray:
    """Score a tree for each utterance, in whose attention nodes see their ancestors."""
    found = []
    for sentences in nbest:
        tree = prefixes.make_tree(sentences, words)
        seen = torch.zeros(len(tree.words), len(tree.words), dtype=torch.bool)
        for path in torch.from_numpy(tree.paths):
            path = path[: 1 + int((path > 0).sum())]
            seen[path[:, None], path[None]] |= torch.ones(len(path), len(path)).tril().bool()
        hidden = model.encoder.embed(model.embed(torch.from_numpy(tree.words)))
        for block in model.encoder.encoders:
            attention, given = block.self_attn, block.norm1(hidden)
            layers = (attention.linear_q, attention.linear_k, attention.linear_v)
            parts = [
                layer(given).unflatten(1, (attention.h, -1)).transpose(0, 1)[None]
                for layer in layers
            ]
            context = F.scaled_dot_product_attention(*parts, attn_mask=seen)
            hidden = hidden + attention.linear_out(context[0].transpose(0, 1).flatten(1))
            hidden = hidden + block.feed_forward(block.norm2(hidden))
        hidden = model.encoder.after_norm(hidden)
        nodes, after = torch.from_numpy(tree.pair_nodes), torch.from_numpy(tree.pair_words)
        found.append(prefixes._score_pairs(model, hidden, nodes, after).numpy()[tree.pairs])
    return np.concatenate(found)


WAYS = {"ours": ours, "masked": masked, "batched": batched, "alone": alone}


def main() -> None:
    """Run it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("words", 10000), ("bins", 4000), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_nnlm(NnlmOptions(), options.words).eval().to(options.device)
    on_cpu = options.device == "cpu"
    ways = WAYS if on_cpu else {"ours": ours}
    clock = time.process_time if on_cpu else time.perf_counter
    rows = []
    for utterances, size, length in SETS:
        nbest = lists(utterances, size, length, options.words, seed=1)
        total = sum(len(ids) for one in nbest for ids in one)
        nodes = sum(len(prefixes.make_tree(one, options.words).words) for one in nbest)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        scores = {}
        for _ in range(options.turns):
            for name, way in ways.items():
                begun = clock()
                scores[name] = way(model, nbest, options.words, options.bins)
                seconds[name].append(clock() - begun)
        for name, spent in seconds.items():
            np.testing.assert_allclose(scores[name], scores["ours"], rtol=0, atol=1e-4)
            ratios = [one / own for one, own in zip(spent, seconds["ours"], strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            lists_ = f"{utterances} x {size} x {length}, {nodes / total:.2f} distinct"
            median = statistics.median(spent)
            rows.append((lists_, name, f"{median:.2f}", f"{1e6 * median / total:.0f}", spread))
    header = ("lists", "way", "CPU s" if on_cpu else "s", "s/million words", "over ours")
    print(format_table(header, rows), end="")


if __name__ == "__main__":
    sys.exit(main())
