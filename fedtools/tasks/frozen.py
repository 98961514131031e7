"""Outputs of a model's frozen layers on an experiment's data, computed once and kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from fedtools.files.config import from_mapping, option_error, read_yaml
from fedtools.files.experiment import Experiment
from fedtools.files.frozen import Place, place_of
from fedtools.files.progress import Count
from fedtools.models.pretrained.options import Pretrained, is_pretrained

Parts = Callable[[], Iterable[tuple[int, np.ndarray]]]
_MEGABYTE = 1e6


class FrozenOutputs:
    """The frozen layers' outputs of an experiment; see `fedtools.files.frozen`.

    Args:
        experiment: the opened experiment.
        options: of its model.
        build: returns the model.
    """

    def __init__(self, experiment: Experiment, options: Pretrained, build: Callable[[], Any]):
        self._experiment, self._options, self._build = experiment, options, build

    def make(
        self, split: str, owner: str | None, what: Iterable[object], rows: int, parts: Parts
    ) -> Place:
        """Return where the outputs for an owner's data lie; compute them if they are missing.

        Args:
            owner: the client; None for the whole split.
            what: identifies the part of the data, and how it is read.
            rows: the number of positions in all of it.
            parts: see `Place.make`.
        """
        model = self._build()
        known = [self._options.sum, model.depth, sorted(self._identities[split].items()), *what]
        shape = rows, model.encoder.size
        dtype = self._options.cache_dtype
        place = place_of(self._experiment, split, owner, known, shape, dtype)
        place.make(partial(_shown, parts, rows, f"frozen layers, {owner or split}"))
        return place

    @cached_property
    def _identities(self) -> Mapping[str, Any]:
        return read_yaml(self._experiment.path / "data.yaml")


def open_frozen(experiment: Experiment, build: Callable[[], Any]) -> FrozenOutputs | None:
    """Return the frozen layers' outputs of an experiment that keeps them; None for others."""
    config = experiment.options.model
    if not is_pretrained(config):
        return None
    options = from_mapping(Pretrained, config, experiment.path / "config.yaml")
    return FrozenOutputs(experiment, options, build) if options.cache_frozen else None


def check_size(
    config: Mapping[str, Any], where: str | Path, size: int, rows: Mapping[str, int]
) -> None:
    """Print how much disk space the kept outputs will take.

    Args:
        config: the section `model`.
        where: what it was read from.
        size: values per position.
        rows: split -> its number of positions.

    Raises:
        UserError: if that is more than the options allow.
    """
    options = from_mapping(Pretrained, config, where)
    each = size * np.dtype(options.cache_dtype).itemsize / _MEGABYTE
    sizes = ", ".join(f"{split} {count * each:.1f} MB" for split, count in rows.items())
    whole = sum(rows.values()) * each
    if whole > options.cache_limit:
        problem = f"cache_limit {options.cache_limit} MB: cache_frozen would keep {sizes}"
        raise option_error(problem, where, "cache_limit", options.cache_limit)
    print(f"outputs of frozen layers take {whole:.1f} MB on disk: {sizes}", file=sys.stderr)


def _shown(parts: Parts, rows: int, title: str) -> Iterator[tuple[int, np.ndarray]]:
    with Count(title, rows, "positions") as bar:
        for first, part in parts():
            yield first, part
            bar.advance(len(part))
