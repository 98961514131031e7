"""Bag-of-words attack: find a client's tokens or keywords from the change of its output layer.

The gradient of a softmax layer's bias is the expected count of a token under the model less its
true count: training raises the biases of tokens that occur and lowers the others (A. Wainakh et
al.: User-level label leakage from gradients in federated learning, PoPETs 2022). For one clip the
result is exact (B. Zhao, K. Mopuri, H. Bilen: iDLG, 2020). Without a bias, as in the decoder of
Whisper, whose output layer is its table of token embeddings, rows of the weight move along one
direction: the rows of tokens that occur move to one side, on which they are few and move far.

The control is an attacker who ranks tokens by how often other clients said them. Tokens are words
only where the tokenizer's tokens are words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedtools.attack.updates import NotApplicable
from fedtools.attack.victims import State
from fedtools.data.symbols import BLANK, SOS_EOS, UNKNOWN
from fedtools.exchange.states import Spec
from fedtools.federation.federation import Federation
from fedtools.tasks.parts import TOKENIZER

# Output layers of CTC, of keywords, and of Whisper, with weights of its own or tied to the tokens'.
_LAYERS = ("ctc.ctc_lo", "head", "proj_out", "decoder.embed_tokens")
BIAS, WEIGHT = "bias", "weight"


@dataclass(frozen=True)
class Output:
    """Output layer of a model.

    Attributes:
        tensors: `BIAS` or `WEIGHT` -> name of the tensor, for those that are sent.
        rows: indices of the rows of tokens that can be spoken, which special tokens cannot.
    """

    tensors: Mapping[str, str]
    rows: np.ndarray


def output_layer(federation: Federation, sent: Spec) -> Output:
    """Return the output layer of the experiment's models.

    Args:
        sent: the tensors that clients send.

    Raises:
        NotApplicable: if the layer is not sent, or its outputs are not tokens.
    """
    options = federation.experiment.options.model
    if options.get("criterion") == "lfmmi":
        raise NotApplicable("the outputs of LF-MMI are not tokens")
    known = [path for path in _LAYERS if any(name.startswith(f"{path}.") for name in sent)]
    if not known:
        adapted = "adapt" in options
        why = "adapters do not change it" if adapted else "clients keep it"
        raise NotApplicable(f"the output layer is not sent: {why}")
    own = [name for name in sent if name.startswith(f"{known[0]}.")]
    # In a head of several layers, the last layer is the output.
    last = max(own, key=lambda name: int(re.search(r"(\d*)\.\w+$", name)[1] or 0))
    layer = last.rpartition(".")[0]
    # LoRA's second factor has a row for each output, which moves as the weight's row does.
    kinds = {BIAS: BIAS, WEIGHT: WEIGHT, "lora_b": WEIGHT}
    tensors = {kinds[one]: f"{layer}.{one}" for one in kinds if f"{layer}.{one}" in own}
    if not tensors:
        raise NotApplicable(f"no tensor of output layer {layer} with a row per output is sent")
    count = sent[next(iter(tensors.values()))][0][0]
    tokenizer = TOKENIZER.of(federation.task)
    tokens = list(tokenizer.tokens) if tokenizer else [""] * count
    special = {BLANK, UNKNOWN, SOS_EOS}
    rows = [row for row, one in enumerate(tokens[:count])
            if one not in special and not re.fullmatch(r"<\|.*\|>", one)]  # fmt: skip
    return Output(tensors, np.array(rows))


def scores_of(output: Output, sent: State, start: State) -> dict[str, np.ndarray]:
    """Return how likely each token is, given the change: `BIAS`, or else `WEIGHT`, -> (tokens,).

    A tensor that is not sent, or did not change, gives no scores.
    """
    for kind, name in output.tensors.items():
        if name in sent:
            moved = (sent[name].astype(np.float64) - start[name])[output.rows]
            if moved.any():
                # The bias comes first: for a weight, the sign of the direction is a guess.
                return {kind: moved if kind == BIAS else _along(moved)}
    return {}


def _along(rows: np.ndarray) -> np.ndarray:
    """Return how far rows move along their main direction, signed so that few rows move far."""
    _, vectors = np.linalg.eigh(rows.T @ rows)
    places = rows @ vectors[:, -1]
    return places if (places**3).sum() >= 0 else -places


class Ranked(NamedTuple):
    """Quality of a ranking of tokens.

    Attributes:
        area: how often a token that occurs ranks above one that does not, ties counting half, in %.
        precision: the average precision, in %.
        counts: correlation of scores with counts of tokens.
    """

    area: float
    precision: float
    counts: float


def ranked(scores: np.ndarray, counts: np.ndarray) -> Ranked:
    """Judge scores, (tokens,), by counts of tokens; NaN where all tokens occur, or none."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    there = counts > 0
    along = float(np.corrcoef(scores, counts)[0, 1]) if scores.std() and counts.std() else 0.0
    if there.all() or not there.any():
        return Ranked(np.nan, np.nan, along)
    return Ranked(
        100 * float(roc_auc_score(there, scores)),
        100 * float(average_precision_score(there, scores)),
        along,
    )


def count_tokens(labels: Sequence[Sequence[int]], output: Output) -> np.ndarray:
    """Return the count of each token of the output in some labels, (tokens,)."""
    found = Counter(token for one in labels for token in one)
    return np.array([found[row] for row in output.rows.tolist()], np.float64)


def bags(
    counts: Mapping[str, np.ndarray], scores: Mapping[str, Mapping[str, np.ndarray]]
) -> Iterator[tuple[str, str, Ranked, Ranked]]:
    """Judge the scores of clients who say some tokens more often than others.

    Args:
        counts: client -> count of each token.
        scores: client -> scores from `scores_of`.

    Yields:
        the client, the kind of scores, and the quality of the scores and of the control.
    """
    total = sum(counts.values())
    for client, own in scores.items():
        here = counts[client]
        if not here.std():
            continue
        control = ranked(total - here, here)
        for kind, values in own.items():
            yield client, kind, ranked(values, here), control
