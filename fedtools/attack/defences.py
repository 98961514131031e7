"""Defences that clients may apply to an update before sending it, so that it reveals less.

    clip=1         scale it down to at most this multiple of the median norm of the round's updates
    noise=0.5      add Gaussian noise, this multiple of the root mean square of the update's values
                   (with clip, of an update whose norm is the bound): to each of n values with a
                   standard deviation of noise * norm / sqrt(n)
    bits=8         round each tensor's values to this many bits, evenly from the least to the
                   largest
    keep=A,B       do not send the tensors that a pattern matches, as FedNorm and FedExtract do
    mean=4         secure aggregation, which partitions a round's clients into groups of at least
                   this many, of different speakers if possible: only a group's mean is visible

A defence is one of these, or several joined by "+", in the order above.

Norms are of the tensors that are sent. For clip and noise all weights together are one vector; each
tensor of BatchNorm statistics is another, with its own norm, its own median and its own noise.
Statistics have the units of what they measure, squared for a variance, and may change hundreds of
times as much as weights: in one norm with them, noise would drown the weights, and a bound would
only constrain the statistics.

This noise shows what noise would do: it is drawn from a seed that is not secret, and gives no
differential privacy (`fedtools.privacy` does, for counts of words).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np

from fedtools.attack.victims import Victims
from fedtools.core.errors import UserError
from fedtools.core.seeds import generator
from fedtools.exchange.values import STATISTICS
from fedtools.federation.federation import Federation
from fedtools.methods.base import SHARED

State = dict[str, np.ndarray]
# Lower bound of a variance, as a share of the global model's.
_LEAST_VARIANCE = 0.01
# Values that would have no effect, such as 0, are refused.
_NUMBER = r"(?=.*[1-9])\d+(\.\d+)?"
_FORMS = {"clip": _NUMBER, "noise": _NUMBER, "bits": r"[1-9]|1[0-6]", "keep": r"[^+]+",
          "mean": r"(?!1$)[1-9]\d{0,5}"}  # fmt: skip


@dataclass(frozen=True)
class Defence:
    """The options above; each is off by default."""

    clip: float = 0.0
    noise: float = 0.0
    bits: int = 0
    keep: tuple[str, ...] = ()
    mean: int = 1

    @classmethod
    def parse(cls, text: str) -> Defence:
        """Parse a text such as "clip=1+noise=0.5"; "" or "none" is no defence.

        Raises:
            UserError: for any other text.
        """
        found: dict[str, Any] = {}
        for part in text.split("+") if text not in ("", "none") else ():
            name, _, value = part.partition("=")
            if name not in _FORMS or not re.fullmatch(_FORMS[name], value) or name in found:
                remedy = "join some of clip=1 noise=0.5 bits=8 keep=PATTERN mean=4 with +"
                raise UserError(f"invalid defence {part!r} in {text!r}", remedy=remedy)
            kind = {"bits": int, "mean": int, "keep": lambda one: tuple(one.split(","))}
            found[name] = kind.get(name, float)(value)
        return cls(**found)


class Defended:
    """Victims behind a defence, as an attacker sees them.

    Args:
        victims: models that clients sent.
        defence: defence that clients apply before sending.
        start: the global model's tensors that clients began with.
        seed: random seed of noise and groups.
        within: model -> what all models of a group have in common; by default nothing.
    """

    def __init__(
        self,
        victims: Victims,
        defence: Defence,
        start: Mapping[str, np.ndarray],
        seed: int,
        within: Mapping[str, object] | None = None,
    ):
        self._victims, self._defence, self._seed = victims, defence, seed
        self._within = within or {}
        self._start = {name: np.asarray(value) for name, value in start.items()}

    def states(self, wanted: Sequence[str]) -> Iterator[tuple[str, State]]:
        """Yield states like `Victims.states`; with mean=k each is the mean of its group."""
        for name in wanted:
            if name in self._victims.refused:
                continue
            members = self.group(name)
            states = [self._one(member) for member in members]
            # Only a model's own state counts: one refused because of its group is fine in another.
            bad = [one for one, state in zip(members, states, strict=True) if state is None]
            if bad:
                reason = f"aggregated with {bad[0]!r}: {self._victims.refused[bad[0]]}"
                self._victims.refused.setdefault(name, reason)
                continue
            yield name, _mean(states)

    def _one(self, name: str) -> State | None:
        """Return what a client sends; None if it is not finite."""
        for _, state in self._victims.states([name]):
            return self.protect(name, state)
        return None

    def group(self, name: str) -> list[str]:
        """Return the model itself and the models aggregated with it."""
        if self._defence.mean == 1:
            return [name]
        return [name, *(one for one in self._groups[name] if one != name)]

    @cached_property
    def _groups(self) -> dict[str, list[str]]:
        """Return each model's group, in C order."""
        pools: dict[object, list[str]] = {}
        for name in sorted(self._victims.messages):
            pools.setdefault(self._within.get(name), []).append(name)
        random = generator(self._seed, "groups")
        speakers = self._victims.speakers
        return {
            name: group
            for pool in pools.values()
            for group in partition(pool, speakers, self._defence.mean, random)
            for name in group
        }

    def protect(self, name: str, state: Mapping[str, np.ndarray]) -> State:
        """Return what one client sends in place of a state; its name seeds the noise."""
        defence = self._defence
        update = self._change(state)
        norms, sizes = _norms(update), _sizes(update)
        if defence.clip:
            bounds = {part: defence.clip * self._medians[part] for part in norms}
            for key, value in update.items():
                part = _part(key)
                update[key] = value * min(1, bounds[part] / max(norms[part], 1e-30))
            norms = bounds
        if defence.noise:
            random = generator(self._seed, "noise", name)
            for key, value in update.items():
                part = _part(key)
                spread = defence.noise * norms[part] / np.sqrt(max(sizes[part], 1))
                update[key] = value + random.normal(0, spread, value.shape)
        if defence.bits:
            update = {key: _rounded(value, defence.bits) for key, value in update.items()}
        sent = {key: self._start[key] + value for key, value in update.items()}
        for key in sent:
            if key.endswith(".running_var"):
                # Noise must not make a variance of BatchNorm negative, or nearly 0.
                sent[key] = np.maximum(sent[key], _LEAST_VARIANCE * self._start[key])
        return {key: value.astype(state[key].dtype) for key, value in sent.items()}

    def _change(self, state: Mapping[str, np.ndarray]) -> State:
        """Return the difference of each sent tensor from the global model's."""
        return {
            key: value.astype(np.float64) - self._start[key]
            for key, value in state.items()
            if not any(fnmatchcase(key, pattern) for pattern in self._defence.keep)
        }

    @cached_property
    def _medians(self) -> dict[str, float]:
        """Return the median norm of the updates, for each part that has its own norm."""
        states = self._victims.states(sorted(self._victims.messages))
        norms = [_norms(self._change(state)) for _, state in states]
        known = [each for each in norms if np.isfinite(list(each.values())).all()]
        return {part: float(np.median([each[part] for each in known])) for part in known[0]}


def partition(
    names: Sequence[str], speakers: Mapping[str, str], least: int, random: np.random.Generator
) -> list[list[str]]:
    """Divide models into as many groups of at least `least` as there can be.

    A speaker's models are in different groups, unless the speaker has more models than there are
    groups. Apart from that, groups are drawn at random, and their sizes differ by at most one.

    Args:
        names: the models.
        speakers: model -> speaker; a model without an entry has a speaker of its own.

    Raises:
        UserError: if there are fewer models than `least`.
    """
    if least > len(names):
        problem = f"mean={least}, but there are {len(names)} models"
        raise UserError(problem, remedy="use a smaller mean")
    own: dict[tuple[str, bool], list[str]] = {}
    for name in names:
        own.setdefault((speakers.get(name, name), name in speakers), []).append(name)
    found: list[list[str]] = [[] for _ in range(len(names) // least)]
    some = list(own.values())
    for place in random.permutation(len(some)):
        # The smallest groups, in random order among those of one size.
        order = sorted(random.permutation(len(found)), key=lambda one: len(found[one]))
        for number, name in enumerate(some[place]):
            found[order[number % len(found)]].append(name)
    return [sorted(group) for group in found]


def defended(
    federation: Federation,
    victims: Victims,
    number: int,
    defence: str,
    seed: int,
    within: Mapping[str, object] | None = None,
) -> Defended:
    """Return the victims of one round behind a defence.

    Args:
        within: see `Defended`.

    Raises:
        UserError: for a defence that cannot be read, a pattern that matches nothing, or patterns
            that match all.
    """
    folder = federation.experiment.round(number).path
    own = {name: one for name, one in victims.messages.items() if one.path.parent == folder}
    start = federation.states.of_kind(SHARED, federation.states.start(number))
    of_round = Victims(own, victims.refused, victims.speakers)
    chosen = Defence.parse(defence)
    for pattern in chosen.keep:
        if not any(fnmatchcase(name, pattern) for name in start):
            problem = f"defence {defence!r}: no tensor that is sent matches {pattern!r}"
            raise UserError(problem, remedy=f"there are {min(start)} to {max(start)}")
    if all(any(fnmatchcase(name, pattern) for pattern in chosen.keep) for name in start):
        raise UserError(f"defence {defence!r}: nothing is sent", remedy="keep fewer tensors")
    return Defended(of_round, chosen, start, seed, within)


def groups_of(
    federation: Federation,
    victims: Victims,
    rounds: Sequence[int],
    defence: str,
    seed: int,
    within: Mapping[str, object] | None = None,
) -> dict[str, list[str]]:
    """Return model -> models whose mean is seen in its place, if the defence makes means."""
    found = {}
    for number in rounds if Defence.parse(defence).mean > 1 else ():
        seen = defended(federation, victims, number, defence, seed, within)
        folder = federation.experiment.round(number).path
        for name, message in victims.messages.items():
            if message.path.parent == folder:
                found[name] = seen.group(name)
    return found


def _part(name: str) -> str:
    """Return the part whose norm a tensor shares: "" for weights, its own name for a statistic."""
    return name if name.endswith(STATISTICS) else ""


def _norms(update: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the norm of each part of an update."""
    squares: dict[str, float] = {}
    for name, value in update.items():
        part = _part(name)
        squares[part] = squares.get(part, 0.0) + float(np.square(value, dtype=np.float64).sum())
    return {part: float(np.sqrt(total)) for part, total in squares.items()}


def _sizes(update: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return the number of values of each part of an update."""
    sizes: dict[str, int] = {}
    for name, value in update.items():
        sizes[_part(name)] = sizes.get(_part(name), 0) + value.size
    return sizes


def _rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """Round to the nearest of 2^bits values, spaced evenly from the least to the largest."""
    if not values.size:
        return values
    low, high = values.min(), values.max()
    if low == high:
        return values
    step = (high - low) / (2**bits - 1)
    return low + step * np.round((values - low) / step)


def _mean(states: Sequence[State]) -> State:
    if len(states) == 1:
        return states[0]
    return {
        name: (sum(state[name].astype(np.float64) for state in states) / len(states)).astype(
            states[0][name].dtype
        )
        for name in states[0]
    }
