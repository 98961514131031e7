"""The sentences of the mini corpus: a small grammar, topics, and each person's favourite words.

Sentences come from templates, in which capitals stand for a kind of word. Nouns depend on the
speaker and the meeting:

common topics   The background text and the training meetings are about these.
rare topics     Each meeting of dev and eval has one of these as its most frequent nouns; in the
                background each is about ten times rarer than a common noun. Some sound like a
                common noun: deck and desk, ship and sheep, chain and train.
news            Words that occur in every meeting of dev and eval, and seldom elsewhere.
pet words       Each person in dev and eval begins half of their sentences with one of three words.
names           Invented words, one for each meeting of dev and eval, that occur nowhere else.

All other words occur in the training meetings; rare ones are used in turn, so that each occurs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

COMMON = """
pan pot plate spoon knife bowl oven stove kettle cup fork sink
train plane ticket station hotel suitcase airport passport bridge tunnel platform harvest
desk paper printer folder pencil drawer stapler cabinet envelope calendar invoice contract
rain wind cloud storm snow thunder fog frost sun breeze flood season
hand foot head knee back neck shoulder finger elbow stomach ankle ear
class lesson teacher pupil exam grade essay lecture textbook homework library chalk
bank loan price cost budget market salary tax profit debt account share
dog cat horse sheep cow pig goat duck hen rabbit donkey goose
wall roof floor door window ceiling stair garden fence chimney carpet lamp
"""
# One topic for each meeting of dev and eval, in their order.
RARE = """
violin drum tune chord melody flute trumpet piano choir tempo rhythm cello
seed soil tulip shovel weed hedge compost petal orchard bulb pear plum
judge jury witness lawyer verdict crime trial clerk oath sentence plea guard
button screen battery T_V_ infra-red casing signal menu scroll-wheel chip sensor cable
ship sail deck anchor harbour mast captain rope cabin rudder crew buoy
rocket planet orbit comet lens telescope crater moon galaxy probe satellite capsule
dough flour yeast crust pie bun pastry icing butter honey cream tray
wheel pedal brake saddle chain gear helmet tyre pump frame basket lock
stage actor curtain script costume mask puppet scene balcony director prop audience
"""
NEWS = "deadline prototype survey sponsor rehearsal voucher logo slogan".split()
NAMES = "zorvane bleckle tumbrio pradda quimmet laxony frenholt vasteem drobbin".split()
PET = (
    "basically honestly actually literally obviously apparently seriously frankly certainly "
    "hopefully roughly technically ideally personally clearly normally possibly definitely "
    "absolutely surely simply truly mainly partly strictly sadly luckily oddly ultimately "
    "initially formally naturally supposedly presumably admittedly curiously"
).split()
WORDS = {
    "A": "small big old new cheap bright heavy simple strange broken clean round".split(),
    "V": "check move open paint fix test draw change keep carry choose count bring find".split(),
    "T": (
        "next week|this morning|after lunch|on monday|in the end|at home|by friday|last year|"
        "every day|before the break|for now|all the time"
    ).split("|"),
}
TEMPLATES = (
    "we should V the A N T",
    "i think the N is too A for the N",
    "so can you V a N and a N T",
    "do we need the N or the A N",
    "what about the N near the N",
    "the N was A but the N is A",
    "let's V the N before we V the A N",
    "i would V it like a N with a A N",
    "you said the N and the N were A T",
    "nobody wants to V a A N T",
    "maybe the A N goes under the N",
    "there is no N in the A N T",
    "that's why i V the N and not the N",
    "put the N on the A N please",
    "who can V our N T",
    "it's more like a N than a N",
    "i don't want a A N T",
    "and then we V the N again T",
)
SHORT = ("yeah", "mm-hmm", "okay", "right", "uh-huh")
QUESTIONS = ("so", "do", "what", "who")


@dataclass(frozen=True)
class Clause:
    """The words of one breath group, as they are written.

    Attributes:
        words: the words.
        pet: whether a comma follows the first word.
        trunc: whether the first word is broken off and repeated.
    """

    words: tuple[str, ...]
    pet: bool = False
    trunc: bool = False

    @property
    def mark(self) -> str:
        """Return the punctuation mark at the clause's end."""
        return "?" if self.words[int(self.pet or self.trunc)] in QUESTIONS else "."

    @property
    def spoken(self) -> str:
        """Return the text for espeak-ng, with spelled letters as separate words."""
        return " ".join(self.words).lower().replace("_", " ").replace("-", " ")


def lists_of(topics: str) -> list[list[str]]:
    """Return the words of each topic."""
    return [line.split() for line in topics.split("\n") if line]


class Deck:
    """A deck that deals words in random order, each once before any is repeated."""

    def __init__(self, words: Sequence[str], random: Random):
        self._words, self._random, self._left = list(words), random, []

    def take(self) -> str:
        if not self._left:
            self._left = self._random.sample(self._words, len(self._words))
        return self._left.pop()


class Grammar:
    """A maker of clauses; subclasses choose the nouns and pet words."""

    def __init__(self, random: Random):
        self.random = random
        self.common, self.rare = lists_of(COMMON), lists_of(RARE)
        self.seldom = [*(word for topic in self.rare for word in topic), *NEWS]

    def noun(self, topic: int) -> str:
        raise NotImplementedError

    def pet(self) -> str:
        """Return a word to begin a clause with, or ""."""
        raise NotImplementedError

    def clause(self, topic: int) -> Clause:
        """Make a clause about a topic."""
        random, words = self.random, []
        for word in random.choice(TEMPLATES).split():
            if word == "N":
                words.append(self.noun(topic))
            else:
                words += random.choice(WORDS[word]).split() if word in WORDS else [word]
        pet, chance = self.pet(), random.random()
        if pet:
            return Clause((pet, *words), pet=True)
        if chance < 0.08:
            return Clause((random.choice(("um", "uh")), *words), pet=True)
        if chance < 0.12:
            return Clause((words[0], *words), trunc=True)
        return Clause(tuple(words))


class Training(Grammar):
    """The training meetings: common topics, and all other words in turn."""

    def __init__(self, random: Random):
        super().__init__(random)
        self._seldom, self._pets = Deck(self.seldom, random), Deck(PET, random)

    def noun(self, topic: int) -> str:
        chance = self.random.random()
        if chance < 0.3:
            return self._seldom.take()
        other = topic if chance < 0.8 else self.random.randrange(len(self.common))
        return self.random.choice(self.common[other % len(self.common)])

    def pet(self) -> str:
        return self._pets.take() if self.random.random() < 0.2 else ""


class Background(Grammar):
    """The background text: each sentence is about one common topic."""

    def lines(self, count: int) -> Iterator[str]:
        """Yield written sentences without punctuation marks."""
        for _ in range(count):
            clause = self.clause(self.random.randrange(len(self.common)))
            short = self.random.random() < 0.05
            yield self.random.choice(SHORT) if short else " ".join(clause.words)

    def noun(self, topic: int) -> str:
        chance = self.random.random()
        if chance < 0.1:
            return self.random.choice(self.seldom)
        topics = self.common[topic] if chance < 0.85 else self.random.choice(self.common)
        return self.random.choice(topics)

    def pet(self) -> str:
        return self.random.choice(PET) if self.random.random() < 0.1 else ""


class Person(Grammar):
    """A person in a meeting of dev or eval: the meeting's topic, and favourite words."""

    def __init__(self, random: Random, topic: int, liked: Sequence[str], pets: Sequence[str]):
        super().__init__(random)
        own = self.rare[topic]
        self._pets, self._liked = pets, liked
        # The first words of a topic are the whole meeting's most frequent ones.
        self._weights = [(rank + 1) ** -0.7 * (4 if own[rank] in liked else 1)
                         for rank in range(len(own))]  # fmt: skip

    def noun(self, topic: int) -> str:
        chance = self.random.random()
        if chance < 0.56:
            return self.random.choices(self.rare[topic], self._weights)[0]
        if chance < 0.64:
            return self.random.choice(NEWS)
        if chance < 0.89:
            return self.random.choice(self.random.choice(self.common))
        return NAMES[topic] if chance < 0.97 else self.random.choice(self.seldom)

    def pet(self) -> str:
        return self.random.choice(self._pets) if self.random.random() < 0.45 else ""


def breaths(grammar: Grammar, topic: int, count: int, long: bool) -> list[list[Clause]]:
    """Make clauses in segments, most of one clause, some of two, and if `long` one of five.

    Args:
        grammar: the speaker's grammar.
        topic: the topic's number.
        count: number of clauses.
        long: whether there is a sentence of five clauses, too long for an utterance.
    """
    segments: list[list[Clause]] = []
    left = count
    while left:
        if grammar.random.random() < 0.07:
            segments.append([Clause((grammar.random.choice(SHORT),))])
        else:
            most = 5 if long and len(segments) == 2 else 1 + (grammar.random.random() < 0.2)
            segments.append([grammar.clause(topic) for _ in range(min(most, left))])
        left -= len(segments[-1])
    return segments
