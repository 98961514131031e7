#!/usr/bin/env bash
# Runs every test; sets up what they need, the first time. Arguments go to pytest:
#
#   tests/run.sh                     all tests
#   tests/run.sh tests/test_score.py -k wer
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# The tables of the tests are sorted by bytes, as a recipe's path.sh has it.
export LC_ALL=C
. utils/environment.sh

needs=tests/requirements.txt
# Once: as long as the same packages are there, pip is not even started.
if ! python3 - "$needs" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    lines = [line for line in Path(sys.argv[1]).read_text().splitlines() if "==" in line]
    sys.exit(any(version(name) != wanted for name, _, wanted in (x.partition("==") for x in lines)))
except PackageNotFoundError:
    sys.exit(1)
PYTHON
then
    echo "tests/run.sh: installing what the tests need ($needs)" >&2
    python3 -m pip install -q --no-input --disable-pip-version-check -r "$needs" >&2
fi

workers=(-n 2)
for argument in "$@"; do
    # A single file or a chosen test is sooner done in one process.
    case $argument in -n* | -k* | -x | --pdb | *.py*) workers=(-n 0) ;; esac
done
exec python3 -m pytest "${workers[@]}" "$@"
