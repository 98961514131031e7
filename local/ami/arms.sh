# shellcheck shell=bash
# Sourced by run.sh after local/rescoring.sh, whose functions work on an arm when exp is its folder.
# Rescores the same meetings with language models of near and far text, and compares FMP with controls.
#
#   near    both models trained on the text of other meetings
#   far     both trained on open chat (local/chat.sh)
#
# Both arms share one acoustic model; seeds are those of the neural models.
# shellcheck disable=SC2030,SC2031,SC2034  # exp and of_seed's variables are local to the loop
# shellcheck disable=SC2154  # run.sh's options and folders, and the commands of cmd.sh

chat=downloads/chitchat.txt

# Run a command for each arm, with exp set to the arm's folder.
in_arms() { # command...
    local arm top=${exp} exp
    for arm in ${arms}; do
        exp=${top}/arms/${arm}
        mkdir -p "${exp}/log"
        "$@"
    done
}

text_of() { # arm; sets text
    text=(--plain "${chat}")
    [ "$1" != near ] || text=("${data}/train/text" --plain "${background}")
}

arm_ngrams() {
    local arm text
    log "Stage 3: tokens, n-grams of ${arms}"
    local/chat.sh "${chat}"
    run fedtools train-tokens "${data}/train/text" "${exp}/tokens" \
        --token-type "$(setting tokens.token_type)" --vocab-size "$(setting tokens.vocab_size)"
    for arm in ${arms}; do
        text_of "${arm}"
        train_lm "${text[@]}" "${exp}/arms/${arm}/lm" --order "${order}" \
            --valid "${data}/dev/text" --valid "${data}/eval/text"
    done
}

arm_lists() {
    local arm part am=${exp}/am/seed${am_seed} logs=${exp}/log
    log "Stage 5: N-best lists by ${am}"
    for arm in ${arms}; do
        for set in dev eval; do
            for part in $(seq "${nj}"); do
                tabbed "${am}" "${data}/${set}" "${exp}/arms/${arm}/lists/decode_${set}" \
                    --lm "${exp}/arms/${arm}/lm" --job "${part}"
            done
        done
    done | each "${decode_cmd}" decode fedtools decode --config "${config}" --nj "${nj}" \
        --ngpu "${ngpu}"
    for arm in ${arms}; do
        for set in dev eval; do
            tabbed "${exp}/arms/${arm}/lists/decode_${set}" "${data}/${set}"
        done
    done | each "${cpu_cmd}" decode.merge fedtools merge-nbest --nj "${nj}"
    for arm in ${arms}; do echo "${exp}/arms/${arm}/lists"; done | tune dev
    for arm in ${arms}; do tabbed "${exp}/arms/${arm}/lists" decode_eval eval; done |
        score score
}

arm_models() {
    local arm seed text
    log "Stage 6: the neural language models of ${arms}"
    for arm in ${arms}; do
        text_of "${arm}"
        for seed in ${seeds}; do
            tabbed "${text[@]}" "${exp}/arms/${arm}/nnlm/seed${seed}" --seed "${seed}" \
                --config "conf/${arm}.yaml"
        done
    done | each "${train_cmd}" nnlm fedtools train-nnlm --valid "${data}/dev/text" --ngpu "${ngpu}"
    in_arms rescore_arm
}

rescore_arm() { # uses arm, whose folder is exp
    local seed set part
    log "Scores of every word, ${exp}"
    for seed in ${seeds}; do
        for set in dev eval; do
            for part in $(seq "${nj}"); do
                tabbed "${exp}/lists/decode_${set}" "${exp}/nnlm/seed${seed}" \
                    "${exp}/nnlm/seed${seed}/rescored_${set}" --job "${part}"
            done
        done
    done | each "${train_cmd}" rescore fedtools rescore --nj "${nj}" --ngpu "${ngpu}"
    for seed in ${seeds}; do
        for set in dev eval; do
            tabbed "${exp}/lists/decode_${set}" "${exp}/nnlm/seed${seed}" \
                "${exp}/nnlm/seed${seed}/rescored_${set}"
        done
    done | each "${cpu_cmd}" rescored fedtools merge-rescored --nj "${nj}"
    for seed in ${seeds}; do
        for set in dev eval; do
            tabbed "${data}/${set}" "${exp}/nnlm/seed${seed}/rescored_${set}" \
                "${exp}/nnlm/seed${seed}/stream_${set}"
        done
    done | each "${cpu_cmd}" stream fedtools rescore-stream
}

# Tune the weights without adaptation, and then lambda, on dev, before eval is read.
tune_arm() { # uses arm, whose folder is exp
    log "Stage 7: weights and lambda of ${arm}, tuned on dev"
    bound_all
    choose weights
    choose scale weights
    [ "${arm}" != far ] || tune_doubt
}

rows_arm() { # uses arm, whose folder is exp
    local seed am nnlm fixed
    log "Stage 8: rows of ${arm}"
    for seed in ${seeds}; do
        of_seed "${seed}"
        mapfile -t fixed < <(fixed_of)
        tabbed "${nnlm}/stream_eval" "${data}/eval" "${exp}/rows/seed${seed}.tsv" "${fixed[@]}" \
            --seed "${seed}"
    done | each "${cpu_cmd}" rows fedtools rescore-rows --config conf/fmp.yaml \
        --static "${data}${bounded}/train/text" --without conf/fillers.txt
    show rows
}

# Run the sweeps of table 4, for the far arm only.
privacy_arm() { # uses arm, whose folder is exp
    local seed am nnlm fixed
    [ "${arm}" = far ] || return 0
    log "Stage 9: ${exp}/sweeps"
    for seed in ${seeds}; do
        of_seed "${seed}"
        mapfile -t fixed < <(fixed_of)
        fixed+=(--seed "${seed}")
        sweeps_of_privacy
    done | each "${cpu_cmd}" sweep fedtools rescore-sweep
    show sweep
}

report_arms() {
    run local/arms.py "${exp}/arms" "${results}" --arms "${arms}" --seeds "${seeds}" \
        --rounds "${most}" --section "${section}" --corpus "${corpus_name}" --release "${release}" \
        --experiment "${exp}/am/seed${am_seed}" "${mini[@]}" --command "${command_line% }"
    log "Stage 10: wrote ${results}"
}
