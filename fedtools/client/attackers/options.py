"""The section `attackers` of an experiment: which clients attack, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from fedtools.audio.trigger import Tone
from fedtools.core.config import AboveZero, from_mapping, option_error
from fedtools.core.seeds import seed64

SECTION = "attackers"
Kind = Literal["label_flip", "sign_flip", "ipm", "replacement", "backdoor", "minmax", "adaptive"]
Goal = Literal["untargeted", "backdoor"]
Direction = Literal["unit", "std", "sign"]

_ALWAYS = ("share", "kind")
_BACKDOOR = ("target", "poisoned", "tone_hz", "tone_ms", "tone_dbfs")
_USES: Mapping[str, tuple[str, ...]] = {
    "label_flip": (),
    "sign_flip": ("factor",),
    "ipm": ("epsilon",),
    "replacement": ("boost", "goal"),
    "backdoor": ("boost", *_BACKDOOR),
    "minmax": ("goal", "direction"),
    "adaptive": ("goal", "direction"),
}


@dataclass(frozen=True, kw_only=True)
class Attackers:
    """Clients that attack; an option that is not of the `kind` is refused.

    Attributes:
        share: of all clients; rounded to a number, which is at least one if this is above 0.
        kind: label_flip and backdoor train on poisoned clips; sign_flip, ipm, replacement, minmax
            and adaptive send other updates than they have trained.
        factor: of sign_flip: its own honest change, times minus this.
        epsilon: of ipm: the attackers' mean change, times minus this.
        boost: of replacement and backdoor: the factor of the change towards the malicious model.
            null: of replacement, the clients of the round over its attackers; of backdoor, 1.
        goal: of replacement, minmax and adaptive: "untargeted" lowers accuracy; "backdoor", for
            keywords, moves the model to where clips with the trigger have trained it.
        direction: of minmax and adaptive with the goal untargeted: "unit", against the attackers'
            mean change; "std", against its standard deviation in each value; "sign", against its
            signs.
        target: of backdoors: the word that clips with the trigger are to be taken for.
        poisoned: of backdoors: the share of each training batch with the trigger.
        tone_hz, tone_ms, tone_dbfs: of backdoors: frequency, length and peak of the trigger, a tone
            that begins at 100 ms of a clip.
    """

    share: Annotated[float, Ge(0), Le(1)]
    kind: Kind
    factor: AboveZero = 5.0
    epsilon: AboveZero = 0.5
    boost: AboveZero | None = None
    goal: Goal = "untargeted"
    direction: Direction = "unit"
    target: str = "yes"
    poisoned: Annotated[float, Gt(0), Le(1)] = 0.5
    tone_hz: Annotated[float, Gt(0), Le(8000)] = 3000.0
    tone_ms: Annotated[float, Ge(1), Le(60_000)] = 100.0
    tone_dbfs: Annotated[float, Ge(-90), Le(0)] = -20.0

    @property
    def tone(self) -> Tone:
        """Return the trigger."""
        return Tone(self.tone_hz, self.tone_ms, self.tone_dbfs)

    @property
    def has_backdoor(self) -> bool:
        """Return whether attackers train on clips with the trigger."""
        return self.kind == "backdoor" or ("goal" in _USES[self.kind] and self.goal == "backdoor")

    @property
    def trains_poisoned(self) -> bool:
        """Return whether attackers train on poisoned data, possibly besides their own."""
        return self.kind == "label_flip" or self.has_backdoor

    @property
    def trains_honestly(self) -> bool:
        """Return whether attackers need the changes that honest training would give."""
        return not self.trains_poisoned or self.kind in ("minmax", "adaptive")

    @property
    def crafts(self) -> bool:
        """Return whether attackers send other changes than those of a training."""
        return self.kind != "label_flip"


def read_attackers(section: Mapping[str, Any], where: str | Path) -> Attackers | None:
    """Return the options of an experiment's attackers; None without the section.

    Raises:
        UserError: if an option is unknown, out of range, or not of the kind of attack.
    """
    if not section:
        return None
    place = f"{where}: {SECTION}"
    found = from_mapping(Attackers, section, place)
    known = [*_ALWAYS, *_USES[found.kind], *(_BACKDOOR if found.has_backdoor else ())]
    if found.has_backdoor and "direction" in known:
        known.remove("direction")
    for name, value in section.items():
        if name not in known:
            goal = f" with goal {found.goal}" if "goal" in known else ""
            problem = f"{name} is not used by kind {found.kind}{goal}; leave it out"
            raise option_error(problem, place, name, value)
    return found


def draw_attackers(clients: Sequence[str], share: float, seed: int) -> list[str]:
    """Return the attackers among clients, in their order: those with the lowest keyed hashes.

    The set depends on names and seed alone, and that of a larger share contains those of smaller
    ones.
    """
    count = min(len(clients), max(1, int(share * len(clients) + 0.5))) if share > 0 else 0
    order = sorted(clients, key=lambda name: (seed64(seed, "attacker", name), name))
    chosen = set(order[:count])
    return [name for name in clients if name in chosen]


@dataclass(frozen=True)
class Attack:
    """The attackers of an experiment.

    Attributes:
        options: what they do.
        clients: who they are, in C order.
    """

    options: Attackers
    clients: tuple[str, ...]

    def split(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the attackers among some clients, and the others, both in the given order."""
        known = set(self.clients)
        return [one for one in names if one in known], [one for one in names if one not in known]
