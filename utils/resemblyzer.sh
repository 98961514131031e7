#!/usr/bin/env bash
# Install Resemblyzer, a speaker encoder trained by others, into the environment of the recipes, for
# `fedtools attack speech` only. 16 MB, with its weights (Apache-2.0); the wheel is pinned by its hash.
# Does nothing if it is installed.
#
#   utils/resemblyzer.sh
set -euo pipefail
export LC_ALL=C

root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf 'resemblyzer.sh: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

case ${1:-} in
    --help | -h) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
[[ $# -eq 0 ]] || { say "unknown argument '$1'; see --help"; exit 2; }
. "$root/utils/environment.sh"

is_done() {
    (cd / && python3 -c 'import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, ("resemblyzer", "webrtcvad"))))') 2>/dev/null
}
! is_done || exit 0

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Without its requirements: librosa and others are installed already. It imports webrtcvad without using
# it; webrtcvad builds only with an old setuptools, but webrtcvad-wheels has the module.
install() {
    python3 -m pip install --no-input --disable-pip-version-check --progress-bar off --no-deps \
        "$@" >"$log" 2>&1 && return
    local reason
    reason=$(grep -iE '^ *(error:|.*no module named)' "$log" | tail -n 1)
    fail "pip cannot install Resemblyzer: ${reason:-$(tail -n 1 "$log")}"
}
say "installing Resemblyzer 0.1.4"
install --require-hashes -r /dev/stdin <<'REQUIREMENTS'
Resemblyzer==0.1.4 --hash=sha256:8f12eb2f1a9982d32e8db7856de754709b59c93a77bcf0ff536584b619a9dd1f
REQUIREMENTS
install webrtcvad-wheels==2.0.14.post1
is_done || fail "resemblyzer cannot be imported after its installation"
