#!/usr/bin/env bash
# Makes the environment of Flower, .venv-flower at the root of the checkout, from PyPI.
#
#   utils/build_flower.sh
#
# Flower 1.42 wants typer < 0.21, rich < 15 and protobuf < 7, and so it cannot share an environment with
# fedtools, which it calls as a program. Other versions were not tried. Python 3.11 or later is needed:
# python3, or what PYTHON names. If the environment is complete, this does nothing; after a kill, the same
# command begins again.
set -euo pipefail
export LC_ALL=C

version=1.42.0

say() { printf 'build_flower.sh: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

case ${1-} in
    --help | -h) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    "") ;;
    *) say "unknown argument '$1'; see --help"; exit 2 ;;
esac

root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
place=$root/.venv-flower
is_done() { [[ $(cat "$place/.done" 2>/dev/null) == "$version" ]]; }
! is_done || exit 0

if command -v flock >/dev/null; then
    exec 9>"$root/.venv-flower.lock"
    flock 9
    rm -f "$root/.venv-flower.lock"
    ! is_done || exit 0
fi
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "Flower needs Python 3.11 or later, and $python is not; name one: PYTHON=python3.12"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
say "installing Flower $version into $place, once; takes a minute"
rm -rf "$place"
if ! { "$python" -m venv "$place" && "$place/bin/python3" -m pip install -q --no-input \
    --disable-pip-version-check "flwr==$version"; } >"$log" 2>&1; then
    tail -n 5 "$log" | sed 's/^/    | /' >&2
    fail "Flower cannot be installed; the same command tries again"
fi
echo "$version" >"$place/.done"
