# shellcheck shell=bash
# Sourced by run.sh after utils/asr_steps.sh: personalised models, and the attacks on them, with the
# caller's options and folders.
# shellcheck disable=SC2154  # run.sh's options and folders, and the commands of cmd.sh

personalise() { # part, whose speakers are the clients of a federation of one round
    log "Stage 6: personalised models, ${exp}/$1"
    fedtools init "${exp}/$1" --config "${config}" --section methods.fedavg --method fedavg \
        --data "train=${data}/$1${sp}${iv}" --data "valid=${data}/${valid}" \
        --asset "tokens=${exp}/tokens" --seed "${seed}" \
        --start "${global}/model.safetensors" "${assets[@]}" \
        ${local_epochs:+--set "method_conf.local_epochs=${local_epochs}"}
    ${rounds_cmd:-${train_cmd}} "${exp}/$1/log/rounds.log" \
        fedtools rounds "${exp}/$1" --nj "${nj}" --ngpu "${ngpu}" --to 1
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
