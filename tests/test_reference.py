"""The reference of options: complete, as the code is, and what `fedtools methods NAME` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml
from conftest import ROOT, fedtools, inside

PAGE = ROOT / "fedtools/OPTIONS.md"
# Options of these sections are free: torch's, ESPnet's, and settings that commands vary.
FREE = ("optim_conf", "scheduler_conf", "specaug_conf", "normalize_conf", "ctc_conf", "model_conf")
OPTIONS = "training", "method_conf", "model"


def rows() -> dict[str, list[str]]:
    """Return the cells of the rows by key; a key may be in several tables."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"\| `([\w.]+)` \| `(.*?)` \| (.+?) \| (.+) \|", line):
            # A method with another default comes after the one that it is derived from.
            found.setdefault(match[1], list(match.groups()[1:]))
    return found


def keys_in(content: object, before: str = "") -> Iterator[str]:
    """Yield the keys of a section and of the sections in it, without the sections themselves."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if name not in FREE:
            yield from () if isinstance(value, dict) else (f"{before}{name}",)
            yield from keys_in(value, f"{before}{name}.")


def sections_in(content: object) -> Iterator[dict]:
    """Yield all mappings of a file with options of an experiment, at any level."""
    if isinstance(content, dict):
        yield content
        for value in content.values():
            yield from sections_in(value)


def test_the_page_is_up_to_date():
    done = fedtools("options", env={"FEDTOOLS_PATH": ""}).ok()
    assert done.out == PAGE.read_text(encoding="utf-8"), "fedtools options fedtools/OPTIONS.md"


def test_every_option_of_the_recipes_is_on_the_page():
    known, seen = rows(), set()
    for path in ROOT.glob("conf/*/*.yaml"):
        for section in sections_in(yaml.safe_load(path.read_text(encoding="utf-8"))):
            for name in OPTIONS:
                espnet = "encoder" in (section.get("model") or {})
                for key in keys_in(section.get(name), f"{name}."):
                    if not (espnet and key.startswith("model.")):
                        listed = key.replace("training.search.", "decode.")
                        assert listed in known, f"{path}: {key}"
                        seen.add(key)
    assert len(seen) > 40


def test_rows_have_the_published_defaults():
    """By hand, from the papers' texts and the sources of other projects."""
    known = rows()
    for key, default in {
        "method_conf.proximal": "0.001",
        "method_conf.max_norm_ratio": "20.0",
        "method_conf.privacy.mechanism": "none",
        "model.network_conf.norm": "batch",
        "model.adapt.rank": "8",
        "training.decay": "0.9998",
        "clients_per_round": "null",
        "evaluate_every": "1",
        "average": "1",
        "sampling": "fixed",
    }.items():
        assert known[key][0] == default, key
    assert known["clients_per_round"][1] == "integer or number or null"
    assert known["training.labels"][1] == "transcripts, continuous"
    assert [key for key, (*_, told) in known.items() if not re.search("[a-z]{2}", told)] == []
    # What the command line and other options set are no keys.
    assert not known.keys() & {"method", "seed", "data", "defaults", "model.sum"}
    assert "method_conf.privacy.release" not in known


def test_methods_prints_the_options_of_one(tmp_path):
    said = inside("methods", "fedprox").ok().out
    assert re.search(r"^method_conf\.proximal +0\.001 +number from 0 +FedProx$", said, re.M)
    assert re.search(r"^method_conf\.local_epochs +1 +integer from 1 +Method$", said, re.M)
    assert "method_conf.proximal: mu, the weight of the proximal term." in said
    assert "method_conf" not in inside("methods", "fedprox", "fedavg").ok().out
    nested = inside("methods", "fmp").ok().out
    assert re.search(r"^method_conf\.privacy\.epsilon +1\.0", nested, re.M)
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods/mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedtools.methods import METHODS\n"
        "from fedtools.methods.fedavg import FedAvg\n\n\n"
        '@METHODS.register("mine")\n@dataclass(frozen=True)\nclass Mine(FedAvg):\n'
        '    """Mine.\n\n    Attributes:\n        share: of the way.\n    """\n\n'
        '    title = "Mine"\n    share: float = 0.5\n'
    )
    own = fedtools("methods", "mine", env={"FEDTOOLS_PATH": str(tmp_path)}).ok().out
    assert re.search(r"^method_conf\.share +0\.5 +number +Mine$", own, re.M)
    assert "method_conf.share: of the way." in own
