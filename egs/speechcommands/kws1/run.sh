#!/usr/bin/env bash
# Federated keyword spotting on Speech Commands, where every speaker is a client: from audio to the
# tables and figures of Li et al., "Avoid overfitting user specific information in federated
# keyword spotting", Interspeech 2022.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
printf -v command_line '%q ' egs/speechcommands/kws1/run.sh "$@"

stage=1
stop_stage=7
ngpu=0                  # 1: train on a GPU
nj=2                    # jobs at the same time; no result depends on it
seeds="0 1 2"
tasks="12 35"
networks="dscnn mhattrnn resnet transformer"
methods="centralized fedavg fedprox fedmmd fedopt alo alt fedkws_ui"
ablations=true          # figure 3: mu, lambda; where fedkws_ui and dscnn or resnet are chosen
config=                 # default: conf/mini.yaml, or conf/paper.yaml for a real corpus
tag=                    # where things go: data/<tag>, dump/<tag>, exp/<tag>
split=official          # or paper: test clips are in training, as the paper's counts say
min_clips=              # leave smaller clients out; default: 5 with --split paper or released.yaml
landscape_clips=        # figure 4: of clients with so many clips; default: 100, mini: 10
max_drop=0.02           # fail if more than this share of the clips is unusable
keywords=               # of the first task; default: Google's ten
corpus_name="Speech Commands"   # the corpus, and ...
release=                # ... its release, as tables shall call them
results=                # default: exp/<tag>/RESULTS.md

# shellcheck disable=SC2034  # printed by parse_options.sh
help_message="Usage: $0 [--stage N] [--stop_stage N] [--nj N] [--ngpu 0|1] [--seeds \"0 1 2\"]
          [--tasks \"12 35\"] [--networks \"dscnn ...\"] [--methods \"fedavg ...\"]
          [--ablations true|false] [--config YAML] [--tag NAME] [--split official|paper]
          [--min_clips N] [--landscape_clips N] [--max_drop X] [--keywords WORD,...]
          [--corpus_name NAME] [--release NAME] [--results FILE]
Stages:
  1  data directories of both tasks; every speaker is a client;
     the mini corpus is made first if SPEECHCOMMANDS in db.sh is empty
  2  clips, packed into one file for each set
  3  the list of experiments: tasks x networks x methods x seeds, and the ablations
  4  training, round by round, and accuracy on the test clips
  5  false accepts and false rejects of the last models
  6  figures 1 (clients) and 4 (landscape)
  7  the report: tables, accuracy by round, ablations"

. utils/parse_options.sh
if [ $# -gt 0 ]; then
    echo "$0: unexpected '$1'; a list of several words wants quotes" >&2
    exit 2
fi
. ./path.sh
. ./cmd.sh
. ./db.sh

log() { echo "$(date '+%Y-%m-%d %H:%M:%S') $*"; }
begins() { [ "${stage}" -le "$1" ] && [ "${stop_stage}" -ge "$1" ]; }

mini=()
corpus=${SPEECHCOMMANDS}
if [ -z "${SPEECHCOMMANDS}" ]; then
    mini=(--mini)
    corpus=downloads/speech_commands_mini
    : "${release:=speech_commands_mini}" "${config:=conf/mini.yaml}" "${landscape_clips:=10}"
    log "SPEECHCOMMANDS is empty in db.sh: this run uses the mini corpus, spoken by a synthesiser"
fi
for setting in SPEECHCOMMANDS SPEECHCOMMANDS_TEST; do
    # In the report's command the corpus stands without the folders of this machine.
    [ -z "${!setting}" ] || command_line="${setting}=.../$(basename "${!setting}") ${command_line}"
done
# Other clips or other options are other experiments, and so need a tag of their own.
default=conf/paper.yaml name=$(basename "${corpus}")
[ -n "${SPEECHCOMMANDS}" ] || default=conf/mini.yaml name=mini
: "${config:=${default}}" "${landscape_clips:=100}" "${release:=$(basename "${corpus}")}"
[ "${config}" = "${default}" ] || name+=-$(basename "${config}" .yaml)
[ "${split}" = official ] || name+=-${split}
: "${tag:=${name//[!A-Za-z0-9._-]/_}}"
if [[ ! ${tag} =~ ^[A-Za-z0-9_][A-Za-z0-9._-]*$ ]]; then
    echo "$0: --tag '${tag}': use letters, digits and . _ -" >&2
    exit 2
fi
words() { # option, pattern, its words: at least one, each as the pattern says, and none twice;
          # the option then has one blank between two, as all below takes it apart
    local word seen=" "
    [ $# -gt 2 ] || { echo "$0: --$1 is empty" >&2; exit 2; }
    for word in "${@:3}"; do
        [[ ${word} =~ ^($2)$ ]] || { echo "$0: --$1: '${word}' is not of the form $2" >&2; exit 2; }
        [[ ${seen} != *" ${word} "* ]] || { echo "$0: --$1: ${word} comes twice" >&2; exit 2; }
        seen+="${word} "
    done
    printf -v "$1" '%s' "${*:3}"
}
# shellcheck disable=SC2086  # lists of words
{
    words seeds '0|[1-9][0-9]*' ${seeds}
    words tasks '12|35' ${tasks}
    words networks '[a-z0-9_]+' ${networks}
    words methods '[a-z0-9_]+' ${methods}
    words ngpu '0|1' ${ngpu}
}
# The authors' code leaves them out, as the paper's counts of clients do.
[[ ${config##*/} != released.yaml && ${split} != paper ]] || : "${min_clips:=5}"
: "${min_clips:=1}"
section=${tag,,}
section=${section//[!a-z0-9]/-}
data=data/${tag} dump=dump/${tag} exp=exp/${tag} list=exp/${tag}/experiments
: "${results:=${exp}/RESULTS.md}"
figures=${results%.md}-${section} pictures=()
[[ ${ngpu} -gt 0 ]] && train_cmd=${cuda_cmd}

if [ "${stage}" -le 3 ]; then
    # Rather now than after hours of preparing a corpus.
    sections=()
    for name in ${networks}; do sections+=("networks.${name}"); done
    for name in ${methods}; do sections+=("methods.${name}"); done
    fedtools config "${config}" "${sections[@]}" >/dev/null
fi

if begins 1; then
    log "Stage 1: data directories in ${data}"
    # Made anew with other options, they would be lost for the experiments that began with them.
    made_with="--split ${split} --min_clips ${min_clips} --keywords ${keywords:-default}"
    made_with+=" SPEECHCOMMANDS=$(basename "${corpus}")"
    made_with+=" SPEECHCOMMANDS_TEST=$(basename "${SPEECHCOMMANDS_TEST}")"
    before=${exp}/data_options
    if compgen -G "${exp}/*/*/*/seed*" >/dev/null && [ -s "${before}" ] &&
        [ "$(<"${before}")" != "${made_with}" ]; then
        echo "$0: the experiments in ${exp} are of data made with $(<"${before}");" \
            "give another --tag" >&2
        exit 1
    fi
    mkdir -p "${exp}"
    echo "${made_with}" >"${before}"
    [ -n "${SPEECHCOMMANDS}" ] || local/mini.py downloads
    one_task=()
    [[ ${tasks} = *" "* ]] || one_task=(--task "${tasks}")
    local/prepare.py "${corpus}" "${data}" --split "${split}" "${one_task[@]}" \
        --max-drop "${max_drop}" --min-clips "${min_clips}" ${keywords:+--keywords "${keywords}"} \
        ${SPEECHCOMMANDS_TEST:+--test-archive "${SPEECHCOMMANDS_TEST}"}
    for task in ${tasks}; do
        for set in train valid test; do
            utils/validate_data_dir.py --no-feats "${data}/${task}/${set}"
        done
    done
fi

if begins 2; then
    log "Stage 2: packed clips in ${dump}"
    for task in ${tasks}; do
        for set in train valid test; do
            fedtools pack-clips "${data}/${task}/${set}" "${dump}/${task}/${set}" \
                --classes "${data}/${task}/classes.txt" --noise "${data}/noise.scp" \
                --max-drop "${max_drop}"
        done
    done
fi

experiment() { # seed, task, network, method, name, settings: a line of the list
    local seed=$1 task=$2 network=$3 method=$4 name=$5
    echo "${exp}/${task}/${network}/${name}/seed${seed}" "${dump}/${task}" "${seed}" "${method}" \
        "networks.${network}" "methods.${method}" "tasks.${task}.${method}?" "${@:6}"
}

vary() { # network, option, values: FedKWS-UI with other values of an option, for figure 3
    local network=$1 option=$2 value
    for value in "${@:3}"; do
        experiment "${seeds%% *}" "${tasks%% *}" "${network}" fedkws_ui \
            "fedkws_ui.${option}=${value}" "method_conf.${option}=${value}"
    done
}

if begins 3; then
    log "Stage 3: the list of experiments, ${list}"
    mkdir -p "${exp}"
    table=${dump}/${tasks##* }/train/clips.tsv
    if begins 6 && [[ " ${methods} " == *" centralized "* ]] && [ -e "${table}" ]; then
        # Rather now than after hours of training.
        enough=$(awk -F '\t' -v least="${landscape_clips}" '
            NR > 1 { clips[$2]++ }
            END { for (client in clips) enough += clips[client] >= least; print enough + 0 }
        ' "${table}")
        if [ "${enough}" -lt 2 ]; then
            echo "$0: figure 4 wants two clients of ${landscape_clips} clips, there are ${enough}:" \
                "give a smaller --landscape_clips" >&2
            exit 1
        fi
    fi
    for task in ${tasks}; do
        for network in ${networks}; do
            for method in ${methods}; do
                for seed in ${seeds}; do
                    experiment "${seed}" "${task}" "${network}" "${method}" "${method}"
                done
            done
        done
    done >"${list}.new"
    if "${ablations}" && [[ " ${methods} " == *" fedkws_ui "* ]]; then
        for network in dscnn resnet; do
            [[ " ${networks} " == *" ${network} "* ]] || continue
            vary "${network}" smoothing 0.0 0.1 0.3 0.5
            vary "${network}" adversarial 0.0 0.0001 0.01 0.1
        done >>"${list}.new"
    fi
    mv "${list}.new" "${list}"
    log "Stage 3: $(wc -l <"${list}") experiments"
fi

if begins 4; then
    if [ ! -s "${list}" ]; then
        echo "$0: ${list}: no experiments; run --stage 3" >&2
        exit 1
    fi
    log "Stage 4: training the $(wc -l <"${list}") experiments of ${list}, logs in ${exp}/log"
    experiments=$(wc -l <"${list}")
    if [ -z "${rounds_cmd:-}" ]; then
        ${train_cmd} --max-jobs-run "${nj}" "JOB=1:${experiments}" "${exp}/log/train.JOB.log" \
            local/train.sh "${list}" JOB "${config}" "${ngpu}"
    else
        # One experiment after the other, each over all processes that cmd.sh asks for.
        for job in $(seq "${experiments}"); do
            local/train.sh "${list}" "${job}" "${config}" "${ngpu}" init
            ${rounds_cmd} "${exp}/log/train.${job}.log" \
                local/train.sh "${list}" "${job}" "${config}" "${ngpu}" rounds
        done
    fi
fi

if begins 5 && [[ " ${tasks} " == *" 12 "* ]]; then
    log "Stage 5: false accepts and false rejects, task 12"
    ${train_cmd} "${exp}/log/detection.log" \
        fedtools detection "${exp}"/12/*/*/seed* --ngpu "${ngpu}"
    cat "${exp}/log/detection.log"
fi

if begins 6; then
    log "Stage 6: figures 1 and 4"
    # Pictures of an earlier run must not stand in a later report.
    rm -f "${figures}"-clients-*.png "${figures}"-landscape.{png,tsv}
    for task in ${tasks}; do
        local/plot_clients.py "${dump}/${task}/train" "${figures}-clients-${task}.png" \
            --config "${config}" --section "methods.fedkws_ui?" \
            --section "tasks.${task}.fedkws_ui?"
    done
    last=${tasks##* }
    if [[ " ${methods} " == *" centralized "* ]]; then
        ${train_cmd} "${exp}/log/landscape.log" local/landscape.py \
            "${exp}/${last}/${networks%% *}/centralized/seed${seeds%% *}" \
            "${figures}-landscape.png" --ngpu "${ngpu}" --min-clips "${landscape_clips}" \
            --config "${config}" --section "methods.alo?" --section "tasks.${last}.alo?"
    else
        log "Stage 6: no figure 4, which begins with a model of centralised training"
    fi
fi

if begins 7; then
    for task in ${tasks}; do
        clients=${figures}-clients-${task}.png
        [ ! -e "${clients}" ] || pictures+=(--figure "Clients of task ${task} (figure 1)=${clients}")
    done
    caption="Accuracy between a model and two clients' models (figure 4)"
    landscape=${figures}-landscape.png
    [ ! -e "${landscape}" ] || pictures+=(--figure "${caption}=${landscape}")
    local/report.py "${exp}" "${results}" --section "${section}" --corpus "${corpus_name}" \
        --release "${release}" "${mini[@]}" "${pictures[@]}" --published conf/published.tsv \
        --config "${config##*/}" \
        --command "${command_line% }"
    log "Stage 7: wrote ${results}"
fi
