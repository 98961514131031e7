"""Whisper's hypotheses of utterances, with the fallbacks for those that went wrong.

Radford et al. (Robust speech recognition via large-scale weak supervision, ICML 2023, section 4.5)
sample another hypothesis where one repeats itself or is improbable. Here, what repeats itself is
first searched for again without repetitions, which is cheaper and draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedtools.core.config import from_mapping
from fedtools.core.errors import UserError
from fedtools.decode.repetition import compression_ratio, repeats
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.models.pretrained.options import Generation
from fedtools.models.pretrained.whisper import POSITIONS_PER_SECOND
from fedtools.tasks.asr.data import Batch

# Tokens of a hypothesis, and the sum of their log-probabilities and that of the end.
Scored = tuple[list[int], float]


def fixed_search(training: Mapping[str, Any], where: str | Path) -> Generation:
    """Return the options of the search that `fedtools init` has fixed.

    Raises:
        UserError: if one is missing, as in experiments that began before it was added.
    """
    search = training.get("search") or {}
    for field in fields(Generation):
        if field.name not in search:
            problem = f"option 'search.{field.name}' is missing"
            remedy = "begin another experiment, or go on with the commit in software.yaml"
            raise UserError(problem, path=where, remedy=remedy)
    return from_mapping(Generation, search, f"{where}.search")


def greedy_search(options: Generation) -> Generation:
    """Return the same options with a beam of one."""
    return replace(options, beam=1, nbest=1)


def is_lost(tokens: WhisperTokens, ids: Sequence[int]) -> bool:
    """Return whether a hypothesis repeats itself, or has nothing but blanks."""
    text = tokens.decode(ids)
    return repeats(text) or bool(ids and not text)


def generate(
    model: Any,
    tokens: WhisperTokens,
    found: tuple[Tensor, Tensor],
    batch: Batch,
    options: Generation,
) -> list[list[Scored]]:
    """Return Whisper's hypotheses for each utterance, the best one first.

    Args:
        model: a `Whisper`.
        tokens: its tokens.
        found: what `fedtools.models.acoustic.asr.outputs` returned for the batch.
        batch: the batch, of which prompts, seeds and lengths are used.
        options: options of the search.
    """
    values, lengths = found
    # Features that a client sent come without their duration.
    seconds = batch.get("seconds", lengths / POSITIONS_PER_SECOND)
    rows = zip(
        *(values, lengths.tolist(), batch["prompt"], seconds.tolist(), batch["seed"].tolist()),
        strict=True,
    )
    return [
        _Search(model, tokens, options, encoded[None, :length], prompt[None], *others).run()
        for encoded, length, prompt, *others in rows
    ]


@dataclass(frozen=True)
class _Search:
    """The search for the hypotheses of one utterance.

    Attributes:
        model, tokens, options: see `generate`.
        encoded: (1, T', D), without padding.
        prompt: (1, P).
        seconds: length of the audio.
        seed: of samples.
    """

    model: Any
    tokens: WhisperTokens
    options: Generation
    encoded: Tensor
    prompt: Tensor
    seconds: float
    seed: int

    def run(self) -> list[Scored]:
        """Return the hypotheses."""
        options, place = self.options, (self.encoded, self.prompt)
        best = self.model.generate(*place, options, self.seconds)
        if options.no_repeat_ngram_size and self._repeats(best):
            size = self._size(best[0][0])
            best = self.model.generate(*place, options, self.seconds, size)
        for temperature in options.temperatures:
            if self._is_silent(best) or not (self._repeats(best) or self._is_improbable(best)):
                break
            best = self.model.sample(*place, self.seconds, temperature, self.seed)
        return [([], self.model.score([], *place))] if self._is_silent(best) else best

    def _size(self, ids: list[int]) -> int:
        """Return the length of sequences that must not come twice, in tokens."""
        letters = len(self.tokens.decode(ids))
        return math.ceil(self.options.no_repeat_ngram_size * max(1, len(ids) / max(1, letters)))

    def _repeats(self, best: list[Scored]) -> bool:
        ids, most = best[0][0], self.options.compression_ratio_threshold
        too_much = most is not None and compression_ratio(self.tokens.decode(ids)) > most
        return too_much or is_lost(self.tokens, ids)

    def _is_improbable(self, best: list[Scored]) -> bool:
        (ids, score), least = best[0], self.options.logprob_threshold
        return least is not None and score / (len(ids) + 1) < least

    def _is_silent(self, best: list[Scored]) -> bool:
        most, least = self.options.no_speech_threshold, self.options.logprob_threshold
        if most is None or (least is not None and not self._is_improbable(best)):
            return False
        place = self.encoded, self.prompt
        return bool(self.model.probability(*place, self.tokens.no_speech) > most)
