"""Footprints on disk, the input of attacks on models.

models.<job>.tsv      model speaker status, a row for each model; written last
footprints.<job>.<number>-<layer>.ark .scp
                      for each finite model and each layer, numbered from the bottom, a matrix of
                      two rows: mean and standard deviation of the differences from the global
                      model
footprints.<job>.files names of the files above
footprints.<job>.yaml options and inputs that they were made from
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from fedtools.attack.defences import Defence, defended, groups_of
from fedtools.attack.knowledge import NO_DEFENCE
from fedtools.attack.speakers.footprints import footprints
from fedtools.attack.victims import State, Victims, find_victims, make_probe
from fedtools.core.atomic import sha256, write_text
from fedtools.core.config import read_yaml, write_yaml
from fedtools.core.errors import UserError
from fedtools.core.progress import Count
from fedtools.core.tables import read_tsv, write_tsv
from fedtools.core.text_files import read_text
from fedtools.data.ark import FeatureReader, write_ark
from fedtools.data.datadir import read_table, write_table
from fedtools.federation.federation import Federation
from fedtools.tasks.base import as_configured

COLUMNS = ("model", "speaker", "status")
OK = "ok"
# Keys of footprints.<job>.yaml that must agree for footprints to be comparable, and their names.
_ALIKE = {
    "part": "part of the layers",
    "highest": "highest layer",
    "defence": "defence",
    "models": "global model",
    "network": "kind of network",
    "indicator": "Indicator",
}


@dataclass(frozen=True)
class FootprintSetup:
    """Rounds, layers and defence of which footprints are made.

    Attributes:
        rounds: rounds in which models were sent.
        part: part of a TDNN's layers, see `fedtools.attack.options.Part`.
        highest: the last layer, from 1; 0 for all layers.
        held: models in memory at a time.
        defence: defence that clients applied to their updates, see `fedtools.attack.defences`.
        seed: random seed of a defence's noise and groups.
    """

    rounds: Sequence[int]
    part: str = "relu"
    highest: int = 0
    held: int = 16
    defence: str = ""
    seed: int = 0


@dataclass(frozen=True)
class Prints:
    """Footprints read from disk.

    Attributes:
        models: names of the models, in C order.
        speakers: the speaker of each model, "" where it is not known.
        layers: layer -> (models, 2, D).
        origin: options and inputs of all of them, from footprints.<job>.yaml.
        groups: for each model that is a mean, the models in the mean, see `Defended.group`.
    """

    models: list[str]
    speakers: list[str]
    layers: dict[str, np.ndarray]
    origin: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def defence(self) -> str:
        """Return the defence that clients applied to updates; see `fedtools.attack.defences`."""
        return str(self.origin.get("defence") or NO_DEFENCE)


@as_configured
def write_footprints(
    federation: Federation,
    indicator: Path,
    out: Path,
    setup: FootprintSetup,
    job: int = 1,
    jobs: int = 1,
) -> Path:
    """Write one job's share of the footprints of an experiment's models.

    Footprints of the same models and speech are not made again. The first job removes the files
    of jobs beyond `jobs`.

    Args:
        indicator: a data directory of speakers who have no model.
        out: output directory.
        job, jobs: number of the contiguous share, from 1, and number of shares.

    Returns:
        path of the table of models.

    Raises:
        UserError: if no models were sent, or a speaker of the Indicator is in the training data.
            Existing footprints are then unchanged.
    """
    Defence.parse(setup.defence)
    if job == 1:
        _remove_beyond(out, jobs)
    victims = find_victims(federation, setup.rounds)
    names = sorted({*victims.messages, *victims.refused})
    share = names[len(names) * (job - 1) // jobs : len(names) * job // jobs]
    table, made_from = out / f"models.{job}.tsv", out / f"footprints.{job}.yaml"
    origin = {**asdict(setup), "rounds": list(setup.rounds), "job": f"{job} of {jobs}"}
    del origin["held"]
    origin["models"] = {str(n): federation.experiment.round(n).start_sum() for n in setup.rounds}
    origin["files"] = {
        str(path): sha256(path)
        for path in sorted({victims.messages[n].path for n in share if n in victims.messages})
    }
    origin["network"] = federation.experiment.options.model
    origin["indicator"] = federation.facts.identity(indicator, False)
    every = groups_of(federation, victims, setup.rounds, setup.defence, setup.seed)
    if groups := {name: every[name] for name in share if name in every}:
        origin["groups"] = groups
    known = table.exists() and made_from.exists() and read_yaml(made_from) == origin
    if known and not _missing(out, job):
        return table
    found = _all(federation, victims, indicator, share, setup)
    # Errors occur with the first model, before any existing file is removed.
    begun = list(islice(found, 1))
    table.unlink(missing_ok=True)
    for path in out.glob(f"footprints.{job}.*"):
        path.unlink()
    out.mkdir(parents=True, exist_ok=True)
    write_yaml(made_from, origin)
    _write_job(chain(begun, found), out, job)
    rows = []
    for name in share:
        status = f"refused: {victims.refused[name]}" if name in victims.refused else OK
        if status != OK:
            print(f"{name}: {status}", file=sys.stderr)
        rows.append({"model": name, "speaker": victims.speakers.get(name, "-"), "status": status})
    write_tsv(table, COLUMNS, rows)
    return table


def _all(
    federation: Federation,
    victims: Victims,
    indicator: Path,
    names: Sequence[str],
    setup: FootprintSetup,
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield the footprints of some models, round by round, as each has its own global model."""
    wanted = [name for name in names if name in victims.messages]
    with Count("footprints", len(wanted), "models") as bar:
        for number in setup.rounds:
            folder = federation.experiment.round(number).path
            own = [name for name in wanted if victims.messages[name].path.parent == folder]
            probe = make_probe(federation, number, indicator, min(setup.held, len(own)))
            states: Iterator[tuple[str, State]] = victims.states(own)
            if setup.defence:
                states = defended(federation, victims, number, setup.defence, setup.seed).states(
                    own
                )
            for name, layers in footprints(probe, states, setup.part, setup.highest or None):
                # In the precision they are written in; finite weights can give infinite values.
                with np.errstate(over="ignore"):
                    found = {layer: matrix.astype(np.float32) for layer, matrix in layers.items()}
                bad = next(
                    (one for one, matrix in found.items() if not np.isfinite(matrix).all()), ""
                )
                if bad:
                    victims.refused[name] = f"activations of layer {bad} are not finite"
                else:
                    yield name, found
                bar.advance()


def _write_job(found: Iterator[tuple[str, dict[str, np.ndarray]]], out: Path, job: int) -> None:
    """Write a job's archives, one for each layer."""
    by_layer: dict[str, list[tuple[str, np.ndarray]]] = {}
    for name, layers in found:
        for layer, matrix in layers.items():
            by_layer.setdefault(layer, []).append((name, matrix))
    for number, (layer, matrices) in enumerate(by_layer.items(), 1):
        path = out / f"footprints.{job}.{number:02d}-{layer}.ark"
        write_table(path.with_suffix(".scp"), write_ark(path, sorted(matrices)))
    files = sorted(path.name for path in out.glob(f"footprints.{job}.*-*"))
    write_text(out / f"footprints.{job}.files", "".join(f"{name}\n" for name in files))


def _missing(out: Path, job: int) -> list[Path]:
    """Return the files that a job has written and that are missing."""
    written = out / f"footprints.{job}.files"
    names = read_text(written).split() if written.exists() else [written.name]
    return [out / name for name in names if not (out / name).exists()]


def read_footprints(out: Path) -> Prints:
    """Read the footprints of all jobs.

    Raises:
        UserError: if a job's share is missing, jobs had different options or models, or no model
            differs from the global model.
    """
    jobs, origin, groups = _origin(out)
    speakers: dict[str, str] = {}
    for job in range(1, jobs + 1):
        path = out / f"models.{job}.tsv"
        if not path.exists():
            remedy = f"run fedtools attack footprints --job {job}"
            raise UserError("missing", path=path, remedy=remedy)
        if missing := _missing(out, job):
            remedy = "run fedtools attack footprints again"
            raise UserError("missing", path=missing[0], remedy=remedy)
        for row in read_tsv(path, COLUMNS):
            if row["status"] == OK:
                speakers[row["model"]] = "" if row["speaker"] == "-" else row["speaker"]
    models = sorted(speakers)
    if not models:
        raise UserError("no model is left", path=out)
    paths: dict[str, dict[str, str]] = {}
    for path in out.glob("footprints.*.*-*.scp"):
        numbered = path.name.split(".", 2)[2].removesuffix(".scp")
        paths.setdefault(numbered, {}).update(read_table(path))
    layers = {}
    for numbered, scp in sorted(paths.items()):
        layer = numbered.partition("-")[2]
        if missing := [name for name in models if name not in scp]:
            problem = f"no footprint of {missing[0]!r} in layer {layer}"
            raise UserError(problem, path=out, remedy="run fedtools attack footprints again")
        layers[layer] = np.stack(FeatureReader(scp).read_many(models))
    if not any(values.any() for values in layers.values()):
        problem = "no layer of any model differs from the global model's"
        remedy = "attack models that are trained in a layer of the encoder"
        raise UserError(problem, path=out, remedy=remedy)
    return Prints(models, [speakers[name] for name in models], layers, origin, groups)


def join(parts: Sequence[Prints], where: Sequence[Path]) -> Prints:
    """Join the footprints of several directories.

    Raises:
        UserError: if they differ in layers, global model, Indicator or defence, or a model is in
            two of them.
    """
    for part, folder in zip(parts, where, strict=True):
        _check_alike(part.origin, parts[0].origin, folder, str(where[0]))
    names = [name for part in parts for name in part.models]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{duplicate!r} is also in another folder", path=where[-1])
    if len({tuple(part.layers) for part in parts}) > 1:
        raise UserError("the layers differ from those of the other folders", path=where[-1])
    layers = {
        layer: np.concatenate([part.layers[layer] for part in parts]) for layer in parts[0].layers
    }
    speakers = [one for part in parts for one in part.speakers]
    groups = {name: own for part in parts for name, own in part.groups.items()}
    return Prints(names, speakers, layers, parts[0].origin, groups)


def undefended(prints: Prints, parts: Sequence[Prints], where: Sequence[Path]) -> Prints | None:
    """Return the footprints of the same models without the defence, in the same order.

    Args:
        prints: footprints with or without a defence.
        parts, where: undefended footprints of several directories, and the directories.

    Returns:
        None if there is no defence.

    Raises:
        UserError: if they are missing, behind a defence themselves, or of other models, layers,
            global model or Indicator.
    """
    if prints.defence == NO_DEFENCE and not parts:
        return None
    if not parts:
        problem = f"the footprints are behind {prints.defence}, and undefended ones are not given"
        raise UserError(problem, remedy="give --undefended, of the same models")
    if prints.defence == NO_DEFENCE:
        raise UserError("--undefended is given, but the footprints are behind no defence")
    plain = join(parts, where)
    if plain.defence != NO_DEFENCE:
        raise UserError(f"made behind {plain.defence}", path=where[0])
    # Apart from the defence, they must be as comparable as any two folders.
    _check_alike({**plain.origin, "defence": prints.origin["defence"]}, prints.origin, where[0])
    place = {name: index for index, name in enumerate(plain.models)}
    if missing := [name for name in prints.models if name not in place]:
        raise UserError(f"no footprint of {missing[0]!r}", path=where[0])
    if plain.layers.keys() != prints.layers.keys():
        raise UserError("the layers differ from those behind the defence", path=where[0])
    order = [place[name] for name in prints.models]
    layers = {layer: values[order] for layer, values in plain.layers.items()}
    return Prints(prints.models, prints.speakers, layers, plain.origin)


def _check_alike(
    origin: Mapping[str, Any], other: Mapping[str, Any], path: Path, than: str = "the others"
) -> None:
    """Raise a `UserError` if footprints are not comparable with others."""
    for name, what in _ALIKE.items():
        one, two = (each.get(name) for each in (origin, other))
        if name == "models":
            # The round does not matter, only the models that they were compared with.
            one, two = (sorted((each or {}).values()) for each in (one, two))
        if one != two:
            remedy = "run fedtools attack footprints with the same options and Indicator"
            raise UserError(f"the {what} differs from that of {than}", path=path, remedy=remedy)


def _remove_beyond(out: Path, jobs: int) -> None:
    """Remove the files of jobs above `jobs`, tables first."""
    for pattern in ("models.*.tsv", "footprints.*"):
        for path in out.glob(pattern):
            job = path.name.split(".")[1]
            if job.isdigit() and int(job) > jobs:
                path.unlink()


def _origin(out: Path) -> tuple[int, dict[str, Any], dict[str, list[str]]]:
    """Return the number of jobs, the options and inputs of all of them, and their groups."""
    counts, first = set(), None
    groups: dict[str, list[str]] = {}
    for path in sorted(out.glob("footprints.*.yaml")):
        origin = read_yaml(path)
        match = re.fullmatch(r"\d+ of (\d+)", str(origin.get("job", "")))
        counts.add(int(match[1]) if match else 0)
        first = first or (path, origin)
        groups |= origin.get("groups") or {}
        _check_alike(origin, first[1], path, first[0].name)
    if first is None or len(counts) != 1 or not all(counts):
        problem = "no footprints here" if not counts else "made by different numbers of jobs"
        raise UserError(problem, path=out, remedy="run fedtools attack footprints")
    return counts.pop(), first[1], groups
