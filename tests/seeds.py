"""The seed of tests that draw at random: each commit has another one, which is printed."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Repeats a red test: FEDTOOLS_TESTS_SEED=123 tests/run.sh tests/test_soak.py
VARIABLE = "FEDTOOLS_TESTS_SEED"


def commit_seed(root: Path = ROOT) -> int:
    """Return the seed of a commit, or without git of the sources; a variable has precedence."""
    if given := os.environ.get(VARIABLE):
        return int(given)
    words = ("git", "-C", str(root), "rev-parse", "HEAD")
    try:
        named = subprocess.run(words, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        files = sorted((root / "fedtools").rglob("*.py"))
        named = b"".join(path.read_bytes() for path in files)
    seed = int.from_bytes(hashlib.sha256(named).digest()[:4], "big") >> 2
    # Shown by pytest where a test fails.
    print(f"{VARIABLE}={seed}")
    return seed
