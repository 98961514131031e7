#!/usr/bin/env bash
# Runs the rounds of an experiment over Flower on this machine alone: a server and a node for each site.
#
#   utils/flower_rounds.sh EXP [option of fedtools rounds]...
#
# EXP was begun with --sites; of another one, `fedtools rounds` runs the rounds. Every site has the folder of all
# training data, as EXP names it, of which it reads its own clients' part. What sites keep, with the personal tensors
# of their clients, is in EXP.flower; those are copied to EXP/clients in the end, and `fedtools rounds` does what is
# left, such as evaluations. The same command goes on after a kill. Recipes call this with --transport flower.
set -euo pipefail
export LC_ALL=C
umask 077

say() { printf 'flower_rounds.sh: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

case ${1-} in
    --help | -h) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    "" | -*) say "give an experiment; see --help"; exit 2 ;;
esac
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ -d $1 ]] || fail "$1: no such experiment"
exp=$(cd -P -- "$1" && pwd)
command -v fedtools >/dev/null || . "$root/utils/environment.sh"
# Of a recipe's list, an experiment without clients.
[[ -s $exp/sites.tsv ]] || exec fedtools rounds "$@"
work=$exp.flower
is_done() { [[ -e $exp/round_$(printf '%04d' "$(fedtools config "$exp/config.yaml" rounds)")/.done ]]; }
! is_done || exec fedtools rounds "$@"
FEDTOOLS=$(command -v fedtools)
export FEDTOOLS FLOWER_RESTART=10

# Sites train as `fedtools rounds` would.
ngpu=0 before=
for word in "$@"; do
    [[ $before != --ngpu ]] || ngpu=$word
    before=$word
done
mkdir -p "$work/server/sites"
mapfile -t sites < <(tail -n +2 "$exp/sites.tsv" | cut -f 2 | sort -u)
mapfile -t facts < <(fedtools config "$exp/config.yaml" data.train)
pretrained=$(fedtools config "$exp/config.yaml" model.path 2>/dev/null || true)

# A string of TOML, of a path that is relative to the current folder.
quoted() { python3 -c 'import json, os, sys; print(json.dumps(sys.argv[1] + os.path.abspath(sys.argv[2])))' "$@"; }

for site in "${sites[@]}"; do
    mkdir -p "$work/$site"
    [[ -e $work/$site/capsule ]] || fedtools site "$exp" --site "$site" "$work/$site/capsule"
    words="\"--data\", $(quoted train= "${facts[0]}")"
    [[ -z $pretrained ]] || words+=", \"--pretrained\", $(quoted '' "$pretrained")"
    words+=", \"--ngpu\", \"$ngpu\""
    # All that a recipe does is the user's own.
    printf 'payloads: [models, changes, features]\ncode: true\n' >"$work/$site/site.yaml"
    words+=", \"--bounds\", $(quoted '' "$work/$site/site.yaml")"
    printf 'site = "%s"\ncapsule = "capsule"\nsite-round = [%s]\n' "$site" "$words" >"$work/$site/site.toml"
done
[[ -e $work/app ]] || fedtools flower app "$exp" "$work/app" >/dev/null

port=$(python3 -c 'import socket
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    print(one.getsockname()[1])')
# They end with this, whatever ends it.
started=()
background() {
    setpriv --pdeathsig TERM -- "$root/utils/flower.sh" "$@" &
    started+=($!)
}
stop() {
    kill "${started[@]}" 2>/dev/null || true
    wait
}
trap stop EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
background server "$work/server" "$exp" "127.0.0.1:$port"
until [[ -e $work/server/ca.crt && -e $work/server/flwr/config.toml ]]; do sleep 0.2; done
for site in "${sites[@]}"; do
    cp "$work/server/ca.crt" "$work/$site/"
    background site "$work/$site" "127.0.0.1:$port"
done
for site in "${sites[@]}"; do
    until [[ -e $work/$site/node.key ]]; do sleep 0.2; done
    cmp -s "$work/$site/node.pub" "$work/server/sites/$site.pub" ||
        cp "$work/$site/node.pub" "$work/server/sites/$site.pub"
done
"$root/utils/flower.sh" run "$work/server" "$work/app"
for site in "${sites[@]}"; do
    [[ ! -d $work/$site/capsule/clients ]] || cp -a "$work/$site/capsule/clients/." "$exp/clients/"
done
# As exec would not: the servers end first.
trap - EXIT
stop
exec fedtools rounds "$@"
