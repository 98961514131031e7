"""The lists of experiments of all recipes, which utils/waves.py orders.

A line has, separated by tabs, the folder of an experiment, the folder that it waits for or "-",
and options of `fedtools init`. The folder is named after what experiments of a row of the tables
share, such as the method, and after the random seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def folder(*names: str, seed: str) -> str:
    """Return the folder of an experiment."""
    return "/".join([*names, f"seed{seed}"])


def words(**given: str | Iterable[str] | Mapping[str, object]) -> list[str]:
    """Return options of `fedtools init` in the order given.

    A list has the values of an option that is given several times, and a mapping has values of the
    form NAME=VALUE.
    """
    found = []
    for option, values in given.items():
        if isinstance(values, Mapping):
            values = [f"{name}={value}" for name, value in values.items()]
        for value in [values] if isinstance(values, str) else values:
            found += [f"--{option}", value]
    return found
