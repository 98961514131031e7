#!/usr/bin/env bash
# Builds the documentation site from the pages of the repository, the help of commands and the
# docstrings of methods and of privacy; its pages open from disk. A broken link or anchor is an error.
# What the build needs is installed into the environment of the recipes.
set -euo pipefail

source=                 # the URL of the repository's files, for links to those that are no pages;
                        # default: such links are plain words

help_message="Usage: $0 [--source URL] [OUT]
OUT gets the site, in place of one that was built there before; default: build/site at the root of the
checkout."
. "$(dirname "${BASH_SOURCE[0]}")/parse_options.sh"
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf 'site.sh: %s\n' "$*" >&2; }
[[ $# -le 1 ]] || { say "unexpected argument '$2'; see --help"; exit 2; }
out=${1:-$root/build/site}
if [[ -e $out && ! -e $out/assets/iframe-worker.js && -n $(ls -A -- "$out") ]]; then
    say "$out exists and is not a site; name another folder"
    exit 1
fi

. "$root/utils/environment.sh"
python3 -m pip install -q --no-input --disable-pip-version-check \
    -r "$root/utils/site/requirements.txt" >&2

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# As wide as on a plain terminal, and without methods of the user's own.
COLUMNS=80 FEDTOOLS_PATH='' PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} \
    python3 "$root/utils/site/pages.py" ${source:+--source "${source%/}"} "$work"
NO_MKDOCS_2_WARNING=1 python3 -m mkdocs build --strict -f "$work/mkdocs.yml" -d "$work/site" >&2
mkdir -p -- "$(dirname -- "$out")"
rm -rf -- "$out"
mv -- "$work/site" "$out"
say "built $out/index.html"
