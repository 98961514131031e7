"""A pretrained encoder with a CTC layer, and ESPnet's interface for `models.acoustic.asr`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fedtools.core.config import from_mapping, option_error
from fedtools.models.criteria import Ctc
from fedtools.models.pretrained.build import Recogniser, build_encoder, depth_of
from fedtools.models.pretrained.folder import open_known
from fedtools.models.pretrained.options import Pretrained


class PretrainedCtc(Recogniser):
    """A pretrained encoder with a CTC layer; see `Recogniser`.

    Args:
        config: the section `model`.
        tokens: number of tokens.
        where: source of `config`, for messages.
        specaug: ESPnet's SpecAugment, or None.
    """

    def __init__(
        self, config: Mapping[str, Any], tokens: int, where: str, specaug: nn.Module | None
    ):
        from espnet2.asr.ctc import CTC

        super().__init__()
        options = from_mapping(Pretrained, config, where)
        if options.language is not None:
            problem = "language has no effect with criterion ctc: leave it out"
            raise option_error(problem, where, "language", options.language)
        try:
            folder = open_known(options.path, options.sum)
            window = options.seconds(folder.kind, where)
            self.encoder, _ = build_encoder(folder, options.adaptation, None, window)
        except ValueError as error:
            raise option_error(f"adapt: {error}", where, "adapt") from None
        # Number of bottom layers whose outputs are cached.
        self.depth = depth_of(self.encoder, options, where)
        self.specaug = specaug
        self.ctc = CTC(odim=tokens, encoder_output_size=self.encoder.size)
        self.criterion = Ctc(self.ctc)
        if options.adaptation.kind == "none":
            self.ctc.requires_grad_(False)
