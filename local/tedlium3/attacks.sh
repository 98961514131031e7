# shellcheck shell=bash
# Sourced by run.sh after utils/asr_steps.sh: personalised models, and the attacks on them, with the
# caller's options and folders.
# shellcheck disable=SC2154  # run.sh's options and folders, and the commands of cmd.sh

# The list of experiments: the global model, and federations of one round, which begin with it and whose
# clients are a part's speakers.
plan() {
    local part
    experiment "${global}" - "${seed}" baseline centralized "${train}" "${valid}" "${assets[@]}"
    for part in part1 part2; do
        experiment "${exp}/${part}" "${global}" "${seed}" methods.fedavg fedavg \
            "${part}${sp}${iv}" "${valid}" --start "${global}/model.safetensors" "${assets[@]}" \
            ${local_epochs:+--set "method_conf.local_epochs=${local_epochs}"}
    done
}

attack_a1() { # where activations are taken, affine or relu
    local part name out folders
    for part in part1 part2; do
        log "Stage 7: footprints of ${exp}/${part}, $1"
        out=${exp}/${part}/footprints.$1
        ${train_cmd} "JOB=1:${nj}" "${out}/log/footprints.JOB.log" fedtools attack footprints \
            "${exp}/${part}" "${out}" --indicator "${data}/indicator${iv}" --round 1 \
            --part "$1" --job JOB --nj "${nj}" --ngpu "${ngpu}"
    done
    for name in part2 "part1 part2"; do
        folders=()
        for part in ${name}; do folders+=("${exp}/${part}/footprints.$1"); done
        fedtools attack a1 "${folders[@]}" "${exp}/a1.$1.${name// /+}" \
            --config "${config}" --models "${data}/models.tsv" --seed "${seed}"
    done
}

attack_a2() { # hidden layer
    log "Stage 8: attack A2, hidden layer $1"
    ${train_cmd} "${exp}/a2/log/a2.$1.log" fedtools attack a2 "${exp}/part1" "${exp}/part2" \
        "${exp}/a2" --indicator "${data}/indicator${iv}" --layer "$1" \
        --models "${data}/models.tsv" --seed "${seed}" --ngpu "${ngpu}" \
        --config "${config}"
}
