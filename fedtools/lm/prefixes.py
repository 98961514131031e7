"""Word scores of many hypotheses at once, with each distinct prefix computed only once.

Hypotheses of an N-best list share their words up to where they differ. All prefixes of a batch form
a tree whose nodes are the distinct ones. Everything in a transformer that works word by word
(embeddings, projections, feed-forward layers, and the output layer, which costs most) is computed
for the nodes alone. Only attention needs paths: queries, keys and values of the nodes are laid out
as rows, one for each path from the root to a leaf, and after a plain causal attention one copy of
each node is taken back. Padding is at a row's end, where causal attention does not look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.lm.nnlm_network import word_logits

# The most logits (nodes x words) in memory at a time.
_MAX_LOGITS = 1 << 22


@dataclass(frozen=True)
class PrefixTree:
    """The distinct prefixes of some sentences: N nodes, R paths from the root to a leaf.

    Node 0 is the empty prefix; a node's parent has a smaller number. A pair is a node and a word
    that comes after it in some sentence; pairs are sorted by their nodes.

    Attributes:
        words: (N,) the id of each node's last word; for node 0 that of the start.
        depths: (N,) the number of words in each node's prefix.
        paths: (R, T) the nodes of each path, then zeros.
        places: (N,) where each node stands in `paths`, counted through the rows.
        pair_nodes: (P,) the node of each pair.
        pair_words: (P,) its word.
        pairs: (W,) for every word of every sentence, one after the other: the number of its pair.
    """

    words: np.ndarray
    depths: np.ndarray
    paths: np.ndarray
    places: np.ndarray
    pair_nodes: np.ndarray
    pair_words: np.ndarray
    pairs: np.ndarray


def make_tree(sentences: Sequence[Sequence[int]], start: int) -> PrefixTree:
    """Build the tree of sentences, each the ids of its words and then that of the end.

    Args:
        sentences: at least one.
        start: the id of the start.
    """
    # (node, word) -> pair; a pair's next node is made when a word follows it.
    numbers: dict[tuple[int, int], int] = {}
    children: list[int] = []
    words, parents, found = [start], [0], []
    for sentence in sentences:
        node = 0
        for word in sentence[:-1]:
            pair = numbers.setdefault((node, word), len(children))
            if pair == len(children):
                children.append(len(words))
                words.append(word)
                parents.append(node)
            found.append(pair)
            node = children[pair]
        pair = numbers.setdefault((node, sentence[-1]), len(children))
        if pair == len(children):
            children.append(-1)
        found.append(pair)
    pairs = np.array(list(numbers), dtype=np.int64)
    order = np.argsort(pairs[:, 0], kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    depths, paths, places = _paths(parents)
    return PrefixTree(
        words=np.array(words),
        depths=depths,
        paths=paths,
        places=places,
        pair_nodes=pairs[order, 0],
        pair_words=pairs[order, 1],
        pairs=rank[np.array(found, dtype=np.int64)],
    )


def _paths(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the depths, paths and places of a tree's nodes."""
    depths = np.zeros(len(parents), dtype=np.int64)
    is_leaf = np.ones(len(parents), dtype=bool)
    for node, parent in enumerate(parents[1:], 1):
        depths[node] = depths[parent] + 1
        is_leaf[parent] = False
    up, rows = np.array(parents), np.flatnonzero(is_leaf)
    paths = np.zeros((len(rows), int(depths.max()) + 1), dtype=np.int64)
    places = np.zeros(len(parents), dtype=np.int64)
    at, row = rows.copy(), np.arange(len(rows))
    # Follow all paths at once, from the leaves to the root.
    while len(row):
        paths[row, depths[at]] = at
        places[at] = row * paths.shape[1] + depths[at]
        row, at = row[depths[at] > 0], up[at[depths[at] > 0]]
    return depths, paths, places


@torch.no_grad()
def score_tree(model: nn.Module, tree: PrefixTree) -> np.ndarray:
    """Return ln p(word | words before it), float32 (W,), of every word of every sentence of a tree.

    Args:
        model: made by `build_nnlm`, in evaluation mode.
        tree: with the model's word ids.
    """
    device = model.decoder.weight.device
    given = {
        name: torch.from_numpy(getattr(tree, name)).to(device)
        for name in ("words", "depths", "paths", "places", "pair_nodes", "pair_words")
    }
    hidden = _encode(model, given["words"], given["depths"], given["paths"], given["places"])
    scores = _score_pairs(model, hidden, given["pair_nodes"], given["pair_words"])
    return scores.cpu().numpy()[tree.pairs]


def _encode(
    model: nn.Module, words: Tensor, depths: Tensor, paths: Tensor, places: Tensor
) -> Tensor:
    """Return ESPnet's encoder output for the last word of each node's prefix, (N, att_unit)."""
    hidden = _embed(model, words, depths, paths.shape[1])
    for block in model.encoder.encoders:
        attention = block.self_attn
        given = block.norm1(hidden)
        query, key, value = (
            layer(given)[paths].unflatten(2, (attention.h, -1)).transpose(1, 2)
            for layer in (attention.linear_q, attention.linear_k, attention.linear_v)
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        found = found.transpose(1, 2).flatten(2).flatten(0, 1)[places]
        hidden = hidden + attention.linear_out(found)
        hidden = hidden + block.feed_forward(block.norm2(hidden))
    return model.encoder.after_norm(hidden)


def _embed(model: nn.Module, words: Tensor, depths: Tensor, longest: int) -> Tensor:
    """Return the input of the first block, (N, att_unit), with each node at its own position."""
    *layers, positions = model.encoder.embed
    hidden = model.embed(words)
    for layer in layers:
        hidden = layer(hidden)
    if hasattr(positions, "extend_pe"):
        positions.extend_pe(hidden.new_zeros(1, longest))
        hidden = hidden * positions.xscale + positions.pe[0, depths]
    return hidden


def _score_pairs(model: nn.Module, hidden: Tensor, nodes: Tensor, words: Tensor) -> Tensor:
    """Return ln p(word | prefix) of pairs sorted by their nodes, (P,)."""
    step = max(1, _MAX_LOGITS // len(model.decoder.weight))
    scores = hidden.new_empty(len(nodes))
    firsts = range(0, len(hidden), step)
    bounds = torch.searchsorted(nodes, torch.tensor([*firsts, len(hidden)], device=nodes.device))
    for first, begin, end in zip(firsts, bounds, bounds[1:], strict=False):
        # torch's log_softmax takes a fourth of the time of its logsumexp.
        found = word_logits(model, hidden[first : first + step]).log_softmax(1)
        scores[begin:end] = found[nodes[begin:end] - first, words[begin:end]]
    return scores
