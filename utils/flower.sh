#!/usr/bin/env bash
# Runs a federation between sites over Flower 1.42: at the server, and at each site.
#
#   utils/flower.sh server FOLDER EXP HOST:PORT   at the server; sites reach it by this name or address
#   utils/flower.sh site FOLDER HOST:PORT         at a site
#   utils/flower.sh run FOLDER APP                at the server, beside the first: run the rounds
#
# `server` makes in FOLDER, the first time, certificates and server.toml, and starts a SuperLink. FOLDER/ca.crt
# is for the sites. A site's node.pub becomes FOLDER/sites/NAME.pub: from then on that node is the site NAME.
# `site` makes FOLDER/node.key and node.pub the first time. FOLDER has the server's ca.crt, the folder of
# `fedtools site`, and site.toml:
#
#   site = "east"
#   capsule = "capsule"
#   site-round = ["--data", "train=clips"]
#
# `run` gives the app of `fedtools flower app` to the SuperLink, shows its log, and does so again until all
# rounds are complete, whatever was killed; `flwr run APP here` with FLWR_HOME=FOLDER/flwr runs it once. `server`
# and `site` start again what ends, until they are interrupted. FEDTOOLS is the program that Flower calls;
# default: that of this checkout. FLOWER_RESTART: seconds before a node is started again; default: 10.
# Whoever runs `run` runs programs at all sites, as the users of their nodes.
set -euo pipefail
export LC_ALL=C
umask 077

say() { printf 'flower.sh: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
wrong() { say "$*; see --help"; exit 2; }

case ${1-} in
    --help | -h) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    server) [[ $# -eq 4 ]] || wrong "server FOLDER EXP HOST:PORT" ;;
    site) [[ $# -eq 3 ]] || wrong "site FOLDER HOST:PORT" ;;
    run) [[ $# -eq 3 ]] || wrong "run FOLDER APP" ;;
    *) wrong "server, site or run" ;;
esac
what=$1
mkdir -p -- "$2"
folder=$(cd -P -- "$2" && pwd)
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
flower=$root/.venv-flower

"$root/utils/build_flower.sh"
if [[ -z ${FEDTOOLS-} ]]; then
    # shellcheck source=utils/environment.sh
    FEDTOOLS=$(bash -c '. "$1" >&2 && command -v fedtools' - "$root/utils/environment.sh") ||
        fail "there is no fedtools"
fi
export FEDTOOLS FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
# Where Flower unpacks apps, and finds the SuperLink that is called `here`.
export FLWR_HOME=$folder/flwr
# Flower starts its programs by their names; fedtools has an environment of its own.
export PATH=$flower/bin:$PATH
unset PYTHONHOME PYTHONPATH
mkdir -p "$FLWR_HOME"

split_address() { # HOST:PORT
    [[ $1 =~ ^([A-Za-z0-9._-]+):([0-9]{1,5})$ ]] || wrong "'$1' is not HOST:PORT"
    host=${BASH_REMATCH[1]} port=${BASH_REMATCH[2]}
}

free_port() {
    "$flower/bin/python3" -c 'import socket
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    print(one.getsockname()[1])'
}

# Run a command again whenever it ends, with its output in a log, until this shell is ended.
keep() { # seconds, log, command...
    local pause=$1 log=$2 child='' code
    shift 2
    # shellcheck disable=SC2064  # the child of that moment
    trap '[[ -z $child ]] || kill "$child" 2>/dev/null; exit 0' TERM INT
    while :; do
        printf '=== %s: %s\n' "$(date '+%F %T')" "$1" >>"$log"
        # It ends with this shell, also when that is killed, and this with the script.
        setpriv --pdeathsig TERM -- "$@" >>"$log" 2>&1 &
        child=$! code=0
        while kill -0 "$child" 2>/dev/null; do
            kill -0 $$ 2>/dev/null || { kill "$child"; exit 0; }
            sleep 2 &
            wait $! || true
        done
        wait "$child" 2>/dev/null || code=$?
        say "$(basename "$1") ended ($code); it is started again in $pause s (log: $log)"
        sleep "$pause" &
        child=$!
        wait "$child" || true
    done
}

make_certificates() ( # in a shell of its own, in FOLDER
    local curve=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes) name=DNS
    [[ ! $host =~ ^[0-9.]+$ ]] || name=IP
    cd "$folder"
    if [[ ! -e ca.crt ]]; then
        openssl req -x509 "${curve[@]}" -keyout ca.key -out ca.new -days 3650 -subj "/CN=fedtools" \
            -addext "keyUsage=critical,keyCertSign,cRLSign" 2>/dev/null
        mv ca.new ca.crt
    fi
    # For other names than before, another certificate of the same authority, which sites know.
    if ! [[ -e server.crt && $(cat server.name 2>/dev/null) == "$host" ]]; then
        openssl req "${curve[@]}" -keyout server.key -out server.csr -subj "/CN=$host" 2>/dev/null
        openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 825 -out server.crt \
            -extfile <(printf 'subjectAltName=%s:%s,IP:127.0.0.1\nextendedKeyUsage=serverAuth\n' "$name" "$host") \
            2>/dev/null
        echo "$host" >server.name
        rm server.csr
    fi
)

# What flwr takes for the SuperLink named `here`.
write_connection() { # port
    "$flower/bin/python3" - "$FLWR_HOME/config.toml" "$folder/ca.crt" "$1" <<'PYTHON'
import json
import sys

path, authority, port = sys.argv[1:]
text = '[superlink]\ndefault = "here"\n\n[superlink.here]\n'
text += f'address = "127.0.0.1:{port}"\nroot-certificates = {json.dumps(authority)}\n'
with open(path, "w", encoding="utf-8") as file:
    file.write(text)
PYTHON
}

# Tell the SuperLink the keys of nodes, each with the name of its site.
register() {
    local key name said
    for key in "$folder"/sites/*.pub; do
        name=$(basename "$key" .pub)
        [[ -e $key && ! -e $folder/sites/.$name ]] || continue
        if said=$(flwr supernode register "$key" here --name "$name" 2>&1); then
            cp "$key" "$folder/sites/.$name"
            say "the node of site $name is known"
        elif [[ $said == *"already in use"* ]]; then
            cp "$key" "$folder/sites/.$name"
        else
            say "site $name: $(tr -s ' \n' ' ' <<<"$said")"
        fi
    done
}

serve() { # EXP
    local inner experiment bind=0.0.0.0
    [[ -d $1 ]] || fail "$1: no such experiment"
    experiment=$(cd -P -- "$1" && pwd)
    [[ $host != 127.* && $host != localhost ]] || bind=127.0.0.1
    make_certificates
    mkdir -p "$folder/sites"
    [[ -e $folder/server.toml ]] ||
        "$flower/bin/python3" -c 'import json, sys
for name, value in zip(("experiment", "where"), sys.argv[1:]):
    print(name, "=", json.dumps(value))' "$experiment" "$PWD" >"$folder/server.toml"
    export FEDTOOLS_FLOWER=$folder/server.toml
    inner=$(free_port)
    write_connection "$inner"
    trap 'kill $(jobs -p) 2>/dev/null; wait; exit 0' TERM INT
    (keep 2 "$folder/superlink.log" flower-superlink --host 127.0.0.1 --port "$inner" \
        --ssl-ca-certfile "$folder/ca.crt" --ssl-certfile "$folder/server.crt" --ssl-keyfile "$folder/server.key" \
        --enable-supernode-auth --database "$folder/superlink.db" --disable-runtime-dependency-installation) &
    (keep 2 "$folder/front.log" "$flower/bin/python3" "$root/utils/flower_front.py" "$bind" "$port" "$inner" \
        "$folder/server.crt" "$folder/server.key" "$folder/ca.crt") &
    # The port is open before the SuperLink answers.
    until flwr list here >/dev/null 2>&1; do sleep 1; done
    say "ready at $host:$port; sites need $folder/ca.crt, and you need their keys: $folder/sites/NAME.pub"
    while :; do
        register
        sleep 2 &
        wait $! || true
    done
}

join() {
    local one
    for one in site.toml ca.crt; do
        [[ -e $folder/$one ]] || fail "$folder/$one: missing; see --help"
    done
    if [[ ! -e $folder/node.key ]]; then
        "$flower/bin/python3" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec

folder, key = Path(sys.argv[1]), ec.generate_private_key(ec.SECP384R1())
public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
(folder / "node.pub").write_bytes(public + b"\n")
pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
(folder / "node.new").write_bytes(pem)
(folder / "node.new").rename(folder / "node.key")
PYTHON
        say "made $folder/node.pub; the server needs it, as sites/NAME.pub, and this waits until it knows it"
    fi
    export FEDTOOLS_FLOWER=$folder/site.toml
    trap 'kill $(jobs -p) 2>/dev/null; wait; exit 0' TERM INT
    # A node that is not known yet, or is started again while the server takes it for alive, ends at once: Flower
    # calls that exit code 305.
    (keep "${FLOWER_RESTART:-10}" "$folder/node.log" flower-supernode --superlink "$host:$port" \
        --root-certificates "$folder/ca.crt" --auth-supernode-private-key "$folder/node.key" \
        --port "$(free_port)") &
    wait
}

answers() { flwr list here >/dev/null 2>&1; }

# The number of a run of this app that is not over, or nothing.
going_on() {
    flwr list here --format json --limit 1 | "$flower/bin/python3" -c 'import json, sys
for run in json.load(sys.stdin)["runs"]:
    if run["status"].split(":")[0] != "finished":
        print(run["run-id"])'
}

run_app() { # APP
    local log=$folder/run.log run
    [[ -e $1/pyproject.toml ]] || fail "$1: no app; make it with fedtools flower app"
    [[ -e $FLWR_HOME/config.toml ]] || fail "$folder: no server was started here"
    while :; do
        until answers; do sleep 2; done
        run=$(going_on || true)
        if [[ -z $run ]]; then
            if ! run=$(flwr run "$1" here --format json 2>&1); then
                # It may have been killed in between.
                answers || continue
                fail "$(tr -cs '[:print:]' ' ' <<<"$run")"
            fi
            run=$(sed -n 's/.*"run-id": "\([0-9]*\)".*/\1/p' <<<"$run")
        fi
        # The app's own lines; all are in the log.
        flwr log "$run" here --stream 2>&1 | tee "$log" | sed -un 's/^fedtools: //p' || true
        ! grep -q '^fedtools: all [0-9]* rounds are complete' "$log" || break
        ! grep -q '^fedtools: stopped: ' "$log" || exit 1
        say "the run ended before its last round; it goes on in 5 s (log: $log)"
        sleep 5
    done
}

# To the end in one go: the file may be another one by then.
{
    case $what in
        server) split_address "$4"; serve "$3" ;;
        site) split_address "$3"; join ;;
        run) run_app "$3" ;;
    esac
    exit
}
