"""A reader of NXT: AMI's annotations, XML files that point at each other.

words/<MEETING>.<agent>.words.xml      one speaker's words, marks and sounds in order, with times
segments/<MEETING>.<agent>.segments.xml  their segments, each of which points at words
corpusResources/meetings.xml           the speakers of a meeting, and their channels

The files declare their encoding, ISO-8859-1, and are parsed as bytes. Entities are refused: none is
needed, and nothing may be read from outside of a file.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from xml.parsers import expat

from words import MARKS, SOUND, WORD, Token

from fedtools.core.errors import UserError
from fedtools.core.text_files import read_bytes

TIME = re.compile(r"[0-9]{1,7}(\.[0-9]{1,12})?", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9]{1,40}", re.ASCII)
HREF = re.compile(r"([^#]+)#id\(([^()]+)\)(?:\.\.id\(([^()]+)\))?")
DEEPEST = 50


@dataclass
class Element:
    """An XML element: its name without the namespace, its contents, and its line in the file."""

    tag: str
    attributes: dict[str, str]
    line: int
    text: str = ""
    children: list[Element] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.attributes.get("nite:id", "")

    @property
    def called(self) -> str:
        """Return the element's name in error messages."""
        return f"<{self.tag}> {self.id!r}" if self.id else f"<{self.tag}>"


@dataclass(frozen=True)
class Speaker:
    """A speaker in a meeting: the number of the headset, and the name within the whole corpus."""

    channel: int
    name: str


class Fault(Exception):
    """An unusable part of the corpus, which is left out; its text is the reason."""


def read_xml(path: Path) -> Element:
    """Read the root element of an XML file.

    Raises:
        UserError: with file and line, if it is not XML, declares or uses an entity, or is nested
            too deeply.
    """
    parser = expat.ParserCreate()
    parser.buffer_text = True
    root = Element("", {}, 0)
    above = [root]

    def refuse(name: str, *_: object) -> None:
        problem = f"the entity {name!r} is not allowed"
        remedy = "annotations have no entities: unpack them again"
        raise UserError(problem, path=path, line=parser.CurrentLineNumber, remedy=remedy)

    def start(tag: str, attributes: dict[str, str]) -> None:
        if len(above) > DEEPEST:
            problem = "elements are nested too deeply"
            raise UserError(problem, path=path, line=parser.CurrentLineNumber)
        element = Element(tag.rpartition(":")[2], attributes, parser.CurrentLineNumber)
        above[-1].children.append(element)
        above.append(element)

    def text(data: str) -> None:
        above[-1].text += data

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: above.pop()
    parser.CharacterDataHandler = text
    parser.EntityDeclHandler = refuse
    parser.SkippedEntityHandler = refuse
    remedy = "unpack the annotations again"
    try:
        parser.Parse(read_bytes(path, remedy=remedy), True)
    except expat.ExpatError as error:
        problem = f"not XML: {expat.ErrorString(error.code)}"
        raise UserError(problem, path=path, line=error.lineno, remedy=remedy) from None
    except (LookupError, ValueError) as error:
        # The declared encoding is unknown to Python, or not a single-byte encoding.
        raise UserError(f"not XML: {error}", path=path, line=1, remedy=remedy) from None
    return root.children[0]


def read_meetings(path: Path, wanted: Collection[str]) -> dict[str, dict[str, Speaker]]:
    """Read meeting -> agent -> speaker, of the wanted meetings.

    The agent is the letter in the names of words and segments files, and does not determine the
    channel. A speaker without a channel is left out.

    Raises:
        UserError: with file and line, if an attribute is missing or invalid, or a meeting or agent
            appears twice.
    """
    meetings: dict[str, dict[str, Speaker]] = {}
    for meeting in read_xml(path).children:
        name = meeting.attributes.get("observation", "")
        if name not in wanted:
            continue
        if name in meetings:
            raise UserError(f"the meeting {name} appears twice", path=path, line=meeting.line)
        speakers = meetings.setdefault(name, {})
        for element in meeting.children:
            if element.tag != "speaker" or not element.attributes.get("channel"):
                continue
            agent, channel, person = (
                _attribute(element, name, pattern, path)
                for name, pattern in (
                    ("nxt_agent", NAME), ("channel", re.compile("[0-9]{1,2}", re.ASCII)),
                    ("global_name", NAME),
                )
            )  # fmt: skip
            if agent in speakers:
                problem = f"{element.called} has the agent {agent} of another speaker of {name}"
                raise UserError(problem, path=path, line=element.line)
            speakers[agent] = Speaker(int(channel), person)
    return meetings


def _attribute(element: Element, name: str, pattern: re.Pattern, path: Path) -> str:
    value = element.attributes.get(name, "")
    if not pattern.fullmatch(value):
        problem = f"{element.called} has the {name} {value!r}"
        raise UserError(problem, path=path, line=element.line, remedy="correct it")
    return value


def hundredths(element: Element, name: str) -> int | None:
    """Return a time of seconds in hundredths, rounded; None if missing, empty or invalid."""
    value = element.attributes.get(name, "")
    if not TIME.fullmatch(value):
        return None
    return int((100 * Decimal(value)).to_integral_value(ROUND_HALF_UP))


class Words:
    """One speaker's words, marks and sounds, and their order.

    Attributes:
        duplicates: number of elements with another element's id; the first is kept.
        untimed: number of words whose time is missing, empty or invalid.
    """

    def __init__(self, path: Path):
        self.tokens: list[Token] = []
        self.duplicates = self.untimed = 0
        self._places: dict[str, int] = {}
        for element in read_xml(path).children:
            if not element.id:
                problem = f"{element.called} without an id"
                raise UserError(problem, path=path, line=element.line, remedy="correct it")
            if element.id in self._places:
                self.duplicates += 1
                continue
            token = _token(element)
            self.untimed += token.kind == WORD and None in (token.start, token.end)
            self._places[element.id] = len(self.tokens)
            self.tokens.append(token)

    def range(self, first: str, last: str) -> list[Token]:
        """Return the tokens from one id to another, inclusive; raise `Fault` if there are none."""
        if first not in self._places or last not in self._places:
            raise Fault("points at no word")
        begin, end = self._places[first], self._places[last]
        if begin > end:
            raise Fault("points from a later word to an earlier one")
        return self.tokens[begin : end + 1]


def _token(element: Element) -> Token:
    text = element.text.strip()
    kind = SOUND
    if element.tag == "w":
        kind = MARKS.get(text, SOUND) if element.attributes.get("punc") == "true" else WORD
    return Token(text, kind, hundredths(element, "starttime"), hundredths(element, "endtime"))


def pointed_at(segment: Element, words: Words, file: str) -> list[Token]:
    """Return the tokens that a segment points at: `file#id(a)..id(b)` or `file#id(a)`.

    Raises:
        Fault: if a pointer is malformed, leads to another file, or leads nowhere.
    """
    tokens: list[Token] = []
    for child in segment.children:
        if child.tag != "child":
            continue
        found = HREF.fullmatch(child.attributes.get("href", ""))
        if not found:
            raise Fault("malformed href")
        if found[1] != file:
            raise Fault("points at another speaker's words")
        tokens += words.range(found[2], found[3] or found[2])
    return tokens
