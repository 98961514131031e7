#!/usr/bin/env bash
# Run a command for one line of a list, as an element of an array job:
#
#   line.sh [-n] LIST JOB COMMAND...
#
# JOB is the number of the line, whose words are separated by tabs. They are appended to the command.
# In a list of experiments, which waves.py made, a command has the words EXP and OPTIONS instead, which
# stand for the experiment's folder and for all its options. The log begins with the whole command; if
# the command fails, it ends with the first words of the line, which name the experiment. With -n, the
# command is only printed.
set -euo pipefail
export LC_ALL=C

run=true
[ "$1" != -n ] || { run=false && shift; }
list=$1 job=$2
mapfile -t line < <(sed -n "${job}p" "${list}")
[ ${#line[@]} -eq 1 ] || { echo "$0: ${list} has no line ${job}" >&2 && exit 1; }
mapfile -t -d $'\t' words < <(printf '%s\t' "${line[0]}")
command=() named=false
for word in "${@:3}"; do
    case ${word} in
        EXP) command+=("${words[1]}") named=true ;;
        OPTIONS) command+=("${words[@]:3}") named=true ;;
        *) command+=("${word}") ;;
    esac
done
"${named}" || command+=("${words[@]}")
printf -v shown ' %q' "${command[@]}"
"${run}" || { echo "   ${shown}" && exit; }
# Several processes of one job share its log.
[ "${RANK:-0}" != 0 ] || echo "#${shown}"
code=0
"${command[@]}" || code=$?
[ "${code}" -eq 0 ] || echo "$0: line ${job} of ${list} failed: ${words[*]::3}" >&2
exit "${code}"
