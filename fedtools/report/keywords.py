"""A section with the accuracies of single experiments of keyword spotting.

The recipe's own report needs its folders <task>/<network>/<method>/seed<k>, and shows more tables.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedtools.core.atomic import write_text
from fedtools.core.config import differences
from fedtools.core.errors import UserError
from fedtools.core.tables import count, read_tsv
from fedtools.data.clips import Clips
from fedtools.exchange.experiment import Experiment
from fedtools.methods import METHODS
from fedtools.report.accuracies import (
    ERRORS,
    Row,
    accuracy_of,
    costs_of,
    is_whole,
    note_of,
    read_accuracy,
    read_counts,
    read_record,
    read_rows,
    summary_of,
    write_record,
)
from fedtools.report.intervals import record_file
from fedtools.report.page import Page, check_pictures, further, provenance, read_tables
from fedtools.report.section import Section, page_with
from fedtools.report.summary import Summary
from fedtools.score.bootstrap import MIN_SPEAKERS
from fedtools.score.last_evaluations import CLIP, SPEAKER_COLUMNS, last_of
from fedtools.score.utterances import Utterances
from fedtools.tasks import facts_of
from fedtools.tasks.facts import data_of


@dataclass(frozen=True)
class Scored:
    """An experiment whose test clips have been scored.

    Attributes:
        name: the name of its row.
        experiment: its files.
        counts: errors by clip.
        bytes: what a client sends and receives, mean over all clients.
        epochs: of a client, mean over all clients, and of the server.
        clips: the number of training clips.
        test: the sums that identify the test data.
        trained_on: the number of test clips that are in training.
        classes: the number of labels.
    """

    name: str
    experiment: Experiment
    counts: Utterances
    bytes: float
    epochs: float
    clips: int
    test: Mapping[str, str]
    trained_on: int
    classes: int


def write_accuracies(path: Path, rows: Sequence[tuple[str, Path]], page: Page) -> Summary:
    """Write a section of RESULTS.md: the provenance of the figures, and their summary.

    Args:
        path: the page; made if it is missing. Text outside the section stays.
        rows: name and experiment of each row; those of one name are seeds of one method. {} in a
            name is the method's title, which is the default.
        page: the rest of the section.

    Returns:
        The summary.

    Raises:
        UserError: if an experiment is not finished, its clips have not been scored, a file is
            malformed, or experiments have other test clips.
    """
    check_pictures(page)
    found = [_read(name, experiment) for name, experiment in rows]
    systems = _rows(found)
    experiments = [one.experiment for one in found]
    about = provenance(
        path,
        page,
        seeds={one.seed for one in experiments},
        rounds={one.options.rounds for one in experiments},
        pictures=[picture.name for _, picture in page.pictures],
        experiments=[one.path for one in experiments],
    )
    caption, file = page.corpus.caption, record_file(path, page.section)
    reading = (
        f"**{caption}: summary.** {note_of(systems)} {_data(found)}" + f" {page.note}".rstrip()
    )
    again = f"`fedtools report {path.name} --from {file.name}` makes this section again."
    below = [again, *further(page, *read_tables(page))]
    section = Section(page.section, caption, [f"## {caption}", about, reading], below)
    summary = summary_of(systems)
    new = page_with(path, section, summary)
    write_record(file, section, systems)
    write_text(path, new)
    return summary


def remake(record: Path, path: Path) -> tuple[str, Summary]:
    """Write a section again from the file beside its page; return its corpus and summary."""
    section, rows = read_record(record)
    summary = summary_of(rows)
    write_text(path, page_with(path, section, summary))
    return section.caption, summary


def _rows(found: Sequence[Scored]) -> list[Row]:
    """Return a row for each name, with all of its seeds."""
    first, most = found[0], max(one.clips for one in found)
    named: dict[str, dict[int, Scored]] = {}
    for one in found:
        if one.test != first.test:
            problem = f"its test clips are not those of {first.experiment.path}"
            raise UserError(problem, path=one.experiment.path, remedy="report them separately")
        seeds = named.setdefault(one.name, {})
        _check_alike(one, list(seeds.values()))
        seeds[one.experiment.seed] = one
    rows = []
    for name, seeds in named.items():
        if not seeds.keys() & named[first.name].keys():
            problem = f"{name!r} has no seed in common with {first.name!r}"
            raise UserError(problem, path=next(iter(seeds.values())).experiment.path)
        accuracy = {seed: accuracy_of(one.counts) for seed, one in seeds.items()}
        rows.append(
            Row(
                "",
                name,
                accuracy,
                {seed: one.counts for seed, one in seeds.items()},
                statistics.fmean(one.bytes for one in seeds.values()),
                # An epoch of a server alone is shorter than one of all clients' clips.
                statistics.fmean(one.epochs * one.clips / most for one in seeds.values()),
            )
        )
    return rows


def _check_alike(one: Scored, others: Sequence[Scored]) -> None:
    """Raise a `UserError` if an experiment is not another seed of those in the same row."""
    options, remedy = one.experiment.options, "give it a name: --row NAME=EXP_DIR"
    for other in others:
        if one.experiment.seed == other.experiment.seed:
            problem = f"{one.name!r} is duplicated, with seed {options.seed}"
            raise UserError(problem, path=one.experiment.path, remedy=remedy)
        theirs = {**vars(other.experiment.options), "seed": options.seed}
        if difference := next(differences(theirs, vars(options)), ""):
            problem = f"not another seed of {other.experiment.path}: {difference}"
            raise UserError(problem, path=one.experiment.path, remedy=remedy)


def _data(found: Sequence[Scored]) -> str:
    """Return the size of the test data, and what of it is in training."""
    first = found[0]
    people = len({speaker for _, speaker, _ in first.counts.keys})
    clips = len(first.counts.keys)
    text = (
        f"Test data: {clips} clips of {first.classes} classes by {people} "
        f"speaker{'s' * (people != 1)}; each clip of silence counts as a speaker of its own."
    )
    if people < MIN_SPEAKERS:
        text += f" Fewer than {MIN_SPEAKERS} have no intervals."
    known = {one.name: one.trained_on for one in found if one.trained_on}
    if known:
        listed = ", ".join(f"{count} of {clips} for {name}" for name, count in known.items())
        text += f" **Test clips that are in training: {listed}.**"
    return text


def _read(name: str, path: Path) -> Scored:
    experiment = Experiment(path)
    options, where = experiment.options, path / "config.yaml"
    facts = facts_of(options.task, where)
    if facts.rate != "accuracy":
        problem = f"{options.task} has no accuracy"
        raise UserError(
            problem, path=where, remedy="give fedtools score's folder: EXP_DIR:SCORE_DIR"
        )
    title = METHODS.get(options.method, where).title
    counts = _read_counts(experiment)
    train, test = (data_of(experiment, split) for split in ("train", "test"))
    trained, tested = Clips.read(train), Clips.read(test)
    size, epochs, server = costs_of(read_rows(experiment), set(experiment.clients))
    return Scored(
        name.replace("{}", title) or title,
        experiment,
        counts,
        size / max(1, len(experiment.clients)),
        epochs + server,
        len(trained.labels),
        facts.identity(test, True),
        len(set(tested.utterances) & set(trained.utterances)),
        len(tested.classes),
    )


def _read_counts(experiment: Experiment) -> Utterances:
    """Read errors by clip of a finished experiment, of its last evaluations."""
    path, rounds = experiment.path, experiment.options.rounds
    last, scores = experiment.last_round(), f"run fedtools clip-scores {experiment.path}"
    if last < rounds:
        problem = f"not finished: {last} of {rounds} rounds"
        raise UserError(problem, path=path, remedy=f"run fedtools rounds {path}")
    if not (path / ERRORS).exists():
        raise UserError("no errors by clip", path=path / ERRORS, remedy=scores)
    wanted = last_of(filter(experiment.is_measured, range(rounds + 1)))
    by_speaker = path / "speakers_test.tsv"
    lines = enumerate(read_tsv(by_speaker, SPEAKER_COLUMNS), 2)
    counted = sorted({count(row, "round", by_speaker, line) for line, row in lines})
    if counted != wanted:
        problem = f"of rounds {_listed(counted)}, not of {_listed(wanted)}"
        raise UserError(problem, path=by_speaker, remedy=scores)
    evaluation = experiment.evaluation("test")
    curve = read_accuracy(evaluation) if evaluation.exists() else {}
    known = statistics.fmean(curve.get(number, math.nan) for number in wanted)
    counts = read_counts(path, known)
    if not is_whole(counts) or counts.tokens[CLIP].max() != len(wanted):
        problem = f"not errors of {len(wanted)} evaluations of each clip"
        raise UserError(problem, path=path / ERRORS, remedy=scores)
    return counts


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
