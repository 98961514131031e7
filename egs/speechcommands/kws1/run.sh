#!/usr/bin/env bash
# Federated keyword spotting with speakers as clients. Li et al., "Avoid overfitting user specific
# information in federated keyword spotting", Interspeech 2022.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
LC_ALL=C printf -v command_line '%q ' egs/speechcommands/kws1/run.sh "$@"

stage=1
stop_stage=7
ngpu=0                  # 1: train on a GPU
nj=2                    # jobs at the same time; no result depends on it
networks=               # default: those of the config
whole_grid=false        # true: the section grid of the config, or else both tasks, all methods,
                        # seeds "0 1 2", and ablations
price=false             # true: time a round of each row of the list, print an estimate, and exit
tasks=                  # "keywords words" or one of them (Google: 12, 35); default: the config's,
                        # section rows, as for the next three
methods=                # "centralized fedavg alt fedkws_ui" and others that the config has
seeds=                  # random seeds of training
dimension=              # values of the projection, for networks with normalise: projection
server_clips=           # "25 67": rows of a server that trains alone on so many clips of the
                        # validation list; none: no such row
ablations=              # clips: ALT with FedAvg's clips; true: also mu, lambda; default: false
keywords=               # yes,no,...: two or more, for the task keywords; default: Google's ten
silence=                # whether the task keywords has the class _silence_, true or false; default: true;
                        # own: a client's depends on its own clips alone, for user-level privacy
unknown=true            # whether the task keywords has the class _unknown_
noise=corpus            # noise for silence and augmentation: corpus, its recordings, or made, generated
rounds=                 # rounds of each experiment; default: the config's
config=                 # default: conf/first.yaml, or conf/paper.yaml for a corpus in db.sh
pretrained=             # folder of a pretrained model; default: the config's section pretrained, if any
clip_seconds=           # length of a clip: longer ones are cut, and shorter ones padded; default: the
                        # config's, section clips
tag=                    # name of the run's folders: data/<tag>, dump/<tag>, exp/<tag>
split=official          # or paper: test clips are in training, as the paper's counts imply
min_clips=              # leave clients with fewer clips out; default: the config's, section clips
figures=                # "clients landscape", one of them, or none, of stage 6; default: the config's
landscape_clips=        # least clips of the clients of figure 4; default: the config's, section landscape
max_drop=0.02           # fail if more than this fraction of the clips is unusable
running=                # "an4=DIR so762=DIR": speech with transcripts, to count false accepts an hour
leave_out=know,write    # leave out such speech if it has these words, which sound like keywords
corpus_name="Speech Commands"   # name of the corpus in tables
release=                # name of its release in tables; default: its folder's name
references=             # rows that accuracies are compared with, "FedAvg; FedAvg, rounds = 450";
                        # default: the server alone with the fewest clips, and FedAvg, if there
transport=files         # flower: clients are dealt to three sites, which train over Flower on the loopback
results=                # default: exp/<tag>/RESULTS.md

# shellcheck disable=SC2034  # printed by parse_options.sh
help_message="Usage: $0 [--option value]...
Stages:
  1  data directories; speakers are clients. If SPEECHCOMMANDS is empty in db.sh, the corpus is the one
     in the folder corpus, real speech of 560 people, or with --config conf/mini.yaml a synthetic one
  2  clips, packed into one file for each set
  3  the list of experiments: tasks x networks x methods x seeds, and the ablations, or a grid
  4  training, round by round, and accuracy on the test clips
  5  predictions for each test clip; false accepts and rejects; false accepts an hour
  6  figures 1 (clients) and 4 (landscape)
  7  the report: tables, accuracy by round, ablations"

. utils/parse_options.sh
. utils/recipe.sh

: "${silence:=true}"
check_word ngpu '0|1' silence 'true|false|own' noise 'corpus|made' whole_grid 'true|false' price 'true|false' \
    transport 'files|flower'
mini=() length=() alone=() corpus=${SPEECHCOMMANDS} default=conf/paper.yaml made=none
[ -n "${corpus}" ] || default=conf/first.yaml
: "${config:=${default}}"
seeds_of_grid=${seeds} given=${methods}
! "${whole_grid}" || : "${tasks:=keywords words}" "${seeds:=0 1 2}" "${ablations:=true}" \
    "${methods:=centralized fedavg fedprox fedmmd fedopt alo alt fedkws_ui}"
[ -n "${corpus}" ] || made=
take_options "${config}" made=rows.corpus rows.{tasks,methods,seeds,server_clips,figures}
case ${made} in
    own) corpus=downloads/speech_commands_560 name=first ;;
    mini)
        mini=(--mini) corpus=downloads/speech_commands_mini default=conf/mini.yaml name=mini
        log "SPEECHCOMMANDS is empty in db.sh: this run uses the mini corpus, spoken by a synthesiser"
        ;;
    none) name=$(basename "${corpus}") ;;
esac
[ "${made}" != own ] || : "${release:=560 speakers}"
: "${release:=$(basename "${corpus}")}" "${ablations:=false}" "${figures:=none}"
tasks=$(sed -E 's/\b12\b/keywords/g; s/\b35\b/words/g' <<<"${tasks}")
check_words seeds '0|[1-9][0-9]*' tasks 'keywords|words' methods '[a-z0-9_]+' \
    figures 'clients|landscape|none'
check_word ablations 'true|clips|false'
[ -z "${rounds}" ] || check_word rounds '[1-9][0-9]*'
[ "${server_clips}" != none ] || server_clips=
first=()
if [ -n "${server_clips}" ]; then
    check_words server_clips '[1-9][0-9]*'
    alone=(--server-clips "${server_clips// /,}")
    first=("Server alone, $(tr ' ' '\n' <<<"${server_clips}" | sort -n | sed 1q) clips")
fi
[ -z "${running}" ] || check_words running '[A-Za-z0-9][A-Za-z0-9._-]*=.+'
name_corpora SPEECHCOMMANDS SPEECHCOMMANDS_TEST
# A grid has its own rows, of any methods of its configuration.
if "${whole_grid}" && [ -z "${given}" ] && fedtools config "${config}" grid &>/dev/null; then
    methods=$(fedtools config "${config}" methods)
fi
[[ " ${methods} " != *" fedavg "* ]] || first+=(FedAvg)
[[ -n ${references} || ${#first[@]} -eq 0 ]] || printf -v references '%s;' "${first[@]}"
[ "${split}" != paper ] || take_options "${config}" min_clips=clips.paper_min_clips
take_options "${config}" networks clips.{clip_seconds,min_clips} landscape_clips=landscape.min_clips \
    rows.dimension
check_words networks '[a-z0-9_]+'
check_word clip_seconds '[0-9]+(\.[0-9]{1,3})?' dimension '[1-9][0-9]*'
# Runs with other clips or options are other experiments, and so need their own tag.
[ "${config}" = "${default}" ] || name+=-$(basename "${config}" .yaml)
[ "${split}" = official ] || name+=-${split}
[ "${clip_seconds}" = 1 ] || name+=-${clip_seconds}s length=(--clip-seconds "${clip_seconds}")
: "${tag:=${name//[!A-Za-z0-9._-]/_}}" "${results:=exp/${tag}/RESULTS.md}"
check_tag "${tag}"
data=data/${tag} dump=dump/${tag} exp=exp/${tag} list=exp/${tag}/experiments
pictures=${results%.md}-${section} drawings=${exp}/pictures last=${tasks##* } sets=()
for task in ${tasks}; do
    sets+=("${task}"/{train,valid,test})
    for clips in ${server_clips}; do sets+=("${task}/server${clips}"); done
done

# Fit each task's projection on clips of people who are no clients, the server's largest set.
fit_projections() {
    local task largest file=${exp}/data_options.stage3
    [ -n "${server_clips}" ] || fail 2 "normalise: projection is fitted on the server's clips; give --server_clips"
    [ ! -s "${file}" ] || [ "$(<"${file}")" = "${projection}" ] ||
        fail 1 "${exp} has experiments with $(<"${file}"), not ${projection}; give another --tag"
    keep_options "${exp}" "${projection}" 3
    largest=$(tr ' ' '\n' <<<"${server_clips}" | sort -n | tail -n 1)
    for task in ${tasks}; do
        tabbed "${dump}/${task}/server${largest}" "${exp}/${task}/projection"
    done | each "${train_cmd}" projection fedtools fit-projection --pretrained "${pretrained}" \
        --dimension "${dimension}" --ngpu "${ngpu}"
}

[ "${made}" = none ] || stated=${config}
say_estimate "${stated-}" "Keyword spotting on ${release} by ${methods} (seeds ${seeds})"
fetch_pretrained "${config}"
# Check the sections now, and not after hours of preparing a corpus.
read -r -a sections <<<"networks.${networks// / networks.} methods.${methods// / methods.}"
[ "${stage}" -gt 3 ] || fedtools config "${config}" "${sections[@]}" >/dev/null
if [[ " ${methods} " = *" dpfedavg "* && ${tasks} = *keywords* && "${silence} ${unknown}" != @(own|false)" false" ]]; then
    fail 2 "dpfedavg: clips of silence and of unknown words are drawn by all clients' clips;" \
        "give --silence own --unknown false"
fi

options=(--split "${split}" --min-clips "${min_clips}" --silence "${silence}")
options+=(--unknown "${unknown}" ${keywords:+--keywords "${keywords}"} "${length[@]}")
[ "${noise}" = corpus ] || options+=(--noise "${noise}")
projection="--dimension ${dimension} of --server_clips ${server_clips}"
check_kept "${exp}" "${corpora}${options[*]}" 1 split min_clips silence unknown keywords noise clip_seconds
check_kept "${exp}" "${projection}" 3 dimension server_clips

if begins 1; then
    log "Stage 1: data directories in ${data}"
    keep_options "${exp}" "${corpora}${options[*]}"
    case ${made} in
        own) run local/unpack_corpus.py corpus "${corpus}" ;;
        mini) run local/mini.py downloads ;;
    esac
    [[ ${tasks} = *" "* ]] || options+=(--task "${tasks}")
    # Not among the options above, because the other sets do not depend on it.
    options+=("${alone[@]}")
    run local/prepare.py "${corpus}" "${data}" "${options[@]}" --max-drop "${max_drop}" \
        ${SPEECHCOMMANDS_TEST:+--test-archive "${SPEECHCOMMANDS_TEST}"}
    for set in "${sets[@]}"; do utils/validate_data_dir.py --no-feats "${data}/${set}"; done
fi

check_pretrained
if begins 2; then
    log "Stage 2: packed clips in ${dump}"
    for set in "${sets[@]}"; do
        tabbed "${data}/${set}" "${dump}/${set}" --classes "${data}/${set%/*}/classes.txt"
    done | each "${cpu_cmd}" pack fedtools pack-clips --max-drop "${max_drop}" \
        --noise "${data}/noise.scp" "${length[@]}"
    show pack
fi

await_pretrained
if begins 3; then
    begins 6 && [[ ${figures} = *landscape* ]] || landscape_clips=0
    whole=()
    ! "${whole_grid}" || whole=(--grid "${config}" --seeds "${seeds_of_grid}")
    planned=$(local/experiments.py "${exp}" "${dump}" --seeds "${seeds}" --tasks "${tasks}" \
        --networks "${networks}" --methods "${methods}" --ablations "${ablations}" --config "${config}" \
        --landscape-clips "${landscape_clips}" --rounds "${rounds}" --pretrained "${pretrained}" "${alone[@]}" \
        "${whole[@]}")
    [ "${transport}" = files ] || planned=$(utils/flower_sites.py "${exp}/sites" <<<"${planned}")
    utils/waves.py "${list}" <<<"${planned}"
    if grep -qF "projection=${exp}/" "${list}"; then fit_projections; fi
    log "Stage 3: the list of $(wc -l <"${list}") experiments, ${list}"
    if "${price}"; then
        job "${train_cmd}" "${exp}/log/price.log" local/price.py "${list}" \
            --config "${config}" --ngpu "${ngpu}" --nj "${nj}"
        printed "${exp}/log/price.log"
        exit
    fi
fi

if begins 4; then
    [ -s "${list}" ] || fail 1 "${list}: no experiments; run --stage 3"
    log "Stage 4: training the $(wc -l <"${list}") experiments of ${list}, logs in ${exp}/log"
    train=(fedtools rounds)
    [ "${transport}" = files ] || train=(utils/flower_rounds.sh)
    # For each experiment: EXP is its folder, OPTIONS are its options in the list, NJ its share of --nj.
    train_waves "${list}" train 1 0 fedtools init EXP --config "${config}" OPTIONS '&&' \
        "${train[@]}" EXP --nj NJ --ngpu "${ngpu}" --evaluate test
fi

if begins 5; then
    log "Stage 5: predictions for each test clip"
    job "${train_cmd}" "${exp}/log/clip_scores.log" \
        fedtools clip-scores "${exp}"/*/*/*/seed* --ngpu "${ngpu}"
fi

if begins 5 && [[ ${tasks} = *keywords* && "${silence} ${unknown}" != "false false" ]]; then
    log "Stage 5: false accepts and false rejects, task keywords"
    job "${train_cmd}" "${exp}/log/detection.log" \
        fedtools detection "${exp}"/keywords/*/*/seed* --ngpu "${ngpu}"
    # The log has a table with a row for each experiment.
    printed "${exp}/log/detection.log" | awk '
        NR == 1 { for (fields = NF; n++ < NF;) place[$n] = n }
        NF == fields && /\/seed/ { printf "%s: %s false accepts, %s false rejects\n",
            $1, $place["false_accepts"], $place["false_rejects"] }'
fi

if begins 5 && [[ ${tasks} = *keywords* && -n ${running} ]]; then
    for speech in ${running}; do
        log "Stage 5: false accepts an hour of ${speech%%=*}"
        job "${train_cmd}" "${exp}/log/false_alarms.${speech%%=*}.log" \
            fedtools false-alarms "${exp}"/keywords/*/*/seed* --data "${speech}" \
            --leave-out "${leave_out}" --ngpu "${ngpu}"
        printed "${exp}/log/false_alarms.${speech%%=*}.log"
    done
fi

if begins 6; then
    log "Stage 6: figures ${figures}"
    rm -rf "${drawings}"
    mkdir -p "${drawings}"
fi

if begins 6 && [[ ${figures} = *clients* ]]; then
    for task in ${tasks}; do
        run local/plot_clients.py "${dump}/${task}/train" "${drawings}/clients-${task}.png" \
            --config "${config}"
    done
fi

if begins 6 && [[ ${figures} = *landscape* ]]; then
    # The first network in the list with a model of centralised training; a grid need not have all.
    start=$(awk -F '\t' -v task="${last}" '
        split($2, part, "/") && part[3] == task && part[5] == "centralized" { print $2; exit }' "${list}")
    if [ -n "${start}" ]; then
        job "${train_cmd}" "${exp}/log/landscape.log" local/landscape.py --config "${config}" "${start}" \
            "${drawings}/landscape.png" --ngpu "${ngpu}" --min-clips "${landscape_clips}"
    else
        log "Stage 6: no figure 4, which starts from a model of centralised training"
    fi
fi

if begins 7; then
    compared=()
    IFS=';' read -r -a rows <<<"${references}"
    for row in "${rows[@]}"; do compared+=(--reference "${row# }"); done
    # There are no data directories if the clips were packed elsewhere.
    [ ! -d "${data}" ] || compared+=(--notes "${data}/notes.txt")
    place_pictures "${drawings}" "${pictures}" "${pictures}"-clients-*.png \
        "${pictures}"-landscape.{png,tsv}
    run local/report.py "${exp}" "${results}" --section "${section}" --corpus "${corpus_name}" \
        --release "${release}" "${mini[@]}" --published conf/published.tsv \
        --config "${config##*/}" --command "${command_line% }" "${compared[@]}"
    write_cards "${exp}" "${results}" "${seeds%% *}"
    log "Stage 7: wrote ${results}"
    if [ "${made}" = own ]; then
        further="fedtools show ${exp}/${last}/head/fedavg/seed0 lists what each client sent; README.md has more"
        [[ ${server_clips} = *" "* ]] ||
            further="./run.sh --server_clips '25 67 270' trains servers with more clips; ${further}"
        log "Next: ${further}"
    fi
fi
