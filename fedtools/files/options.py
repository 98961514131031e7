"""The options of an experiment, as its config.yaml has them: their types, ranges and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from fedtools.files.config import Natural, Section, from_mapping, read_yaml
from fedtools.files.errors import UserError

# Rounds are folders, and groups of utterances: far more than anybody runs is a slip of the pen.
MOST_ROUNDS = 1_000_000
Rounds = Annotated[int, Ge(1), Le(MOST_ROUNDS)]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an experiment is, in the order of config.yaml.

    What is here is typed by `fedtools init`, and by `read_frozen` when an experiment is opened;
    the sections by their owners, then too: `method_conf` by `make_method`, `training` by the
    task, in `begin` or its constructor, and `model` by whoever builds the model, of speech
    recognition ESPnet's classes. What was typed is an object from there on. Sections of other
    commands are in `fedtools.files.sections` and `fedtools.attack.options`.

    Attributes:
        method: a name in `fedtools.methods.METHODS`.
        task: a name in `fedtools.tasks.TASKS`.
        clients_per_round: a number, a share as a float, or None for all.
        rounds: how many by default.
        average: of how many best models.
        evaluate_every: so many rounds' models are measured.
        keep_updates: after a round is complete.
        start: the SHA-256 of the model to begin with; None draws one from `seed`.
        data: split -> data directory.
        clients: their number; 0 where nobody is federated.
    """

    method: str
    task: str = "asr"
    method_conf: Section = field(default_factory=dict)
    clients_per_round: int | float | None = None
    sampling: Literal["fixed", "poisson"] = "fixed"
    rounds: Rounds = 1
    average: Rounds = 1
    evaluate_every: Rounds = 1
    keep_updates: bool = True
    model: Section = field(default_factory=dict)
    training: Section = field(default_factory=dict)
    seed: int = 0
    start: str | None = None
    data: dict[str, str]
    clients: Natural = 0

    def __post_init__(self) -> None:
        value, total = self.clients_per_round, self.clients
        share = isinstance(value, float) and 0 < value <= 1
        # Without clients nobody is sampled, and the number is of no account.
        count = isinstance(value, int) and 0 < value <= (total or value)
        if value is not None and not share and not count:
            whose = f"{total} clients" if total else "the clients"
            problem = f"option 'clients_per_round' is {value!r}, no number or share of {whose}"
            raise ValueError(f"{problem}; give 10, or 0.1")


NAMES = tuple(field.name for field in fields(Options))


def read_frozen(path: Path) -> Options:
    """Read the options that `fedtools init` has frozen; of those nothing is left to a default.

    Raises:
        UserError: if one is missing, unknown or of a wrong type.
    """
    found = read_yaml(path)
    options = from_mapping(Options, found, path)
    for name in NAMES:
        if name not in found and name != "start":
            raise UserError(f"option {name!r} is missing", path=path)
    return options
