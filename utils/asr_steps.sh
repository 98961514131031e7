# shellcheck shell=bash
# Sourced by recipes after utils/recipe.sh: steps from data directories to hypotheses, with the
# caller's options and folders.
# shellcheck disable=SC2154  # data, dump, exp, config, nj, ngpu and the commands of cmd.sh

# What extract-features and merge-features are told beside the directories, and average beside the
# experiment.
feature_options=() merge_options=() average_options=()

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

train() { # experiment, seed, section of the config, method, data for training, for validation,
          # options
    fedtools init "$1" --config "${config}" --section "$3" --method "$4" --seed "$2" \
        --data "train=${data}/$5" --data "valid=${data}/$6" --asset "tokens=${exp}/tokens" "${@:7}"
    ${rounds_cmd:-${train_cmd}} "$1/log/rounds.log" \
        fedtools rounds "$1" --nj "${nj}" --ngpu "${ngpu}" --evaluate valid
    ${train_cmd} "$1/log/average.log" \
        fedtools average "$1" --ngpu "${ngpu}" "${average_options[@]}"
}

decode() { # experiment, set, options: N-best lists of all utterances
    ${decode_cmd} "JOB=1:${nj}" "$1/decode_$2/log/decode.JOB.log" \
        fedtools decode "$1" "${data}/$2" "$1/decode_$2" --lm "${exp}/lm" \
        --config "${config}" --job JOB --nj "${nj}" --ngpu "${ngpu}" "${@:3}"
    fedtools merge-nbest "$1/decode_$2" "${data}/$2" --nj "${nj}"
}

tune() { # experiment: the weights of its N-best lists, by validation data
    fedtools tune "$1/decode_valid" "${data}/valid" "$1/weights.yaml"
}

score() { # experiment, set: the best hypotheses by the experiment's weights, and their error rates
    fedtools best-path "$1/decode_$2" --weights "$1/weights.yaml"
    fedtools score "${data}/$2" "$1/decode_$2/text" "$1/decode_$2"
}
