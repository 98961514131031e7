"""A summary of a partition, next to Table 1 of Tomashenko et al. (ICASSP 2022).

Table 1 has 1,079 models of the 634 speakers of Part-2, so that 445 of them have two; section 4.2
says 463, which is the number shown here.
"""

from __future__ import annotations

from itertools import combinations

from partition import UNITS, PartitionOptions, Partitions, seconds_of

from fedtools.core.tables import format_table

# Table 1, and the speakers with two models by section 4.2: Train-G, Part-1, Part-2, Indicator.
TABLE_1 = {
    "hours": ("200", "86", "73", "0.5"),
    "speakers": ("880", "736", "634", "32"),
    "models": ("--", "1300", "1079", "--"),
    "speakers with two models": ("--", "564", "463", "--"),
    "utterances": ("--", "--", "--", "320"),
}


def report_of(result: Partitions, options: PartitionOptions, split: str) -> str:
    """Return hours and counts next to Table 1, and the properties of the sets that affect results.

    Args:
        result: the partition.
        options: the parameters of the partition.
        split: the corpus' own partition into train, dev and test.
    """
    unit = options.unit
    sets = {
        "Train-G": [*result.sets["train_g"], *result.sets["valid"]],
        "Part-1": result.sets["part1"],
        "Part-2": result.sets["part2"],
        "Indicator": result.sets["indicator"],
    }
    ours: dict[str, list[str]] = {name: [] for name in TABLE_1}
    persons = [{u.person for u in own} for own in sets.values()]
    for name, own in sets.items():
        models = result.models.get(name.lower().replace("-", ""), {})
        two = sum(model.endswith("-m2") for model in models)
        ours["hours"].append(f"{seconds_of(own) / 3600:.2f}")
        ours["speakers"].append(str(len({UNITS[unit](u) for u in own})))
        ours["models"].append(str(len(models)) if models else "--")
        ours["speakers with two models"].append(str(two) if models else "--")
        ours["utterances"].append(str(len(own)))
    header = ["", *(cell for name in sets for cell in (name, "Table 1"))]
    rows: list[list[object]] = [
        [name, *(cell for pair in zip(ours[name], theirs, strict=True) for cell in pair)]
        for name, theirs in TABLE_1.items()
    ]
    rows.append(["persons", *(cell for one in persons for cell in (len(one), "--"))])
    lines = [f"A speaker is a {unit}; seed {options.seed}; {split} partition.", ""]
    lines += [format_table(header, rows, "l" + "r" * (len(header) - 1)).rstrip(), ""]
    lines += model_lines(result, options.seconds)
    both = {name for one in persons for name in one if sum(name in two for two in persons) > 1}
    lines.append(f"{len(both)} persons are in more than one set.")
    return "\n".join(lines) + "\n"


def model_lines(result: Partitions, requested: float) -> list[str]:
    """Return a line for each part: its models' seconds, and talks shared by target pairs."""
    lines = []
    for part, models in result.models.items():
        lengths = sorted(map(seconds_of, models.values()))
        by_speaker: dict[str, list[set[str]]] = {}
        for model, own in models.items():
            talks = {u.talk for u in own}
            by_speaker.setdefault(model.rpartition("-m")[0], []).append(talks)
        pairs = [pair for own in by_speaker.values() for pair in combinations(own, 2)]
        shared = sum(bool(a & b) for a, b in pairs)
        mean = sum(lengths) / len(lengths)
        lines.append(
            f"{part}: {mean:.1f} s a model (asked for {requested:g}), {lengths[0]:.1f} to "
            f"{lengths[-1]:.1f}; of {len(pairs)} target pairs, {shared} share a talk."
        )
    return lines
