# shellcheck shell=bash
# Sourced by run.sh after utils/asr_steps.sh: its longer steps, which use its options and folders.
# shellcheck disable=SC2154  # run.sh's options and folders, and the commands of cmd.sh

# Print the folders of all experiments, of the baselines (which wait for nothing), or of the systems.
listed() { # all, baselines, systems
    awk -F '\t' -v which="$1" '
        which == "all" || ($2 == "-") == (which == "baselines") { print $1 }' <<<"${planned}"
}

# Make fixed labels: the baselines' hypotheses of the training data, by beam search with the n-gram and
# the weights tuned on validation data.
label_train() {
    local path set weights
    log "Stage 5: the baselines' labels of ${trained}"
    for path in $(listed baselines); do
        for set in "${tuned[@]}" "${trained}"; do tabbed "${path}" "${set}"; done
    done | decode_all labels "${decode[@]}"
    listed baselines | tune valid
    for path in $(listed baselines); do
        weights=(--weights "${path}/weights.yaml")
        ! "${seq2seq}" || weights=(--drop-loops)
        tabbed "${path}/decode_${trained}" "${weights[@]}"
    done | each "${cpu_cmd}" labels.best fedtools best-path
    ! "${seq2seq}" || show labels.best
    for path in $(listed baselines); do
        tabbed "${data}/${trained}" "${path}/decode_${trained}/text" \
            "${data}/${trained}_fixed_${path##*/}"
    done | each "${cpu_cmd}" relabel fedtools relabel
    show relabel
}

# Tune the LM weight and word score of the search with which a server labels the features that clients
# send, on the server's own validation data.
tune_server() {
    local path
    log "Stage 5: weights of the servers' search"
    for path in $(listed baselines); do tabbed "${path}" server_valid; done | decode_all server "${decode[@]}"
    for path in $(listed baselines); do
        tabbed "${path}/decode_server_valid" "${data}/server_valid" "${path}/server_weights.yaml"
    done | each "${cpu_cmd}" server.tune fedtools tune
    show server.tune
}

decode_sets() {
    local path set
    for path in $(listed baselines); do
        for set in "${tuned[@]}" test server_test; do tabbed "${path}" "${set}"; done
    done
    for path in $(listed systems); do
        for set in "${tuned[@]}" test; do tabbed "${path}" "${set}"; done
    done
}

score_sets() {
    local path set
    log "Stage 7: error rates of $(listed all | wc -l) experiments"
    decode_sets | while IFS=$'\t' read -r path set; do
        [ "${set}" = valid ] || tabbed "${path}" "decode_${set}" "${set}"
    done | score score
    for path in $(listed systems); do
        tabbed "${data}/test" "${exp}/baseline/${path##*/}/decode_test/text" \
            "${path}/decode_test/text" --out "${path}/compare_baseline.tsv"
    done | each "${cpu_cmd}" compare fedtools compare "${score_options[@]}"
    show compare
}

# Attack the features that DecoupleFL's clients send.
attack_features() { # command for each experiment...
    local wave path name picture drawn merged=() attacks=${exp}/log/attacks
    mkdir -p "${exp}/log"
    local/experiments.py sending "${chosen[@]}" >"${attacks}.sending"
    log "Stage 8: attacks on the features that clients of $(wc -l <"${attacks}.sending") experiments sent"
    for wave in 1 2; do
        awk -F '\t' -v OFS='\t' -v wave="${wave}" '$1 == wave { print $2, $2 "/attacks" }' \
            "${attacks}.sending" >"${attacks}${wave}.list"
        [ ! -s "${attacks}${wave}.list" ] || array "${train_cmd}" "${attacks}${wave}.JOB.log" \
            "${attacks}${wave}.list" 1 0 "$@"
    done
    while IFS=$'\t' read -r _ path name picture; do
        merged+=("${name}=${path}/attacks/attacks.tsv")
        # Figure 4 shows one client.
        drawn=("${path}"/attacks/tsne.*.png)
        [[ ${path##*/} != "seed${seeds%% *}" || ! -s ${drawn[0]} ]] ||
            cp "${drawn[0]}" "${drawings}/tsne-${picture}.png"
    done <"${attacks}.sending"
    fedtools attack merge "${exp}/attacks.tsv" "${merged[@]}"
}

cross() { # command for each system...
    local named one merged=()
    log "Stage 8: each client's model on each client's data"
    named=$(local/experiments.py cross "${chosen[@]}")
    while IFS= read -r one; do merged+=("${one##*=}/cross.tsv"); done <<<"${named}"
    while IFS= read -r one; do tabbed "${data}/test" "${one##*=}/cross.tsv" "${one}"; done <<<"${named}" |
        each "${train_cmd}" cross "$@"
    fedtools merge-cross "${exp}/cross.tsv" "${merged[@]}" --plot "${drawings}/cross.png"
}

# Score newcomers, whose speech is in no training set, with the shared layers and with a model adapted
# to their first seconds; both are scored on the rest of their speech.
newcomers() {
    local epochs part path wide set=${data}/test
    epochs=$(setting newcomers.epochs)
    run fedtools subset-data "${set}" "${set}_first" --first "${newcomer_seconds}" --rest "${set}_rest"
    for part in first rest; do
        fedtools partition "${set}_${part}" "${set}_${part}_spk" --scheme map --by utt2spk
    done
    log "Stage 8: newcomers"
    for path in $(listed systems); do
        tabbed "${path}" "${set}_first_spk" "${path}/newcomers" --epochs "${epochs}"
    done | each "${cpu_cmd}" adapt.begin fedtools adapt
    wide=$(listed systems | wc -l)
    for path in $(listed systems); do tabbed "${path}/newcomers"; done |
        each "${train_cmd}" adapt fedtools rounds --nj "$((nj > wide ? nj / wide : 1))" --ngpu "${ngpu}"
    for path in $(listed systems); do
        tabbed "${path}" test_rest
        tabbed "${path}/newcomers" test_rest_spk --model "round:${epochs}"
    done | decode_all newcomers "${decode[@]}"
    for path in $(listed systems); do
        for part in decode_test_rest newcomers/decode_test_rest_spk; do
            tabbed "${path}" "${part}" test_rest
        done
    done | score newcomers.score
}
