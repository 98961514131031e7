# shellcheck shell=bash
# Sourced by run.sh after utils/asr_steps.sh: personalised models, and the attacks on them, with the
# caller's options and folders.
# shellcheck disable=SC2154  # run.sh's options and folders, and the commands of cmd.sh

# Print the held-out sets of parts that have one: utterances of a part's speakers that are in no model.
held_sets() {
    local part
    for part in part1 part2; do
        [ ! -d "${data}/${part}_held" ] || echo "${part}_held"
    done
}

# Print the list of experiments: the global model, and federations of one round, which start from it and
# whose clients are a part's speakers. The cost of defences is measured on the part's held-out utterances
# and on the Indicator's speakers.
plan() {
    local part own
    experiment "${global}" - "${seed}" baseline centralized "${train}" "${valid}" "${assets[@]}" \
        ${rounds:+--set "rounds=${rounds}"}
    for part in part1 part2; do
        own=(--data "newcomers=${data}/indicator${iv}")
        [ ! -d "${data}/${part}_held" ] || own+=(--data "held=${data}/${part}_held${iv}")
        experiment "${exp}/${part}" "${global}" "${seed}" methods.fedavg fedavg \
            "${part}${sp}${iv}" "${valid}" "${own[@]}" --start "${global}/model.safetensors" "${assets[@]}" \
            ${local_epochs:+--set "method_conf.local_epochs=${local_epochs}"}
    done
}

attack_a1() {
    local place part job name folders
    log "Stage 7: footprints of ${exp}/part1 and ${exp}/part2, ${parts}"
    for place in ${parts}; do
        for part in part1 part2; do
            for job in $(seq "${nj}"); do
                tabbed "${exp}/${part}" "${exp}/${part}/footprints.${place}" --part "${place}" \
                    --job "${job}"
            done
        done
    done | each "${train_cmd}" footprints fedtools attack footprints --round 1 \
        --indicator "${data}/indicator${iv}" --nj "${nj}" --ngpu "${ngpu}"
    for place in ${parts}; do
        for name in part2 "part1 part2"; do
            folders=()
            for part in ${name}; do folders+=("${exp}/${part}/footprints.${place}"); done
            tabbed a1 "${folders[@]}" "${exp}/a1.${place}.${name// /+}" \
                --config "${config}" --models "${data}/models.tsv" --seed "${seed}"
        done
    done | each "${cpu_cmd}" a1 fedtools attack
    show a1
}
