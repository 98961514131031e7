# shellcheck shell=bash
# Sourced by recipes after utils/recipe.sh: steps from data directories to hypotheses, with the
# caller's options and folders.
# shellcheck disable=SC2154  # data, dump, exp, config, nj, ngpu and the commands of cmd.sh

# Options of extract-features, merge-features and score, in addition to the directories.
feature_options=() merge_options=() score_options=()
# Language model of decode, from take_pretrained.
lm=()
# Whether models have their own decoder, and so their own tokens and language model.
seq2seq=false
# Sets whose N-best lists the caller decodes for tuning; none for models with their own decoder.
# shellcheck disable=SC2034
tuned=(valid)

setting() { fedtools config "${config}" "$1"; }

extract_features() { # sets...
    local set
    for set in "$@"; do
        job "${train_cmd} JOB=1:${nj}" "${dump}/${set}/log/extract.JOB.log" \
            fedtools extract-features "${data}/${set}" "${dump}/${set}" --job JOB --nj "${nj}" \
            "${feature_options[@]}"
    done
    for set in "$@"; do tabbed "${data}/${set}" "${dump}/${set}"; done |
        each "${cpu_cmd}" features fedtools merge-features --nj "${nj}" "${merge_options[@]}"
    show features
}

# Set the options that a pretrained model needs, or those of other models.
take_pretrained() { # sets pretrained, tokens, seq2seq, tuned, lm, feature_options, score_options
    tokens=${exp}/tokens lm=(--lm "${exp}/lm")
    fetch_pretrained "${config}"
    await_pretrained
    [ -n "${pretrained}" ] || return 0
    feature_options=(--pretrained "${pretrained}")
    # Whisper writes capitals, punctuation and digits.
    score_options=(--text-rule spoken)
    # shellcheck disable=SC2034  # the caller uses tokens and tuned
    [ "$(setting model.criterion)" != seq2seq ] || seq2seq=true tokens=${pretrained} tuned=() lm=()
}

# Train an n-gram, for which a build in the background must have ended.
train_lm() { # arguments of fedtools train-lm
    utils/build_kenlm.sh
    run fedtools train-lm "$@"
}

train_units() { # set to train tokens and n-gram on, --valid TEXT...: to report perplexities of
    run fedtools train-tokens "${data}/$1/text" "${exp}/tokens" \
        --token-type "$(setting tokens.token_type)" --vocab-size "$(setting tokens.vocab_size)"
    train_lm "${data}/$1/text" "${exp}/lm" --order "$(setting lm.order)" "${@:2}"
}

# Print an experiment's line for waves.py.
experiment() { # folder, folder it waits for or -, seed, section of the config, method, training data,
               # validation data, options of fedtools init
    tabbed "$1" "$2" --seed "$3" --section "$4" --method "$5" --data "train=${data}/$6" \
        --data "valid=${data}/$7" --asset "tokens=${tokens:-${exp}/tokens}" "${@:8}"
}

# Make N-best lists of all utterances of several sets, as one array. If there are fewer sets than --nj,
# each is cut into parts, so that there are at least --nj jobs.
decode_all() { # name of the logs, command that decodes...; on standard input, lines with tabs:
               # experiment, set, options
    local lines line words part parts
    mapfile -t lines
    parts=$(((nj + ${#lines[@]} - 1) / ${#lines[@]}))
    for line in "${lines[@]}"; do
        mapfile -t -d $'\t' words < <(printf '%s\t' "${line}")
        for part in $(seq "${parts}"); do
            tabbed "${words[0]}" "${data}/${words[1]}" "${words[0]}/decode_${words[1]}" \
                --job "${part}" "${words[@]:2}"
        done
    done | each "${decode_cmd}" "$1" "${@:2}" --nj "${parts}"
    for line in "${lines[@]}"; do
        mapfile -t -d $'\t' words < <(printf '%s\t' "${line}")
        tabbed "${words[0]}/decode_${words[1]}" "${data}/${words[1]}"
    done | each "${cpu_cmd}" "$1.merge" fedtools merge-nbest --nj "${parts}"
}

# Tune the weights of experiments' N-best lists on a set.
tune() { # set; on standard input, experiments
    local path
    # Hypotheses of these models have a single score, so there is nothing to tune. The input is read
    # all the same, because the command that writes to the pipe would fail otherwise.
    if "${seq2seq}"; then
        cat >/dev/null
        return 0
    fi
    while IFS= read -r path; do
        tabbed "${path}/decode_$1" "${data}/$1" "${path}/weights.yaml"
    done | each "${cpu_cmd}" tune fedtools tune
    show tune
}

# Choose the best hypotheses by an experiment's weights, and compute their error rates.
score() { # name of the logs; on standard input, lines with tabs: experiment, folder of the lists
          # below it, set, folder of the rates (default: the lists' folder)
    local lines path lists set out weights
    mapfile -t lines
    printf '%s\n' "${lines[@]}" | while IFS=$'\t' read -r path lists _; do
        weights=(--weights "${path}/weights.yaml")
        ! "${seq2seq}" || weights=()
        tabbed "${path}/${lists}" "${weights[@]}"
    done | each "${cpu_cmd}" "$1.best" fedtools best-path
    printf '%s\n' "${lines[@]}" | while IFS=$'\t' read -r path lists set out; do
        tabbed "${data}/${set}" "${path}/${lists}/text" "${path}/${out:-${lists}}"
    done | each "${cpu_cmd}" "$1" fedtools score "${score_options[@]}"
    printf '%s\n' "${lines[@]}" | while IFS=$'\t' read -r path lists set out; do
        rate_of "${path}/${out:-${lists}}"
    done
}

# Print the error rate of a system, the mean over clients; the whole table is in the folder.
rate_of() { # folder of the rates
    awk -F '\t' -v folder="$1" '
        NR == 1 {
            for (n = 1; n <= NF; n++) place[$n] = n
            rate = ("wer" in place) ? "wer" : "cer"
        }
        $1 == "average" { printf "%s: %s %s %%\n", folder, toupper(rate), $place[rate] }' "$1/wer.tsv"
}
