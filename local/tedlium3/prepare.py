#!/usr/bin/env python3
"""Make the data directories of the privacy attacks from TED-LIUM 3.

    prepare.py CORPUS OUT --unit person

writes, for section 4.1 of Tomashenko et al., "Privacy attacks for automatic speech recognition
acoustic models in a federated learning framework", ICASSP 2022 (see partition.py for the sets):

    OUT/train_g, OUT/valid      Train-G, and some of its speakers' utterances for tuning
    OUT/part1, OUT/part2        Part-1 and Part-2: each personalised model is a client in
                                utt2client, <speaker>-m1, <speaker>-m2, ...; model2speaker has its
                                speaker
    OUT/part1_held, part2_held  utterances of their speakers that are in no model, if any exist
    OUT/indicator               utterances of the speakers of the corpus' dev and test sets
    OUT/speakers.tsv            speaker, set, gender, person, talks, utterances, seconds, models
    OUT/models.tsv              model, part, speaker, gender, talks, utterances, seconds
    OUT/partition.txt           hours and counts next to the paper's Table 1

Data directories have utt2talk and utt2person for either unit, and spk2gender of the speakers whose
labels give a gender. An utterance is <speaker>-<audio>-<start>-<end>, in hundredths of a second
(without <audio> if it equals the speaker). The audio is not copied. See corpus.py for how the
corpus' quirks are handled.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import corpus
import typer
from corpus import Utterance
from partition import UNITS, PartitionOptions, Partitions, by_speaker, partition, seconds_of
from table1 import report_of

from fedtools.cli.app import script
from fedtools.core.atomic import write_text
from fedtools.core.errors import UserError
from fedtools.core.recipe_sections import Sets
from fedtools.core.tables import write_tsv
from fedtools.data.datadir import DataDir, byte_order, check_id, write_table
from fedtools.data.dropped import Dropped

DIRECTORIES = ("train_g", "valid", "part1", "part2", "indicator")
# Utterances of the parts' speakers that are in none of their models.
HELD = ("part1_held", "part2_held")
TABLES = ("speakers.tsv", "models.tsv", "partition.txt")


# --- writing --------------------------------------------------------------------------------------


def data_dir(path: Path, utterances: Iterable[Utterance], unit: str) -> DataDir:
    """Build the tables of one set, without clients."""
    data = DataDir(path, others={"utt2talk": {}, "utt2person": {}})
    for utterance in utterances:
        name, speaker = utterance_id(utterance, unit), UNITS[unit](utterance)
        data.wav_scp[utterance.audio] = str(utterance.path)
        start, end = (f"{time // 100}.{time % 100:02}" for time in (utterance.start, utterance.end))
        data.segments[name] = f"{utterance.audio} {start} {end}"
        data.text[name] = utterance.text
        data.utt2spk[name] = speaker
        data.utt2dur[name] = f"{utterance.seconds:.2f}"
        data.others["utt2talk"][name] = utterance.talk
        data.others["utt2person"][name] = utterance.person
    return data


def utterance_id(utterance: Utterance, unit: str) -> str:
    """Return an id that begins with the speaker and sorts the utterances of a talk by time."""
    speaker = UNITS[unit](utterance)
    parts = [speaker] if speaker == utterance.audio else [speaker, utterance.audio]
    name = "-".join([*parts, f"{utterance.start:07}", f"{utterance.end:07}"])
    return check_id(name, "utterance", utterance.path)


def write_all(out: Path, result: Partitions, unit: str, report: str) -> None:
    """Write everything under temporary names, then move it into place."""
    new, old = out / ".new", out / ".old"
    shutil.rmtree(new, ignore_errors=True)
    try:
        for name in (*DIRECTORIES, *(name for name in HELD if name in result.sets)):
            data = data_dir(new / name, result.sets[name], unit)
            models = result.models.get(name, {})
            data.utt2client = {
                utterance_id(u, unit): check_id(model, "model")
                for model, own in models.items()
                for u in own
            }
            known = set(data.utt2spk.values()) & result.genders.keys()
            data.others["spk2gender"] = {name: result.genders[name] for name in known}
            data.write()
            if models:
                owners = {model: UNITS[unit](own[0]) for model, own in models.items()}
                write_table(new / name / "model2speaker", owners)
        write_lists(new, result, unit)
        write_text(new / "partition.txt", report)
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir()
        for name in (*DIRECTORIES, *HELD, *TABLES):
            with suppress(FileNotFoundError):
                (out / name).rename(old / name)
            if (new / name).exists():
                (new / name).rename(out / name)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_lists(out: Path, result: Partitions, unit: str) -> None:
    """Write speakers.tsv and models.tsv: the whole partition, for readers and for trials."""

    def row(speaker: str, own: list[Utterance]) -> dict[str, object]:
        return {
            "speaker": speaker,
            "gender": result.genders.get(speaker, "--"),
            "person": own[0].person,
            "talks": ",".join(byte_order({u.talk for u in own})),
            "utterances": len(own),
            "seconds": f"{seconds_of(own):.2f}",
        }

    speakers, models = [], []
    for part in DIRECTORIES:
        numbers = Counter(UNITS[unit](own[0]) for own in result.models.get(part, {}).values())
        for name, own in sorted(by_speaker(result.sets[part], unit).items()):
            speakers.append({**row(name, own), "set": part, "models": numbers[name]})
        for model, own in sorted(result.models.get(part, {}).items()):
            models.append({**row(UNITS[unit](own[0]), own), "model": model, "part": part})
    columns = ["gender", "person", "talks", "utterances", "seconds"]
    write_tsv(out / "speakers.tsv", ["speaker", "set", *columns, "models"], speakers)
    write_tsv(out / "models.tsv", ["model", "part", "speaker", *columns], models)


# --- the command ----------------------------------------------------------------------------------


def prepare(options: SimpleNamespace) -> None:
    """Read the corpus, choose and write the sets, and report what was kept and dropped."""
    folder = corpus.find_partition(options.corpus, options.partition)
    dropped = Dropped()
    train, *others = (corpus.read_set(folder / name, dropped) for name in corpus.SETS)
    held_out = [utterance for own in others for utterance in own]
    parameters = PartitionOptions(
        options.unit,
        options.seed,
        options.hours_g,
        options.seconds_per_model,
        options.speakers,
        options.indicator_utterances,
        options.valid,
        options.models_of,
        options.held_seconds,
    )
    faults, usable = dropped.faults(), len(train) + len(held_out)
    for reason, place in sorted(dropped.first.items()):
        print(f"{reason}: {dropped[reason]}, the first in {place}", file=sys.stderr)
    if not train or not held_out or faults > options.max_drop * (faults + usable):
        raise UserError(
            f"{faults} of {faults + usable} lines cannot be used ({dropped.summary()})",
            path=folder,
            remedy="repair the corpus or raise --max-drop",
        )
    result = partition(train, held_out, parameters, dropped)
    report = report_of(result, parameters, options.partition)
    write_all(options.out, result, options.unit, report)
    print(report, end="")
    reasons = f" ({dropped.summary()})" if dropped.total() else ""
    print(f"kept {sum(map(len, result.sets.values()))}, dropped {dropped.total()}{reasons}")


def above_0(text: str) -> float:
    """Read a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise typer.BadParameter("expected a number above 0")
    return value


def from_0(text: str) -> float:
    """Read a finite number from 0."""
    return 0.0 if text in ("0", "0.0") else above_0(text)


def three_counts(text: str) -> tuple[int, int, int]:
    """Read the numbers of speakers of Train-G, Part-1 and Part-2."""
    if not re.fullmatch("[1-9][0-9]{0,8}(,[1-9][0-9]{0,8}){2}", text):
        raise typer.BadParameter("expected three whole numbers, such as 880,736,634")
    one, two, three = map(int, text.split(","))
    return one, two, three


def main(
    corpus: Path = typer.Argument(
        ..., metavar="CORPUS", help="TEDLIUM_release-3, which has legacy and speaker-adaptation."
    ),
    out: Path = typer.Argument(
        ..., metavar="OUT", help="Where the data directories and lists are written."
    ),
    partition: Literal["legacy", "speaker-adaptation"] = typer.Option(
        Sets.partition,
        help="The corpus' own split: its dev and test speakers make the Indicator.",
    ),
    unit: Literal["person", "talk"] = typer.Option(
        Sets.unit,
        help="Definition of a speaker: person, the stricter test, or talk, as in the paper.",
    ),
    seed: int = typer.Option(0, help="Random seed of the partition."),
    hours_g: Any = typer.Option(
        f"{Sets.hours_g:g}", parser=above_0, metavar="H", help="Hours of Train-G."
    ),
    seconds_per_model: Any = typer.Option(
        f"{Sets.seconds_per_model:g}",
        parser=above_0,
        metavar="S",
        help="Seconds of speech of a personalised model.",
    ),
    held_seconds: Any = typer.Option(
        f"{Sets.held_seconds:g}",
        parser=from_0,
        metavar="S",
        help="Seconds of speech of each speaker of a part to keep out of its models, if available; "
        "0: none.",
    ),
    models_of: Literal["speaker", "talk"] = typer.Option(
        "speaker",
        help="Two models of each speaker, from different talks if possible, or of each talk.",
    ),
    speakers: Any = typer.Option(
        None,
        parser=three_counts,
        metavar="G,1,2",
        help="Numbers of speakers of Train-G, Part-1, Part-2 (default: 880,736,634 with --unit "
        "talk and at least 2,250 talks; otherwise by --hours-g, and the rest 736 : 634).",
    ),
    indicator_utterances: int = typer.Option(
        10,
        min=1,
        max=999_999_999,
        metavar="N",
        help="Utterances of each speaker of the Indicator.",
    ),
    valid: float = typer.Option(
        Sets.valid_share,
        min=0.0,
        max=1.0,
        metavar="X",
        help="Fraction of Train-G's utterances in valid.",
    ),
    max_drop: float = typer.Option(
        0.02,
        min=0.0,
        max=1.0,
        metavar="X",
        help="Fail if more than this fraction of the lines is unusable.",
    ),
) -> None:
    prepare(SimpleNamespace(**locals()))


if __name__ == "__main__":
    script(
        main,
        "prepare.py",
        "Make data directories of TED-LIUM 3 whose clients are personalised models.",
    )
