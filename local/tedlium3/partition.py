"""The partitions of section 4.1 of Tomashenko et al. (ICASSP 2022): who is in which, by a seed.

    Train-G     trains the global model
    Part-1, -2  one or two adaptation sets of each speaker, each for a personalised model; or one or
                two of each of its talks
    Indicator   some utterances of each speaker of the corpus' dev and test sets
    held        of a part's speakers some utterances that are in none of their models

A speaker, the unit that no two of them share, is a person or a talk.

person      The stricter test. Where a person has several talks, the two adaptation sets are of
            different ones: the talks are dealt into two groups of about the same length, and each
            set is filled from its own group, so that a pair of models of one person shares neither
            talk nor channel. Where the groups are too small for this, as in a single talk, all
            speech in order of talk and time is cut: the first set, then the second, which has
            nothing that overlaps with the first. Of talks that the corpus has twice, under two
            names of one person, one is left out.
talk        What the paper must have done: 880 + 736 + 634 speakers are more than the corpus'
            persons, about 1,983. Both sets of a speaker are then cut from one talk, and a person
            may be in Part-1 and in Part-2.

Whatever the unit, a person of the Indicator is in none of the other sets.

A set ends where its length comes nearest to the seconds that are asked for. It has at least
`FEWEST` of them; a speaker with less is in neither part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from corpus import Utterance, event_of

from fedtools.files.dropped import Dropped
from fedtools.files.errors import UserError
from fedtools.files.seeds import seed64

FEWEST = 0.75
# Table 1: speakers of Train-G, Part-1 and Part-2.
PAPER = (880, 736, 634)
UNITS: dict[str, Callable[[Utterance], str]] = {
    "person": lambda utterance: utterance.person,
    "talk": lambda utterance: utterance.talk,
}
Speakers = dict[str, list[Utterance]]


@dataclass(frozen=True)
class Wanted:
    """What decides a partition.

    Args:
        unit: "person" or "talk".
        seed: decides the draw, with all else here.
        hours_g: of Train-G with the utterances for validation.
        seconds: of an adaptation set.
        speakers: how many of Train-G, Part-1 and Part-2; None for the paper's where the unit is a
            talk and there are as many, or else for Train-G by `hours_g`, and all others for the
            two parts, in the proportion of the paper's.
        indicator: utterances of each speaker of the Indicator.
        valid: the share of Train-G's utterances that are for validation.
        models_of: "speaker" for two adaptation sets of each, or "talk" for two of each talk, so
            that a speaker has pairs of models that share a recording, and others that do not.
        held: seconds of each speaker of a part that are in none of its models, at least, where
            there are so many.
    """

    unit: str
    seed: int
    hours_g: float
    seconds: float
    speakers: tuple[int, int, int] | None
    indicator: int
    valid: float
    models_of: str = "speaker"
    held: float = 0.0


@dataclass
class Partitions:
    """The utterances of each data directory; of each part, model -> utterances; speaker -> m, f."""

    genders: dict[str, str]
    sets: dict[str, list[Utterance]] = field(default_factory=dict)
    models: dict[str, dict[str, list[Utterance]]] = field(default_factory=dict)


def seconds_of(utterances: Iterable[Utterance]) -> float:
    return sum(utterance.end - utterance.start for utterance in utterances) / 100


def by_speaker(utterances: Iterable[Utterance], unit: str) -> Speakers:
    """Speaker -> utterances, in order of audio and time."""
    speakers: Speakers = {}
    for utterance in sorted(utterances):
        speakers.setdefault(UNITS[unit](utterance), []).append(utterance)
    return speakers


def genders_of(speakers: Speakers) -> dict[str, str]:
    """Speaker -> m or f, for those whose labels tell one of the two and not both."""
    told = {name: {u.gender for u in own if u.gender} for name, own in speakers.items()}
    return {name: min(genders) for name, genders in told.items() if len(genders) == 1}


def partition(
    train: Sequence[Utterance], held_out: Sequence[Utterance], wanted: Wanted, dropped: Dropped
) -> Partitions:
    """Choose the utterances of all data directories.

    Args:
        train: of the corpus' training set.
        held_out: of its dev and test sets.
        wanted: how.
        dropped: what is left out is added to it.

    Raises:
        UserError: if there are too few speakers.
    """
    indicator = by_speaker(held_out, wanted.unit)
    speakers = by_speaker(train, wanted.unit)
    # Of a talk's person, too: its voice is the same in another talk.
    people = {utterance.person for utterance in held_out}
    for name in [name for name, own in speakers.items() if own[0].person in people]:
        dropped["of a person of the Indicator"] += len(speakers.pop(name))
    if wanted.unit == "person":
        for name, utterances in speakers.items():
            speakers[name] = without_twins(utterances, dropped)
    result = Partitions(genders_of({**speakers, **indicator}))
    chosen = [draw(utterances, wanted, "indicator") for utterances in indicator.values()]
    result.sets["indicator"] = [u for one in chosen for u in one[: wanted.indicator]]
    left = len(held_out) - len(result.sets["indicator"])
    dropped["beyond the utterances of the Indicator"] += left
    order = sorted(speakers, key=lambda name: seed64(wanted.seed, "speaker", name))
    models = {name: adaptation_sets(speakers[name], wanted) for name in order}
    train_g, *parts = share_out(order, speakers, models, wanted)
    hold_out(result, [u for name in train_g for u in speakers[name]], wanted, dropped)
    for part, names in zip(("part1", "part2"), parts, strict=True):
        result.models[part] = {
            f"{name}-m{number}": utterances
            for name in names
            for number, utterances in enumerate(models[name], 1)
        }
        result.sets[part] = [u for one in result.models[part].values() for u in one]
        held = [u for name in names for u in spare(speakers[name], models[name], wanted)]
        if held:
            result.sets[f"{part}_held"] = held
        left = sum(len(speakers[name]) for name in names) - len(result.sets[part]) - len(held)
        dropped["beyond the adaptation sets"] += left
    taken = {*train_g, *parts[0], *parts[1]}
    for name in speakers.keys() - taken:
        reason = "speaker not drawn" if models[name] else "too little speech for a model"
        dropped[reason] += len(speakers[name])
    return result


def draw(utterances: Sequence[Utterance], wanted: Wanted, purpose: str) -> list[Utterance]:
    """The utterances in an order that only they and the seed decide."""
    return sorted(utterances, key=lambda u: seed64(wanted.seed, purpose, u.audio, u.start, u.end))


# --- speakers -------------------------------------------------------------------------------------


def share_out(
    order: list[str], speakers: Speakers, models: dict[str, list], wanted: Wanted
) -> tuple[list[str], list[str], list[str]]:
    """The speakers of Train-G, Part-1 and Part-2; those of a part have a model.

    Train-G takes first who has too little speech for a model, as a part could not use it. Where
    numbers are not given, it goes on in order until it is nearest to its hours.
    """
    short = [name for name in order if not models[name]]
    order = [*short, *(name for name in order if models[name])]
    seconds = {name: seconds_of(speakers[name]) for name in order}
    goal = 3600 * wanted.hours_g
    by_paper = wanted.unit == "talk" and len(order) >= sum(PAPER)
    counts = wanted.speakers or (PAPER if by_paper else None)
    if counts:
        train_g = nearest(order, seconds, counts[0], goal, len(short))
    else:
        train_g = []
        for name in order:
            if goal < seconds[name] / 2:
                break
            train_g.append(name)
            goal -= seconds[name]
    taken = set(train_g)
    rest = [name for name in order if name not in taken and models[name]]
    first, second = counts[1:] if counts else (0, 0)
    if not wanted.speakers and (not counts or first + second > len(rest)):
        first = round(len(rest) * PAPER[1] / (PAPER[1] + PAPER[2]))
        second = len(rest) - first
    if not train_g or not first or not second or first + second > len(rest):
        hours = sum(seconds.values()) / 3600
        raise UserError(
            f"of {len(order)} speakers ({hours:.1f} h), {len(train_g)} are in Train-G, and "
            f"{len(rest)} of the others have the {FEWEST * wanted.seconds:g} s for a model",
            remedy="give other --hours-g, --speakers or --seconds-per-model",
        )
    return train_g, rest[:first], rest[first : first + second]


def nearest(
    order: list[str], seconds: dict[str, float], count: int, goal: float, fixed: int
) -> list[str]:
    """The first `count` speakers, exchanged one for one to come nearer to `goal` seconds.

    The first `fixed` of them are not exchanged.
    """
    chosen = order[:count]
    missing = goal - sum(seconds[name] for name in chosen)
    for index, other in zip(range(fixed, count), order[count:], strict=False):
        gain = seconds[other] - seconds[chosen[index]]
        if abs(missing - gain) < abs(missing):
            chosen[index] = other
            missing -= gain
    return chosen


def hold_out(
    result: Partitions, utterances: list[Utterance], wanted: Wanted, dropped: Dropped
) -> None:
    """Make train_g and valid of Train-G's utterances; no speaker is in valid alone.

    What overlaps in time with an utterance of valid is in neither.
    """
    remaining = {name: set(own) for name, own in by_speaker(utterances, wanted.unit).items()}
    valid: list[Utterance] = []
    for utterance in draw(utterances, wanted, "valid"):
        if len(valid) >= max(1, wanted.valid * len(utterances)):
            break
        own = remaining[UNITS[wanted.unit](utterance)]
        lost = {utterance} | overlapping(own, {utterance})
        if utterance in own and len(lost) < len(own):
            own -= lost
            valid.append(utterance)
    if not valid:
        raise UserError("no speaker of Train-G has utterances to spare", remedy="raise --hours-g")
    result.sets["valid"] = valid
    result.sets["train_g"] = [u for own in remaining.values() for u in own]
    left = len(utterances) - len(valid) - len(result.sets["train_g"])
    dropped["overlaps with an utterance of valid"] += left


def overlapping(utterances: Iterable[Utterance], held: set[Utterance]) -> set[Utterance]:
    """Those that are not of `held` and overlap in time with one that is."""
    touched: set[Utterance] = set()
    by_audio: dict[str, list[Utterance]] = {}
    for utterance in held:
        by_audio.setdefault(utterance.audio, []).append(utterance)
    for utterance in utterances:
        for other in by_audio.get(utterance.audio, ()):
            if utterance.start < other.end and other.start < utterance.end:
                touched.add(utterance)
    return touched - held


# --- the utterances of a model --------------------------------------------------------------------


def without_twins(utterances: list[Utterance], dropped: Dropped) -> list[Utterance]:
    """A person's utterances, without talks that have the year and letters of another name's."""
    first: dict[str, str] = {}
    kept = [
        u
        for u in utterances
        if not event_of(u.talk) or first.setdefault(event_of(u.talk), u.talk) == u.talk
    ]
    dropped["talk under another name"] += len(utterances) - len(kept)
    return kept


def adaptation_sets(utterances: list[Utterance], wanted: Wanted) -> list[list[Utterance]]:
    """The adaptation sets of a speaker, whose utterances come by audio and time."""
    audios: dict[str, list[Utterance]] = {}
    for utterance in utterances:
        audios.setdefault(utterance.audio, []).append(utterance)
    if wanted.models_of == "talk":
        return [one for own in audios.values() for one in cut(own, wanted)]
    groups: list[list[Utterance]] = [[], []]
    # Longest first, each to the shorter group; the seed decides which group is the first set's.
    for audio in sorted(audios.values(), key=lambda own: (-seconds_of(own), own)):
        min(groups, key=seconds_of).extend(audio)
    groups.sort(key=lambda own: seed64(wanted.seed, "group", own[0].audio) if own else -1)
    sets = [fill(own, wanted.seconds) for own in groups]
    if min(map(seconds_of, sets)) >= FEWEST * wanted.seconds:
        return sets
    return cut(utterances, wanted)


def cut(utterances: list[Utterance], wanted: Wanted) -> list[list[Utterance]]:
    """Two, one or no adaptation set, of which the second begins after the first."""
    first = fill(utterances, wanted.seconds)
    used = set(first) | overlapping(utterances, set(first))
    rest = [u for u in utterances if u not in used]
    sets = [first, fill(rest, wanted.seconds)]
    return [own for own in sets if seconds_of(own) >= FEWEST * wanted.seconds]


def spare(
    utterances: list[Utterance], sets: list[list[Utterance]], wanted: Wanted
) -> list[Utterance]:
    """A speaker's utterances, drawn, of which no adaptation set has anything."""
    used = {u for own in sets for u in own}
    taken: list[Utterance] = []
    used |= overlapping(utterances, used)
    rest = [u for u in utterances if u not in used]
    for utterance in draw(rest, wanted, "held"):
        if seconds_of(taken) >= wanted.held:
            break
        taken.append(utterance)
    return taken


def fill(utterances: Iterable[Utterance], seconds: float) -> list[Utterance]:
    """The first utterances, up to where their length comes nearest to `seconds`."""
    taken = []
    for utterance in utterances:
        if seconds < utterance.seconds / 2:
            break
        taken.append(utterance)
        seconds -= utterance.seconds
    return taken
