"""The package as seen by pip, and the command line's entry points."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, fedtools, run

import fedtools as package

# The form of fedtools-speech in file names.
DIST = "fedtools_speech"


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Make a folder with the source distribution and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    # Built from a copy, because a build leaves files next to the sources.
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
    assert wheel.name == f"{DIST}-{package.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"{DIST}-{package.__version__}.dist-info"
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
    # A folder without one would be missing in the wheel.
    folders = {path.parent for path in (ROOT / "fedtools").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_what_is_pinned_meets_what_is_declared(dist):
    """utils/requirements.txt is within setup.py's ranges, for every supported Python."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    (wheel,) = dist.glob("*.whl")
    metadata = zipfile.ZipFile(wheel).read(f"{DIST}-{package.__version__}.dist-info/METADATA")
    declared = re.findall(r"^Requires-Dist: (.+)$", metadata.decode(), re.MULTILINE)
    pins = (ROOT / "utils/requirements.txt").read_text().splitlines()
    # utils/setup.sh installs these by itself.
    own = {"espnet", "torch", "kenlm"}
    for minor in range(10, 14):
        python = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.1"}
        pinned = {}
        for line in pins:
            if line and not line.startswith("#"):
                pin = Requirement(line)
                if pin.marker is None or pin.marker.evaluate(python):
                    name = canonicalize_name(pin.name)
                    assert name not in pinned, f"{name} is duplicated on Python 3.{minor}"
                    pinned[name] = str(pin.specifier).removeprefix("==")
        for line in declared:
            wanted = Requirement(line)
            name = canonicalize_name(wanted.name)
            applies = wanted.marker is None or wanted.marker.evaluate({**python, "extra": ""})
            if applies and name not in own:
                assert name in pinned, f"{name} is not pinned for Python 3.{minor}"
                assert wanted.specifier.contains(pinned[name]), line


def test_an_environment_of_the_former_name_ends_with_one_distribution(tmp_path):
    """Where the package is installed as `fedtools`, setup.sh leaves only `fedtools-speech`."""
    root, venv = tmp_path / "a checkout", tmp_path / "a venv"
    shutil.copytree(ROOT / "fedtools", root / "fedtools", ignore=shutil.ignore_patterns("*.pyc"))
    (root / "utils").mkdir()
    for name in ("setup.sh", "build_kenlm.sh", "build_flashlight.sh", "requirements.txt"):
        shutil.copy(ROOT / "utils" / name, root / "utils")
    for name in ("LICENSE", "README.md"):
        shutil.copy(ROOT / name, root)
    run(sys.executable, "-m", "venv", "--without-pip", venv).ok()
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "fedtools" not in path.name:
            (packages / path.name).symlink_to(path)

    def named(name: str) -> str:
        """Write setup.py with a distribution's name; return its part of the step's mark."""
        text = (ROOT / "setup.py").read_text().replace("fedtools-speech", name)
        (root / "setup.py").write_text(text)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def installed() -> list[str]:
        """Return the distributions with the package, and those with the command."""
        line = "from importlib.metadata import entry_points, packages_distributions as p\n"
        line += "print(*p()['fedtools'], *{e.dist.name for e in entry_points(name='fedtools')})"
        return run(venv / "bin" / "python", "-c", line, cwd=tmp_path).ok().out.split()

    pip = (venv / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps")
    former = named("fedtools")
    run(*pip, "--no-build-isolation", "-e", root).ok()
    assert installed() == ["fedtools", "fedtools"]
    # All other steps of a set-up are done, and so was this one, with the former setup.py.
    versions = dict(
        re.findall(r"^(\w+)_version=(.+)$", (root / "utils/setup.sh").read_text(), re.M)
    )
    needs, flashlight = (
        hashlib.sha256((root / "utils" / name).read_bytes()).hexdigest()[:16]
        for name in ("requirements.txt", "build_flashlight.sh")
    )
    marks = {"venv": "made", "torch": f"default {versions['torch']}", "needs": needs}
    marks |= {"espnet": versions["espnet"], "kenlm": versions["kenlm"], "flashlight": flashlight}
    (venv / ".steps").mkdir()
    for name, key in (marks | {"fedtools": f"{former} {root} {venv}"}).items():
        (venv / ".steps" / name).write_text(f"{key}\n")
    named("fedtools-speech")
    run(root / "utils/setup.sh", "--venv", venv, env={"FEDTOOLS_TORCH": ""}).ok()
    assert installed() == ["fedtools-speech", "fedtools-speech"]
    said = run(venv / "bin" / "fedtools", "--version", cwd=tmp_path).ok().out
    assert said == f"fedtools {package.__version__}\n"


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
