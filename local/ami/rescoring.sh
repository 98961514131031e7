# shellcheck shell=bash
# Sourced by run.sh after utils/asr_steps.sh: the second pass, for one seed, with the caller's
# options and folders.
# shellcheck disable=SC2154  # am, nnlm, data, exp, config, nj, ngpu, seed, rounds

# What the neural language model says of every word of a set's N-best lists, stored once.
rescore() { # set
    local out=${nnlm}/rescored_$1
    ${train_cmd} "JOB=1:${nj}" "${out}/log/rescore.JOB.log" fedtools rescore "${am}/decode_$1" \
        "${nnlm}" "${out}" --job JOB --nj "${nj}" --ngpu "${ngpu}"
    fedtools merge-rescored "${am}/decode_$1" "${nnlm}" "${out}" --nj "${nj}" --ngram "${exp}/lm2"
    fedtools rescore-stream "${data}/$1" "${out}" "${nnlm}/stream_$1"
    # Lists of private words are of what clients say before the first round.
    fedtools rescore-words "${nnlm}/stream_$1" --rounds "${rounds##* }"
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
        --vary scale=0,0.05,0.1,0.2,0.3,0.4,0.5,0.6,0.8,1,1.25,1.5,2,3 --set "rounds=${rounds##* }"
    # What private words and the density ratio add, each on its own, to FMP.
    mapfile -t -O "${#fixed[@]}" fixed < <(settings "${nnlm}/scale.yaml")
    fedtools rescore-tune "${stream}" "${nnlm}/bonus.yaml" "${fixed[@]}" \
        --vary bonus=0,0.25,0.5,1,1.5,2,3,4,6 --set "rounds=${rounds##* }"
    fedtools rescore-tune "${stream}" "${nnlm}/density.yaml" "${fixed[@]}" \
        --vary density=0,0.05,0.1,0.15,0.2,0.3,0.4,0.5 --set "rounds=${rounds##* }"
}

# The federations of table 2, on files, and what their clients make of their utterances.
federate() {
    local T path weights adapted stream=${nnlm}/stream_eval
    mapfile -t weights < <(settings "${nnlm}/weights.yaml" method_conf.)
    mapfile -t adapted < <(settings "${nnlm}/scale.yaml" method_conf.)
    federation "${exp}/rescored/seed${seed}" --set method_conf.scale=0 --set rounds=1
    for T in ${rounds}; do
        federation "${exp}/fmp${T}/seed${seed}" "${adapted[@]}" --set "rounds=${T}"
    done
    path=${exp}/finetuned/seed${seed}
    log "Stage 8: ${path}"
    fedtools init "${path}" --config "${finetuning}" --method fedavg --seed "${seed}" \
        --data "train=${stream}" --asset "weights=${nnlm}" --start "${nnlm}/model.safetensors" \
        --set "rounds=${rounds##* }"
    ${rounds_cmd:-${train_cmd}} "${path}/log/rounds.log" \
        fedtools rounds "${path}" --nj "${nj}" --ngpu "${ngpu}"
    best_of "${path}"
}

federation() { # experiment, options
    log "Stage 8: $1"
    fedtools init "$1" --config conf/fmp.yaml --method fmp --seed "${seed}" \
        --data "train=${stream}" "${weights[@]}" "${@:2}"
    ${train_cmd} "$1/log/rounds.log" fedtools rounds "$1"
    best_of "$1"
}

best_of() { # experiment
    ${train_cmd} "$1/log/best.log" fedtools rescore-best "$1" "$1/best"
    fedtools score "${data}/eval" "$1/best/text" "$1/best"
}

# Tables 3 and 4: other settings, on the same stored scores. Clipping of counts is for the words of
# an utterance, and of a speaker in a meeting, that most have.
sweep() {
    local out=${exp}/sweeps/seed${seed} stream=${nnlm}/stream_eval fixed
    log "Stage 9: ${out}"
    mapfile -t fixed < <(settings "${nnlm}/weights.yaml"; settings "${nnlm}/scale.yaml")
    fixed+=(--set "rounds=${rounds##* }" --seed "${seed}")
    fedtools rescore-sweep "${stream}" "${out}/sigma.tsv" "${fixed[@]}" \
        --vary alpha=0.5 --vary beta=0.25 --vary sigma=5,0,0.1,1,10,100
    fedtools rescore-sweep "${stream}" "${out}/beta.tsv" "${fixed[@]}" \
        --vary alpha=0 --vary beta=0.75 --vary sigma=5
    fedtools rescore-sweep "${stream}" "${out}/alpha.tsv" "${fixed[@]}" \
        --vary alpha=0.75 --vary beta=0 --vary sigma=5
    fedtools rescore-sweep "${stream}" "${out}/continuous.tsv" "${fixed[@]}" \
        --set alpha=0.5 --set beta=0.25 --vary sigma=5 --vary continuous=true --vary normalise=false,true
    local bonus density
    bonus=$(fedtools config "${nnlm}/bonus.yaml" bonus)
    density=$(fedtools config "${nnlm}/density.yaml" density)
    fedtools rescore-sweep "${stream}" "${out}/words.tsv" "${fixed[@]}" --vary "bonus=0,${bonus}"
    fedtools rescore-sweep "${stream}" "${out}/density.tsv" "${fixed[@]}" \
        --vary "density=0,${density}"
    fixed+=(--set sigma=0.1)
    fedtools rescore-sweep "${stream}" "${out}/paper.tsv" "${fixed[@]}" --set release=cumulative \
        --set mechanism=paper --vary epsilon=2,1,0.5,0.1
    fixed+=(--set mechanism=laplace --set groups=clock --vary "epsilon=8,4,2,1,0.5,0.1")
    fedtools rescore-sweep "${stream}" "${out}/utterance.tsv" "${fixed[@]}" --vary unit=utterance \
        --set cap=12
    fedtools rescore-sweep "${stream}" "${out}/user.tsv" "${fixed[@]}" --vary unit=user --set cap=300
}
