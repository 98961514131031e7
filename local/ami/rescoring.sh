# shellcheck shell=bash
# Sourced by run.sh after utils/asr_steps.sh: the second pass, for one seed, with the caller's
# options and folders.
# shellcheck disable=SC2154  # am, nnlm, data, exp, config, nj, ngpu, seed, rounds

# What the neural language model says of every word of a set's N-best lists, stored once.
rescore() { # set
    local out=${nnlm}/rescored_$1
    ${train_cmd} "JOB=1:${nj}" "${out}/log/rescore.JOB.log" fedtools rescore "${am}/decode_$1" \
        "${nnlm}" "${out}" --job JOB --nj "${nj}" --ngpu "${ngpu}"
    fedtools merge-rescored "${am}/decode_$1" "${nnlm}" "${out}" --nj "${nj}"
    fedtools rescore-stream "${data}/$1" "${out}" "${nnlm}/stream_$1"
}

# The options that a YAML of values sets, one a line: --set PREFIXname=value.
settings() { # file, prefix
    sed -nE "s/^([a-z_]+): (.*)$/--set\n${2:-}\1=\2/p" "$1"
}

# By validation data: first the weights without adaptation, then lambda alone.
tune_weights() {
    local fixed stream=${nnlm}/stream_dev
    log "Stage 7: weights by ${stream}"
    fedtools rescore-tune "${stream}" "${nnlm}/weights.yaml" --set scale=0 \
        --vary lm_weight=0,0.25,0.5,0.75,1,1.25,1.5,2,2.5,3,4 \
        --vary word_score=0,-0.5,0.5,-1,1,-1.5,1.5,-2,2,3,4
    mapfile -t fixed < <(settings "${nnlm}/weights.yaml")
    fedtools rescore-tune "${stream}" "${nnlm}/scale.yaml" "${fixed[@]}" \
        --vary scale=0,0.05,0.1,0.2,0.3,0.4,0.5,0.6,0.8,1 --set "rounds=${rounds##* }"
}

# The federations of table 2, on files, and what their clients make of their utterances.
federate() {
    local T path fixed
    mapfile -t fixed < <(settings "${nnlm}/weights.yaml" method_conf.)
    for T in none ${rounds}; do
        path=${exp}/fmp/${T}/seed${seed}
        log "Stage 8: ${path}"
        if [ "${T}" = none ]; then
            fedtools init "${path}" --config conf/fmp.yaml --method fmp --seed "${seed}" \
                --data "train=${nnlm}/stream_eval" "${fixed[@]}" --set method_conf.scale=0 \
                --set rounds=1
        else
            mapfile -t -O "${#fixed[@]}" fixed < <(settings "${nnlm}/scale.yaml" method_conf.)
            fedtools init "${path}" --config conf/fmp.yaml --method fmp --seed "${seed}" \
                --data "train=${nnlm}/stream_eval" "${fixed[@]}" --set "rounds=${T}"
        fi
        ${rounds_cmd:-${train_cmd}} "${path}/log/rounds.log" fedtools rounds "${path}" --nj 1
        fedtools rescore-best "${path}" "${path}/best"
        fedtools score "${data}/eval" "${path}/best/text" "${path}/best"
    done
}

# Tables 3 and 4: other settings, on the same stored scores.
sweep() {
    local out=${exp}/sweeps/seed${seed} stream=${nnlm}/stream_eval fixed
    log "Stage 9: ${out}"
    mapfile -t fixed < <(settings "${nnlm}/weights.yaml"; settings "${nnlm}/scale.yaml")
    fixed+=(--set "rounds=${rounds##* }")
    fedtools rescore-sweep "${stream}" "${out}/sigma.tsv" "${fixed[@]}" \
        --vary sigma=5,0.1,1,10,100 --vary alpha=0.5 --vary beta=0.25
    fedtools rescore-sweep "${stream}" "${out}/beta.tsv" "${fixed[@]}" \
        --vary sigma=5 --vary alpha=0 --vary beta=0.75
    fedtools rescore-sweep "${stream}" "${out}/alpha.tsv" "${fixed[@]}" \
        --vary sigma=5 --vary alpha=0.75 --vary beta=0
}
