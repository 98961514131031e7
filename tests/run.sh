#!/usr/bin/env bash
# Runs the tests; installs their requirements the first time. The last line is what they cost.
#
#   tests/run.sh                              the tests, but for those of LONG in conftest.py: 25 minutes
#   tests/run.sh --all                        all, as .ci/run does: 30 minutes on two cores
#   tests/run.sh tests/test_score.py -k wer   some; all arguments are passed to pytest
set -euo pipefail
[[ ${1-} != --help ]] || { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export LC_ALL=C
. utils/environment.sh
utils/build_kenlm.sh --background

# Once. In a user's own environment any version is accepted, and pip only adds missing packages.
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
    python3 -m pip install -q --no-input --no-compile --disable-pip-version-check $missing >&2
fi
utils/build_kenlm.sh

# Tests of a file share expensive fixtures, and so a process: one more than there are cores, since
# some wait for disks, kills and Flower. Skipped tests are listed with reasons.
workers=$(($(nproc) + 1))
how=(-n "$((workers < 8 ? workers : 8))" --dist loadfile --no-loadscope-reorder --durations=20 -rs)
case "$*" in
    "") set -- "${how[@]}" --short ;;
    --all) set -- "${how[@]}" ;;
esac
exec python3 -m pytest "$@"
