"""Attack I: retrieve a speaker's sent features by other features of the speaker.

Zhu et al. (Interspeech 2022), section 3.5. The attacker has audio of a speaker, but not the
client's extractor, and compares vectors of unadapted features with those of personalised ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fedtools.attack.features.figures import Figure, Speakers
from fedtools.score.verification import (
    chance_of_first,
    chance_reciprocal_rank,
    equal_error_rate,
    first_ranks,
    resampled_error_rates,
)


def find_speakers(
    unadapted: np.ndarray, personalised: np.ndarray, speakers: Speakers
) -> Iterator[Figure]:
    """Yield figures of retrieval: unadapted vectors are queries, personalised ones the gallery.

    There are figures for an attacker with the very audio that was sent, and with only other audio
    of its speaker; and for both kinds of vectors centred on the mean of the gallery, which is all
    that an attacker with a single recording can do, and for each kind centred on its own mean,
    which needs recordings of many. The latter removes a shift between the kinds that is common to
    all speakers.

    Args:
        unadapted, personalised: (utterances, D), of the same utterances.
        speakers: speakers of the utterances.
    """
    gallery_mean = personalised.mean(0)
    centrings = {"": gallery_mean, ", each centred": unadapted.mean(0)}
    for centring, mean in centrings.items():
        scores = unit(unadapted - mean) @ unit(personalised - gallery_mean).T
        for audio in ("same", "other"):
            used = np.ones(scores.shape, bool)
            if audio == "other":
                np.fill_diagonal(used, False)
            yield from _trials(f"I, {audio} audio{centring}", scores, used, speakers)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors to length 1, so that their products are cosines; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1)


def _trials(
    attack: str, scores: np.ndarray, used: np.ndarray, speakers: Speakers
) -> Iterator[Figure]:
    """Yield figures of queries (rows) against a gallery (columns), over pairs in `used`."""
    numbers = speakers.numbers
    wanted = (numbers[:, None] == numbers) & used
    known = wanted.any(1)
    queries, own = int(known.sum()), len(np.unique(numbers[known]))
    value = equal_error_rate(scores[used], wanted[used])
    drawn = resampled_error_rates(scores, used, numbers, numbers, speakers.draws)
    yield speakers.figure(attack, "EER%", value, drawn, 50.0, own, queries)
    ranks = first_ranks(scores, wanted, used)
    items = int(used[0].sum())
    rates = {
        "top1%": (ranks == 1, chance_of_first, 100),
        "MRR": (1 / ranks, chance_reciprocal_rank, 1),
    }
    targets = wanted.sum(1)[known]
    for measure, (values, chance_of, factor) in rates.items():
        chances = {int(many): chance_of(int(many), items) for many in np.unique(targets)}
        known_chances = [chances[int(many)] for many in targets]
        chance = factor * float(np.mean(known_chances)) if queries else math.nan
        sums = np.where(known, values, 0.0)
        yield speakers.ratio(attack, measure, sums, known.astype(float), chance, factor)
