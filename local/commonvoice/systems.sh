# shellcheck shell=bash
# Sourced by run.sh after utils/asr_steps.sh: systems, their variants, and what is made of them.
#
# A system is a method with variants, "decouplefl+cnn+sit": the config's sections
# methods.decouplefl, variants.cnn and variants.sit, laid over the rest in this order.
# shellcheck disable=SC2034,SC2154  # run.sh's options and folders; systems, of_table, rows

# Systems: those of --methods, with the variants of other options, then those of further tables.
name_systems() {
    local method system table l said wanted
    own_labels=$(setting training.labels)
    : "${labels:=${own_labels}}"
    check_word labels 'transcripts|continuous|fixed'
    [ -z "${extractor}" ] || check_word extractor 'cnn'
    [ -z "${tables}" ] || check_words tables '2|4|5'
    awk -v n="${newcomer_seconds}" \
        'BEGIN { exit !(n ~ /^([0-9]+[.]?[0-9]*|[.][0-9]+)$/ && n + 0 >= 0.1) }' ||
        fail 2 "--newcomer_seconds: '${newcomer_seconds}' is not a number from 0.1 on"
    l=$(of_labels "${labels}")
    declare -gA of_table=(
        [2]="centralized$(of_labels fixed) centralized$(of_labels continuous)"
        [4]="decouplefl${l} decouplefl+no_stage1${l} decouplefl+no_stage2${l} joint${l}"
        [5]="decouplefl+cnn${l} decouplefl+cnn+sit${l} decouplefl${l} decouplefl+sit${l}"
    )
    read -r -a wanted <<<"${methods}"
    said=$(fedtools methods --task asr "${wanted[@]%%+*}" 2>&1 >/dev/null) ||
        fail 2 "--methods: ${said#fedtools: }"
    main=
    for method in ${methods}; do
        system=${method}
        [[ ${method} != *+@(transcripts|continuous|fixed)* ]] ||
            fail 2 "--methods ${method}: give labels by --labels, for all methods"
        case ${method%%+*} in
            fedextract | decouplefl | joint) system+=${extractor:+"+${extractor}"} ;;
        esac
        [[ ${method%%+*} != decouplefl || ${sit} = false ]] || system+=+sit
        main+=" ${system}${l}"
    done
    [[ -z ${extractor} || ${main} = *+"${extractor}"* ]] ||
        fail 2 "--extractor ${extractor}: none of --methods has an extractor"
    [[ ${sit} = false || ${main} = *+sit* ]] || fail 2 "--sit true: no decouplefl among --methods"
    systems=${main}
    for table in ${tables}; do systems+=" ${of_table[${table}]}"; done
    # Each once, in this order.
    systems=$(tr ' ' '\n' <<<"${systems}" | awk 'NF && !seen[$0]++' | tr '\n' ' ')
    [[ ${clients} = accent || ${systems} != *+fixed* ]] ||
        fail 2 "--clients speaker: newcomers have no fixed labels"
    [[ ${clients} = accent || " ${systems}" != *" joint"* ]] ||
        fail 2 "--clients speaker: joint (--methods, --tables 4) holds every client's model in memory"
    [[ ${clients} = accent || ${systems} != *+sit* ]] ||
        fail 2 "--clients speaker: a client of one speaker has none to be invariant to" \
            "(--sit true, +sit, --tables 5)"
    [[ ${attacks} = false || -n $(sending) ]] ||
        fail 2 "--attacks true: no DecoupleFL among --methods and --tables that sends features"
    # Of fixed labels, train_system makes transcripts.
    mapfile -t wanted < <(tr ' ' '\n' <<<"${systems//+fixed/+transcripts}" | sed 's/^[^+]*//' |
        tr '+' '\n' | awk 'NF && !seen[$0]++ { print "variants." $0 }')
    [ ${#wanted[@]} -eq 0 ] ||
        said=$(fedtools config "${config}" "${wanted[@]}" 2>&1 >/dev/null) ||
        fail 2 "unknown variant: ${said#fedtools: }"
}

# Those of the systems whose clients send features.
sending() {
    local system
    for system in ${systems}; do
        [[ ${system} != decouplefl?(+*) || ${system} = *+no_stage2* ]] || echo "${system}"
    done
}

# The variant of a system that is trained on such labels; none where the config says so already.
of_labels() { [ "$1" = "${own_labels}" ] || echo "+$1"; }

# What a system is called in tables: its method's title, which {} stands for, and its variants.
title() { # system
    local variants=${1#"${1%%+*}"}
    variants=${variants//+/, }
    echo "{}${variants//_/ }"
}

train_system() { # system, seed, baseline
    local method=${1%%+*} set=${trained} variant sections=()
    for variant in $(tr '+' ' ' <<<"${1#"${method}"}"); do
        # Labels that the baseline gave are transcripts of other data.
        if [ "${variant}" = fixed ]; then
            set+=_fixed_seed$2 variant=transcripts
        fi
        sections+=(--section "variants.${variant}")
    done
    train "${exp}/$1/seed$2" "$2" "methods.${method}?" "${method}" "${set}" valid \
        --start "$3/model.safetensors" "${sections[@]}"
}

# Labels that do not change: the baseline's hypotheses of the training data, by beam search with the
# n-gram and the weights that suit it on validation data.
label_train() { # baseline, seed
    local set
    for set in valid "${trained}"; do
        decode "$1" "${set}"
        [ "${set}" != valid ] || tune "$1"
    done
    fedtools best-path "$1/decode_${trained}" --weights "$1/weights.yaml"
    fedtools relabel "${data}/${trained}" "$1/decode_${trained}/text" "${data}/${trained}_fixed_seed$2"
}

# What the features that DecoupleFL's clients send give away.
attack_features() {
    local seed system path name drawn merged=()
    rm -f "${pictures}"-tsne-*.png
    for seed in ${seeds}; do
        for system in $(sending); do
            path=${exp}/${system}/seed${seed}
            log "Stage 8: attacks on the features of ${path}"
            ${train_cmd} "${path}/log/attacks.log" fedtools attack features "${path}" \
                "${path}/attacks" --server-data "${data}/server_train${sp}" \
                --decoders "${exp}/decoders" --text "${data}/${trained}/text" --ngpu "${ngpu}"
            name=DecoupleFL${system#decouplefl}
            merged+=("${name//+/, }=${path}/attacks/attacks.tsv")
            # Figure 4 is of one client.
            drawn=("${path}"/attacks/tsne.*.png)
            [[ ${seed} != "${seeds%% *}" || ! -s ${drawn[0]} ]] ||
                cp "${drawn[0]}" "${pictures}-tsne-${system//+/-}.png"
        done
    done
    fedtools attack merge "${exp}/attacks.tsv" "${merged[@]}"
}

cross() {
    local seed system named=()
    log "Stage 8: each client's model on each client's data"
    for seed in ${seeds}; do
        for system in ${main}; do
            named+=("$(title "${system}")=${exp}/${system}/seed${seed}")
        done
    done
    ${train_cmd} "${exp}/log/cross.log" fedtools cross "${data}/test" "${exp}/cross.tsv" \
        "${named[@]}" --plot "${pictures}-cross.png" --ngpu "${ngpu}"
}

# A newcomer, whose speech no training has heard: with what all share, and adapted to the first
# seconds of its own. Both are scored on the rest of it.
newcomers() {
    local epochs part path seed system set=${data}/test
    epochs=$(setting newcomers.epochs)
    fedtools subset-data "${set}" "${set}_first" --first "${newcomer_seconds}" --rest "${set}_rest"
    for part in first rest; do
        fedtools partition "${set}_${part}" "${set}_${part}_spk" --scheme map --by utt2spk
    done
    for seed in ${seeds}; do for system in ${systems}; do
        path=${exp}/${system}/seed${seed}
        log "Stage 8: newcomers of ${path}"
        fedtools adapt "${path}" "${set}_first_spk" "${path}/newcomers" --epochs "${epochs}"
        ${train_cmd} "${path}/log/newcomers.log" \
            fedtools rounds "${path}/newcomers" --nj "${nj}" --ngpu "${ngpu}"
        decode "${path}" test_rest
        decode "${path}/newcomers" test_rest_spk --model "round:${epochs}"
        for part in "${path}/decode_test_rest" "${path}/newcomers/decode_test_rest_spk"; do
            fedtools best-path "${part}" --weights "${path}/weights.yaml"
            fedtools score "${set}_rest" "${part}/text" "${part}"
        done
    done; done
}

write_report() {
    report_rows
    fedtools report "${results}" --section "${section}" --corpus "${corpus_name}" \
        --release "${release}" "${mini[@]}" "${rows[@]}" --plot "${pictures}.png" \
        --published "Zhu et al. 2022, table 3=conf/published.tsv" --command "${command_line% }"
}

# The rows of the main table, and those of further ones.
report_rows() {
    local seed system path table name baseline trained_on=labels
    case ${labels} in
        continuous) trained_on="labels of a teacher that follows the model" ;;
        fixed) trained_on="the baseline's hypotheses by beam search" ;;
        transcripts) trained_on="their transcripts" ;;
    esac
    name="On clients' speech, models are trained on ${trained_on}."
    [[ ${labels} = continuous || -z $(sending) ]] ||
        name+=" DecoupleFL's stage 2 is trained on a teacher's labels of the features sent: transcripts stay."
    if [ "${clients}" = speaker ]; then
        name+=" Speakers of the test are no clients: they are scored with what all clients share;"
        name+=" layers that are personal are the baseline's."
        name+=" '..., adapted' takes $(setting newcomers.epochs) epochs more, at each newcomer."
    fi
    rows+=(--note "${name}")
    for seed in ${seeds}; do
        baseline=${exp}/baseline/seed${seed}
        rows+=(--row "Baseline=:${baseline}/decode_test")
        rows+=(--elsewhere "the baseline on the server's own accents=${baseline}/decode_server_test")
        for system in ${main}; do
            path=${exp}/${system}/seed${seed}
            rows+=(--row "$(title "${system%"$(of_labels "${labels}")"}")=${path}:${path}/decode_test")
        done
        for table in ${tables}; do
            name="table ${table} of Zhu et al."
            rows+=(--also "${name}=Baseline=:${baseline}/decode_test")
            for system in ${of_table[${table}]}; do
                path=${exp}/${system}/seed${seed}
                # Table 2 is about labels, also those of the config.
                [ "${table}" = 2 ] || system=${system%"$(of_labels "${labels}")"}
                [[ ${table} != 2 || ${system} = *+* ]] || system+="+${own_labels}"
                rows+=(--also "${name}=$(title "${system}")=${path}:${path}/decode_test")
            done
        done
        [ "${clients}" = speaker ] || continue
        for system in ${main}; do
            path=${exp}/${system}/seed${seed} name="newcomers, on what follows their first seconds"
            system=$(title "${system%"$(of_labels "${labels}")"}")
            rows+=(--also "${name}=${system}=${path}:${path}/decode_test_rest")
            name+="=${system}, adapted"
            rows+=(--also "${name}=${path}:${path}/newcomers/decode_test_rest_spk")
        done
    done
    if [ -s "${exp}/cross.tsv" ]; then
        name=$(awk 'NR == 1 { print toupper($NF) }' "${exp}/cross.tsv")
        name="each client's model on each client's test data, ${name} by greedy search, %"
        rows+=(--picture "${name}=${pictures}-cross.png")
    fi
    [ "${attacks}" = true ] || return 0
    name="attacks on the features that clients send: means over clients, with 95 % intervals by bootstrap"
    name+=" over speakers; README.md says what they are"
    rows+=(--table "${name}=${exp}/attacks.tsv")
    for path in "${pictures}"-tsne-*.png; do
        [ -s "${path}" ] || continue
        name=${path#"${pictures}-tsne-"}
        rows+=(--picture "features of one client's speakers, ${name%.png}=${path}")
    done
}
