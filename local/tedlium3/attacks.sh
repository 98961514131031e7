# shellcheck shell=bash
# Sourced by run.sh: attack A1 on both parts' models, with the caller's options and folders.
# shellcheck disable=SC2154  # data, exp, iv, nj, ngpu, seed, and the commands of cmd.sh

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
            --models "${data}/models.tsv" --seed "${seed}"
    done
}
