"""The reference of all options of a configuration: `fedtools options PAGE.md` writes the page."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import fedtools
from fedtools.attack.options import SECTIONS as OF_ATTACKS
from fedtools.audio.augment import Augment
from fedtools.client.attackers.options import Attackers
from fedtools.client.options import ClipTraining, UtteranceTraining
from fedtools.core.recipe_sections import SECTIONS as OF_RECIPES
from fedtools.decode.beam import BeamOptions
from fedtools.exchange.options import Options
from fedtools.lm.nnlm_network import NnlmOptions
from fedtools.lm.nnlm_training import NnlmTraining
from fedtools.methods import METHODS
from fedtools.methods.base import Method
from fedtools.models.acoustic.tdnn import TdnnEncoder
from fedtools.models.adapt.adaptation import Adapt
from fedtools.models.keywords import NETWORKS
from fedtools.models.keywords.base import Sizes
from fedtools.models.pretrained.options import Generation, Pretrained
from fedtools.models.training import Training
from fedtools.privacy.options import Privacy
from fedtools.privacy.secagg.plan import Options as SecureSums
from fedtools.report.keys import keys_of
from fedtools.server.robust import RULES
from fedtools.tasks.lm.model import LmTraining

_ROOT = Path(fedtools.__file__).resolve().parent
# Set by the command line or the data, and no keys of a configuration.
_GIVEN = ("method", "seed", "start", "data", "clients", "defaults")
_HEADER = ("Key", "Default", "Values", "Meaning")
_ABOUT = """\
All keys of the YAML of `fedtools init --config`, with their defaults, values, meaning and the file
that declares them. `--set training.batch_size=8` sets one on the command line, and `--section NAME`
merges a section of the file into its top level. `fedtools methods NAME` prints the options of one
method, also of your own. An experiment's `config.yaml` has the defaults of all options that were
not given, in its section `defaults`."""
_ESPNET = """\
`encoder: transformer`, `conformer` or `branchformer`, with `encoder_conf`, `specaug_conf`,
`normalize_conf`, `ctc_conf` and `model_conf`, are ESPnet's classes of these names, with ESPnet's
keys and defaults; `criterion` is `ctc` or `lfmmi`, and `input_size` the number of values in a
frame."""

_ROBUST = """\
`robust: {rule: multi_krum, attackers: 0.2}`: the name of a rule, by default `mean`, and its own
options. What each rule assumes is in [`server/robust/README.md`](server/robust/README.md)."""


def page() -> str:
    """Return the reference of all options as a page in Markdown."""
    parts = [
        "# Options of a configuration",
        "<!-- Written by: fedtools options fedtools/OPTIONS.md -->",
        _ABOUT,
        *_part("Experiment", "", Options, skip=_GIVEN),
        *_methods(),
        *_part("Clients that attack", "attackers", Attackers),
        "## Models: `model`",
        *_networks(),
        *_part("A pretrained model", "model", Pretrained, level=3),
        *_part("A part of a model", "model.adapt", Adapt, level=3),
        "### Speech recognition",
        _ESPNET,
        *_part("TDNN: `encoder: tdnn`", "model.encoder_conf", TdnnEncoder, level=4),
        *_part("Neural language models", "model", NnlmOptions, level=3),
        "## Training: `training`",
        *_part("Every task with models", "training", Training, level=3),
        *_part("Speech recognition", "training", UtteranceTraining, level=3),
        *_part("Keyword spotting", "training", ClipTraining, level=3),
        *_part("Augmentation of clips", "training.augment", Augment, level=3),
        *_part("Federated neural language models", "training", LmTraining, level=3),
        *_part("Neural language models: `fedtools train-nnlm`", "nnlm", NnlmTraining, level=3),
        "## Decoding: `decode`, and `training.search` with `server_labels: beam`",
        *_part("CTC", "decode", BeamOptions, level=3),
        *_part("Whisper's decoder", "decode", Generation, level=3),
        "## Attacks",
    ]
    for name, kind in OF_ATTACKS.items():
        parts += _part(f"`{name}`", name, kind, level=3)
    parts.append("## Recipes, and commands before an experiment exists")
    for name, kind in OF_RECIPES.items():
        parts += _part(f"`{name}`", name, kind, level=3)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _methods() -> list[str]:
    parts = ["## Methods: `method_conf`", *_part("Every method", "method_conf", Method, level=3)]
    for name in METHODS.names():
        method = METHODS.get(name, None)
        if Path(inspect.getfile(method)).is_relative_to(_ROOT):
            parts += _part(f"{method.title}: `--method {name}`", "method_conf", method, level=3)
    parts += _part("Privacy", "method_conf.privacy", Privacy, level=3)
    parts += _part("Secure sums", "method_conf.sums_conf", SecureSums, level=3)
    parts += ["### Robust rules: `method_conf.robust`", _ROBUST]
    for name in RULES.names():
        rule = RULES.get(name, None)
        if Path(inspect.getfile(rule)).is_relative_to(_ROOT):
            parts += _part(f"`rule: {name}`", "method_conf.robust", rule, level=4)
    return parts


def _networks() -> list[str]:
    parts = _part("Every keyword network", "model.network_conf", Sizes, level=3)
    for name in NETWORKS.names():
        kind = NETWORKS.get(name, None)
        if Path(inspect.getfile(kind)).is_relative_to(_ROOT):
            parts += _part(f"{kind.title}: `network: {name}`", "model.network_conf", kind, level=4)
    return parts


def _part(
    title: str, section: str, kind: type, level: int = 2, skip: Sequence[str] = ()
) -> list[str]:
    """Return a heading, where the options come from, and their table; inherited ones by name."""
    keys, own = [key for key in keys_of(kind) if key.name not in skip], []
    tabled = {Method, Sizes, Training, *map(partial(METHODS.get, where=None), METHODS.names())}
    inherited: dict[type, list[str]] = {}
    for key in keys:
        if (
            key.owner is kind
            or key.owner not in tabled
            or key.default != _default_in(key.owner, key.name)
        ):
            own.append(key)
        else:
            inherited.setdefault(key.owner, []).append(key.name)
    prefix = f"{section}." if section else ""
    rows = [[f"`{prefix}{k.name}`", f"`{k.default}`", k.values, _plain(k.meaning)] for k in own]
    file = Path(inspect.getfile(kind)).resolve().relative_to(_ROOT)
    about = [f"Source: [`{file}`]({file})."]
    for owner, names in inherited.items():
        about.append(f"Also those of `{owner.__name__}`: {', '.join(names)}.")
    if not keys:
        about.insert(0, "No options.")
    # Not aligned: a longer cell would change all rows of its table.
    lines = [_HEADER, ["---"] * len(_HEADER), *rows]
    table = ["\n".join(f"| {' | '.join(line)} |" for line in lines)] if rows else []
    return [f"{'#' * level} {title}", " ".join(about), *table]


def _default_in(owner: type, name: str) -> str:
    return next((key.default for key in keys_of(owner) if key.name == name), "")


def _plain(text: str) -> str:
    """Return a text whose characters mean themselves in a table of Markdown, but for code."""
    return re.sub(r"(`[^`]*`)|([<*|])", lambda at: at[1] or f"\\{at[2]}", text)
