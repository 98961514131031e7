"""The papers' values, in paper_values.tsv, against conf/*/paper.yaml and the options' defaults.

A row of the table has the value that must be in force, `one of [...]` where the paper tried
several, or `*`, and the paper's section and wording. In place of a section, "open" means that the
paper does not report it; "other", that our value differs from the paper's; and "own", that the
paper has no such option. Every option set by paper.yaml is in the table.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache

import pytest
import yaml
from conftest import ROOT

from fedtools.client.options import UtteranceTraining
from fedtools.core.config import from_mapping
from fedtools.core.tables import read_tsv
from fedtools.methods import make_method

RECIPES = {
    "commonvoice": "asr1",
    "speechcommands": "kws1",
    "ami": "rescore1",
    "tedlium3": "attack1",
}
COLUMNS = ("recipe", "key", "value", "section", "said")
SILENT = ("open", "other", "own")
ROWS = read_tsv(ROOT / "tests" / "paper_values.tsv", COLUMNS)


@cache
def config_of(recipe: str) -> dict:
    return yaml.safe_load((ROOT / "conf" / recipe / "paper.yaml").read_text())


def leaves(options: Mapping, above: str = "") -> dict[str, object]:
    """Return dotted option names -> values, none of which is a section unless it is empty."""
    found: dict[str, object] = {}
    for name, value in options.items():
        section = isinstance(value, dict) and value
        found |= leaves(value, f"{above}{name}.") if section else {f"{above}{name}": value}
    return found


def in_force(recipe: str, key: str) -> object:
    """Return an option's value: from paper.yaml, the recipe's script, or the default."""
    config = config_of(recipe)
    if (found := leaves(config)).get(key) is not None:
        return found[key]
    kind, _, name = key.rpartition(".")
    if key.startswith("run.sh "):
        scripts = [ROOT / "egs" / recipe / RECIPES[recipe] / "run.sh"]
        scripts += sorted((ROOT / "local" / recipe).glob("data.sh"))
        text = "\n".join(path.read_text() for path in scripts)
        name = key.partition(" ")[2]
        # The last assignment is that of a real corpus.
        pattern = rf'^{name}="?([^"#\n]+?)"?(?:\s+#.*)?$|\$\{{{name}:=([^}}]*)\}}'
        return "".join(re.findall(pattern, text, re.M)[-1])
    if kind == "training":
        return getattr(from_mapping(UtteranceTraining, config["training"], "here"), name)
    if kind == "model.encoder_conf":
        from fedtools.models.acoustic.tdnn import TdnnEncoder

        return inspect.signature(TdnnEncoder).parameters[name].default
    fmp = ROOT / "conf" / recipe / "fmp.yaml"
    if kind == "rescoring":
        return yaml.safe_load(fmp.read_text())[kind][name]
    if kind == "method_conf":
        fmp = yaml.safe_load(fmp.read_text())
        return getattr(make_method("fmp", fmp["method_conf"], "here"), name)
    method = re.fullmatch(r"methods\.(\w+)\.method_conf", kind)[1]
    section = (config.get("methods") or {}).get(method) or {}
    options = (config.get("method_conf") or {}) | (section.get("method_conf") or {})
    return getattr(make_method(method, options, "here"), name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_papers_values_are_in_force(recipe):
    rows = [row for row in ROWS if row["recipe"] == recipe]
    assert len([row for row in rows if row["section"] not in SILENT]) > 10
    for row in rows:
        wanted, where = row["value"], f"{recipe}, {row['key']}, section {row['section']}"
        if wanted == "*" or "*" in row["key"]:
            assert row["section"] in SILENT, where
            continue
        found = in_force(recipe, row["key"])
        if row["key"].startswith("run.sh "):
            assert found == wanted, where
            continue
        one_of = wanted.startswith("one of ")
        values = yaml.safe_load(wanted.removeprefix("one of "))
        for value in values if one_of else [values]:
            # YAML reads 1.0e-4 as a number, and 1e-4 as a string.
            found = list(found) if isinstance(found, tuple) else found
            assert type(found) is type(value), where
        assert (found in values) if one_of else (found == values), f"{where}: {found!r}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_whatever_paper_yaml_sets_is_in_the_table(recipe):
    """Rows have the paper's value or are marked open; each table pattern matches an option."""
    keys = [row["key"] for row in ROWS if row["recipe"] == recipe]
    assert len(keys) == len(set(keys))
    found = leaves(config_of(recipe))
    unknown = [key for key in found if not any(fnmatchcase(key, one) for one in keys)]
    assert not unknown, f"conf/{recipe}/paper.yaml: not in tests/paper_values.tsv: {unknown}"
    silent = [row for row in ROWS if row["recipe"] == recipe and row["section"] in SILENT]
    for row in silent:
        assert row["said"] and any(fnmatchcase(key, row["key"]) for key in found), row


def test_every_recipe_of_a_paper_is_in_the_table():
    assert {path.parent.name for path in ROOT.glob("conf/*/paper.yaml")} == set(RECIPES)
