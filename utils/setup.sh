#!/usr/bin/env bash
# Make the virtual environment that recipes and tests run in, once.
#
#   utils/setup.sh [--venv DIR]          (default: .venv at the root of the checkout)
#
# Needs Python 3.10 to 3.13 with its venv module, and PyPI. A recipe's path.sh
# calls it; if the environment is complete it does nothing. After a kill, the same command continues
# with the step that was interrupted. All output is in DIR/setup.log.
#
# Environment: FEDTOOLS_PYTHON  the Python to use, instead of a search on PATH
#              FEDTOOLS_TORCH   requirement to install as PyTorch, e.g. 'torch==2.4.1+cpu'
set -euo pipefail
export LC_ALL=C

torch_version=2.13.0

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

say() { printf '%s\n' "$*" >&2; }
fail() { say "setup.sh: $*"; exit 1; }

while [[ $# -gt 0 ]]; do
    case $1 in
        --venv) [[ $# -ge 2 ]] || { say "setup.sh: --venv needs a directory"; exit 2; }
            venv=$2; shift 2 ;;
        --help | -h) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) say "setup.sh: unknown argument '$1'; see --help"; exit 2 ;;
    esac
done
mkdir -p "$venv"
venv=$(cd "$venv" && pwd)
python=$venv/bin/python
log=$venv/setup.log
marks=$venv/.steps

hash_of() { cat "$@" | sha256sum | cut -c 1-16; }

# The environment has absolute paths, so a moved checkout repeats the steps that depend on them.
installed="$(hash_of "$root/setup.py") $root $venv"
everything="$(hash_of "$root"/setup.py "$root"/utils/{setup.sh,requirements.txt}) $installed"
# Once chosen, a PyTorch is kept until FEDTOOLS_TORCH asks for another.
torch="default $torch_version"
if [[ -n ${FEDTOOLS_TORCH:-} ]]; then
    torch="chosen $FEDTOOLS_TORCH"
elif [[ $(cat "$marks/torch" 2>/dev/null) == chosen* ]]; then
    torch=$(cat "$marks/torch")
fi

is_done() {
    [[ -x $python && $(cat "$venv/.done" 2>/dev/null) == "$everything $torch" ]]
}
! is_done || exit 0

# ---------------------------------------------------------------------------------------------
# One set-up at a time; the lock is released when the process ends, for whatever reason.
if command -v flock >/dev/null; then
    exec 9>"$venv/.lock"
    if ! flock --nonblock 9; then
        say "setup.sh: another set-up of $venv is running; waiting for it"
        flock 9
    fi
    ! is_done || exit 0
fi

number=0
steps=4
ticker=
trap '[[ -z $ticker ]] || kill "$ticker" 2>/dev/null' EXIT

# Show the time that a long step has taken: every second on a terminal, every 30 s in a file.
tick() {
    local label=$1 start=$SECONDS
    exec 9>&-
    while sleep 1 && kill -0 "$$" 2>/dev/null; do
        if [[ -t 2 ]]; then
            printf '\r%s %3d s' "$label" $((SECONDS - start)) >&2
        elif (((SECONDS - start) % 30 == 0)); then
            say "    ... $((SECONDS - start)) s"
        fi
    done
}

# step NAME KEY LABEL FUNCTION: run FUNCTION unless it has succeeded for the same KEY before.
step() {
    local name=$1 key=$2 label start code=0
    number=$((number + 1))
    label=$(printf '[%d/%d] %-44s' "$number" "$steps" "$3")
    if [[ $(cat "$marks/$name" 2>/dev/null) == "$key" ]]; then
        say "$label   done before"
        return
    fi
    start=$SECONDS
    [[ -t 2 ]] || say "[$number/$steps] $3"
    tick "$label" &
    ticker=$!
    # An installation that was killed may lack files of a package that looks complete to pip.
    pip_mode=()
    [[ ! -e $marks/$name.begun ]] || pip_mode=(--ignore-installed)
    touch "$marks/$name.begun"
    printf '\n===== %s: %s\n' "$(date '+%F %T')" "$3" >>"$log"
    set +e
    (
        set -e
        "$4"
    ) 4>&2 >>"$log" 2>&1
    code=$?
    set -e
    kill "$ticker" 2>/dev/null
    wait "$ticker" 2>/dev/null || true
    ticker=
    if [[ $code -ne 0 ]]; then
        [[ ! -t 2 ]] || say ""
        grep -v "^Ignoring " "$log" | tail -n 12 | sed 's/^/    | /' >&2
        fail "step '$3' failed; its output is in $log; the same command continues from here"
    fi
    printf '%s\n' "$key" >"$marks/$name.new"
    mv "$marks/$name.new" "$marks/$name"
    rm "$marks/$name.begun"
    if [[ -t 2 ]]; then
        printf '\r%s %3d s\n' "$label" $((SECONDS - start)) >&2
    else
        say "    $((SECONDS - start)) s"
    fi
}

# Print a line for the user from inside a step, whose output goes to the log.
note() {
    printf '%s\n' "$*"
    printf '\r    %s\n' "$*" >&4
}

# Python compiles a module when it is first imported; to compile all takes longer than the rest of a
# set-up, and most are never imported.
install() {
    "$python" -m pip install --no-input --progress-bar off --no-compile "${pip_mode[@]}" "$@"
}

# ---------------------------------------------------------------------------------------------
# Candidates must run, not only exist: a version manager has shims for versions it has not installed.
fitting() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' \
        >/dev/null 2>&1
}

find_python() {
    local candidate
    if [[ -n ${FEDTOOLS_PYTHON:-} ]]; then
        fitting "$FEDTOOLS_PYTHON" ||
            fail "FEDTOOLS_PYTHON=$FEDTOOLS_PYTHON is not Python 3.10 to 3.13 with venv"
        echo "$FEDTOOLS_PYTHON"
        return
    fi
    for candidate in python3 python3.{13,12,11,10}; do
        if fitting "$candidate"; then echo "$candidate"; return; fi
    done
    fail "no Python 3.10 to 3.13 with venv on PATH (Debian, Ubuntu: apt-get install python3-venv); or" \
        "name one in FEDTOOLS_PYTHON"
}

make_venv() {
    # Remove remains of an interrupted or broken environment, which would count as installed.
    find "$venv" -mindepth 1 -maxdepth 1 ! -name .lock ! -name .steps ! -name setup.log \
        -exec rm -rf {} +
    find "$marks" -mindepth 1 ! -name venv.begun -delete
    "$base" -m venv "$venv"
    install --upgrade pip==26.3
}

install_torch() {
    local cpu_index=https://download.pytorch.org/whl/cpu requirement=${torch#* }
    "$python" -m pip uninstall -y torch || true
    if [[ $torch == chosen* ]]; then
        if [[ $requirement == *+cpu* ]]; then
            install --extra-index-url "$cpu_index" "$requirement"
        else
            install "$requirement"
        fi
        return
    fi
    if [[ $(uname -s) == Linux ]] && ! nvidia-smi -L >/dev/null 2>&1; then
        note "no NVIDIA GPU here: the CPU build (another: FEDTOOLS_TORCH='torch==$torch_version')"
        # With few retries, because the index may be unreachable; dependencies come in the next step.
        if install --retries 1 --timeout 15 --no-deps --extra-index-url "$cpu_index" \
            "torch==$torch_version+cpu"; then
            return
        fi
        note "the CPU build is not available from $cpu_index: PyPI's build instead (larger)"
    fi
    install "torch==$torch_version"
}

install_needs() {
    # Environments of earlier versions have the modules of ufal-* from two packages without that prefix.
    # All four go first: to uninstall one removes the files of its namesake.
    rm -f "$marks"/{espnet,kenlm,flashlight}
    "$python" -m pip uninstall -y {,ufal-}{kenlm,flashlight-text}
    install --no-deps -r "$root/utils/requirements.txt"
}

install_fedtools() {
    # Environments of earlier versions have the package under the name `fedtools`. Two distributions
    # of one package would share the command, which goes when either is uninstalled. From "/", since
    # pip takes what a build has left in the current directory for an installation.
    (cd / && "$python" -m pip uninstall -y fedtools)
    install --no-deps --no-build-isolation -e "$root"
    cd /
    "$python" -c '
import importlib
for name in ("fedtools.cli", "torch", "espnet2.asr.espnet_model", "espnet2.layers.log_mel",
             "flashlight.lib.text.decoder.kenlm", "kenlm"):
    importlib.import_module(name)'
}

# ---------------------------------------------------------------------------------------------
if ! "$python" -c 'import pip' 2>/dev/null; then
    rm -f "$marks/venv"
elif [[ -n ${FEDTOOLS_PYTHON:-} ]]; then
    of='import sys; print(sys.version)'
    [[ $("$python" -c "$of") == "$("$FEDTOOLS_PYTHON" -c "$of")" ]] || rm -f "$marks/venv"
fi
mkdir -p "$marks"
base=$python
[[ -e $marks/venv ]] || base=$(find_python)
say "Setting up $venv, once: about a minute on two idle cores, 0.4 GB of downloads, 1.5 GB of disk (more" \
    "with CUDA); log: $log"
version=$("$base" -c 'import platform; print(platform.python_version())')

step venv made "virtual environment, Python $version" make_venv
step torch "$torch" "PyTorch ${torch#* }" install_torch
step needs "$(hash_of "$root/utils/requirements.txt")" "packages, ESPnet among them" install_needs
step fedtools "$installed" "fedtools" install_fedtools

printf '%s\n' "$everything $torch" >"$venv/.done.new"
mv "$venv/.done.new" "$venv/.done"
say "Set-up done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
