"""Settings of utils/environment.sh for recipes, jobs and tests."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "PASSIVE--"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE--"),
        ({"GOMP_SPINCOUNT": "5"}, "-5-"),
        ({"KMP_BLOCKTIME": "0"}, "--0"),
    ],
)
def test_threads_wait_asleep_unless_the_user_says_otherwise(given, found):
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    shown = "-".join(f"${{{name}-}}" for name in NAMES)
    line = f'. {shlex.quote(str(ROOT / "utils/environment.sh"))} && echo "{shown}"'
    done = subprocess.run(
        ["bash", "-c", line], env=environment | given, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{found}\n"
