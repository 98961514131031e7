"""The partitions of section 4.1 of Tomashenko et al. (ICASSP 2022), drawn with a random seed.

    Train-G     trains the global model
    Part-1, -2  one or two adaptation sets of each speaker, each for a personalised model; or one or
                two of each of its talks
    Indicator   some utterances of each speaker of the corpus' dev and test sets
    held        some utterances of a part's speakers that are in none of their models

No speaker is in two of the first three. A speaker is a person or a talk:

person      The stricter test. If a person has several talks, the two adaptation sets come from
            different ones: the talks are divided into two groups of about the same length, and each
            set is filled from its own group, so that a pair of models of one person shares neither
            talk nor channel. If the groups are too small for this, as with a single talk, all
            speech is taken in order of talk and time: the first set, then the second, which has no
            utterance that overlaps with the first. Of talks that the corpus has twice, under two
            names of one person, one is left out.
talk        Probably the paper's unit: 880 + 736 + 634 speakers are more than the corpus' persons,
            about 1,983. Both sets of a speaker are then cut from one talk, and a person may be in
            Part-1 and in Part-2.

For either unit, a person of the Indicator is in none of the other sets.

A set ends where its length comes nearest to the seconds that are asked for. It has at least the
fraction `FEWEST` of them; a speaker with less is in neither part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from corpus import Utterance, event_of

from fedtools.core.errors import UserError
from fedtools.core.seeds import seed64
from fedtools.data.dropped import Dropped

FEWEST = 0.75
# Table 1: speakers of Train-G, Part-1 and Part-2.
PAPER = (880, 736, 634)
UNITS: dict[str, Callable[[Utterance], str]] = {
    "person": lambda utterance: utterance.person,
    "talk": lambda utterance: utterance.talk,
}
Speakers = dict[str, list[Utterance]]


@dataclass(frozen=True)
class PartitionOptions:
    """The parameters of a partition, which determine it.

    Args:
        unit: "person" or "talk".
        seed: random seed.
        hours_g: hours of Train-G, including the utterances for validation.
        seconds: length of an adaptation set.
        speakers: numbers of speakers in Train-G, Part-1 and Part-2. None: the paper's numbers if
            the unit is a talk and there are enough; otherwise as many as `hours_g` needs in
            Train-G, and all others in the two parts, in the paper's ratio.
        indicator: utterances of each speaker of the Indicator.
        valid: fraction of Train-G's utterances that are for validation.
        models_of: "speaker" for two adaptation sets of each speaker, or "talk" for two of each
            talk, so that some pairs of a speaker's models share a recording and others do not.
        held: least seconds of each speaker of a part that are in none of its models, if the
            speaker has as many.
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
    """A partition: speaker -> m or f; data directory -> utterances; part -> model -> utterances."""

    genders: dict[str, str]
    sets: dict[str, list[Utterance]] = field(default_factory=dict)
    models: dict[str, dict[str, list[Utterance]]] = field(default_factory=dict)


def seconds_of(utterances: Iterable[Utterance]) -> float:
    return sum(utterance.end - utterance.start for utterance in utterances) / 100


def by_speaker(utterances: Iterable[Utterance], unit: str) -> Speakers:
    """Return speaker -> utterances, in order of audio and time."""
    speakers: Speakers = {}
    for utterance in sorted(utterances):
        speakers.setdefault(UNITS[unit](utterance), []).append(utterance)
    return speakers


def genders_of(speakers: Speakers) -> dict[str, str]:
    """Return speaker -> m or f, for speakers whose labels name exactly one of the two."""
    found = {name: {u.gender for u in own if u.gender} for name, own in speakers.items()}
    return {name: min(genders) for name, genders in found.items() if len(genders) == 1}


def partition(
    train: Sequence[Utterance],
    held_out: Sequence[Utterance],
    options: PartitionOptions,
    dropped: Dropped,
) -> Partitions:
    """Choose the utterances of all data directories.

    Args:
        train: utterances of the corpus' training set.
        held_out: utterances of its dev and test sets.
        options: the parameters of the partition.
        dropped: counts of dropped utterances by reason, added to.

    Raises:
        UserError: if there are too few speakers.
    """
    indicator = by_speaker(held_out, options.unit)
    speakers = by_speaker(train, options.unit)
    # By person even if the unit is a talk: a person has the same voice in another talk.
    people = {utterance.person for utterance in held_out}
    for name in [name for name, own in speakers.items() if own[0].person in people]:
        dropped["person is in the Indicator"] += len(speakers.pop(name))
    if options.unit == "person":
        for name, utterances in speakers.items():
            speakers[name] = without_twins(utterances, dropped)
    result = Partitions(genders_of({**speakers, **indicator}))
    chosen = [draw(utterances, options, "indicator") for utterances in indicator.values()]
    result.sets["indicator"] = [u for one in chosen for u in one[: options.indicator]]
    left = len(held_out) - len(result.sets["indicator"])
    dropped["beyond the utterances of the Indicator"] += left
    order = sorted(speakers, key=lambda name: seed64(options.seed, "speaker", name))
    models = {name: adaptation_sets(speakers[name], options) for name in order}
    train_g, *parts = share_out(order, speakers, models, options)
    hold_out(result, [u for name in train_g for u in speakers[name]], options, dropped)
    for part, names in zip(("part1", "part2"), parts, strict=True):
        result.models[part] = {
            f"{name}-m{number}": utterances
            for name in names
            for number, utterances in enumerate(models[name], 1)
        }
        result.sets[part] = [u for one in result.models[part].values() for u in one]
        held = [u for name in names for u in spare(speakers[name], models[name], options)]
        if held:
            result.sets[f"{part}_held"] = held
        left = sum(len(speakers[name]) for name in names) - len(result.sets[part]) - len(held)
        dropped["beyond the adaptation sets"] += left
    taken = {*train_g, *parts[0], *parts[1]}
    for name in speakers.keys() - taken:
        reason = "speaker not drawn" if models[name] else "too little speech for a model"
        dropped[reason] += len(speakers[name])
    return result


def draw(
    utterances: Sequence[Utterance], options: PartitionOptions, purpose: str
) -> list[Utterance]:
    """Return the utterances in a random order that depends on them and the seed alone."""
    return sorted(utterances, key=lambda u: seed64(options.seed, purpose, u.audio, u.start, u.end))


# --- speakers -------------------------------------------------------------------------------------


def share_out(
    order: list[str], speakers: Speakers, models: dict[str, list], options: PartitionOptions
) -> tuple[list[str], list[str], list[str]]:
    """Return the speakers of Train-G, Part-1 and Part-2; those of a part have a model.

    Train-G first takes the speakers with too little speech for a model, which a part cannot use. If
    numbers are not given, it takes more in order until it comes nearest to its hours.

    Raises:
        UserError: if there are too few speakers.
    """
    short = [name for name in order if not models[name]]
    order = [*short, *(name for name in order if models[name])]
    seconds = {name: seconds_of(speakers[name]) for name in order}
    goal = 3600 * options.hours_g
    by_paper = options.unit == "talk" and len(order) >= sum(PAPER)
    counts = options.speakers or (PAPER if by_paper else None)
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
    if not options.speakers and (not counts or first + second > len(rest)):
        first = round(len(rest) * PAPER[1] / (PAPER[1] + PAPER[2]))
        second = len(rest) - first
    if not train_g or not first or not second or first + second > len(rest):
        hours = sum(seconds.values()) / 3600
        raise UserError(
            f"too few speakers: of {len(order)} ({hours:.1f} h), {len(train_g)} are in Train-G, and"
            f" {len(rest)} of the others have the {FEWEST * options.seconds:g} s for a model",
            remedy="give other --hours-g, --speakers or --seconds-per-model",
        )
    return train_g, rest[:first], rest[first : first + second]


def nearest(
    order: list[str], seconds: dict[str, float], count: int, goal: float, fixed: int
) -> list[str]:
    """Choose the first `count` speakers, swapped for later ones to come nearer to `goal` seconds.

    The first `fixed` of them are not swapped.
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
    result: Partitions, utterances: list[Utterance], options: PartitionOptions, dropped: Dropped
) -> None:
    """Split Train-G's utterances into train_g and valid; every speaker of valid is in train_g.

    Utterances that overlap in time with one of valid are in neither.
    """
    remaining = {name: set(own) for name, own in by_speaker(utterances, options.unit).items()}
    valid: list[Utterance] = []
    for utterance in draw(utterances, options, "valid"):
        if len(valid) >= max(1, options.valid * len(utterances)):
            break
        own = remaining[UNITS[options.unit](utterance)]
        lost = {utterance} | overlapping(own, {utterance})
        if utterance in own and len(lost) < len(own):
            own -= lost
            valid.append(utterance)
    if not valid:
        problem = "no speaker of Train-G has an utterance to spare for valid"
        raise UserError(problem, remedy="raise --hours-g")
    result.sets["valid"] = valid
    result.sets["train_g"] = [u for own in remaining.values() for u in own]
    left = len(utterances) - len(valid) - len(result.sets["train_g"])
    dropped["overlaps with an utterance of valid"] += left


def overlapping(utterances: Iterable[Utterance], held: set[Utterance]) -> set[Utterance]:
    """Return the utterances not in `held` that overlap in time with one in `held`."""
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
    """Drop a person's talks that have the same year and letters as a talk under another name."""
    first: dict[str, str] = {}
    kept = [
        u
        for u in utterances
        if not event_of(u.talk) or first.setdefault(event_of(u.talk), u.talk) == u.talk
    ]
    dropped["talk under another name"] += len(utterances) - len(kept)
    return kept


def adaptation_sets(
    utterances: list[Utterance], options: PartitionOptions
) -> list[list[Utterance]]:
    """Return the adaptation sets of a speaker, whose utterances are in order of audio and time."""
    audios: dict[str, list[Utterance]] = {}
    for utterance in utterances:
        audios.setdefault(utterance.audio, []).append(utterance)
    if options.models_of == "talk":
        return [one for own in audios.values() for one in cut(own, options)]
    groups: list[list[Utterance]] = [[], []]
    # Longest first, each to the shorter group; the seed decides which group is the first set's.
    for audio in sorted(audios.values(), key=lambda own: (-seconds_of(own), own)):
        min(groups, key=seconds_of).extend(audio)
    groups.sort(key=lambda own: seed64(options.seed, "group", own[0].audio) if own else -1)
    sets = [fill(own, options.seconds) for own in groups]
    if min(map(seconds_of, sets)) >= FEWEST * options.seconds:
        return sets
    return cut(utterances, options)


def cut(utterances: list[Utterance], options: PartitionOptions) -> list[list[Utterance]]:
    """Cut utterances into at most two adaptation sets, the second after the first."""
    first = fill(utterances, options.seconds)
    used = set(first) | overlapping(utterances, set(first))
    rest = [u for u in utterances if u not in used]
    sets = [first, fill(rest, options.seconds)]
    return [own for own in sets if seconds_of(own) >= FEWEST * options.seconds]


def spare(
    utterances: list[Utterance], sets: list[list[Utterance]], options: PartitionOptions
) -> list[Utterance]:
    """Draw utterances of a speaker that no adaptation set contains or overlaps with."""
    used = {u for own in sets for u in own}
    taken: list[Utterance] = []
    used |= overlapping(utterances, used)
    rest = [u for u in utterances if u not in used]
    for utterance in draw(rest, options, "held"):
        if seconds_of(taken) >= options.held:
            break
        taken.append(utterance)
    return taken


def fill(utterances: Iterable[Utterance], seconds: float) -> list[Utterance]:
    """Return the first utterances, as many as come nearest to `seconds`."""
    taken = []
    for utterance in utterances:
        if seconds < utterance.seconds / 2:
            break
        taken.append(utterance)
        seconds -= utterance.seconds
    return taken
