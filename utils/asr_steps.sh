# shellcheck shell=bash
# Sourced by recipes after utils/recipe.sh: steps from data directories to hypotheses, with the
# caller's options and folders.
# shellcheck disable=SC2154  # data, dump, exp, config, nj, ngpu and the commands of cmd.sh

# What extract-features and merge-features are told beside the directories.
feature_options=() merge_options=()

setting() { fedtools config "${config}" "$1"; }

extract_features() { # sets...
    local set
    for set in "$@"; do
        ${train_cmd} "JOB=1:${nj}" "${dump}/${set}/log/extract.JOB.log" \
            fedtools extract-features "${data}/${set}" "${dump}/${set}" --job JOB --nj "${nj}" \
            "${feature_options[@]}"
        fedtools merge-features "${data}/${set}" "${dump}/${set}" --nj "${nj}" "${merge_options[@]}"
    done
}

train_units() { # set that tokens and n-gram are of, --valid TEXT...: to report perplexities of
    fedtools train-tokens "${data}/$1/text" "${exp}/tokens" \
        --token-type "$(setting tokens.token_type)" --vocab-size "$(setting tokens.vocab_size)"
    fedtools train-lm "${data}/$1/text" "${exp}/lm" --order "$(setting lm.order)" "${@:2}"
}

# A line for waves.py.
experiment() { # folder, the one that it waits for or -, seed, section of the config, method, data for
               # training, for validation, options of fedtools init
    tabbed "$1" "$2" --seed "$3" --section "$4" --method "$5" --data "train=${data}/$6" \
        --data "valid=${data}/$7" --asset "tokens=${exp}/tokens" "${@:8}"
}

# N-best lists of all utterances of several sets, as one array. Where the sets are fewer than --nj,
# each is cut into so many parts that there are as many jobs.
decode_all() { # name of the logs; on standard input, lines with tabs: experiment, set, options
    local lines line words part parts list=${exp}/log/$1.list
    mapfile -t lines
    parts=$(((nj + ${#lines[@]} - 1) / ${#lines[@]}))
    mkdir -p "${exp}/log"
    for line in "${lines[@]}"; do
        mapfile -t -d $'\t' words < <(printf '%s\t' "${line}")
        for part in $(seq "${parts}"); do
            tabbed "${words[0]}" "${data}/${words[1]}" "${words[0]}/decode_${words[1]}" \
                --job "${part}" "${words[@]:2}"
        done
    done >"${list}"
    array "${decode_cmd}" "${exp}/log/$1.JOB.log" "${list}" 1 0 fedtools decode --lm "${exp}/lm" \
        --config "${config}" --nj "${parts}" --ngpu "${ngpu}"
    for line in "${lines[@]}"; do
        mapfile -t -d $'\t' words < <(printf '%s\t' "${line}")
        fedtools merge-nbest "${words[0]}/decode_${words[1]}" "${data}/${words[1]}" --nj "${parts}"
    done
}

tune() { # experiment: the weights of its N-best lists, by validation data
    fedtools tune "$1/decode_valid" "${data}/valid" "$1/weights.yaml"
}

score() { # experiment, set: the best hypotheses by the experiment's weights, and their error rates
    fedtools best-path "$1/decode_$2" --weights "$1/weights.yaml"
    fedtools score "${data}/$2" "$1/decode_$2/text" "$1/decode_$2"
}
