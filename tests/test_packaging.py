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
    for name in ("setup.py", "LICENSE", "README.md", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    commit_all(copy)
    build = (sys.executable, "setup.py", "-q", "sdist", "-d", folder, "bdist_wheel", "-d", folder)
    run(*build, cwd=copy, cold=True).ok()
    return folder


def commit_all(folder: Path) -> None:
    """Commit all files of a folder."""
    git = ("git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b.c")
    run("git", "init", "-q", folder).ok()
    run(*git, "add", ".").ok()
    run(*git, "commit", "-qm", "all").ok()


def test_an_experiment_of_the_wheel_knows_its_commit(dist, tmp_path):
    """What pip installs lies in no checkout."""
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    head = run("git", "-C", dist / "a check out", "rev-parse", "HEAD").ok().out.strip()
    line = "from pathlib import Path; from fedtools.core.provenance import record; record(Path())"
    run(sys.executable, "-c", line, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, cold=True).ok()
    assert (tmp_path / "software.yaml").read_text().splitlines()[0] == f"git: {head}"


def test_a_package_is_built_where_git_does_not_read_the_checkout(tmp_path):
    """As in a container whose user does not own the files, or without git."""
    copy = tmp_path / "checkout"
    (copy / "fedtools").mkdir(parents=True)
    (copy / "fedtools/__init__.py").write_text('__version__ = "1.0"\n')
    (copy / ".git").write_text("gitdir: /nowhere\n")
    shutil.copy(ROOT / "setup.py", copy)
    run(sys.executable, "setup.py", "-q", "build_py", cwd=copy, cold=True).ok()
    assert (copy / "build/lib/fedtools/__init__.py").exists()
    assert not (copy / "build/lib/fedtools/commit.txt").exists()


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
    own = {"torch"}
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


class Checkout:
    """A checkout of setup.sh and the package, and an environment that has this one's packages."""

    def __init__(self, folder: Path):
        self.root, self.venv, self.folder = folder / "a checkout", folder / "a venv", folder
        ignored = shutil.ignore_patterns("*.pyc")
        shutil.copytree(ROOT / "fedtools", self.root / "fedtools", ignore=ignored)
        (self.root / "utils").mkdir()
        for name in ("setup.sh", "requirements.txt"):
            shutil.copy(ROOT / "utils" / name, self.root / "utils")
        for name in ("LICENSE", "README.md", "setup.py"):
            shutil.copy(ROOT / name, self.root)
        run(sys.executable, "-m", "venv", "--without-pip", self.venv, cold=True).ok()
        self.packages = Path(sysconfig.get_path("purelib", vars={"base": str(self.venv)}))
        self.python = self.venv / "bin" / "python"

    def has(self, *left_out: str) -> None:
        """Link this environment's packages, but those whose names begin so."""
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if not path.name.startswith(("fedtools", "__editable__", *left_out)):
                (self.packages / path.name).symlink_to(path)

    def hash_of(self, name: str) -> str:
        """Return a file's part of the key of a step."""
        return hashlib.sha256((self.root / name).read_bytes()).hexdigest()[:16]

    def is_done(self, **steps: str) -> None:
        """Mark steps of a set-up as done, with their keys; the first two with the present ones."""
        text = (self.root / "utils/setup.sh").read_text()
        torch = re.search(r"^torch_version=(.+)$", text, re.M)[1]
        (self.venv / ".steps").mkdir(exist_ok=True)
        for name, key in ({"venv": "made", "torch": f"default {torch}"} | steps).items():
            (self.venv / ".steps" / name).write_text(f"{key}\n")

    def set_up(self, **env: str):
        env = {"FEDTOOLS_TORCH": "", "FEDTOOLS_PYTHON": ""} | env
        return run(self.root / "utils/setup.sh", "--venv", self.venv, env=env, cold=True)

    def says(self, line: str) -> list[str]:
        """Return the words that a line of Python prints in the environment."""
        return run(self.python, "-c", line, cwd=self.folder).ok().out.split()


def test_an_environment_of_the_former_name_ends_with_one_distribution(tmp_path):
    """Where the package is installed as `fedtools`, setup.sh leaves only `fedtools-speech`."""
    checkout = Checkout(tmp_path)
    checkout.has()
    root, text = checkout.root, (ROOT / "setup.py").read_text()

    def installed() -> list[str]:
        """Return the distributions with the package, and those with the command."""
        line = "from importlib.metadata import entry_points, packages_distributions as p\n"
        line += "print(*p()['fedtools'], *{e.dist.name for e in entry_points(name='fedtools')})"
        return checkout.says(line)

    pip = (checkout.python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation")
    (root / "setup.py").write_text(text.replace("fedtools-speech", "fedtools"))
    run(*pip, "-e", root).ok()
    assert installed() == ["fedtools", "fedtools"]
    # All other steps of a set-up are done, and so was this one, with the former setup.py.
    former = f"{checkout.hash_of('setup.py')} {root} {checkout.venv}"
    checkout.is_done(needs=checkout.hash_of("utils/requirements.txt"), fedtools=former)
    (root / "setup.py").write_text(text)
    checkout.set_up().ok()
    assert installed() == ["fedtools-speech", "fedtools-speech"]
    said = run(checkout.venv / "bin" / "fedtools", "--version", cwd=tmp_path).ok().out
    assert said == f"fedtools {package.__version__}\n"


def wheel(folder: Path, name: str, version: str, modules: list[str]) -> None:
    """Write a wheel whose modules say which distribution they are from."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = dict.fromkeys(modules, f"OWNER = {name!r}\n")
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
        archive.writestr(f"{info}/RECORD", record)


FORMER = {"kenlm": "0.3.0", "flashlight-text": "0.0.7"}
MODULES = {"kenlm": ["kenlm.py"], "flashlight-text": ["flashlight/lib.py", "flashlight/old.py"]}


@pytest.mark.parametrize("newer_first", [False, True], ids=["from-former", "former-over-present"])
def test_former_packages_of_the_decoder_are_replaced(tmp_path, newer_first):
    """Packages that own the same files: none is missing, even if a set-up stops between the two."""
    checkout, wheels = Checkout(tmp_path), tmp_path / "wheels"
    checkout.has("kenlm", "flashlight", "ufal")
    wheels.mkdir()
    pins = (ROOT / "utils/requirements.txt").read_text()
    present = dict(re.findall(r"^ufal-([\w-]+)==(\S+)", pins, re.M))
    assert present.keys() == FORMER.keys()
    for name, version in FORMER.items():
        wheel(wheels, name, version, MODULES[name])
        wheel(wheels, f"ufal-{name}", present[name], MODULES[name][:1])
    pinned = [f"ufal-{name}=={version}" for name, version in present.items()]
    (checkout.root / "utils/requirements.txt").write_text("\n".join(pinned) + "\n")
    pip = (checkout.python, "-m", "pip", "install", "-q", "--no-deps", "--no-index")
    for names in [pinned] * newer_first + [list(FORMER)]:
        run(*pip, "--find-links", wheels, *names).ok()
    done = f"{checkout.hash_of('setup.py')} {checkout.root} {checkout.venv}"
    checkout.is_done(needs="of an earlier version", espnet="202511", kenlm="0.3.0", fedtools=done)

    # Without the wheels the step fails when the former packages are gone.
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PIP_CONSTRAINT": ""}
    stopped = checkout.set_up(**offline, PIP_FIND_LINKS="")
    assert stopped.code == 1
    assert "step 'packages, ESPnet among them' failed" in stopped.err
    owned = "from importlib.metadata import distributions as d\n"
    owned += "print(*sorted(n for n in (i.name for i in d()) if n.endswith(('kenlm', 'text'))))"
    assert not checkout.says(owned)
    # The same command continues.
    checkout.set_up(**offline, PIP_FIND_LINKS=str(wheels)).ok()
    assert checkout.says(owned) == ["ufal-flashlight-text", "ufal-kenlm"]
    line = "import flashlight.lib, kenlm; print(kenlm.OWNER, flashlight.lib.OWNER)"
    assert checkout.says(line) == ["ufal-kenlm", "ufal-flashlight-text"]
    assert not (checkout.packages / "flashlight/old.py").exists()
    steps = {path.name for path in (checkout.venv / ".steps").iterdir()}
    assert steps == {"venv", "torch", "needs", "fedtools"}


def test_version():
    assert fedtools("--version", cold=True).ok().out == f"fedtools {package.__version__}\n"


def test_help_imports_nothing_heavy():
    line = "import sys; sys.argv = ['fedtools', '--help']\nfrom fedtools.cli import main\n"
    line += "try: main()\nexcept SystemExit: pass\n"
    line += "heavy = {'torch', 'numpy', 'espnet2', 'yaml', 'matplotlib', 'pydantic', 'rich'}\n"
    line += "print(heavy & set(sys.modules))"
    assert run(sys.executable, "-c", line, cold=True).ok().out.endswith("set()\n")


def test_an_unknown_command_is_wrong_usage():
    fedtools("no-such-command").fails(2, "no-such-command")
