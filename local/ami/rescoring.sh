# shellcheck shell=bash
# Sourced by run.sh after utils/asr_steps.sh: the second pass, for one seed, with the caller's
# options and folders.
# shellcheck disable=SC2154  # run.sh's options and folders, and the commands of cmd.sh

# What the neural language model says of every word of N-best lists, stored once.
rescore() { # lists, as in decode_<lists>; their set
    local out=${nnlm}/rescored_$1
    ${train_cmd} "JOB=1:${nj}" "${out}/log/rescore.JOB.log" fedtools rescore "${am}/decode_$1" \
        "${nnlm}" "${out}" --job JOB --nj "${nj}" --ngpu "${ngpu}"
    fedtools merge-rescored "${am}/decode_$1" "${nnlm}" "${out}" --nj "${nj}" --ngram "${exp}/lm2"
    fedtools rescore-stream "${data}/$2" "${out}" "${nnlm}/stream_$1"
}

# The options that a YAML of values sets, one a line: --set PREFIXname=value.
settings() { # file, prefix
    sed -nE "s/^([a-z_]+): (.*)$/--set\n${2:-}\1=\2/p" "$1"
}

# By validation data: first the weights without adaptation, then lambda alone.
tune_weights() {
    local fixed stream=${nnlm}/stream_dev
    log "Stage 7: weights by ${stream}"
    local/bounds.py "${data}/dev" "${nnlm}/bounds.yaml"
    fedtools rescore-tune "${stream}" "${nnlm}/weights.yaml" --set scale=0 \
        --config conf/fmp.yaml --section tuning.weights
    mapfile -t fixed < <(settings "${nnlm}/weights.yaml")
    fedtools rescore-tune "${stream}" "${nnlm}/scale.yaml" "${fixed[@]}" \
        --config conf/fmp.yaml --section tuning.scale --set "rounds=${most}"
    # What private words and the density ratio add, each on its own, to FMP.
    mapfile -t -O "${#fixed[@]}" fixed < <(settings "${nnlm}/scale.yaml")
    fedtools rescore-tune "${stream}" "${nnlm}/bonus.yaml" "${fixed[@]}" \
        --config conf/fmp.yaml --section tuning.bonus --set "rounds=${most}"
    fedtools rescore-tune "${stream}" "${nnlm}/density.yaml" "${fixed[@]}" \
        --config conf/fmp.yaml --section tuning.density --set "rounds=${most}"
    tune_words
    tune_finetuning
}

# The rate of federated fine-tuning, by validation data too.
tune_finetuning() {
    local rate tried=()
    for rate in ${rates}; do
        tried+=("${exp}/finetuned_dev/seed${seed}/${rate}")
        fine_tune "${tried[-1]}" dev "${rate}"
    done
    local/fewest_errors.py "${tried[@]}" >"${nnlm}/rate"
}

# The bonus of the first pass, by validation data: there it brings words into the lists.
tune_words() {
    local value tried=("${am}/decode_dev") words
    words=$(tail -n +2 "${nnlm}/stream_dev/phrases.tsv")
    fedtools best-path "${tried[0]}" --weights "${am}/weights.yaml"
    fedtools score "${data}/dev" "${tried[0]}/text" "${tried[0]}/best"
    for value in ${words:+${bonuses}}; do
        tried+=("${am}/decode_dev_words/${value}")
        favour_words dev "${value}" "${tried[-1]}"
        fedtools best-path "${tried[-1]}" --weights "${am}/weights.yaml"
        fedtools score "${data}/dev" "${tried[-1]}/text" "${tried[-1]}/best"
    done
    value=$(local/fewest_errors.py "${tried[@]}")
    [ "${value}" != "${tried[0]}" ] || value=0
    echo "bonus: $(basename "${value}")" >"${nnlm}/first_bonus.yaml"
}

# The federations of table 2, on files, and what their clients make of their utterances.
federate() {
    local T weights adapted
    mapfile -t weights < <(settings "${nnlm}/weights.yaml" method_conf.)
    mapfile -t adapted < <(settings "${nnlm}/scale.yaml" method_conf.)
    federation "${exp}/rescored/seed${seed}" --set method_conf.scale=0 --set rounds=1
    for T in ${rounds}; do
        federation "${exp}/fmp${T}/seed${seed}" "${adapted[@]}" --set "rounds=${T}"
    done
    if [ "${dp}" != none ]; then
        mapfile -t -O "${#adapted[@]}" adapted < <(protection)
        federation "${exp}/${private}/seed${seed}" "${adapted[@]}" --set "rounds=${most}" \
            --section variants.private
        fedtools privacy "${exp}/${private}/seed${seed}"
    fi
    fine_tune "${exp}/finetuned/seed${seed}" eval "$(basename "$(<"${nnlm}/rate")")"
}

# Options of a federation with differential privacy, beside the variant of the config. By the clock one utterance more moves no other;
# without times, groups are even.
protection() {
    local option privacy=(mechanism "${dp}" unit "${dp_unit}" epsilon "${epsilon}")
    privacy+=(cap "$(fedtools config "${nnlm}/bounds.yaml" "${dp_unit}")")
    printf -- '--set\nmethod_conf.privacy.%s=%s\n' "${privacy[@]}"
    for option in $(by_clock); do printf -- '--set\nmethod_conf.%s\n' "${option}"; done
}

by_clock() { sed -n 's/^span: \(.*\)/groups=clock span=\1/p' "${nnlm}/bounds.yaml"; }

federation() { # experiment, options
    log "Stage 8: $1"
    fedtools init "$1" --config conf/fmp.yaml --method fmp --seed "${seed}" \
        --data "train=${nnlm}/stream_eval" "${weights[@]}" "${@:2}"
    ${train_cmd} "$1/log/rounds.log" fedtools rounds "$1" --ngpu "${ngpu}"
    best_of "$1" eval
}

fine_tune() { # experiment, set, rate
    log "Federated fine-tuning: $1"
    fedtools init "$1" --config "${finetuning}" --method fedavg --seed "${seed}" \
        --data "train=${nnlm}/stream_$2" --asset "weights=${nnlm}" \
        --start "${nnlm}/model.safetensors" --set "rounds=${most}" \
        --set "training.optim_conf.lr=$3"
    ${rounds_cmd:-${train_cmd}} "$1/log/rounds.log" \
        fedtools rounds "$1" --nj "${nj}" --ngpu "${ngpu}"
    best_of "$1" "$2"
}

best_of() { # experiment, set
    ${train_cmd} "$1/log/best.log" fedtools rescore-best "$1" "$1/best" \
        --ngpu "${ngpu}"
    fedtools score "${data}/$2" "$1/best/text" "$1/best"
}

# The first pass again, whose beam search favours each client's own words, but not in those
# utterances that they were taken from.
favour_words() { # set, bonus, folder of the lists
    local lists=${am}/decode_$1 listed=${am}/decode_$1_listed stream=${nnlm}/stream_$1
    log "The first pass with private words, bonus $2: $3"
    ln -sfn "$1" "${data}/$1_listed"
    decode "${am}" "$1_listed" --phrases "${stream}/phrases.tsv" --bonus "$2"
    mkdir -p "$3"
    awk -F '\t' 'FILENAME == ARGV[1] { taken[$1]; next }
        ($1 in taken) == (FILENAME == ARGV[2])' \
        "${stream}/phrases_of" "${lists}/nbest.tsv" "${listed}/nbest.tsv" |
        LC_ALL=C sort -s -t $'\t' -k 1,1 >"$3/nbest.tsv"
}

# Tables 3 and 4: other settings, on the same stored scores.
sweep() {
    local fixed bonus first density option unit heard=eval
    bonus=$(fedtools config "${nnlm}/bonus.yaml" bonus)
    first=$(fedtools config "${nnlm}/first_bonus.yaml" bonus)
    density=$(fedtools config "${nnlm}/density.yaml" density)
    mapfile -t fixed < <(settings "${nnlm}/weights.yaml"; settings "${nnlm}/scale.yaml")
    fixed+=(--set "rounds=${most}" --seed "${seed}")
    for option in sigma beta alpha continuous; do
        try eval "${option}" --config conf/fmp.yaml --section "sweeps.${option}"
    done
    try eval density --vary "density=0,${density}"
    try eval words --vary "bonus=0,${bonus}"
    # With a bonus of 0 the first pass would find what it found before.
    if [[ ${first} = *[1-9]* ]]; then
        heard=eval_words
        favour_words eval "${first}" "${am}/decode_${heard}"
        rescore "${heard}" eval
        cp "${nnlm}/stream_eval"/phrases{.tsv,_of} "${nnlm}/stream_${heard}"
    fi
    try "${heard}" first --vary "bonus=0,${bonus}"
    fixed+=(--set "sigma=$(fedtools config conf/fmp.yaml variants.private.method_conf.sigma)")
    for option in $(by_clock); do fixed+=(--set "${option}"); done
    try eval none --vary mechanism=none
    # What clients count for themselves alone, which no noise touches.
    try eval nothing --vary alpha=0
    try eval paper --set mechanism=paper --config conf/fmp.yaml --section sweeps.privacy
    for unit in utterance user; do
        try eval "${unit}" --set mechanism=laplace --set "unit=${unit}" \
            --set "cap=$(fedtools config "${nnlm}/bounds.yaml" "${unit}")" \
            --config conf/fmp.yaml --section sweeps.privacy
    done
}

try() { # lists, name of the table, options
    log "Stage 9: ${exp}/sweeps/seed${seed}/$2.tsv"
    fedtools rescore-sweep "${nnlm}/stream_$1" "${exp}/sweeps/seed${seed}/$2.tsv" "${fixed[@]}" \
        "${@:3}"
}
