#!/usr/bin/env bash
# One line of a list of experiments: begin, all rounds, accuracy on the test clips.
#
#   train.sh LIST JOB CONFIG NGPU [init|rounds]
#
# The last word does only one half of it: several processes, of which each runs the second half
# with its RANK, begin an experiment once. Line JOB of LIST is, as experiments.sh writes it:
#
#   EXP DATA SEED METHOD SECTION... [a.b=value]...
#
# where every SECTION of CONFIG is laid over its top level, and tasks.<number of classes>.METHOD, if
# there is one, after them. Runs in the recipe's directory; a killed one goes on.
set -euo pipefail
export LC_ALL=C

list=$1 job=$2 config=$3 ngpu=$4 half=${5:-}
read -r -a line < <(sed -n "${job}p" "${list}")
exp=${line[0]} data=${line[1]} seed=${line[2]} method=${line[3]}
options=()
for word in "${line[@]:4}"; do
    case ${word} in
        *=*) options+=(--set "${word}") ;;
        *) options+=(--section "${word}") ;;
    esac
done

if [[ ${half} != rounds ]]; then
    classes=$(wc -l <"${data}/train/classes.txt")
    fedtools init "${exp}" --config "${config}" --method "${method}" --seed "${seed}" \
        --data "train=${data}/train" --data "valid=${data}/valid" --data "test=${data}/test" \
        "${options[@]}" --section "tasks.${classes}.${method}?"
fi
[[ ${half} = init ]] || fedtools rounds "${exp}" --ngpu "${ngpu}" --evaluate test
