"""Outputs of a model's frozen layers: which models have them, their making, and their size."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedtools.core.config import from_mapping, option_error
from fedtools.core.progress import Count
from fedtools.exchange.layer_cache import Compute, Outputs, Part, Place
from fedtools.models.pretrained.options import Pretrained, is_pretrained

_MEGABYTE = 1e6


def make_outputs(
    place: Place, batches: Sequence[Sequence[Part]], compute: Compute, title: str, unit: str
) -> Outputs:
    """Open outputs of frozen layers; compute them if they are missing, and show the progress.

    Args:
        place, batches, compute: see `Place.make`.
        title: whose outputs they are.
        unit: what rows count, such as "clips".
    """

    def shown(left: Sequence[Sequence[Part]]) -> Iterator[Sequence[np.ndarray]]:
        rows = place.shape[0]
        count = sum(last - first for batch in left for first, last in batch)
        what = f"outputs of frozen layers, {count} {unit}, {place.size / _MEGABYTE:.1f} MB"
        print(f"{place.path}: computing {what}", file=sys.stderr, flush=True)
        with Count(f"frozen layers, {title}", rows, unit, done=rows - count) as bar:
            for batch, found in zip(left, compute(left), strict=True):
                yield found
                bar.advance(sum(last - first for first, last in batch))

    place.make(batches, shown)
    return place.open()


def options_of(config: Mapping[str, Any], where: str | Path) -> Pretrained | None:
    """Return the options of a model whose frozen layers' outputs are cached; None for others.

    Args:
        config: the section `model`.
        where: what it was read from.
    """
    if not is_pretrained(config):
        return None
    options = from_mapping(Pretrained, config, where)
    return options if options.cache_frozen else None


def check_size(
    config: Mapping[str, Any],
    where: str | Path,
    sizes: Mapping[str, int],
    *,
    complete: bool = False,
) -> None:
    """Print how much disk space the cached outputs will take.

    Args:
        config: the section `model`.
        where: what it was read from.
        sizes: split -> bytes of its outputs.
        complete: whether all are there, so that nothing is printed.

    Raises:
        UserError: if that is more than the options allow.
    """
    options = from_mapping(Pretrained, config, where)
    named = ", ".join(f"{split} {size / _MEGABYTE:.1f} MB" for split, size in sizes.items())
    whole = sum(sizes.values()) / _MEGABYTE
    if whole > options.cache_limit:
        problem = f"cache_limit {options.cache_limit} MB: cache_frozen would keep {named}"
        raise option_error(problem, where, "cache_limit", options.cache_limit)
    if complete:
        return
    print(f"outputs of frozen layers take {whole:.1f} MB on disk: {named}", file=sys.stderr)
