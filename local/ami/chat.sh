#!/usr/bin/env bash
# Fetch text that is far from meetings: written open chat of 1,315 people, 2.5 million words.
#
#   local/ami/chat.sh FILE       one sentence a line, normalised like the words of meetings
#
# It is the Chit Chat Challenge dataset (MIT licence), from the wheel chitchat-dataset 0.9.0, 8 MB, on
# the Python package index, pinned by its hash. If FILE exists, the script does nothing.
set -euo pipefail
export LC_ALL=C

# The physical path, because a recipe's local/ is a link.
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)

say() { printf 'chat.sh: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

case ${1:-} in
    --help | -h) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
[[ $# -eq 1 && -n $1 ]] || { say "give a file; see --help"; exit 2; }
[[ ! -s $1 ]] || exit 0
mkdir -p "$(dirname -- "$1")"
file=$(cd "$(dirname -- "$1")" && pwd)/$(basename -- "$1")

. "$root/utils/environment.sh"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say "fetching chitchat-dataset 0.9.0"
if ! python3 -m pip download --no-input --disable-pip-version-check --progress-bar off --no-deps \
    --only-binary :all: --require-hashes -r /dev/stdin -d "$work" >"$work/pip.log" 2>&1 <<'REQUIREMENTS'
chitchat-dataset==0.9.0 --hash=sha256:7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e
REQUIREMENTS
then
    reason=$(grep -iE '^ *(error:|.*no module named)' "$work/pip.log" | tail -n 1)
    fail "pip cannot get chitchat-dataset: ${reason:-$(tail -n 1 "$work/pip.log")}"
fi
python3 -m zipfile -e "$work"/*.whl "$work/unpacked"
"$here/chat.py" "$work/unpacked/chitchat_dataset/dataset.json" "$file"
