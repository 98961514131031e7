"""Robust aggregation: rules that a few dishonest clients cannot lead far, one file for each.

The section `method_conf.robust` names a rule and has its options; what they assume is in README.md.
A rule computes how much of each client's update to add from inner products of updates, or from
values of one coordinate; `fedtools.server.by_rule` streams over the clients' messages for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtools.core.config import from_mapping
from fedtools.core.errors import UserError
from fedtools.core.registry import Registry, undeclared
from fedtools.server.robust.base import MEAN, Rule


def _lacks(rule: type) -> str:
    """Return what a rule's class lacks, or "" if it is complete."""
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        return "is no class derived from Rule"
    return undeclared(rule)


RULES: Registry[type[Rule]] = Registry(__name__, "robust rule", _lacks)


def make_rule(options: Mapping[str, Any] | None, where: str | Path) -> Rule:
    """Make a rule from the section `robust`; raise a `UserError` for what is unknown.

    Args:
        options: "rule", the name, and the rule's own options; without any, the mean.
        where: where they are from, for messages.
    """
    given = dict(options or {})
    if given and "rule" not in given:
        problem = f"{next(iter(given))} is an option of a rule, and no rule is named"
        raise UserError(problem, path=where, remedy=f"add rule, one of {', '.join(RULES.names())}")
    name = given.pop("rule", MEAN)
    return from_mapping(RULES.get(name, where), given, where)
