"""Which tokens did a client say, or which words are its clips of? By what its output layer changed.

Of a softmax, the gradient of a bias is what the model expects of a token less how often it comes:
what is there goes up, and what is not goes down (A. Wainakh et al.: User-level label leakage from
gradients in federated learning, PoPETs 2022). Of one clip it is exact (B. Zhao, K. Mopuri,
H. Bilen: iDLG, 2020). Without a bias, as in the decoder of Whisper, whose output layer is its table
of tokens, rows of the weight move along one direction, and those of tokens that are there to one
side, on which they are few and move far.

Control is an attacker who ranks tokens by how often other clients said them. Tokens are not words,
unless words are the tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedtools.attack.footprints import State
from fedtools.attack.updates import NotApplicable
from fedtools.federation.federation import Federation
from fedtools.files.states import Spec
from fedtools.files.symbols import BLANK, SOS_EOS, UNKNOWN
from fedtools.tasks.parts import TOKENIZER

# Of CTC, of keywords, of Whisper with a table of its own or that of its tokens.
_LAYERS = ("ctc.ctc_lo", "head", "proj_out", "decoder.embed_tokens")
BIAS, WEIGHT = "bias", "weight"


@dataclass(frozen=True)
class Output:
    """The output layer: a tensor for each of `BIAS` and `WEIGHT` that is sent, and the rows that
    are tokens which somebody can say.
    """

    tensors: Mapping[str, str]
    rows: np.ndarray


def output_layer(federation: Federation, sent: Spec) -> Output:
    """The output layer of the experiment's models.

    Args:
        sent: the tensors that clients send.

    Raises:
        NotApplicable: if it tells nothing of tokens.
    """
    options = federation.experiment.options.model
    if options.get("criterion") == "lfmmi":
        raise NotApplicable("the outputs of LF-MMI are no tokens")
    known = [path for path in _LAYERS if any(name.startswith(f"{path}.") for name in sent)]
    if not known:
        adapted = "adapt" in options
        why = "adapters leave it as it is" if adapted else "clients keep it"
        raise NotApplicable(f"the output layer is not sent: {why}")
    own = [name for name in sent if name.startswith(f"{known[0]}.")]
    # A head of several layers ends with the last.
    last = max(own, key=lambda name: int(re.search(r"(\d*)\.\w+$", name)[1] or 0))
    layer = last.rpartition(".")[0]
    # Of LoRA's product the factor whose rows are outputs moves as the weight's rows do.
    kinds = {BIAS: BIAS, WEIGHT: WEIGHT, "lora_b": WEIGHT}
    tensors = {kinds[one]: f"{layer}.{one}" for one in kinds if f"{layer}.{one}" in own}
    if not tensors:
        raise NotApplicable(f"of the output layer, {layer}, nothing is sent that has its outputs")
    count = sent[next(iter(tensors.values()))][0][0]
    tokenizer = TOKENIZER.of(federation.task)
    tokens = list(tokenizer.tokens) if tokenizer else [""] * count
    special = {BLANK, UNKNOWN, SOS_EOS}
    said = [row for row, one in enumerate(tokens[:count])
            if one not in special and not re.fullmatch(r"<\|.*\|>", one)]  # fmt: skip
    return Output(tensors, np.array(said))


def scores_of(output: Output, sent: State, start: State) -> dict[str, np.ndarray]:
    """How likely each token is by what was changed: `BIAS`, or else `WEIGHT`, -> (tokens,).

    A tensor that is not seen, or did not move, tells nothing.
    """
    for kind, name in output.tensors.items():
        if name in sent:
            moved = (sent[name].astype(np.float64) - start[name])[output.rows]
            if moved.any():
                # The first one tells more: of what comes without a bias the side is a guess.
                return {kind: moved if kind == BIAS else _along(moved)}
    return {}


def _along(rows: np.ndarray) -> np.ndarray:
    """How far rows move along their main direction, to the side on which few move far."""
    _, vectors = np.linalg.eigh(rows.T @ rows)
    places = rows @ vectors[:, -1]
    return places if (places**3).sum() >= 0 else -places


class Ranked(NamedTuple):
    """How well one ranking of tokens finds those that are there.

    Attributes:
        area: how often one that is there is above one that is not, ties counting half, in %.
        precision: the average precision, in %.
        counts: correlation of scores with how often tokens come.
    """

    area: float
    precision: float
    counts: float


def ranked(scores: np.ndarray, counts: np.ndarray) -> Ranked:
    """Judge scores, (tokens,), by how often each token comes; NaN where all do, or none."""
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
    """How often each token of the output comes in some labels, (tokens,)."""
    found = Counter(token for one in labels for token in one)
    return np.array([found[row] for row in output.rows.tolist()], np.float64)


def bags(
    counts: Mapping[str, np.ndarray], scores: Mapping[str, Mapping[str, np.ndarray]]
) -> Iterator[tuple[str, str, Ranked, Ranked]]:
    """Judge the scores of clients who say some tokens more often than others.

    Args:
        counts: by client, how often it says each token.
        scores: by client, as of `scores_of`.

    Yields:
        the client, the kind of scores, and how good they are and the control.
    """
    total = sum(counts.values())
    for client, own in scores.items():
        here = counts[client]
        if not here.std():
            continue
        control = ranked(total - here, here)
        for kind, values in own.items():
            yield client, kind, ranked(values, here), control
