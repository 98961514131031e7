"""Attack III: transcribe the features that clients sent, with the server's classifier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedtools.attack.features.figures import Figure, Speakers
from fedtools.attack.features.sent import Victim, as_sent
from fedtools.decode.greedy import greedy
from fedtools.federation.federation import Federation
from fedtools.score.align import count_errors
from fedtools.tasks.parts import MODELS, TOKENIZER

# Indices of utterances, log posteriors (B, T, tokens), numbers of frames (B,).
Posteriors = Iterable[tuple[Sequence[int], Tensor, Tensor]]


def read_transcripts(
    federation: Federation, sent_in: int, victim: Victim, speakers: Speakers
) -> Iterator[Figure]:
    """Yield the server's greedy word error rates on sent features.

    One is of the classifier that it had when features arrived, one of that trained on them.

    Args:
        sent_in: the round in which features were sent.
        victim: client with transcripts.
    """
    federation.task.load(federation.states.initial, 0)
    yield _with_classifier(federation, victim, speakers, "III, initial classifier")
    last = federation.experiment.result_round()
    if last > sent_in:
        federation.load_result(None, last)
        name = f"III, classifier after round {last}"
        yield _with_classifier(federation, victim, speakers, name)


def word_error_rate(
    federation: Federation,
    posteriors: Posteriors,
    victim: Victim,
    speakers: Speakers,
    attack: str,
) -> Figure:
    """Return the greedy error rate of a client's utterances in %, in their language's unit."""
    unit, tokenizer = victim.audio.unit, federation.task.need(TOKENIZER)
    errors, words = np.zeros(len(victim.texts)), np.zeros(len(victim.texts))
    for indices, log_probs, lengths in posteriors:
        hypotheses = greedy(log_probs.cpu().numpy(), lengths.cpu().numpy())
        for index, tokens in zip(indices, hypotheses, strict=True):
            reference = unit.cut(victim.texts[index])
            found = unit.cut(tokenizer.decode(tokens))
            errors[index] = count_errors(reference, found).errors
            words[index] = len(reference)
    return speakers.ratio(attack, f"{unit.title}%", errors, words, factor=100)


def _with_classifier(
    federation: Federation, victim: Victim, speakers: Speakers, attack: str
) -> Figure:
    """Return the word error rate of the loaded classifier on sent features."""

    @torch.no_grad()
    def posteriors() -> Posteriors:
        models = federation.task.need(MODELS)
        model, cut = models.build().eval(), models.cut()
        for part in as_sent(federation, victim.sent):
            log_probs = cut.classify(model, part.features, part.lengths)
            yield part.indices, log_probs, part.lengths

    return word_error_rate(federation, posteriors(), victim, speakers, attack)
