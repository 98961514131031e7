"""A trained neural language model on disk.

    config.yaml         the network, how it was trained and on what
    words.txt           its vocabulary
    unigram.tsv         the counts of these words in its training text
    model.safetensors   the parameters of the epoch with the least perplexity on validation text
    perplexity.tsv      epoch, perplexity on training text (with dropout) and on validation text
    state.safetensors   during training, the state that the next epoch begins with

A folder with model.safetensors, which is written last, holds a complete model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from fedtools.core.config import from_mapping, read_yaml
from fedtools.core.errors import UserError
from fedtools.exchange.states import check_finite, load_state, spec_of
from fedtools.lm.nnlm_network import NnlmOptions, build_nnlm
from fedtools.lm.vocabulary import Vocabulary, read_unigram
from fedtools.models.training import load_model

CONFIG, MODEL = "config.yaml", "model.safetensors"


@dataclass(frozen=True)
class Nnlm:
    """A model and its vocabulary.

    Attributes:
        network: in evaluation mode, see `fedtools.lm.nnlm_network.build_nnlm`.
        vocabulary: the words.
        unigram: (words,) int64, their counts in the training text.
    """

    network: nn.Module
    vocabulary: Vocabulary
    unigram: np.ndarray

    @classmethod
    def open(cls, folder: str | Path, device: str = "cpu") -> Nnlm:
        """Read the model that `fedtools train-nnlm` wrote.

        Raises:
            UserError: if the folder holds no complete model, or a file is damaged or does not
                belong to the others.
        """
        folder = Path(folder)
        require_model(folder)
        vocabulary = Vocabulary.read(folder)
        options = network_options(read_yaml(folder / CONFIG).get("lm_conf"), folder / CONFIG)
        network = build_nnlm(options, len(vocabulary))
        state = load_state(folder / MODEL, spec_of(network.state_dict()))
        check_finite(state, folder / MODEL)
        load_model(network.state_dict(), state)
        unigram, _ = read_unigram(folder, vocabulary)
        return cls(network.to(device).eval(), vocabulary, unigram)


def require_model(folder: Path) -> None:
    """Raise a `UserError` unless a folder holds a model whose training has ended."""
    if not (folder / MODEL).exists():
        problem = f"no {MODEL}: not the folder of a neural language model, or not trained yet"
        raise UserError(problem, path=folder, remedy="run fedtools train-nnlm to its end")


def network_options(options: dict | None, where: str | Path) -> NnlmOptions:
    """Check ESPnet's `lm_conf`."""
    return from_mapping(NnlmOptions, options, f"{where}: lm_conf")
