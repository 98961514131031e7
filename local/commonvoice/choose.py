"""The split of Common Voice into six sets, and the exclusion of rows from training.

No speaker is in two sets. Sentences could be, because many speakers of Common Voice read the same
ones. A row whose normalised sentence is in the clients' validation or test set is therefore left
out of `train` and `server_train`, and so of the n-gram, which is trained on server_train's text.
Other rows of its speaker stay, and the held-out sets do not depend on the training sets. Sentences
of server_valid and server_test are not excluded from training: these sets measure new speakers, not
new sentences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

from corpus import Row, sha256_of

from fedtools.core.errors import UserError
from fedtools.data.dropped import reasons_text

SETS = ("train", "valid", "test")
# Reasons to exclude a row from training.
COMMON = "sentence is in valid or test"
SHORT, LONG = "too short to train on", "too long to train on"
FEW, MANY = "too few characters a second", "too many characters a second"
UNFIT = (COMMON, SHORT, LONG, FEW, MANY)
Speakers = dict[str, list[Row]]
"""speaker -> rows"""


def by_speaker(rows: list[Row], seed: int) -> Speakers:
    """Return speaker -> rows, in a random order that depends on the speakers and the seed alone."""
    speakers: Speakers = {}
    for row in rows:
        speakers.setdefault(row.speaker, []).append(row)
    return {
        name: speakers[name] for name in sorted(speakers, key=lambda n: sha256_of(f"{seed} {n}"))
    }


def fill(speakers: Speakers, seconds: float, leave: int, least: float = 0.0) -> list[Row]:
    """Move whole speakers out of `speakers` until their speech comes nearest to `seconds`.

    At least one speaker is moved, and at least `leave` stay. Speakers with little speech are taken
    first, so that in a large corpus no speaker makes up more than a tenth of a set: confidence
    intervals resampled by speaker would otherwise mean nothing. Speakers whose share of the set is
    at most `least` are taken before all others, which keeps speakers with more speech for training.
    """
    length = {name: sum(row.seconds for row in rows) for name, rows in speakers.items()}
    taken: dict[str, None] = {}
    missing = seconds
    for share in (least, 0.1, 0.3, math.inf):
        for name in speakers:
            room = len(speakers) - len(taken) > leave and name not in taken
            if room and length[name] <= min(share * seconds, 2 * missing):
                taken[name] = None
                missing -= length[name]
    names = list(taken) or [min(speakers, key=lambda name: length[name])]
    return [row for name in names for row in speakers.pop(name)]


def hold_out(
    name: str, speakers: Speakers, hours: list[float], dropped: Counter, least: float
) -> tuple[list[Row], list[Row], float]:
    """Move speakers out of `speakers` for validation and test.

    Sets have as many hours as `hours` says; if the speakers have less, all of it in that ratio.

    Returns:
        The rows of valid and of test, and the seconds of training: infinite for all the rest.

    Raises:
        UserError: if train, valid and test cannot have a speaker each.
    """
    if len(speakers) < len(SETS):
        why = f" (dropped: {reasons_text(dropped)})" if dropped.total() else ""
        raise UserError(
            f"{name} has usable clips of {len(speakers)} speakers, but train, valid and test need "
            f"one each{why}",
            remedy="choose another accent, or another seed or fraction",
        )
    there = sum(row.seconds for rows in speakers.values() for row in rows)
    part = min(3600.0, there / sum(hours))
    test = fill(speakers, hours[2] * part, 2, least)
    valid = fill(speakers, hours[1] * part, 1, least)
    return valid, test, hours[0] * part if part == 3600.0 else math.inf


def pools(
    rows: list[Row], options: SimpleNamespace
) -> Iterator[tuple[str, str, Speakers, list[float]]]:
    """Yield each pool to be split into train, valid and test: prefix, name, speakers, hours."""
    third = [hours / len(options.accents) for hours in options.hours]
    server_hours = options.server_hours or options.hours
    server_third = [hours / len(options.accents) for hours in server_hours]
    for name in options.accents:
        speakers = by_speaker([row for row in rows if row.name == name], options.seed)
        if options.server_fraction:
            first = list(speakers)[: round(options.server_fraction * len(speakers))]
            theirs = {speaker: speakers.pop(speaker) for speaker in first}
            yield "server_", f"the server's part of {name!r}", theirs, server_third
        yield "", f"accent {name!r}", speakers, third
    if not options.server_fraction:
        others = [row for row in rows if row.name not in options.accents]
        if not others:
            raise UserError(
                "no speaker of another accent is left for the server's labelled data",
                remedy="use --server-fraction 0.4 to give it 40 % of each accent's speakers",
            )
        yield "server_", "the server", by_speaker(others, options.seed), server_hours


def unfit(row: Row, heard: set[str], options: SimpleNamespace) -> str:
    """Return why a row is not trained on, one of UNFIT, or "" if it is."""
    rate = len(row.sentence) / row.seconds
    if row.sentence in heard:
        return COMMON
    if not options.min_seconds <= row.seconds <= options.max_seconds:
        return SHORT if row.seconds < options.min_seconds else LONG
    if not options.min_chars_per_second <= rate <= options.max_chars_per_second:
        return FEW if rate < options.min_chars_per_second else MANY
    return ""


def fit_to_train(
    name: str, speakers: Speakers, heard: set[str], options: SimpleNamespace, left_out: Counter
) -> Speakers:
    """Return speaker -> rows to train on, and count all other rows in `left_out` by reason.

    Raises:
        UserError: if there is no row to train on.
    """
    reasons = {row.clip: unfit(row, heard, options) for own in speakers.values() for row in own}
    fit = {who: [row for row in own if not reasons[row.clip]] for who, own in speakers.items()}
    if not any(fit.values()):
        counts = Counter(reasons.values())
        remedy = "widen the limits of seconds and characters a second"
        if counts[COMMON]:
            remedy = "for a closed vocabulary, give --common-sentences keep"
        raise UserError(f"{name} has nothing to train on ({reasons_text(counts)})", remedy=remedy)
    left_out.update(reason for reason in reasons.values() if reason)
    return {who: own for who, own in fit.items() if own}


def choose(
    rows: list[Row], options: SimpleNamespace, dropped: Counter, left_out: Counter
) -> dict[str, list[Row]]:
    """Choose the rows of the six sets.

    Args:
        rows: all usable rows.
        options: the options of prepare.py.
        dropped: reason -> number of unusable rows, for messages.
        left_out: reason -> number of rows excluded from training, added to.

    Raises:
        UserError: if a set would have no rows.
    """
    sets: dict[str, list[Row]] = {prefix + name: [] for prefix in ("", "server_") for name in SETS}
    rest = []
    for prefix, name, speakers, hours in pools(rows, options):
        valid, test, seconds = hold_out(name, speakers, hours, dropped, options.speaker_share)
        sets[prefix + "valid"] += valid
        sets[prefix + "test"] += test
        rest.append((prefix, name, speakers, seconds))
    # The clients' held-out sentences are known only after all pools are split.
    heard: set[str] = set()
    if options.common_sentences == "drop":
        heard = {row.sentence for name in ("valid", "test") for row in sets[name]}
    for prefix, name, speakers, seconds in rest:
        fit = fit_to_train(name, speakers, heard, options, left_out)
        if seconds < math.inf:
            sets[prefix + "train"] += fill(fit, seconds, leave=0)
        else:
            sets[prefix + "train"] += [row for own in fit.values() for row in own]
    return sets
