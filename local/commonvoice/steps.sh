# shellcheck shell=bash
# Sourced by run.sh after utils/asr_steps.sh: its longer steps, with its options and folders.
# shellcheck disable=SC2154  # run.sh's options and folders, and the commands of cmd.sh

# The folders of the experiments: all, the baselines, which wait for nothing, or the systems.
listed() { # all, baselines, systems
    awk -F '\t' -v which="$1" '
        which == "all" || ($2 == "-") == (which == "baselines") { print $1 }' <<<"${planned}"
}

# Labels that do not change: the baselines' hypotheses of the training data, by beam search with the
# n-gram and the weights that suit it on validation data.
label_train() {
    local path set
    log "Stage 5: the baselines' labels of ${trained}"
    for path in $(listed baselines); do
        for set in valid "${trained}"; do tabbed "${path}" "${set}"; done
    done | decode_all labels
    for path in $(listed baselines); do
        tune "${path}"
        fedtools best-path "${path}/decode_${trained}" --weights "${path}/weights.yaml"
        fedtools relabel "${data}/${trained}" "${path}/decode_${trained}/text" \
            "${data}/${trained}_fixed_${path##*/}"
    done
}

decode_sets() {
    local path set
    for path in $(listed baselines); do
        for set in valid test server_test; do tabbed "${path}" "${set}"; done
    done
    for path in $(listed systems); do
        for set in valid test; do tabbed "${path}" "${set}"; done
    done
}

score_sets() {
    local path set baseline
    for path in $(listed baselines); do
        log "Stage 7: ${path}"
        for set in test server_test; do score "${path}" "${set}"; done
    done
    for path in $(listed systems); do
        log "Stage 7: ${path}"
        score "${path}" test
        baseline=${exp}/baseline/${path##*/}/decode_test
        fedtools compare "${data}/test" "${baseline}/text" "${path}/decode_test/text" \
            --out "${path}/compare_baseline.tsv"
    done
}

# What the features that DecoupleFL's clients send give away.
attack_features() {
    local wave path name picture drawn merged=() attacks=${exp}/log/attacks
    rm -f "${pictures}"-tsne-*.png
    mkdir -p "${exp}/log"
    local/experiments.py sending "${chosen[@]}" >"${attacks}.sending"
    log "Stage 8: attacks on what the clients of $(wc -l <"${attacks}.sending") experiments sent"
    for wave in 1 2; do
        awk -F '\t' -v OFS='\t' -v wave="${wave}" '$1 == wave { print $2, $2 "/attacks" }' \
            "${attacks}.sending" >"${attacks}${wave}.list"
        [ ! -s "${attacks}${wave}.list" ] || array "${train_cmd}" "${attacks}${wave}.JOB.log" \
            "${attacks}${wave}.list" 1 0 fedtools attack features --ngpu "${ngpu}" --config "${config}" \
            --server-data "${data}/server_train${sp}" --decoders "${exp}/decoders" \
            --text "${data}/${trained}/text"
    done
    while IFS=$'\t' read -r _ path name picture; do
        merged+=("${name}=${path}/attacks/attacks.tsv")
        # Figure 4 is of one client.
        drawn=("${path}"/attacks/tsne.*.png)
        [[ ${path##*/} != "seed${seeds%% *}" || ! -s ${drawn[0]} ]] ||
            cp "${drawn[0]}" "${pictures}-tsne-${picture}.png"
    done <"${attacks}.sending"
    fedtools attack merge "${exp}/attacks.tsv" "${merged[@]}"
}

cross() {
    local named
    log "Stage 8: each client's model on each client's data"
    named=$(local/experiments.py cross "${chosen[@]}")
    mapfile -t named <<<"${named}"
    ${train_cmd} "${exp}/log/cross.log" fedtools cross "${data}/test" "${exp}/cross.tsv" \
        "${named[@]}" --plot "${pictures}-cross.png" --ngpu "${ngpu}"
}

# A newcomer, whose speech no training has heard: with what all share, and adapted to the first
# seconds of its own. Both are scored on the rest of it.
newcomers() {
    local epochs part path wide set=${data}/test adapted=${exp}/log/adapt
    epochs=$(setting newcomers.epochs)
    fedtools subset-data "${set}" "${set}_first" --first "${newcomer_seconds}" --rest "${set}_rest"
    for part in first rest; do
        fedtools partition "${set}_${part}" "${set}_${part}_spk" --scheme map --by utt2spk
    done
    log "Stage 8: newcomers"
    mkdir -p "${exp}/log"
    for path in $(listed systems); do
        fedtools adapt "${path}" "${set}_first_spk" "${path}/newcomers" --epochs "${epochs}"
    done
    for path in $(listed systems); do tabbed "${path}/newcomers"; done >"${adapted}.list"
    wide=$(wc -l <"${adapted}.list")
    array "${train_cmd}" "${adapted}.JOB.log" "${adapted}.list" 1 0 \
        fedtools rounds --nj "$((nj > wide ? nj / wide : 1))" --ngpu "${ngpu}"
    for path in $(listed systems); do
        tabbed "${path}" test_rest
        tabbed "${path}/newcomers" test_rest_spk --model "round:${epochs}"
    done | decode_all newcomers
    for path in $(listed systems); do
        for part in "${path}/decode_test_rest" "${path}/newcomers/decode_test_rest_spk"; do
            fedtools best-path "${part}" --weights "${path}/weights.yaml"
            fedtools score "${set}_rest" "${part}/text" "${part}"
        done
    done
}
