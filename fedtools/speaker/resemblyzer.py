"""Embeddings of voices by Resemblyzer 0.1.4, an independently written and trained package.

It is an LSTM of three layers, trained with the GE2E loss (Wan et al., ICASSP 2018) on
LibriSpeech-other and VoxCeleb. `utils/resemblyzer.sh` installs it; only measurements of speakers in
audio need it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedtools.core.atomic import sha256
from fedtools.core.errors import UserError

RATE = 16_000
INSTALL = "run in the checkout: utils/resemblyzer.sh"
# SHA-256 of the wheel's pretrained.pt. Another file would give other scores, and is not unpickled.
_MODEL_SUM = "39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e"


class VoiceEncoder:
    """The encoder, on the CPU."""

    def __init__(self) -> None:
        """Load the encoder.

        Raises:
            UserError: if it is not installed, or its weights are not those of version 0.1.4.
        """
        try:
            import resemblyzer
        except ImportError as error:
            problem = f"this needs Resemblyzer, which cannot be imported ({error})"
            raise UserError(problem, remedy=INSTALL) from None
        weights = Path(resemblyzer.__file__).with_name("pretrained.pt")
        if sha256(weights) != _MODEL_SUM:
            problem = "not the weights of Resemblyzer 0.1.4"
            raise UserError(problem, path=weights, remedy=f"remove that package, and {INSTALL}")
        self._package: Any = resemblyzer
        self._encoder = resemblyzer.VoiceEncoder("cpu", verbose=False)

    def embed(self, samples: np.ndarray) -> np.ndarray:
        """Compute the embedding of one utterance, of length 1.

        As in the package, but without the removal of silences: speech below -30 dBFS is amplified
        to that level, and embeddings of windows of 1.6 s are averaged.

        Args:
            samples: float (N,) at 16 kHz, in [-1, 1].

        Returns:
            float32 (256,).

        Raises:
            UserError: if all samples are zeros.
        """
        if not np.any(samples):
            raise UserError("silence: there is no voice to embed")
        from resemblyzer.hparams import audio_norm_target_dBFS

        loud = self._package.normalize_volume(
            np.asarray(samples, np.float32), audio_norm_target_dBFS, increase_only=True
        )
        embedding: np.ndarray = self._encoder.embed_utterance(loud)
        return embedding


def mean_embedding(embeddings: Iterable[np.ndarray]) -> np.ndarray:
    """Return the normalised mean of utterances' embeddings, (256,), as that of their speaker."""
    mean = np.mean(list(embeddings), axis=0)
    return np.asarray(mean / np.linalg.norm(mean))
