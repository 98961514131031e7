"""Optional parts of tasks, which commands request by `Task.need`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtools.tasks.base import Indicator, Items, Part

if TYPE_CHECKING:
    import numpy as np
    import torch

    from fedtools.client.attackers.options import Attackers
    from fedtools.client.unit import Models, Source
    from fedtools.lm.tokens import Tokenizer
    from fedtools.models.training import Training
    from fedtools.tasks.asr.corpus import Corpus
    from fedtools.tasks.asr.data import Utterances
    from fedtools.tasks.kws.clips import ClipCorpus
    from fedtools.tasks.rescore.protection import Protection

# Tasks whose clients train models: the models, the training options, and the device.
MODELS: Part[Models] = Part("models")
TRAINING: Part[Training] = Part("training")
DEVICE: Part[torch.device] = Part("device")
# What attackers train on in place of a source: (source, options, all attackers) -> source.
POISON: Part[Callable[[Any, Attackers, Sequence[str]], Source]] = Part("poison")
# For attacks: client -> its speaker; the training items, with the items of some splits as held-out
# ones; speech in a folder, in batches of a given size.
SPEAKERS: Part[Callable[[], dict[str, str]]] = Part("speakers")
ITEMS: Part[Callable[[Sequence[str]], Items]] = Part("items")
INDICATOR: Part[Callable[[Path, int], Indicator]] = Part("indicator")

# Speech recognition: the utterances, the tokens, and measurements on any utterances.
CORPUS: Part[Corpus] = Part("corpus")
TOKENIZER: Part[Tokenizer] = Part("tokenizer")
MEASURED: Part[Callable[[Utterances], dict[str, object]]] = Part("measured")

# Keywords: the clips; the model's logits for a split and a client, with the labels; its logits for
# features of any waveforms.
CLIPS: Part[ClipCorpus] = Part("clips")
LOGITS: Part[Callable[[str, str], tuple[torch.Tensor, torch.Tensor]]] = Part("logits")
HEAR: Part[Callable[[torch.Tensor], torch.Tensor]] = Part("hear")

# Rescoring: a client's rescored words; the clients' and the global distributions over words; the
# privacy of counts.
RESCORED: Part[Callable[[str], dict[str, str]]] = Part("rescored")
MARGINALS: Part[Callable[[], dict[str, np.ndarray]]] = Part("marginals")
PROTECTION: Part[Protection] = Part("protection")
