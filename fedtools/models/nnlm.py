"""The neural language model: ESPnet's TransformerLM over words, at the size of the FMP paper.

Liu and Peng, "Federated marginal personalization for ASR rescoring", section 3.2: embedding 256,
feed-forward 1024, 3 blocks, 4 heads, dropout 0.1. A model has V words and V + 1 ids: the last id
is the start of a sentence, which is an input only, and no probability goes to it. Id 0 is the end,
which is an output only; ESPnet takes it for padding among the inputs.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.files.config import Positive, Share

PADDING = 0
# Of a target that does not count.
IGNORED = -100


@dataclass(frozen=True)
class NnlmOptions:
    """The network, in ESPnet's names of `lm_conf`.

    Attributes:
        pos_enc: "sinusoidal", or None as in ESPnet's recipes: a causal network can tell positions
            by what it attends to.
        embed_unit: size of a word's embedding.
        att_unit: size of the blocks, a multiple of `head`.
        head: heads of attention.
        unit: size of the feed-forward layers.
        layer: number of blocks.
        dropout_rate: of layers, of attention and of positions.
    """

    pos_enc: Literal["sinusoidal"] | None = None
    embed_unit: Positive = 256
    att_unit: Positive = 256
    head: Positive = 4
    unit: Positive = 1024
    layer: Positive = 3
    dropout_rate: Share = 0.1

    def __post_init__(self) -> None:
        if self.att_unit % self.head:
            raise ValueError(f"att_unit is {self.att_unit}, no multiple of {self.head} heads")
        if self.pos_enc and self.att_unit % 2:
            raise ValueError(f"att_unit is {self.att_unit}: sines and cosines need an even number")


def build_nnlm(options: NnlmOptions, words: int) -> nn.Module:
    """An `espnet2.lm.transformer_lm.TransformerLM`; parameters are drawn from torch's generator.

    Args:
        options: the network.
        words: V, the lines of the vocabulary.
    """
    # ESPnet says on import which packages it can do without.
    with contextlib.redirect_stdout(io.StringIO()):
        from espnet2.lm.transformer_lm import TransformerLM

    rate = options.dropout_rate
    rates = {"positional_dropout_rate": rate, "attention_dropout_rate": rate}
    return TransformerLM(words + 1, **asdict(options), **rates)


def pad(sentences: list[list[int]], words: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of sentences.

    Args:
        sentences: ids of each, with the end.
        words: V; the id of the start.

    Returns:
        inputs (B, T), the start and all ids but the end, padded; targets (B, T), `IGNORED` where
        the inputs are padded.
    """
    longest = max(map(len, sentences))
    inputs = torch.full((len(sentences), longest), PADDING)
    targets = torch.full((len(sentences), longest), IGNORED)
    for row, ids in enumerate(sentences):
        inputs[row, : len(ids)] = torch.tensor([words, *ids[:-1]])
        targets[row, : len(ids)] = torch.tensor(ids)
    return inputs, targets


def losses(
    model: nn.Module, inputs: Tensor, targets: Tensor, sample: Tensor | None = None
) -> Tensor:
    """-ln p(target | inputs up to there), of every target that counts, one after the other.

    Args:
        inputs, targets: (B, T), as of `pad`.
        sample: rare words, for `sampled_entropies`; None sums over all words.
    """
    hidden = represent(model, inputs)
    if sample is None:
        return entropies(model, hidden, targets)
    return sampled_entropies(model, hidden, targets, sample)


def represent(model: nn.Module, inputs: Tensor) -> Tensor:
    """What the last layer sees at each place of the inputs (B, T): (B, T, att_unit)."""
    return model.encoder(model.embed(inputs), model._target_mask(inputs))[0]


def entropies(model: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """-ln p of every target (B, T) that counts, of what `represent` gave."""
    chosen = targets != IGNORED
    logits = word_logits(model, hidden[chosen])
    return F.cross_entropy(logits.float(), targets[chosen], reduction="none")


def sampled_entropies(model: nn.Module, hidden: Tensor, targets: Tensor, sample: Tensor) -> Tensor:
    """As `entropies`, with an estimate of the sum that probabilities are normalised by.

    Words below the least one of the sample are frequent and are summed over exactly; of the sum
    over the others, the sample's part is scaled up. A model trained so is still normalised over all
    words by whoever uses it.

    Args:
        sample: different words, of those from some number on to the last, drawn evenly; the first
            is that number, and stands for no word.
    """
    first, rare = int(sample[0]), sample[1:]
    weight, bias = model.decoder.weight, model.decoder.bias
    chosen = targets != IGNORED
    hidden, targets = hidden[chosen], targets[chosen]
    exact = F.linear(hidden, weight[:first], bias[:first]).float()
    drawn = F.linear(hidden, weight[rare], bias[rare]).float()
    own = (hidden * weight[targets]).sum(-1).float() + bias[targets].float()
    # A rare target is summed over exactly, and what is drawn stands for the others.
    is_rare = targets >= first
    hit = rare == targets[:, None]
    count = len(weight) - 1 - first
    others = count - is_rare.float()
    scale = others / (len(rare) - hit.sum(-1)).clamp(min=1)
    tail = drawn.masked_fill(hit, -torch.inf) + scale.log()[:, None]
    alone = own.masked_fill(~is_rare, -torch.inf)[:, None]
    return torch.logsumexp(torch.cat([exact, tail, alone], 1), 1) - own


def word_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """(..., att_unit) to unnormalised log-probabilities of the V words, (..., V)."""
    # The row of the start is left out: the words' probabilities sum to one without it.
    return F.linear(hidden, model.decoder.weight[:-1], model.decoder.bias[:-1])
