"""The neural language model: ESPnet's TransformerLM over words, at the size of the FMP paper.

Liu and Peng, "Federated marginal personalization for ASR rescoring", section 3.2: embedding 256,
feed-forward 1024, 3 blocks, 4 heads, dropout 0.1. A model has V words and V + 1 ids. The last id is
the start of a sentence, which is only an input, and has no probability. Id 0 is the end of a
sentence, which is only an output; among the inputs, ESPnet treats it as padding.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.core.config import Positive, Share

PADDING = 0
# Target where the input is padded.
IGNORED = -100


@dataclass(frozen=True)
class NnlmOptions:
    """Options of the network, with ESPnet's names in `lm_conf`.

    Attributes:
        pos_enc: "sinusoidal", or None as in ESPnet's recipes: a causal network can infer positions
            from what it attends to.
        embed_unit: size of a word's embedding.
        att_unit: size of the blocks, a multiple of `head`.
        head: number of attention heads.
        unit: size of the feed-forward layers.
        layer: number of blocks.
        dropout_rate: dropout of layers, attention and positions.
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
            raise ValueError(f"att_unit is {self.att_unit}, not a multiple of {self.head} heads")
        if self.pos_enc and self.att_unit % 2:
            raise ValueError(f"att_unit is {self.att_unit}: pos_enc sinusoidal needs an even one")


def build_nnlm(options: NnlmOptions, words: int) -> nn.Module:
    """Build a `TransformerLM` of `espnet2.lm`; parameters are drawn from torch's generator.

    Args:
        options: options of the network.
        words: V, the number of lines in the vocabulary.
    """
    # On import, ESPnet prints which optional packages are missing.
    with contextlib.redirect_stdout(io.StringIO()):
        from espnet2.lm.transformer_lm import TransformerLM

    rate = options.dropout_rate
    rates = {"positional_dropout_rate": rate, "attention_dropout_rate": rate}
    return TransformerLM(words + 1, **asdict(options), **rates)


def pad(sentences: list[list[int]], words: int) -> tuple[Tensor, Tensor]:
    """Return padded inputs and targets of sentences.

    Args:
        sentences: ids of each sentence, including its end.
        words: V, which is also the id of the start.

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
    """Return -ln p(target | inputs so far) of all targets that are not `IGNORED`: (targets,).

    Args:
        model: the network.
        inputs, targets: (B, T), from `pad`.
        sample: sample of rare words, for `sampled_entropies`; None sums over all words.
    """
    hidden = represent(model, inputs)
    if sample is None:
        return entropies(model, hidden, targets)
    return sampled_entropies(model, hidden, targets, sample)


def represent(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the input of the last layer at each place of the inputs (B, T): (B, T, att_unit)."""
    return model.encoder(model.embed(inputs), model._target_mask(inputs))[0]


def entropies(model: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return -ln p of all targets (B, T) that are not `IGNORED`, from the output of `represent`."""
    chosen = targets != IGNORED
    logits = word_logits(model, hidden[chosen])
    return F.cross_entropy(logits.float(), targets[chosen], reduction="none")


def sampled_entropies(model: nn.Module, hidden: Tensor, targets: Tensor, sample: Tensor) -> Tensor:
    """Return `entropies` with an estimate of the normalising sum over words.

    The sum is exact over frequent words, those with lower ids than the rare ones; over rare words
    it is the sample's sum, scaled up. In use, models trained with it are normalised over all words.

    Args:
        model: the network.
        hidden, targets: see `entropies`.
        sample: the id of the first rare word, then distinct rare words, drawn uniformly.
    """
    first, rare = int(sample[0]), sample[1:]
    weight, bias = model.decoder.weight, model.decoder.bias
    chosen = targets != IGNORED
    hidden, targets = hidden[chosen], targets[chosen]
    exact = F.linear(hidden, weight[:first], bias[:first]).float()
    drawn = F.linear(hidden, weight[rare], bias[rare]).float()
    own = (hidden * weight[targets]).sum(-1).float() + bias[targets].float()
    # A rare target has an exact term of its own, and the sample stands for all other rare words.
    is_rare = targets >= first
    hit = rare == targets[:, None]
    count = len(weight) - 1 - first
    others = count - is_rare.float()
    scale = others / (len(rare) - hit.sum(-1)).clamp(min=1)
    tail = drawn.masked_fill(hit, -torch.inf) + scale.log()[:, None]
    alone = own.masked_fill(~is_rare, -torch.inf)[:, None]
    return torch.logsumexp(torch.cat([exact, tail, alone], 1), 1) - own


def word_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """Return unnormalised log-probabilities of the V words, (..., V), from (..., att_unit)."""
    # The row of the start is left out, so that the words' probabilities sum to one.
    return F.linear(hidden, model.decoder.weight[:-1], model.decoder.bias[:-1])
