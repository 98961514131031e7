"""A typo in any recipe's YAML is reported in one line, with the file and the intended key."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, run

from fedtools.attack import options as attacks
from fedtools.client.options import ClipTraining, UtteranceTraining
from fedtools.core.config import from_mapping, read_section, read_yaml
from fedtools.core.errors import UserError
from fedtools.core.recipe_sections import SECTIONS
from fedtools.decode.beam import BeamOptions
from fedtools.federation.init import read_config, read_options
from fedtools.lm.nnlm_network import NnlmOptions
from fedtools.lm.nnlm_training import read_options as read_nnlm
from fedtools.methods import make_method
from fedtools.models.acoustic.asr import build_model, criterion_of
from fedtools.models.keywords import build_network
from fedtools.models.lfmmi.lattice import Lattice, train_denominator
from fedtools.models.pretrained.options import (
    Generation,
    Pretrained,
    is_pretrained,
    is_seq2seq,
)
from fedtools.models.training import check_optimizer
from fedtools.tasks import facts_of
from fedtools.tasks.lm.model import LmTraining

CONFIGS = sorted((ROOT / "conf").glob("*/*.yaml"))
TOKENS = ["<blank>", "<unk>", "a", "<sos/eos>"]
LATTICE = Lattice(train_denominator([[2, 2], [2]], TOKENS, 2, 10), len(TOKENS))
OTHERS = {**SECTIONS, **attacks.SECTIONS, "decode": BeamOptions}
TRAINING = {"asr": UtteranceTraining, "kws": ClipTraining, "lm": LmTraining}
# A large model takes a second, and has the keys of a small one.
SMALL = ("mini", "an4")
# Names used by a recipe, which a command line selects.
NAMES = ("networks", "methods", "variants", "tasks", "tuning", "sweeps")


# Valid models: building one takes longer than all other checks.
RIGHT: set[str] = set()


def check(path: Path, content: dict, build: bool, place: tuple) -> None:
    """Check a place's section of a file with this content, like the commands that read it."""
    plain = "fmp" if content.get("task") == "rescore" else "fedavg"
    method = place[1] if place[0] == "methods" else plain
    network = place[1] if place[0] == "networks" else next(iter(content.get("networks") or {}), "")
    # Values outside of a section are checked without it, since it would override them.
    sections = ["baseline?"] if place[0] == "baseline" else []
    if place[0] in ("networks", "methods"):
        sections = [f"networks.{network}?", f"methods.{method}?"]
    check_experiment(read_config(path, sections, []), method, path, build)
    if place[0] == "tasks":
        check_experiment(read_config(path, [".".join(place[:3])], []), place[2], path, build)
    if place[0] == "variants":
        method = "decouplefl" if plain == "fedavg" else plain
        if "dpfedavg" in content.get("methods", {}):
            method = "dpfedavg"
        sections = [f"methods.{method}?", f"variants.{place[1]}"]
        check_experiment(read_config(path, sections, []), method, path, build)
    if place[0] in OTHERS:
        own = place[0] == "decode" and is_seq2seq(content.get("model") or {})
        read_section(Generation if own else OTHERS[place[0]], path, place[0])
    if place[0] == "nnlm":
        read_nnlm(path, "nnlm")


def check_experiment(config: dict[str, Any], method: str, path: Path, build: bool) -> None:
    options = read_options(config, path, method, 0, None, {"train": "data"})
    made = make_method(method, options.method_conf, path)
    try:
        made.check(options.task, facts_of(options.task, path).parts, options.model)
    except ValueError as error:
        raise UserError(str(error), path=path) from None
    where = f"{path}: training"
    if options.task in TRAINING:
        check_optimizer(from_mapping(TRAINING[options.task], options.training, where), where)
    if search := options.training.get("search"):
        # Options of server_labels.
        kind = Generation if is_seq2seq(options.model) else OTHERS["decode"]
        from_mapping(kind, search, f"{where}.search")
    where, known = f"{path}: model", repr((options.task, options.model))
    if known in RIGHT or not options.model:
        return
    if is_pretrained(options.model):
        # In a folder that the recipe adds.
        from_mapping(Pretrained, {"path": "x", **options.model}, where)
    elif options.task == "lm":
        from_mapping(NnlmOptions, options.model, where)
    elif options.task == "kws":
        build_network(options.model, 12, where)
    elif options.task == "asr" and build:
        lattice = LATTICE if criterion_of(options.model, where) == "lfmmi" else None
        build_model(options.model, TOKENS, where, lattice)
    RIGHT.add(known)


def places(node: Any, above: tuple = ()) -> Iterator[tuple]:
    """Yield every key, as the keys that lead to it."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*above, key)
            yield from places(value, (*above, key))


def changed(content: dict, place: tuple, key: str, value: Any) -> dict:
    """Return a copy with another key and value at a place."""
    whole = copy.deepcopy(content)
    node = whole
    for name in place[:-1]:
        node = node[name]
    items = [(key, value) if name == place[-1] else (name, node[name]) for name in node]
    node.clear()
    node.update(items)
    return whole


def wrong(value: Any) -> Any:
    """Return a value of a type that the option cannot have."""
    if isinstance(value, (bool, int, float)):
        return str(value)
    if isinstance(value, list):
        return {"x": 1}
    return [{"x": value}] if isinstance(value, str) else 5


def is_tried(place: tuple, content: dict, small: bool) -> bool:
    """Return whether `check` covers a typo at a place, and it is not the recipe's own name."""
    if place[0] in ("tuning", "sweeps", "grid") or (
        place[0] in NAMES and len(place) < 3 + (place[0] == "tasks")
    ):
        return False
    return small or "model" not in place or content.get("task", "asr") != "asr"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_one_slip_in_a_recipe_is_told_in_one_line(path, tmp_path):
    content = read_yaml(path)
    small, file = path.stem in SMALL, tmp_path / path.name
    file.write_text(path.read_text())
    missed, right, mini = [], set(), path.with_name("mini.yaml")
    # Keys shared with the corpus' small configuration are tested there.
    tried = set(places(yaml.safe_load(mini.read_text()))) if path.stem not in SMALL else set()
    for place in places(content):
        if place in tried or not is_tried(place, content, small):
            continue
        value, key = content, str(place[-1])
        for name in place:
            value = value[name]
        # What is read for a place depends on three keys at most.
        if place[:3] not in right:
            file.write_text(path.read_text())
            check(file, content, small, place)
            right.add(place[:3])
        for kind, name, other in (("typo", key + key[-1], value), ("type", key, wrong(value))):
            # JSON is YAML, and takes a hundredth of the time to write.
            slipped = changed(content, place, name, other)
            file.write_text(json.dumps(slipped, indent=1))
            try:
                check(file, slipped, small, place)
            except UserError as error:
                said = str(error)
                # A method that expects a missing option names it, too.
                meant = kind == "type" or re.search(rf"mean {key!r}|needs .*\b{key}\b", said)
                if "\n" in said or not said.startswith(str(file)) or not meant:
                    missed.append((kind, place, said))
            else:
                missed.append((kind, place, "taken"))
    assert not missed, "\n".join(map(str, missed))


def test_config_types_what_it_prints(cli, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("tokens:\n  token_type: char\nlm: {order: 3}\nivectors:\n  hours: 1\n")
    keys = ("tokens.token_type", "lm.order", "ivectors.hours", "ivectors.gaussians")
    assert cli("config", file, *keys).ok().out.split() == ["char", "3", "1", "512"]
    cli("config", file, "denominator.ordr").fails(1, "no option 'denominator.ordr'")
    file.write_text("tokens:\n  token_typ: char\n")
    told = ("c.yaml:2: tokens: unknown option 'token_typ', did you mean 'token_type'?",)
    cli("config", file, "tokens.vocab_size").fails(1, *told)
    file.write_text("lm:\n  order: 3.0\n")
    cli("config", file, "lm.order").fails(1, "c.yaml:2: lm: option 'order' is 3.0: input should be")


def test_config_prints_lists_and_decimals_as_they_are_written(cli, tmp_path):
    """They name folders: 1e-4 is not 0.0001 there, nor 8 8.0."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "rescoring: {rates: [1e-4, 0.003], epsilon: 8}\nupdates: {defences: [none, a=1]}\n"
    )
    keys = ("rescoring.rates", "rescoring.epsilon", "rescoring.rounds", "updates.defences")
    said = cli("config", file, *keys, "corpus.server_hours").ok().out
    assert said == "1e-4 0.003\n8\n1 2 5 10\nnone a=1\n\n"
    file.write_text("corpus:\n  hours: [100, 10]\n")
    told = "c.yaml:2: corpus: option 'hours' has 2 values: three are expected"
    cli("config", file, "corpus.hours").fails(1, told)


def test_recipes_take_what_their_options_leave_open(tmp_path):
    """The command line has priority over the YAML; an unreadable YAML ends the script."""
    text = (ROOT / "utils" / "recipe.sh").read_text()
    (function,) = re.findall(r"^take_options\(\).*?^}$", text, re.M | re.S)
    file, script = tmp_path / "c.yaml", tmp_path / "run.sh"
    file.write_text("clips: {min_clips: 3}\nupdates: {each: 7}\n")
    lines = ["set -euo pipefail", "min_clips=$1 least= each=", function]
    lines.append('take_options "$2" clips.min_clips least=clips.min_clips updates.each')
    script.write_text("\n".join([*lines, 'echo "${min_clips} ${least} ${each}"\n']))
    assert run("bash", script, "", file).ok().out == "3 3 7\n"
    assert run("bash", script, "5", file).ok().out == "5 3 7\n"
    ended = run("bash", script, "", tmp_path / "none.yaml")
    assert ended.code == 1 and ended.out == "" and "none.yaml: cannot be read" in ended.err


def test_an_experiment_begins_with_any_section_of_a_recipe(tmp_path):
    """All sections that `fedtools options` lists; most are for other commands."""
    file = tmp_path / "c.yaml"
    for name in (*attacks.SECTIONS, *SECTIONS):
        read_options({"task": "kws", "rounds": 1, name: {}}, file, "fedavg", 0, None, {})


def test_attacks_read_their_options_first(cli, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("a1:\n  alpa: [1, 10]\na2:\n  width: true\n")
    a1 = ("attack", "a1", tmp_path, tmp_path, "--config", file)
    cli(*a1).fails(1, "c.yaml:2: a1: unknown option 'alpa', did you mean 'alpha'?")
    cli(*a1, "--set", "a1.alpha=[0, 0]").fails(1, "alpa")
    a2 = ("attack", "a2", tmp_path, tmp_path, tmp_path, "--indicator", tmp_path, "--layer", "1")
    cli(*a2, "--config", file).fails(1, "c.yaml:4: a2: option 'width' is True: input should be")
    cli("attack", "a1", tmp_path, tmp_path, "--set", "a1.alpha=[0, 0]").fails(1, "above 0")


def test_help_needs_no_pydantic():
    code = "import sys, fedtools.cli; print([m for m in ('pydantic', 'torch') if m in sys.modules])"
    assert run(sys.executable, "-c", code, cold=True).ok().out.strip() == "[]"
