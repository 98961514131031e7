#!/usr/bin/env bash
# Run a command, unless it has been run to its end before; then print again what it printed:
#
#   once.sh FOLDER STATE COMMAND...
#
# FOLDER gets a file with the output of each command that has succeeded. STATE stands for all else that the
# results depend on, such as a sum of input files: with another state, the command runs again.
set -euo pipefail
export LC_ALL=C

folder=$1
key=$(printf '%s\0' "${@:2}" | sha256sum)
file=${folder}/${key%% *}
if [ -f "${file}" ]; then
    cat "${file}"
    exit 0
fi
mkdir -p "${folder}"
part=${file}.$$
trap 'rm -f "${part}"' EXIT
"${@:3}" 2>&1 | tee "${part}"
mv "${part}" "${file}"
