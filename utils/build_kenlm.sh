#!/usr/bin/env bash
# Build KenLM's `lmplz` and `build_binary` from the source on PyPI.
#
#   utils/build_kenlm.sh BIN_DIR [PYTHON]
#
# The two programs are written to BIN_DIR; PYTHON (default: python3) provides pip. A C++ compiler is
# needed. If they are missing, CMake comes from PyPI, and Boost from the Debian or Ubuntu archive,
# unpacked for this build alone: nothing is installed, and no root is needed.
set -euo pipefail
export LC_ALL=C

version=0.3.0

usage() { echo "usage: utils/build_kenlm.sh BIN_DIR [PYTHON]" >&2; exit 2; }
fail() { echo "build_kenlm.sh: $*" >&2; exit 1; }

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

[[ $# -eq 1 || $# -eq 2 ]] || usage
mkdir -p "$1"
bin_dir=$(cd "$1" && pwd)
python=${2:-python3}
command -v "${CXX:-c++}" >/dev/null ||
    fail "no C++ compiler; install one (Debian, Ubuntu: apt-get install g++ make)"

# Not inside the checkout, whose path may have spaces, which some build tools do not support.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

if ! command -v cmake >/dev/null || ! command -v make >/dev/null; then
    "$python" -m pip install -q --target "$work/tools" cmake ninja
    export PATH="$work/tools/bin:$PATH" PYTHONPATH="$work/tools" CMAKE_GENERATOR=Ninja
fi

"$python" -m pip download -q --no-deps --no-binary kenlm "kenlm==$version"
tar -xzf "kenlm-$version.tar.gz"
# Of these two Boost libraries, one is only for KenLM's own tests and the other is header-only.
sed -i -E '/^ *(system|unit_test_framework)$/d' "kenlm-$version/CMakeLists.txt"

configure() { cmake -S "kenlm-$version" -B build -DCMAKE_BUILD_TYPE=Release "$@"; }
if ! configure; then
    echo "build_kenlm.sh: no usable Boost in the system; unpacking the distribution's for this build"
    (unpack_boost "$work/boost") ||
        fail "no Boost; install it (Debian, Ubuntu: apt-get install libboost-program-options-dev" \
            "libboost-thread-dev; Fedora: dnf install boost-devel)"
    rm -rf build
    # Static, because the unpacked libraries are removed after the build.
    configure -DBOOST_ROOT="$work/boost/usr" -DBoost_USE_STATIC_LIBS=ON
fi
cmake --build build --parallel "$(nproc)" --target lmplz build_binary

for program in lmplz build_binary; do
    # Renamed into place, so that a killed build leaves no partial program.
    cp "build/bin/$program" "$bin_dir/.$program.new"
    mv "$bin_dir/.$program.new" "$bin_dir/$program"
done
