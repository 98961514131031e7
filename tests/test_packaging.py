"""The package as pip sees it, and the command line's entry points."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, fedtools, run

import fedtools as package


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """A folder with the source distribution and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    # Built from a copy, because a build leaves its traces beside the sources.
    copy = folder / "a check out"
    shutil.copytree(ROOT / "fedtools", copy / "fedtools", ignore=shutil.ignore_patterns("*.pyc"))
    for folder_beside in ("tests", "utils", "local"):
        shutil.copytree(ROOT / folder_beside, copy / folder_beside, symlinks=True)
    for name in ("setup.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    build = (sys.executable, "setup.py", "-q", "sdist", "-d", folder, "bdist_wheel", "-d", folder)
    run(*build, cwd=copy).ok()
    return folder


def test_the_wheel_holds_the_package_alone(dist):
    (wheel,) = dist.glob("*.whl")
    assert wheel.name == f"fedtools-{package.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"fedtools-{package.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"fedtools", info}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "fedtools").rglob("*.py")}
    assert modules <= names
    assert any(name.endswith("LICENSE") for name in names)
    entry = zipfile.ZipFile(wheel).read(f"{info}/entry_points.txt").decode()
    assert "fedtools = fedtools.cli:main" in entry


def test_the_source_distribution_can_be_built(dist):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        names = {name.partition("/")[2] for name in members.getnames()}
    assert {"setup.py", "LICENSE", "fedtools/__init__.py", "fedtools/cli/__init__.py"} <= names


def test_every_package_has_an_init():
    # A folder without one would be left out of the wheel.
    folders = {path.parent for path in (ROOT / "fedtools").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_what_is_pinned_meets_what_is_declared(dist):
    """utils/requirements.txt is within setup.py's ranges, for every Python that is supported."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    (wheel,) = dist.glob("*.whl")
    metadata = zipfile.ZipFile(wheel).read(f"fedtools-{package.__version__}.dist-info/METADATA")
    declared = re.findall(r"^Requires-Dist: (.+)$", metadata.decode(), re.MULTILINE)
    pins = (ROOT / "utils/requirements.txt").read_text().splitlines()
    # These, utils/setup.sh installs by itself.
    own = {"espnet", "torch", "kenlm"}
    for minor in range(10, 14):
        python = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.1"}
        pinned = {}
        for line in pins:
            if line and not line.startswith("#"):
                pin = Requirement(line)
                if pin.marker is None or pin.marker.evaluate(python):
                    name = canonicalize_name(pin.name)
                    assert name not in pinned, f"{name} comes twice on Python 3.{minor}"
                    pinned[name] = str(pin.specifier).removeprefix("==")
        for line in declared:
            wanted = Requirement(line)
            name = canonicalize_name(wanted.name)
            applies = wanted.marker is None or wanted.marker.evaluate({**python, "extra": ""})
            if applies and name not in own:
                assert name in pinned, f"{name} is not pinned for Python 3.{minor}"
                assert wanted.specifier.contains(pinned[name]), line


def test_version():
    assert fedtools("--version").ok().out == f"fedtools {package.__version__}\n"


def test_help_imports_nothing_heavy():
    line = "import sys; sys.argv = ['fedtools', '--help']\nfrom fedtools.cli import main\n"
    line += "try: main()\nexcept SystemExit: pass\n"
    line += "heavy = {'torch', 'numpy', 'espnet2', 'yaml', 'matplotlib', 'pydantic', 'rich'}\n"
    line += "print(heavy & set(sys.modules))"
    assert run(sys.executable, "-c", line).ok().out.endswith("set()\n")


def test_an_unknown_command_is_wrong_usage():
    fedtools("no-such-command").fails(2, "no-such-command")
