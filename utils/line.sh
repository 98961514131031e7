#!/usr/bin/env bash
# Run a command with the words of one line of a list appended, for an element of an array job:
#
#   line.sh LIST JOB COMMAND...
#
# JOB is the number of the line, whose words are separated by tabs. If the command fails, the log ends
# with the first of these words, which name the experiment.
set -euo pipefail
export LC_ALL=C

list=$1 job=$2
mapfile -t line < <(sed -n "${job}p" "${list}")
[ ${#line[@]} -eq 1 ] || { echo "$0: ${list} has no line ${job}" >&2 && exit 1; }
mapfile -t -d $'\t' words < <(printf '%s\t' "${line[0]}")
code=0
"${@:3}" "${words[@]}" || code=$?
[ "${code}" -eq 0 ] || echo "$0: line ${job} of ${list} failed: ${words[*]::3}" >&2
exit "${code}"
