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

import argparse
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import corpus
from corpus import Utterance
from partition import UNITS, PartitionOptions, Partitions, by_speaker, partition, seconds_of
from table1 import report_of

from fedtools.core.atomic import write_text
from fedtools.core.errors import UserError, exit_with_message
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


def prepare(options: argparse.Namespace) -> None:
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
        raise argparse.ArgumentTypeError("expected a number above 0")
    return value


def from_0(text: str) -> float:
    """Read a finite number from 0."""
    return 0.0 if text in ("0", "0.0") else above_0(text)


def share(text: str) -> float:
    """Read a number from 0 to 1."""
    value = from_0(text)
    if value > 1:
        raise argparse.ArgumentTypeError("expected a number from 0 to 1, such as 0.02")
    return value


def whole(text: str) -> int:
    """Read a whole number from 1."""
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError("expected a whole number of at least 1")
    return int(text)


def three_counts(text: str) -> tuple[int, int, int]:
    """Read the numbers of speakers of Train-G, Part-1 and Part-2."""
    parts = text.split(",")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError("expected three whole numbers, such as 880,736,634")
    return whole(parts[0]), whole(parts[1]), whole(parts[2])


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; wrong usage exits 2."""
    parser = argparse.ArgumentParser(
        description="Make data directories of TED-LIUM 3 whose clients are personalised models."
    )
    add = parser.add_argument
    add("corpus", type=Path, help="TEDLIUM_release-3, which has legacy and speaker-adaptation")
    add("out", type=Path, help="where the data directories and lists are written")
    which = (
        "the corpus' own split: its dev and test speakers make the Indicator (default: %(default)s)"
    )
    add("--partition", choices=corpus.PARTITIONS, default=Sets.partition, help=which)
    unit = "definition of a speaker: person, the stricter test, or talk, as in the paper"
    unit += " (default: %(default)s)"
    add("--unit", choices=tuple(UNITS), default=Sets.unit, help=unit)
    add("--seed", type=int, default=0, help="random seed of the partition (default: 0)")
    hours = "hours of Train-G (default: %(default)g)"
    add("--hours-g", type=above_0, default=float(Sets.hours_g), metavar="H", help=hours)
    seconds = "seconds of speech of a personalised model (default: %(default)g)"
    default = float(Sets.seconds_per_model)
    add("--seconds-per-model", type=above_0, default=default, metavar="S", help=seconds)
    held = "seconds of speech of each speaker of a part to keep out of its models, if available; 0:"
    held += " none (default: %(default)g)"
    default = float(Sets.held_seconds)
    add("--held-seconds", type=from_0, default=default, metavar="S", help=held)
    two = "two models of each speaker, from different talks if possible, or of each talk"
    two += " (default: %(default)s)"
    add("--models-of", choices=("speaker", "talk"), default="speaker", help=two)
    counts = "numbers of speakers of Train-G, Part-1, Part-2 (default: 880,736,634 with --unit talk"
    counts += " and at least 2,250 talks; otherwise by --hours-g, and the rest 736 : 634)"
    add("--speakers", type=three_counts, metavar="G,1,2", help=counts)
    each = "utterances of each speaker of the Indicator (default: 10)"
    add("--indicator-utterances", type=whole, default=10, metavar="N", help=each)
    valid = "fraction of Train-G's utterances in valid (default: %(default)g)"
    add("--valid", type=share, default=Sets.valid_share, metavar="X", help=valid)
    drop = "fail if more than this fraction of the lines is unusable (default: 0.02)"
    add("--max-drop", type=share, default=0.02, metavar="X", help=drop)
    return parser.parse_args(arguments)


def main() -> None:
    """Run the command: 0 done, 1 bad input (one line on stderr), 2 wrong usage."""
    options = parse_options(sys.argv[1:])
    with exit_with_message("prepare.py"):
        prepare(options)


if __name__ == "__main__":
    main()
