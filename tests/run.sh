#!/usr/bin/env bash
# Runs every test; sets up what they need, the first time. Arguments go to pytest:
#
#   tests/run.sh                              all tests, on two cores
#   tests/run.sh tests/test_score.py -k wer   some
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export LC_ALL=C
. utils/environment.sh

# Once. In an environment of the user's own, any version will do, and pip only adds what is missing.
missing=$(
    python3 - tests/requirements.txt "$root/.venv" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

for line in Path(sys.argv[1]).read_text().splitlines():
    wanted = None if line.startswith("#") else Requirement(line)
    if wanted is None or wanted.marker and not wanted.marker.evaluate():
        continue
    pinned = f"{wanted.name}{wanted.specifier}"
    try:
        if version(wanted.name) not in wanted.specifier and sys.prefix == sys.argv[2]:
            print(pinned)
    except PackageNotFoundError:
        print(pinned)
PYTHON
)
if [[ -n $missing ]]; then
    echo "tests/run.sh: installing what the tests need: ${missing//$'\n'/ }" >&2
    # shellcheck disable=SC2086  # one argument for each package
    python3 -m pip install -q --no-input --disable-pip-version-check $missing >&2
fi

# Threads that spin while they wait take the cores from the other worker: a test in double precision
# took 29 seconds of processor time on a busy machine, and takes 4.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
# A file's tests share what is expensive, and so a process. What is skipped is said, with the reason.
[[ $# -gt 0 ]] || set -- -n 2 --dist loadfile --no-loadscope-reorder --durations=20 -rs
exec python3 -m pytest "$@"
