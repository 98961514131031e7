#!/usr/bin/env bash
# Build KenLM's `lmplz` and `build_binary`, which no package has, from the source on PyPI; this takes a
# minute on two cores.
#
#   utils/build_kenlm.sh [--background]
#
# The two programs are written into the environment of the recipes; if they are on PATH, this does
# nothing. With --background it returns at once, and the same command without it waits for that build. A
# C++ compiler is needed. If they are missing, CMake comes from PyPI, and Boost from the Debian or Ubuntu
# archive, unpacked for this build alone: nothing else is installed, and no root is needed.
set -euo pipefail
export LC_ALL=C

version=0.3.0
programs=(lmplz build_binary)

say() { printf 'build_kenlm.sh: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

case ${1-} in
    --help | -h) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    "" | --background) [[ $# -le 1 ]] || { say "one argument at most; see --help"; exit 2; } ;;
    *) say "unknown argument '$1'; see --help"; exit 2 ;;
esac

is_done() { command -v "${programs[@]}" | wc -l | grep -qx "${#programs[@]}"; }
! is_done || exit 0

root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/utils/environment.sh"
! is_done || exit 0
command -v "${CXX:-c++}" >/dev/null || fail "KenLM's lmplz, for n-grams, has to be compiled, and there is" \
    "no C++ compiler; install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)"
prefix=$(python3 -c 'import sys; print(sys.prefix)')
bin_dir=$prefix/bin
log=$prefix/kenlm.log
[[ -w $bin_dir && -w $prefix ]] || fail "cannot write KenLM's lmplz to $bin_dir; put it on PATH by other means"

# Download Boost's packages with all that they depend on, and unpack them into $1/usr.
unpack_boost() {
    local target=$1 packages=() apt=()
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    mkdir -p "$target/debs" "$target/lists/partial" "$target/cache/archives/partial"
    cd "$target/debs"
    # The package lists of a container are often empty or stale; private lists need no root.
    apt=(-o "Dir::State::Lists=$target/lists" -o "Dir::Cache=$target/cache" -o Debug::NoLocking=1)
    [[ $EUID -ne 0 ]] || apt+=(-o APT::Sandbox::User=root)
    apt-get "${apt[@]}" -qq update || return 1
    mapfile -t packages < <(
        apt-cache "${apt[@]}" depends --recurse --no-recommends --no-suggests --no-conflicts \
            --no-breaks --no-replaces --no-enhances libboost-program-options-dev libboost-thread-dev |
            grep '^libboost' | sort -u
    )
    [[ ${#packages[@]} -gt 0 ]] || return 1
    apt-get "${apt[@]}" -qq download "${packages[@]}" || return 1
    local deb
    for deb in *.deb; do dpkg -x "$deb" "$target" || return 1; done
}

configure() { cmake -S "kenlm-$version" -B build -DCMAKE_BUILD_TYPE=Release "$@"; }

build() {
    local program
    # Not inside the checkout, whose path may have spaces, which some build tools do not support.
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    cd "$work"
    if ! command -v cmake >/dev/null || ! command -v make >/dev/null; then
        python3 -m pip install -q --target "$work/tools" cmake ninja
        export PATH="$work/tools/bin:$PATH" PYTHONPATH="$work/tools" CMAKE_GENERATOR=Ninja
    fi
    python3 -m pip download -q --no-deps --no-binary kenlm "kenlm==$version"
    tar -xzf "kenlm-$version.tar.gz"
    # Of these two Boost libraries, one is only for KenLM's own tests and the other is header-only.
    sed -i -E '/^ *(system|unit_test_framework)$/d' "kenlm-$version/CMakeLists.txt"
    if ! configure; then
        say "no usable Boost in the system; unpacking the distribution's for this build"
        (unpack_boost "$work/boost") ||
            fail "no Boost; install it (Debian, Ubuntu: apt-get install libboost-program-options-dev" \
                "libboost-thread-dev; Fedora: dnf install boost-devel)"
        rm -rf build
        # Static, because the unpacked libraries are removed after the build.
        configure -DBOOST_ROOT="$work/boost/usr" -DBoost_USE_STATIC_LIBS=ON
    fi
    cmake --build build --parallel "$(nproc)" --target "${programs[@]}"
    # Renamed into place, so that a killed build leaves no partial program.
    for program in "${programs[@]}"; do
        cp "build/bin/$program" "$bin_dir/.$program.new"
        mv "$bin_dir/.$program.new" "$bin_dir/$program"
    done
}

if [[ ${1-} == --background ]]; then
    say "building KenLM's lmplz in the background, once (log: $log)"
    "$root/utils/build_kenlm.sh" </dev/null &>/dev/null &
    exit 0
fi

# One build at a time; the lock is released when its processes end, for whatever reason.
if command -v flock >/dev/null; then
    exec 9>"$prefix/.kenlm.lock"
    if ! flock --nonblock 9; then
        say "waiting for the build of KenLM's lmplz (log: $log)"
        flock 9
    fi
    ! is_done || exit 0
fi
say "building KenLM's lmplz, once; takes a minute (log: $log)"
set +e
(
    set -e
    build
) >"$log" 2>&1
code=$?
set -e
if [[ $code -ne 0 ]]; then
    tail -n 12 "$log" | sed 's/^/    | /' >&2
    fail "the build of KenLM's lmplz failed; its output is in $log; the same command tries again"
fi
