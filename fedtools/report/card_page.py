"""A leakage card for readers: Markdown with a picture, and its cells as a table."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path

from fedtools.core.atomic import atomic_path, write_text
from fedtools.core.provenance import git_hash, records
from fedtools.core.tables import format_markdown, write_tsv
from fedtools.report.card import COLUMNS, STRONGEST, Card, Cell, by_row
from fedtools.report.card_picture import draw_card
from fedtools.report.page import image, with_section

# Data available to the attacker, by attack.
HAS = {
    "weights": "the updates of a round",
    "a1": "the updates, and speech of any speaker",
    "a2": "the updates, speech of any speaker, and updates of known people",
    "attributes": "the updates, speech of any speaker, and attributes of other people",
    "membership": "the updates, candidates with their transcripts, and how clients train",
    "inversion": "an update, and how clients train",
    "features": "the clients' features",
}
KNOWS = {
    "ignorant": "no defence: it enrols undefended models, and is trained on them",
    "lazy-informed": "the defence: it enrols defended models, and is trained on undefended ones",
    "semi-informed": "the defence: it enrols defended models, and is trained on other people's",
    STRONGEST: "what any of these knows: it is whichever does best behind a defence",
}
TERMS = {
    "EER%": "equal error rate of telling whether two models are of one speaker; 50 is a guess, 0 "
    "tells all, so that lower is worse for privacy",
    "AUC%": "how often one of a kind scores above one of the other kind; 50 is a guess, 100 tells "
    "all, so that higher is worse for privacy",
    "literal": "A1's scores as its paper's equation 4 is written",
    "unit": "A1's scores of vectors of unit length, the equation's other reading",
    "cohort": "A1's scores relative to other speakers' models, which improve on the paper's",
    "regression": "a score trained on the updates of other people",
    "PLDA": "the log-likelihood ratio of probabilistic linear discriminant analysis",
    "LiRA": "the likelihood ratio of an item's loss under models with and without it (Carlini et "
    "al. 2022)",
    "RMIA": "the share of other items that a model favours less than this one (Zarifzadeh et al. "
    "2024)",
}
NOTHING = {
    "membership": "the AUC of whoever hears the audio alone, without any model, because members "
    "and others differ in how they sound; only what is above it is a model's leak",
    "features": "the measure for vectors without information",
    "inversion": "0, no difference from the control that the measure names",
}
COSTS = {
    "own": "each client's update, on its held-out speech",
    "newcomers": "the next global model, on people who are not clients",
    "everybody": "the next global model, on both",
}


def write_card(folder: Path, card: Card, title: str) -> str:
    """Write FOLDER/card.tsv, card.md and card.png with a title; return the text of card.md."""
    write_tsv(
        folder / "card.tsv",
        COLUMNS,
        [dict(zip(COLUMNS, astuple(cell), strict=True)) for cell in (*card.cells, *card.costs)],
    )
    draw_card(folder / "card.png", card, title)
    text = f"**Leakage card of {title}**\n\n{markdown(card)}"
    write_text(folder / "card.md", text)
    return text


def put_on_page(page: Path, folder: Path, experiment: Path, text: str) -> None:
    """Put a card on a page as a section, and its picture next to the page.

    Args:
        page: the Markdown file; made if it is missing. Text outside the section stays.
        folder: has card.png.
        experiment: the attacked experiment, after which the section is named.
        text: the text returned by `write_card`.
    """
    name = "-".join(part for part in experiment.parts if part not in ("exp", "/", ".", ".."))
    picture = page.with_name(f"{page.stem}-card-{name}.png")
    written = [f":(exclude){one}" for one in (page.name, f"{page.stem}-*")]
    section = [
        f"## What {experiment} gives away",
        f"- Git, of this card: {git_hash(page.parent, *written)}.\n"
        f"- Experiment begun with: {records([experiment])}.",
        text,
        image(f"Leakage card of {experiment}", picture.name),
    ]
    new = with_section(page, f"card-{name}", "\n\n".join(part.strip() for part in section))
    with atomic_path(picture) as temporary:
        shutil.copyfile(folder / "card.png", temporary)
    write_text(page, new)


def markdown(card: Card) -> str:
    """Format the card: tables of attacks and costs, and notes on attackers and measures."""
    head = ["Attack", "Attacker", "Measure", "No leak", *(_code(one) for one in card.defences)]
    rows = [
        [f"{key[0]}: {key[1]}", key[2], key[3], some[0].nothing, *_texts(some, card.defences)]
        for key, some in by_row(card.cells).items()
    ]
    parts = [format_markdown(head, rows, "lll" + "r" * (len(head) - 3))]
    if card.costs:
        costs = [
            [key[1], key[3], *_texts(some, card.defences)]
            for key, some in by_row(card.costs).items()
        ]
        names = ["Cost", "Measure", *(_code(one) for one in card.defences)]
        parts.append(format_markdown(names, costs, "ll" + "r" * (len(names) - 2)))
    attacks = dict.fromkeys(cell.attack for cell in card.cells)
    attackers = dict.fromkeys(cell.attacker for cell in card.cells)
    notes = [f"- {name} has {HAS[name]}." for name in attacks]
    notes += [f"- {name} knows {KNOWS[name]}." for name in attackers if name in KNOWS]
    notes += [f"- {cell.of}: {COSTS[cell.of]}." for cell in _first(card.costs)]
    notes += [f"- {name}: {TERMS[name]}." for name in TERMS if _has(card.cells, name)]
    notes += [
        f"- No leak, in rows of {name}: {NOTHING[name]}." for name in attacks if name in NOTHING
    ]
    notes.append(
        "- In the picture, darker cells leak more. A cell whose interval contains the value of no "
        "leak is white: these trials do not show a leak, and do not exclude one. A difference from "
        "a control is light, whatever its size."
    )
    notes.append(
        "- Cells have 95 % intervals. `best of n` is the one that reveals most among n layers, "
        "scores and attackers, in card.tsv under `by`: a maximum, whose interval is of that one "
        "alone and does not cover the choice."
    )
    return "\n\n".join([*parts, "\n".join(notes)]) + "\n"


def _has(cells: Iterable[Cell], term: str) -> bool:
    """Return whether a card's cells have a term: as measure, in scores, or in what is best."""
    texts = (word for one in cells for word in (one.measure, one.of, one.by))
    return any(re.search(rf"(?<!\w){re.escape(term)}(?!\w)", text) for text in texts)


def _texts(cells: Sequence[Cell], defences: Sequence[str]) -> list[str]:
    known = {
        cell.defence: "; ".join(part for part in (cell.text, cell.counts) if part) for cell in cells
    }
    return [known.get(name, "") for name in defences]


def _first(cells: Iterable[Cell]) -> list[Cell]:
    return list({cell.of: cell for cell in cells}.values())


def _code(defence: str) -> str:
    """Format a defence as code if its patterns have stars."""
    return defence if "*" not in defence else f"`{defence}`"
