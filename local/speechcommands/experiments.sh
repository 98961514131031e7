#!/usr/bin/env bash
# Write EXP/experiments, the list of experiments that train.sh takes line by line:
#
#   experiments.sh EXP DUMP SEEDS TASKS NETWORKS METHODS ABLATIONS LANDSCAPE_CLIPS
#
# SEEDS to METHODS are lists of words. It fails where centralised training is among the methods, but
# fewer than two clients have LANDSCAPE_CLIPS clips of the last task: figure 4 could not be drawn,
# and it is better to know that before hours of training. ABLATIONS is false, or adds, of the methods,
# networks, tasks and seeds that are chosen,
#
#   clips   ALT with as many clips a round as FedAvg, instead of as many steps: ALT gives steps to
#           clients with many clips, so that as many steps are more clips
#   true    the same, and FedKWS-UI with other values of mu and lambda (figure 3): for DSCNN and
#           ResNet, on the first task, with the first seed
set -euo pipefail
export LC_ALL=C

exp=$1 dump=$2
read -r -a seeds <<<"$3"
read -r -a tasks <<<"$4"
read -r -a networks <<<"$5"
read -r -a methods <<<"$6"
ablations=$7 landscape_clips=$8

line() { # task, network, method, seed, folder, settings...
    echo "${exp}/$1/$2/$5/seed$4" "${dump}/$1" "$4" "$3" "networks.$2" "methods.$3" "${@:6}"
}

vary() { # network, option, values...
    local value
    for value in "${@:3}"; do
        line "${tasks[0]}" "$1" fedkws_ui "${seeds[0]}" "fedkws_ui.$2=${value}" \
            "method_conf.$2=${value}"
    done
}

table=${dump}/${tasks[-1]}/train/clips.tsv
if [[ " ${methods[*]} " == *" centralized "* && ${landscape_clips} -gt 0 && -e ${table} ]]; then
    enough=$(awk -F '\t' -v least="${landscape_clips}" '
        NR > 1 && ++clips[$2] == least { enough++ }
        END { print enough + 0 }' "${table}")
    if [ "${enough}" -lt 2 ]; then
        echo "$0: figure 4 wants two clients of ${landscape_clips} clips, there are ${enough}:" \
            "give a smaller --landscape_clips" >&2
        exit 1
    fi
fi

grid() {
    local task network method seed
    for task in "${tasks[@]}"; do
        for network in "${networks[@]}"; do
            for method in "${methods[@]}"; do
                for seed in "${seeds[@]}"; do
                    line "${task}" "${network}" "${method}" "${seed}" "${method}"
                done
            done
        done
    done
}

ablations() {
    local task network seed
    for network in "${networks[@]}"; do
        if [[ ${ablations} = true && " ${methods[*]} " == *" fedkws_ui "* &&
            ${network} =~ ^(dscnn|resnet)$ ]]; then
            vary "${network}" smoothing 0.0 0.1 0.3 0.5
            vary "${network}" adversarial 0.0 0.0001 0.01 0.1
        fi
        if [[ " ${methods[*]} " == *" alt "* ]]; then
            for task in "${tasks[@]}"; do
                for seed in "${seeds[@]}"; do
                    line "${task}" "${network}" alt "${seed}" alt.conserve=clips \
                        method_conf.conserve=clips method_conf.base_ratio=0.0
                done
            done
        fi
    done
}

mkdir -p "${exp}"
{
    grid
    [ "${ablations}" = false ] || ablations
} >"${exp}/experiments.new"
mv "${exp}/experiments.new" "${exp}/experiments"
