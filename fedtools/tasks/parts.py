"""What some tasks have and others have not: a command asks for it by `Task.need`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedtools.tasks.base import Indicator, Items, Part

if TYPE_CHECKING:
    import numpy as np
    import torch

    from fedtools.client.unit import Models
    from fedtools.lm.tokens import Tokenizer
    from fedtools.models.training import Training
    from fedtools.tasks.asr.corpus import Corpus
    from fedtools.tasks.asr.data import Utterances
    from fedtools.tasks.kws.clips import ClipCorpus
    from fedtools.tasks.rescore.protection import Protection

# Of tasks whose clients train models: these, how, and where.
MODELS: Part[Models] = Part("models")
TRAINING: Part[Training] = Part("training")
DEVICE: Part[torch.device] = Part("device")
# For attacks: client -> its speaker; training data one by one, and those of some splits as held
# out; speech of others, so many at once.
SPEAKERS: Part[Callable[[], dict[str, str]]] = Part("speakers")
ITEMS: Part[Callable[[Sequence[str]], Items]] = Part("items")
INDICATOR: Part[Callable[[Path, int], Indicator]] = Part("indicator")

# Of speech recognition: its utterances, its tokens, and what the models make of some utterances.
CORPUS: Part[Corpus] = Part("corpus")
TOKENIZER: Part[Tokenizer] = Part("tokenizer")
MEASURED: Part[Callable[[Utterances], dict[str, object]]] = Part("measured")

# Of keywords: the clips; the models' logits of a split and a client, with the labels; and those of
# features of any waveforms.
CLIPS: Part[ClipCorpus] = Part("clips")
LOGITS: Part[Callable[[str, str], tuple[torch.Tensor, torch.Tensor]]] = Part("logits")
HEAR: Part[Callable[[torch.Tensor], torch.Tensor]] = Part("hear")

# Of rescoring: a client's words; its distribution over words, and all clients'; the privacy of
# its counts.
RESCORED: Part[Callable[[str], dict[str, str]]] = Part("rescored")
MARGINALS: Part[Callable[[], dict[str, np.ndarray]]] = Part("marginals")
PROTECTION: Part[Protection] = Part("protection")
