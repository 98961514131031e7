# shellcheck shell=bash
# Sourced by a recipe's path.sh and by tests/run.sh: puts an environment with fedtools on PATH. This is
# the active one if fedtools is installed there, and otherwise .venv at the root of the checkout, which
# utils/setup.sh makes the first time. Neither needs KenLM's lmplz, which utils/build_kenlm.sh builds
# before a command that calls it.
#
# Sets no shell option, so that a batch system's job script can source it too.

_fedtools_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return 1

_fedtools_is_active() {
    local lacking
    case $(command -v python3) in "$_fedtools_root"/.venv/*) return 1 ;; esac
    # From outside the checkout, in which `import fedtools` works without an installation.
    lacking=$(
        cd / && python3 - 2>/dev/null <<'PYTHON'
import importlib.util

import fedtools

for name in ("torch", "espnet2", "kaldiio"):
    if not importlib.util.find_spec(name):
        print(f" the package {name},", end="")
PYTHON
    ) || return 1
    command -v fedtools >/dev/null || lacking+=" the program fedtools,"
    [[ -n $lacking ]] || return 0
    echo "path.sh: fedtools is installed in the active environment, but not ${lacking# }" \
        "using $_fedtools_root/.venv" >&2
    return 1
}

if ! _fedtools_is_active; then
    "$_fedtools_root/utils/setup.sh" || return 1
    case :$PATH: in
        :"$_fedtools_root/.venv/bin":*) ;;
        *) export PATH="$_fedtools_root/.venv/bin:$PATH" ;;
    esac
    # Container images often set the second. Nothing in .venv is compiled when it is installed, so that
    # each process would compile all that it imports: four seconds for torch.
    unset PYTHONHOME PYTHONDONTWRITEBYTECODE
    export VIRTUAL_ENV="$_fedtools_root/.venv"
    hash -r
fi
unset -f _fedtools_is_active
unset _fedtools_root

# OpenMP threads wait passively, unless the user chose otherwise: when other processes are busy too,
# threads that wait actively take processor time from the threads that they wait for.
[[ -n ${OMP_WAIT_POLICY+set}${GOMP_SPINCOUNT+set}${KMP_BLOCKTIME+set} ]] ||
    export OMP_WAIT_POLICY=PASSIVE
