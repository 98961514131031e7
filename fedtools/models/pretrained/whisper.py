"""Whisper itself: an encoder, and a decoder that generates tokens."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.core.config import from_mapping, option_error
from fedtools.core.errors import UserError
from fedtools.core.json_files import read_object
from fedtools.models.adapt.adapters import adapt
from fedtools.models.pretrained.build import Recogniser, depth_of
from fedtools.models.pretrained.encoders import WhisperEncoder, attention_mask
from fedtools.models.pretrained.folder import (
    SETTINGS,
    Folder,
    import_transformers,
    open_known,
)
from fedtools.models.pretrained.options import Generation, Pretrained

# Most tokens per second of speech, and a number added to them. A token is at least a byte; the
# fastest speech has 25 letters a second, which take three bytes in Georgian, Burmese or Khmer.
_TOKENS_PER_SECOND, _MORE = 75, 10
# The longest prompt of a Whisper, and the end of a transcript.
_MARKS = 5
# Positions per second in Whisper's encoder.
POSITIONS_PER_SECOND = 50


def marks_of(folder: Folder) -> dict[str, Any]:
    """Return the tokens that mark begin and end of a hypothesis, and those that are never in one.

    Raises:
        UserError: if they are not tokens of the model.
    """
    where, size = folder.path / SETTINGS, folder.outputs
    settings = read_object(where) if where.is_file() else folder.config

    def known(name: str, most: float = math.inf) -> list[int]:
        found = settings.get(name)
        tokens = [found] if type(found) is int else found or []
        if not isinstance(tokens, list) or any(
            type(one) is not int or not 0 <= one < most for one in tokens
        ):
            problem = f"{name}: {str(found)[:40]} is no token of the model, which has {size}"
            raise UserError(problem, path=where)
        return tokens

    marks: dict[str, Any] = {}
    for name in ("eos_token_id", "decoder_start_token_id"):
        if not (found := known(name, size)):
            raise UserError(f"no {name}", path=where)
        marks[name] = found[0]
    # Whisper pads with its end; of several ends, the first one is written.
    marks["pad_token_id"] = marks["eos_token_id"]
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        # A small model has transformers' default here, tokens that it lacks.
        marks[name] = [one for one in known(name) if one < size] or None
    return marks


class Whisper(Recogniser):
    """Whisper with the interfaces of a model and of its criterion, for `models.acoustic.asr`.

    Args:
        config: the section `model`.
        where: source of `config`, for messages.
        specaug: ESPnet's SpecAugment, or None.
    """

    def __init__(self, config: Mapping[str, Any], where: str, specaug: nn.Module | None):
        super().__init__()
        options = from_mapping(Pretrained, config, where)
        folder = open_known(options.path, options.sum, search=True)
        if folder.kind != "whisper":
            problem = f"criterion seq2seq requires Whisper, but {folder.path} holds {folder.kind}"
            raise option_error(problem, where, "criterion", "seq2seq")
        self.path, marks = folder.path, marks_of(folder)
        whole = folder.load()
        # Nothing else of the folder's settings takes part in the search, such as a time limit.
        whole.generation_config = import_transformers().GenerationConfig(**marks)
        window = options.seconds(folder.kind, where)
        self.encoder, self.specaug = WhisperEncoder(whole.model.encoder, window), specaug
        self.decoder, self.proj_out = whole.model.decoder, whole.proj_out
        try:
            adapt(self, options.adaptation, None)
        except ValueError as error:
            raise option_error(f"adapt: {error}", where, "adapt") from None
        # Number of bottom layers whose outputs are cached.
        self.depth = depth_of(self.encoder, options, where)
        whole.proj_out = self.proj_out
        # transformers reads device and type from the first parameter.
        whole.register_parameter("place", nn.Parameter(torch.zeros(0), requires_grad=False))
        # In a list, to register no layer a second time.
        self._whole = [whole]
        self.longest = int(whole.config.max_target_positions)
        self.unfit = (
            f"transcripts of more than the {self.longest - _MARKS} tokens that the model writes",
            "cut them by segments",
        )
        self.end = marks["eos_token_id"]

    def _apply(self, fn: Any, recurse: bool = True) -> Whisper:
        """Apply a function, such as a move to a device, also to transformers' model."""
        self._whole[0]._apply(fn)
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> Whisper:
        """Set training mode for all but the pretrained encoder and decoder."""
        super().train(mode)
        self.decoder.eval()
        return self

    @property
    def criterion(self) -> Whisper:
        """Return the model itself, because the loss needs its decoder."""
        return self

    def classify(self, features: Tensor) -> Tensor:
        """Return the encoder's output unchanged."""
        return features

    def posteriors(self, encoded: Tensor, lengths: Tensor) -> Tensor:
        """Raise a `UserError`: there are no posteriors of frames."""
        remedy = "take a model of criterion ctc"
        raise UserError("a model of criterion seq2seq has no posteriors of frames", remedy=remedy)

    def losses(self, encoded: Tensor, lengths: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross-entropy of each utterance's tokens and its end, nats, summed: (B,).

        Args:
            encoded, lengths: the output of `encode`.
            batch: `prompt` (B, P), and `text` (B, L), padded with -1.
        """
        prompt = batch["prompt"]
        room = self.longest - prompt.shape[1]
        text, sizes = batch["text"][:, :room], batch["text_lengths"].clamp(max=room)
        labels = F.pad(text, (0, 1), value=-1)
        labels[torch.arange(len(text)), sizes] = self.end
        # Labels are predicted after the prompt's last token and after each token of the text.
        given = torch.cat([prompt, text.clamp(min=0)], 1)
        logits = self._decode(given, encoded, lengths)[:, prompt.shape[1] - 1 :]
        entropies = F.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=-1, reduction="none"
        )
        # Longer transcripts are left out beforehand; were one left, it would not spoil the batch.
        return entropies.sum(1) * (batch["text_lengths"] <= room).to(entropies.device)

    def fewest_frames(self, tokens: Sequence[int]) -> int:
        """Return 0, or more than there are for a transcript longer than the decoder writes."""
        return 0 if len(tokens) <= self.longest - _MARKS else sys.maxsize

    def _decode(self, tokens: Tensor, encoded: Tensor, lengths: Tensor) -> Tensor:
        """Return logits (B, L, tokens) of the token after each of `tokens` (B, L)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        hidden = self.decoder.embed_tokens(tokens)
        hidden = hidden + self.decoder.embed_positions(tokens, position_ids=places)
        causal = hidden.new_full((tokens.shape[1],) * 2, torch.finfo(hidden.dtype).min).triu(1)
        seen = attention_mask(encoded, lengths.to(encoded.device))
        for layer in self.decoder.layers:
            hidden = layer(hidden, causal[None, None], encoded, encoder_attention_mask=seen)
        return self.proj_out(self.decoder.layer_norm(hidden))

    def generate(
        self,
        encoded: Tensor,
        prompt: Tensor,
        options: Generation,
        seconds: float,
        no_repeat: int = 0,
    ) -> list[tuple[list[int], float]]:
        """Return the best hypotheses of one utterance, the best one first.

        They are ordered by the mean log probability of their tokens and their end, since a sum is
        larger for shorter ones.

        Args:
            encoded: (1, T', D), without padding.
            prompt: (1, P).
            options: size of the beam, and number of hypotheses.
            seconds: length of the audio, which bounds the number of tokens.
            no_repeat: length of sequences of tokens that come at most once; 0 for no bound.

        Returns:
            for each hypothesis, tokens without prompt and end, and the sum of their and the end's
            log-probabilities.
        """
        how = {"num_beams": options.beam, "num_return_sequences": options.nbest}
        how |= {"length_penalty": 1.0, "no_repeat_ngram_size": no_repeat, "do_sample": False}
        return self._written(encoded, prompt, seconds, how)

    def sample(
        self, encoded: Tensor, prompt: Tensor, seconds: float, temperature: float, seed: int
    ) -> list[tuple[list[int], float]]:
        """Return a hypothesis that is drawn by the probability of its tokens at a temperature.

        Args:
            encoded, prompt, seconds: see `generate`.
            temperature: of the logits.
            seed: of the draw.

        Returns:
            see `generate`.
        """
        # All tokens can be drawn, not only the most probable ones.
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "num_beams": 1}
        with torch.random.fork_rng([encoded.device] if encoded.is_cuda else []):
            torch.manual_seed(seed)
            return self._written(encoded, prompt, seconds, how)

    @torch.no_grad()
    def _written(
        self, encoded: Tensor, prompt: Tensor, seconds: float, how: Mapping[str, Any]
    ) -> list[tuple[list[int], float]]:
        transformers = import_transformers()
        room = self.longest - prompt.shape[1]
        outputs = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=encoded)
        # Not Whisper's own method, which takes windows of 30 s.
        found = transformers.GenerationMixin.generate(
            self._whole[0],
            encoder_outputs=outputs,
            decoder_input_ids=prompt,
            max_new_tokens=min(room, round(_TOKENS_PER_SECOND * seconds) + _MORE),
            max_length=None,
            return_dict_in_generate=True,
            **how,
        )
        rows = found.sequences[:, prompt.shape[1] :]
        return [self._scored(row.tolist(), encoded, prompt) for row in rows]

    @torch.no_grad()
    def probability(self, encoded: Tensor, prompt: Tensor, token: int) -> float:
        """Return the probability of a token after the first one of the prompt."""
        lengths = torch.tensor([encoded.shape[1]])
        return float(self._decode(prompt[:, :1], encoded, lengths)[0, -1].softmax(0)[token])

    @torch.no_grad()
    def score(self, tokens: list[int], encoded: Tensor, prompt: Tensor) -> float:
        """Return the sum of the log-probabilities of tokens and their end."""
        text = torch.tensor([tokens], dtype=torch.long, device=encoded.device)
        lengths = torch.tensor([encoded.shape[1]])
        batch = {"prompt": prompt, "text": text, "text_lengths": torch.tensor([len(tokens)])}
        return -float(self.losses(encoded, lengths, batch)[0])

    def _scored(self, row: list[int], encoded: Tensor, prompt: Tensor) -> tuple[list[int], float]:
        tokens = row[: row.index(self.end)] if self.end in row else row
        return tokens, self.score(tokens, encoded, prompt)
