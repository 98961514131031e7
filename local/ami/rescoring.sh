# shellcheck shell=bash
# Sourced by run.sh after utils/asr_steps.sh: the second pass, for all seeds in parallel, with the
# caller's options and folders.
# shellcheck disable=SC2030,SC2031  # variables that of_seed sets are local to the loop
# shellcheck disable=SC2154  # run.sh's options and folders, and the commands of cmd.sh

of_seed() { seed=$1 am=${exp}/am/seed$1 nnlm=${exp}/nnlm/seed$1; }

train_nnlms() { # command that trains one...
    local seed set
    log "Stage 6: the neural language models, ${exp}/nnlm"
    for seed in ${seeds}; do tabbed "${exp}/nnlm/seed${seed}" --seed "${seed}"; done |
        each "${train_cmd}" nnlm "$@"
    for seed in ${seeds}; do
        for set in dev eval; do tabbed "${seed}" "${set}" "${set}"; done
    done | rescore
    for seed in ${seeds}; do
        for set in dev eval; do tabbed "${exp}/nnlm/seed${seed}/stream_${set}"; done
    done | each "${cpu_cmd}" private fedtools rescore-words --rounds "${listed}" --corrected
}

# Score every word of N-best lists with the neural language model, and store the scores.
rescore() { # on standard input, lines with tabs: seed, lists, as in decode_<lists>, their set
    local lines seed lists set am nnlm part
    lines=$(cat)
    while IFS=$'\t' read -r seed lists _; do
        of_seed "${seed}"
        for part in $(seq "${nj}"); do
            tabbed "${am}/decode_${lists}" "${nnlm}" "${nnlm}/rescored_${lists}" --job "${part}"
        done
    done <<<"${lines}" |
        each "${train_cmd}" rescore fedtools rescore --nj "${nj}" --ngpu "${ngpu}"
    while IFS=$'\t' read -r seed lists _; do
        of_seed "${seed}"
        tabbed "${am}/decode_${lists}" "${nnlm}" "${nnlm}/rescored_${lists}"
    done <<<"${lines}" |
        each "${cpu_cmd}" rescored fedtools merge-rescored --nj "${nj}"
    while IFS=$'\t' read -r seed lists set; do
        of_seed "${seed}"
        tabbed "${data}/${set}" "${nnlm}/rescored_${lists}" "${nnlm}/stream_${lists}"
    done <<<"${lines}" | each "${cpu_cmd}" stream fedtools rescore-stream
}

# Print the values of a YAML as options, one a line: --set PREFIXname=value.
settings() { # file, prefix
    sed -nE "s/^([a-z_]+): (.*)$/--set\n${2:-}\1=\2/p" "$1"
}

# Tune on validation data: first the weights without adaptation, then lambda alone, and then the
# bonus of private words, on top of FMP.
tune_weights() {
    local seed
    log "Stage 7: weights, tuned on the streams of dev"
    bound_all
    choose weights
    choose scale weights
    choose bonus weights scale
    tune_doubt
    tune_words
    tune_finetuning
}

# Compute the bounds from all of dev, even if only a part of it is spoken.
bound_all() {
    local seed
    for seed in ${seeds}; do
        tabbed "${data}${bounded}/dev" "${exp}/nnlm/seed${seed}/bounds.yaml"
    done | each "${cpu_cmd}" bounds local/bounds.py
}

choose() { # section to tune, sections whose values are fixed
    local seed am nnlm name fixed
    for seed in ${seeds}; do
        of_seed "${seed}"
        fixed=(--set scale=0)
        [ $# -eq 1 ] || mapfile -t fixed < <(
            for name in "${@:2}"; do settings "${nnlm}/${name}.yaml"; done
            printf -- '--set\nrounds=%s\n' "${most}"
        )
        tabbed "${nnlm}/stream_dev" "${nnlm}/$1.yaml" "${fixed[@]}" \
            --config conf/fmp.yaml --section "tuning.$1"
    done | each "${cpu_cmd}" "tune.$1" fedtools rescore-tune
    show "tune.$1"
}

# Tune how far a release must exceed its noise to be used, over all epsilons of table 4.
tune_doubt() {
    local seed am nnlm unit epsilons fixed
    epsilons=$(fedtools config conf/fmp.yaml sweeps.privacy.epsilon)
    for seed in ${seeds}; do
        of_seed "${seed}"
        for unit in utterance user; do
            mapfile -t fixed < <(fixed_of; noisy "${unit}")
            tabbed "${nnlm}/stream_dev" "${nnlm}/doubt_${unit}.yaml" "${fixed[@]}" \
                --config conf/fmp.yaml --section tuning.doubt --over "epsilon=${epsilons// /,}" \
                --draws "${draws}"
        done
    done | each "${cpu_cmd}" tune.doubt fedtools rescore-tune
    show tune.doubt
}

# Print the options of a sweep, one a line: the values tuned on dev, ...
fixed_of() {
    settings "${nnlm}/weights.yaml"
    settings "${nnlm}/scale.yaml"
    printf -- '--set\nrounds=%s\n' "${most}"
}

# ... and, for table 4, those of the private variant and of the protected unit.
private_of() {
    local option
    printf -- '--set\nsigma=%s\n' "$(fedtools config conf/fmp.yaml variants.private.method_conf.sigma)"
    for option in $(by_clock); do printf -- '--set\n%s\n' "${option}"; done
}

noisy() { # unit
    private_of
    printf -- '--set\n%s\n' mechanism=laplace "unit=$1" \
        "cap=$(fedtools config "${nnlm}/bounds.yaml" "$1")"
}

# Tune the learning rate of federated fine-tuning, also on validation data.
tune_finetuning() {
    local seed rate tried folder=${exp}/finetuned_dev
    for seed in ${seeds}; do
        for rate in ${rates}; do
            tabbed "${folder}/seed${seed}/${rate}" dev "${seed}" "${rate}"
        done
    done | fine_tune
    for seed in ${seeds}; do
        tried=()
        for rate in ${rates}; do tried+=("${folder}/seed${seed}/${rate}"); done
        local/fewest_errors.py "${tried[@]}" >"${exp}/nnlm/seed${seed}/rate"
    done
}

# Tune the bonus of the first pass, which brings words into the lists, on validation data.
tune_words() {
    local seed am nnlm value tried
    for seed in ${seeds}; do
        of_seed "${seed}"
        for value in $(bonuses_of); do
            tabbed "${seed}" dev "${value}" "${am}/decode_dev_words/${value}"
        done
    done | favour_words
    for seed in ${seeds}; do
        of_seed "${seed}"
        tabbed "${am}" decode_dev dev decode_dev/best
        for value in $(bonuses_of); do
            tried=decode_dev_words/${value}
            tabbed "${am}" "${tried}" dev "${tried}/best"
        done
    done | score words.score
    for seed in ${seeds}; do
        of_seed "${seed}"
        tried=("${am}/decode_dev")
        for value in $(bonuses_of); do tried+=("${am}/decode_dev_words/${value}"); done
        value=$(local/fewest_errors.py "${tried[@]}")
        [ "${value}" != "${tried[0]}" ] || value=0
        echo "bonus: $(basename "${value}")" >"${nnlm}/first_bonus.yaml"
    done
}

# Print the bonuses to try: none if clients have no words of their own, when no bonus has an effect.
bonuses_of() { [ "$(wc -l <"${nnlm}/stream_dev/phrases.tsv")" -le 1 ] || echo "${bonuses}"; }

# Run the federations of table 2, on files, and score their clients' rescored utterances.
federate() { # commands, as for train_waves...
    local seed am nnlm path list=${exp}/log/fmp.list
    log "Stage 8: federations, ${list}"
    for seed in ${seeds}; do
        of_seed "${seed}"
        federations
    done | utils/waves.py "${list}"
    train_waves "${list}" fmp 1 0 "$@"
    cut -f 2 "${list}" | while read -r path; do tabbed "${path}" eval; done | best_of
    if [ "${dp}" != none ]; then
        for seed in ${seeds}; do tabbed "${exp}/${private}/seed${seed}"; done |
            each "${cpu_cmd}" privacy fedtools privacy
        show privacy
    fi
    for seed in ${seeds}; do
        of_seed "${seed}"
        tabbed "${exp}/finetuned/seed${seed}" eval "${seed}" "$(basename "$(<"${nnlm}/rate")")"
    done | fine_tune
}

federations() { # of one seed
    local T weights adapted
    mapfile -t weights < <(settings "${nnlm}/weights.yaml" method_conf.)
    mapfile -t adapted < <(settings "${nnlm}/scale.yaml" method_conf.)
    federation rescored --set method_conf.scale=0 --set rounds=1
    for T in ${rounds}; do federation "fmp${T}" "${adapted[@]}" --set "rounds=${T}"; done
    if [ "${dp}" != none ]; then
        mapfile -t -O "${#adapted[@]}" adapted < <(protection)
        federation "${private}" "${adapted[@]}" --set "rounds=${most}" --section variants.private
    fi
}

federation() { # name, options
    tabbed "${exp}/$1/seed${seed}" - --method fmp --seed "${seed}" \
        --data "train=${nnlm}/stream_eval" "${weights[@]}" "${@:2}"
}

# Print the options of a federation with differential privacy, in addition to the config's variant. With
# groups by the clock, one more utterance does not move any other into another group.
protection() {
    local option privacy=(mechanism "${dp}" unit "${dp_unit}" epsilon "${epsilon}")
    privacy+=(cap "$(fedtools config "${nnlm}/bounds.yaml" "${dp_unit}")")
    printf -- '--set\nmethod_conf.privacy.%s=%s\n' "${privacy[@]}"
    for option in $(by_clock); do printf -- '--set\nmethod_conf.%s\n' "${option}"; done
}

by_clock() { sed -n 's/^span: \(.*\)/groups=clock span=\1/p' "${nnlm}/bounds.yaml"; }

fine_tune() { # on standard input, lines with tabs: experiment, set, seed, rate
    local lines path set rate seed am nnlm list=${exp}/log/finetune.list
    lines=$(cat)
    log "Federated fine-tuning: $(cut -f 1 <<<"${lines}" | tr '\n' ' ')"
    while IFS=$'\t' read -r path set seed rate; do
        of_seed "${seed}"
        tabbed "${path}" - --method fedavg --seed "${seed}" --data "train=${nnlm}/stream_${set}" \
            --asset "weights=${nnlm}" --start "${nnlm}/model.safetensors" \
            --set "rounds=${most}" --set "training.optim_conf.lr=${rate}"
    done <<<"${lines}" | utils/waves.py "${list}"
    train_waves "${list}" finetune 1 0 fedtools init EXP --config "${finetuning}" OPTIONS '&&' \
        fedtools rounds EXP --nj NJ --ngpu "${ngpu}"
    best_of <<<"${lines}"
}

best_of() { # on standard input, lines with tabs: experiment, set
    local lines path set
    lines=$(cat)
    while IFS=$'\t' read -r path _; do tabbed "${path}" "${path}/best"; done <<<"${lines}" |
        each "${train_cmd}" best fedtools rescore-best --ngpu "${ngpu}"
    while IFS=$'\t' read -r path set _; do
        tabbed "${data}/${set}" "${path}/best/text" "${path}/best"
    done <<<"${lines}" | each "${cpu_cmd}" best.score fedtools score
    while IFS=$'\t' read -r path _; do rate_of "${path}/best"; done <<<"${lines}"
}

# Repeat the first pass with a beam search that favours each client's own words, except in the
# utterances from which they were taken.
favour_words() { # on standard input, lines with tabs: seed, set, bonus, folder of the lists
    local lines seed set bonus out am nnlm favoured
    lines=$(cat)
    [ -n "${lines}" ] || return 0
    log "The first pass with private words: $(cut -f 4 <<<"${lines}" | tr '\n' ' ')"
    while IFS=$'\t' read -r seed set bonus _; do
        of_seed "${seed}"
        ln -sfn "${set}" "${data}/${set}_listed${bonus}"
        tabbed "${am}" "${set}_listed${bonus}" --phrases "${nnlm}/stream_${set}/phrases.tsv" \
            --bonus "${bonus}"
    done <<<"${lines}" |
        decode_all words fedtools decode --lm "${exp}/lm" --config "${config}" --ngpu "${ngpu}"
    while IFS=$'\t' read -r seed set bonus out; do
        of_seed "${seed}"
        favoured=${am}/decode_${set}_listed${bonus}
        mkdir -p "${out}"
        awk -F '\t' 'FILENAME == ARGV[1] { taken[$1]; next }
            ($1 in taken) == (FILENAME == ARGV[2])' "${nnlm}/stream_${set}/phrases_of" \
            "${am}/decode_${set}/nbest.tsv" "${favoured}/nbest.tsv" |
            LC_ALL=C sort -s -t $'\t' -k 1,1 >"${out}/nbest.tsv"
    done <<<"${lines}"
}

# Run the sweeps of tables 3 and 4: other settings, on the same stored scores.
sweep() { # command for each sweep...
    local seed am nnlm
    log "Stage 9: ${exp}/sweeps"
    # With a bonus of 0 the first pass would give the same lists as before.
    for seed in ${seeds}; do
        of_seed "${seed}"
        [ "$(heard)" = eval ] ||
            tabbed "${seed}" eval "$(bonus_of first_bonus)" "${am}/decode_eval_words"
    done | hear_words
    for seed in ${seeds}; do
        of_seed "${seed}"
        sweeps
    done | each "${cpu_cmd}" sweep "$@"
    show sweep
}

bonus_of() { fedtools config "${nnlm}/$1.yaml" bonus; }

# Print the name of the first pass' lists with the bonus tuned on dev.
heard() { if [[ $(bonus_of first_bonus) = *[1-9]* ]]; then echo eval_words; else echo eval; fi; }

hear_words() { # on standard input, as for favour_words
    local lines seed am nnlm
    lines=$(cat)
    [ -n "${lines}" ] || return 0
    favour_words <<<"${lines}"
    while IFS=$'\t' read -r seed _; do tabbed "${seed}" eval_words eval; done <<<"${lines}" | rescore
    while IFS=$'\t' read -r seed _; do
        of_seed "${seed}"
        cp "${nnlm}/stream_eval"/phrases{.tsv,_of} "${nnlm}/stream_eval_words"
    done <<<"${lines}"
}

sweeps() { # of one seed
    local fixed bonus option
    bonus=$(bonus_of bonus)
    mapfile -t fixed < <(fixed_of)
    fixed+=(--seed "${seed}")
    for option in sigma beta alpha continuous; do
        try eval "${option}" --config conf/fmp.yaml --section "sweeps.${option}"
    done
    try eval words --vary "bonus=0,${bonus}"
    try "$(heard)" first --vary "bonus=0,${bonus}"
    sweeps_of_privacy
}

# Print the sweeps of table 4 for one seed.
sweeps_of_privacy() {
    local noise unit
    mapfile -t noise < <(private_of)
    try eval none "${noise[@]}" --vary mechanism=none
    # Clients use only their own counts, release nothing, and so have no noise.
    try eval nothing "${noise[@]}" --config conf/fmp.yaml --section sweeps.nothing
    try eval paper "${noise[@]}" --set mechanism=paper --config conf/fmp.yaml \
        --section sweeps.privacy --draws "${draws}"
    for unit in utterance user; do
        mapfile -t noise < <(noisy "${unit}")
        noise+=(--config conf/fmp.yaml --section sweeps.privacy --draws "${draws}")
        try eval "${unit}" "${noise[@]}"
        try eval "doubt_${unit}" "${noise[@]}" --set "$(doubt_of "${unit}")"
    done
}

doubt_of() { sed -n 's/^doubt: /doubt=/p' "${nnlm}/doubt_$1.yaml"; } # unit

try() { # lists, name of the table, options
    tabbed "${nnlm}/stream_$1" "${exp}/sweeps/seed${seed}/$2.tsv" "${fixed[@]}" "${@:3}"
}
