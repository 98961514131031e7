"""Whisper itself: an encoder, and a decoder that writes what it hears token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor, nn

from fedtools.files.config import Positive, from_mapping, option_error
from fedtools.files.errors import UserError
from fedtools.models.adapters import adapt
from fedtools.models.pretrained.build import Recogniser, depth_of
from fedtools.models.pretrained.encoders import WhisperEncoder, attention_mask
from fedtools.models.pretrained.folder import import_transformers, open_known
from fedtools.models.pretrained.options import Pretrained

# Tokens of a second of speech, far above what is spoken, and beside them.
_TOKENS_PER_SECOND, _MORE = 15, 10
# Of Whisper's encoder.
POSITIONS_PER_SECOND = 50


@dataclass(frozen=True)
class Generation:
    """How hypotheses are searched for.

    Attributes:
        beam: hypotheses that are followed; 1 is greedy.
        nbest: of these, those that are written.
    """

    beam: Annotated[int, Ge(1), Le(100)] = 5
    nbest: Positive = 1

    def __post_init__(self) -> None:
        if self.nbest > self.beam:
            raise ValueError(f"nbest {self.nbest} is more than beam {self.beam}")


class Whisper(Recogniser):
    """Whisper with what `fedtools.models.asr` asks of a model and of its criterion.

    Args:
        config: the section `model`.
        where: what it was read from, for messages.
        specaug: ESPnet's SpecAugment, or None.
    """

    def __init__(self, config: Mapping[str, Any], where: str, specaug: nn.Module | None):
        super().__init__()
        options = from_mapping(Pretrained, config, where)
        folder = open_known(options.path, options.sum)
        if folder.kind != "whisper":
            problem = f"criterion seq2seq is of Whisper, and {folder.path} holds {folder.kind}"
            raise option_error(problem, where, "criterion", "seq2seq")
        whole = folder.load()
        window = options.seconds(folder.kind, where)
        self.encoder, self.specaug = WhisperEncoder(whole.model.encoder, window), specaug
        self.decoder, self.proj_out = whole.model.decoder, whole.proj_out
        try:
            adapt(self, options.adaptation, None)
        except ValueError as error:
            raise option_error(f"adapt: {error}", where, "adapt") from None
        # Of the bottom whose outputs are kept.
        self.depth = depth_of(self.encoder, options, where)
        whole.proj_out = self.proj_out
        # transformers asks the first parameter for device and type.
        whole.register_parameter("place", nn.Parameter(torch.zeros(0), requires_grad=False))
        # In a list: its layers are registered above.
        self._whole = [whole]
        self.longest = int(whole.config.max_target_positions)
        end = whole.generation_config.eos_token_id
        self.end = end[0] if isinstance(end, list) else end

    def _apply(self, fn: Any, recurse: bool = True) -> Whisper:
        """Move also what transformers holds of it."""
        self._whole[0]._apply(fn)
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> Whisper:
        """As of `Recogniser`; the decoder is pretrained, too."""
        super().train(mode)
        self.decoder.eval()
        return self

    @property
    def criterion(self) -> Whisper:
        """Itself: its decoder wants the tokens, too."""
        return self

    def classify(self, features: Tensor) -> Tensor:
        """The encoder's output as it is."""
        return features

    def posteriors(self, encoded: Tensor, lengths: Tensor) -> Tensor:
        """Fail."""
        remedy = "take a model of criterion ctc"
        raise UserError("a model of criterion seq2seq has no posteriors of frames", remedy=remedy)

    def losses(self, encoded: Tensor, lengths: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy of each utterance's tokens and of its end, nats, summed: (B,).

        Args:
            encoded, lengths: what `encode` gave.
            batch: `prompt` (B, P), and `text` (B, L), padded with -1.
        """
        prompt, text = batch["prompt"], batch["text"]
        labels = F.pad(text, (0, 1), value=-1)
        labels[torch.arange(len(text)), batch["text_lengths"]] = self.end
        # The labels that follow the prompt's last token and each token of the text.
        given = torch.cat([prompt, text.clamp(min=0)], 1)
        logits = self._decode(given, encoded, lengths)[:, prompt.shape[1] - 1 :]
        entropies = F.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=-1, reduction="none"
        )
        return entropies.sum(1)

    def _decode(self, tokens: Tensor, encoded: Tensor, lengths: Tensor) -> Tensor:
        """Logits (B, L, tokens) of what follows each of `tokens` (B, L)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        hidden = self.decoder.embed_tokens(tokens)
        hidden = hidden + self.decoder.embed_positions(tokens, position_ids=places)
        causal = hidden.new_full((tokens.shape[1],) * 2, torch.finfo(hidden.dtype).min).triu(1)
        seen = attention_mask(encoded, lengths.to(encoded.device))
        for layer in self.decoder.layers:
            hidden = layer(hidden, causal[None, None], encoded, encoder_attention_mask=seen)
        return self.proj_out(self.decoder.layer_norm(hidden))

    @torch.no_grad()
    def generate(
        self, encoded: Tensor, prompt: Tensor, options: Generation, seconds: float
    ) -> list[tuple[list[int], float]]:
        """The best hypotheses of one utterance, the best one first.

        Args:
            encoded: (1, T', D), without padding.
            prompt: (1, P).
            seconds: of audio, which bound what is written.

        Returns:
            tokens without prompt and end, and the sum of their log probabilities and the end's.
        """
        transformers = import_transformers()
        whole = self._whole[0]
        room = self.longest - prompt.shape[1]
        most = min(room, round(_TOKENS_PER_SECOND * seconds) + _MORE)
        outputs = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=encoded)
        # Not Whisper's own method, which takes windows of 30 s.
        found = transformers.GenerationMixin.generate(
            whole,
            encoder_outputs=outputs,
            decoder_input_ids=prompt,
            max_new_tokens=most,
            max_length=None,
            do_sample=False,
            num_beams=options.beam,
            num_return_sequences=options.nbest,
            length_penalty=1.0,
            return_dict_in_generate=True,
        )
        rows = found.sequences[:, prompt.shape[1] :]
        return [self._scored(row.tolist(), encoded, prompt) for row in rows]

    def _scored(self, row: list[int], encoded: Tensor, prompt: Tensor) -> tuple[list[int], float]:
        tokens = row[: row.index(self.end)] if self.end in row else row
        text = torch.tensor([tokens], dtype=torch.long, device=encoded.device)
        lengths = torch.tensor([encoded.shape[1]])
        batch = {"prompt": prompt, "text": text, "text_lengths": torch.tensor([len(tokens)])}
        return tokens, -float(self.losses(encoded, lengths, batch)[0])
