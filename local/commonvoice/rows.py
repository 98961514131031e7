#!/usr/bin/env python3
"""Print the arguments of `fedtools report` for a run's tables, one a line.

    rows.py --pictures PREFIX --exp EXP --config YAML --seeds "0 1" --methods "fedavg" [...]

PREFIX is the beginning of the names of the report's pictures.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from systems import Systems, method_of, paths, read, title, variants_of

from fedtools.core.config import lookup
from fedtools.core.errors import exit_with_message

TRAINED_ON = {
    "continuous": "labels of a teacher that follows the model",
    "fixed": "the baseline's hypotheses by beam search",
    "transcripts": "their transcripts",
}
BYTES = (
    "In Zhu et al., FedAvg's 20.70 GB match what one client sends and receives (Comm./client), and "
    "DecoupleFL's 2.35 GB match what all three clients send (Comm.)."
)
STAGE_2 = {
    "server_beam": "Server beam: stage 2 is trained on the server's own hypotheses for the features"
    " sent, from one beam search with its n-gram and weights tuned on its own validation data.",
    "server_transcripts": "Server transcripts: stage 2 is trained on transcripts, which no client "
    "would send; a bound.",
}
TABLES = {
    "stage2": "what DecoupleFL's stage 2 is trained on",
    **{table: f"table {table} of Zhu et al." for table in "245"},
}
# In a system's folder, scores of stage 8.
_ADAPTED = "newcomers/decode_test_rest_spk"
NEWCOMERS = "newcomers, on their speech after the first seconds"
ATTACKS = (
    "attacks on the features that clients send: means over clients, with 95 % intervals "
    "over speakers (and over seeds, where there are several); README.md says what they are"
)


def note(systems: Systems, options: argparse.Namespace) -> str:
    """Return the note below the main table."""
    parts = [f"On clients' speech, models are trained on {TRAINED_ON[systems.labels]}."]
    if systems.labels != "continuous" and systems.sending:
        parts.append("DecoupleFL's stage 2 is trained on a teacher's labels of the features sent:")
        parts.append("transcripts stay at the clients.")
    variants = {one for system in systems.all for one in variants_of(system)}
    parts += [what for name, what in STAGE_2.items() if name in variants]
    if any(method_of(system) == "decouplefl" for system in systems.main):
        parts.append(BYTES)
    if options.clients == "speaker":
        epochs = lookup(options.config, "newcomers.epochs")
        parts.append("Test speakers are not clients: they are scored with the layers that all")
        parts.append("clients share and the baseline's personal layers.")
        if newcomers(systems, options, options.seeds):
            parts.append(f"'..., adapted' takes {epochs} more epochs at each newcomer.")
    return " ".join(parts)


def rows(systems: Systems, options: argparse.Namespace, seed: str) -> Iterator[tuple[str, str]]:
    """Yield the report's options that name the scored systems of a seed."""
    baseline = f"{options.exp}/baseline/seed{seed}"
    yield "--row", f"Baseline=:{baseline}/decode_test"
    served = "the baseline on the server's own accents"
    yield "--elsewhere", f"{served}={baseline}/decode_server_test"
    for system, path in paths(options.exp, systems.main, seed):
        yield "--row", f"{title(systems.unlabelled(system))}={path}:{path}/decode_test"
    for table in options.tables:
        name = TABLES[table]
        yield "--also", f"{name}=Baseline=:{baseline}/decode_test"
        for system, path in paths(options.exp, systems.of_table[table], seed):
            called = title(in_table(systems, table, system))
            yield "--also", f"{name}={called}={path}:{path}/decode_test"
    for system, path in newcomers(systems, options, [seed]):
        called = f"{NEWCOMERS}={title(systems.unlabelled(system))}"
        yield "--also", f"{called}={path}:{path}/decode_test_rest"
        yield "--also", f"{called}, adapted={path}:{path}/{_ADAPTED}"


def newcomers(
    systems: Systems, options: argparse.Namespace, seeds: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the systems and folders of which newcomers are scored, if clients are speakers.

    None without stage 8, which scores the models that they adapted.
    """
    if options.clients != "speaker":
        return []
    found = (one for seed in seeds for one in paths(options.exp, systems.main, seed))
    return [
        (system, path) for system, path in found if (Path(path) / _ADAPTED / "wer.tsv").exists()
    ]


def in_table(systems: Systems, table: str, system: str) -> str:
    """Return the name of a system in a further table; table 2 names all labels."""
    if table != "2":
        return systems.unlabelled(system)
    return system if variants_of(system) else f"{method_of(system)}+{systems.own_labels}"


def extras(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the options that name other tables and pictures."""
    crossed = Path(options.exp) / "cross.tsv"
    if crossed.exists() and (text := crossed.read_text(encoding="utf-8")):
        rate = text.split("\n", 1)[0].split()[-1].upper()
        caption = f"each client's model on each client's test data, {rate} by greedy search, %"
        yield "--picture", f"{caption}={options.pictures}-cross.png"
    if not options.attacks:
        return
    yield "--table", f"{ATTACKS}={options.exp}/attacks.tsv"
    start = Path(f"{options.pictures}-tsne-")
    for path in sorted(start.parent.glob("*.png")):
        if path.name.startswith(start.name) and path.stat().st_size:
            name = path.stem.removeprefix(start.name)
            yield "--picture", f"features of one client's speakers, {name}={path}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pictures", required=True, metavar="PREFIX")
    with exit_with_message("rows.py"):
        systems, options = read(parser)
        found = [("--note", note(systems, options)), ("--reference", "Baseline")]
        if "fedavg" in map(systems.unlabelled, systems.main):
            found.append(("--reference", "FedAvg"))
        for seed in options.seeds:
            found += rows(systems, options, seed)
        for option, value in [*found, *extras(options)]:
            print(option, value, sep="\n")


if __name__ == "__main__":
    main()
