"""Code that changes between the rounds of an experiment: one's own files, and defaults."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from pathlib import Path

import keywords
import pytest
import yaml
from conftest import fedtools, run
from keyword_world import OWN_NETWORK

METHOD = '''
from dataclasses import dataclass

from fedtools.methods import METHODS
from mine_helpers.shares import SHARE
from fedtools.methods.mine_base import Base


@METHODS.register("mymethod")
@dataclass(frozen=True)
class MyMethod(Base):
    """A part of the way."""

    title = "Part of the way"

    part: float = 1.0

    def server(self, server):
        from fedtools.methods import mine_late

        server.mean()
        server.step(lambda delta, kept: self.part * SHARE * mine_late.ALL * delta, {})
'''
BASE = """
from dataclasses import dataclass

from fedtools.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Base(FedAvg):
    title = "Base"
    patience: int = 3
"""
# Path in $FEDTOOLS_PATH, or on PYTHONPATH -> content.
FILES = {
    "plug/methods/mymethod.py": METHOD,
    "plug/methods/mine_base.py": BASE,
    "plug/methods/mine_late.py": "ALL = 1.0\n",
    "plug/methods/unrelated.py": "x = 1\n",
    "plug/keywords/mynet.py": OWN_NETWORK,
    "python/mine_helpers/__init__.py": "",
    "python/mine_helpers/shares.py": "SHARE = 1.0\n",
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """Begin an experiment of a method and a network outside the repository; run a round."""
    root = tmp_path_factory.mktemp("own")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write(root / name, text)
    keywords.pack(root / "train", {"c0": [3, 2, 1, 4], "c1": [1, 2, 3, 4]})
    model = {"network": "mynet", "network_conf": {"norm": "group"}}
    keywords.config_file(root / "c.yaml", model=model, rounds=9, clients_per_round=2)
    environment = {"FEDTOOLS_PATH": str(root / "plug"), "PYTHONPATH": python_path(root / "python")}
    words = "init", root / "exp", "--config", root / "c.yaml", "--method", "mymethod"
    fedtools(*words, "--data", f"train={root / 'train'}", env=environment).ok()
    fedtools("rounds", root / "exp", "--to", "1", env=environment).ok()
    return root, environment


def write(file: Path, text: str, seconds=itertools.count(1)) -> None:
    """Write a module with a time of its own: by whole seconds Python tells compiled ones."""
    file.write_text(text)
    at = next(seconds)
    os.utime(file, (at, at))


def python_path(*folders: Path) -> str:
    return ":".join([*map(str, folders), str(Path(__file__).parents[1])])


def test_config_has_all_defaults_and_code_the_own_files(begun):
    root, _ = begun
    frozen = yaml.safe_load((root / "exp/config.yaml").read_text())
    assert frozen["model"] == {"network": "mynet", "network_conf": {"norm": "group"}}
    assert frozen["defaults"]["model"] == {"network_conf": {"width": 7}}
    own = frozen["defaults"]["method_conf"]
    assert (own["part"], own["patience"], own["weighting"]) == (1.0, 3, "uniform")
    assert frozen["defaults"]["training"]["scheduler"] is None
    wanted = {
        name: hashlib.sha256(FILES[path].encode()).hexdigest()
        for name, path in (
            ("fedtools.methods.mymethod", "plug/methods/mymethod.py"),
            ("fedtools.methods.mine_base", "plug/methods/mine_base.py"),
            ("fedtools.methods.mine_late", "plug/methods/mine_late.py"),
            ("fedtools.models.keywords.mynet", "plug/keywords/mynet.py"),
            ("mine_helpers", "python/mine_helpers/__init__.py"),
            ("mine_helpers.shares", "python/mine_helpers/shares.py"),
        )
    }
    assert yaml.safe_load((root / "exp/code.yaml").read_text()) == wanted


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("plug/methods/mymethod.py", "part: float = 1.0", "part: float = 0.5"),
        ("plug/methods/mine_base.py", "patience: int = 3", "patience: int = 4"),
        ("plug/methods/mine_late.py", "1.0", "2.0"),
        ("plug/keywords/mynet.py", ".relu()", ".tanh()"),
        ("python/mine_helpers/shares.py", "1.0", "0.9"),
    ],
)
def test_a_change_between_rounds_is_refused(begun, name, old, new):
    root, environment = begun
    file = root / name
    assert old in file.read_text()
    try:
        write(file, file.read_text().replace(old, new))
        for words in (("rounds", root / "exp"), ("train-local", root / "exp")):
            fedtools(*words, env=environment).fails(1, f"{name}: changed since {root}/exp began")
    finally:
        write(file, FILES[name])


def test_the_same_code_elsewhere_goes_on(begun):
    """A folder that moved, and a file that the experiment does not use."""
    root, environment = begun
    write(root / "plug/methods/unrelated.py", "x = 2\n")
    (root / "plug").rename(root / "moved")
    try:
        moved = environment | {"FEDTOOLS_PATH": str(root / "moved")}
        fedtools("rounds", root / "exp", "--to", "2", env=moved).ok()
        words = "init", root / "exp", "--config", root / "c.yaml", "--method", "mymethod"
        fedtools(*words, "--data", f"train={root / 'train'}", env=moved).ok()
    finally:
        (root / "moved").rename(root / "plug")


def test_a_changed_default_is_refused_by_its_name(begun, tmp_path):
    """As where fedtools itself changes: no file is compared."""
    root, environment = begun
    exp = tmp_path / "exp"
    run("cp", "-r", root / "exp", exp).ok()
    (exp / "code.yaml").unlink()
    sums = [one for one in (exp / "sha256sums").read_text().splitlines() if "code.yaml" not in one]
    (exp / "sha256sums").write_text("".join(f"{line}\n" for line in sums))
    file = root / "plug/methods/mymethod.py"
    try:
        for new, said in (("0.5", "is 0.5 now"), ("1.0\n    more: int = 2", None)):
            write(file, METHOD.replace("part: float = 1.0", f"part: float = {new}"))
            done = fedtools("rounds", exp, "--to", "3", env=environment)
            if said:
                wanted = "the default of method_conf.part was 1.0 when the experiment began"
                done.fails(1, f"{exp}/config.yaml: {wanted}, and {said}")
            else:
                done.ok()
    finally:
        write(file, METHOD)


def test_the_version_of_an_installed_plugin_is_recorded(begun, tmp_path):
    """By pip itself, which copies the files, or leaves them in place with --editable."""
    root, environment = begun
    source, site = tmp_path / "source", tmp_path / "site"
    (source / "myplug").mkdir(parents=True)
    for folder in ("methods", "keywords"):
        run("cp", "-r", root / "plug" / folder, source / "myplug").ok()
        (source / "myplug" / folder / "__init__.py").touch()
    (source / "myplug/__init__.py").touch()
    setup = "name='my-plug', version='1.2.3', packages=find_packages()"
    (source / "setup.py").write_text(f"from setuptools import *\nsetup({setup})\n")
    pip = sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"
    run(*pip, "--no-index", "--target", site, source, cold=True).ok()
    own = {
        "FEDTOOLS_PATH": str(site / "myplug"),
        "PYTHONPATH": python_path(root / "python", site),
    }
    exp = tmp_path / "exp"
    words = "init", exp, "--config", root / "c.yaml", "--method", "mymethod"
    fedtools(*words, "--data", f"train={root / 'train'}", env=environment | own).ok()
    assert yaml.safe_load((exp / "software.yaml").read_text())["my-plug"] == "1.2.3"
    assert "fedtools.methods.mymethod" in yaml.safe_load((exp / "code.yaml").read_text())
    assert "my-plug" not in yaml.safe_load((root / "exp/software.yaml").read_text())
