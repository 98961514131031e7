#!/usr/bin/env bash
# Federated and personalised ASR on Common Voice accents: from audio to a table of word error rates.
# Zhu et al., "Decoupled federated learning for ASR with non-IID data", Interspeech 2022.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
printf -v command_line '%q ' egs/commonvoice/asr1/run.sh "$@"

stage=1
stop_stage=8
nj=3                    # jobs at the same time; no result depends on it
ngpu=0                  # 1: train and decode on a GPU
seed=0
methods="client centralized fedavg"
config=                 # default: conf/mini.yaml, or conf/paper.yaml for a real corpus
tag=                    # where things go: data/<tag>, dump/<tag>, exp/<tag>
accents="au=australia,en=england,in=indian"
hours=                  # train,valid,test hours of all clients, or their ratio; default: 100,10,10, mini 6,2,2
server_hours=           # the same of the server's own data; default: as hours, mini 64,3,5
server_fraction=        # take this share of every accent's speakers as the server's, e.g. 0.4
max_drop=0.5            # fail if more than this share of the wanted clips is unusable
corpus_name="Common Voice"   # the corpus, and ...
release=                # ... its release, as tables shall call them
results=                # default: exp/<tag>/RESULTS.md

# shellcheck disable=SC2034  # printed by parse_options.sh
help_message="Usage: $0 [--stage N] [--stop_stage N] [--nj N] [--ngpu 0|1] [--seed N]
          [--methods \"client centralized fedavg\"] [--config YAML] [--tag NAME]
          [--accents NAME=ACCENT,...] [--hours H,H,H] [--server_hours H,H,H]
          [--server_fraction X] [--max_drop X] [--corpus_name NAME] [--release NAME]
          [--results FILE]
Stages:
  1  data directories: one client for each accent, and the server's labelled data;
     the mini corpus is made first if COMMONVOICE in db.sh is empty
  2  80-bin filterbank features
  3  tokens and n-gram language model, from the server's transcripts
  4  the baseline, trained on the server's data
  5  every method, beginning with the baseline, round by round
  6  decoding by beam search with the n-gram
  7  scoring: WER and CER for each client, intervals, significance against the baseline
  8  the report: tables, and WER by round"

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
corpus=${COMMONVOICE}
if [ -z "${COMMONVOICE}" ]; then
    mini=(--mini)
    corpus=downloads/cv-corpus-mini/en
    : "${tag:=mini}" "${release:=cv-corpus-mini}" "${config:=conf/mini.yaml}"
    : "${hours:=6,2,2}" "${server_hours:=64,3,5}"
    log "COMMONVOICE is empty in db.sh: this run uses the mini corpus, spoken by a synthesiser"
fi
above=$(basename "$(dirname "${corpus}")")
: "${tag:=${above}}" "${release:=${above}}" "${config:=conf/paper.yaml}" "${hours:=100,10,10}"
: "${server_hours:=${hours}}"
data=data/${tag} dump=dump/${tag} exp=exp/${tag}
: "${results:=${exp}/RESULTS.md}"
[[ ${ngpu} -gt 0 ]] && train_cmd=${cuda_cmd}
sets="server_train server_valid server_test train valid test"
setting() { fedtools config "${config}" "$1"; }

if begins 1; then
    log "Stage 1: data directories in ${data}"
    [ -n "${COMMONVOICE}" ] || local/mini.py downloads
    local/prepare.py "${corpus}" "${data}" --accents "${accents}" --seed "${seed}" \
        --hours "${hours}" --server-hours "${server_hours}" --max-drop "${max_drop}" \
        ${server_fraction:+--server-fraction "${server_fraction}"}
    for set in ${sets}; do
        utils/validate_data_dir.py --no-feats "${data}/${set}"
    done
fi

if begins 2; then
    log "Stage 2: features in ${dump}"
    for set in ${sets}; do
        ${train_cmd} "JOB=1:${nj}" "${dump}/${set}/log/extract.JOB.log" \
            fedtools extract-features "${data}/${set}" "${dump}/${set}" --job JOB --nj "${nj}"
        fedtools merge-features "${data}/${set}" "${dump}/${set}" --nj "${nj}"
    done
fi

if begins 3; then
    log "Stage 3: tokens and language model, from the server's transcripts"
    fedtools train-tokens "${data}/server_train/text" "${exp}/tokens" \
        --token-type "$(setting tokens.token_type)" --vocab-size "$(setting tokens.vocab_size)"
    fedtools train-lm "${data}/server_train/text" "${exp}/lm" --order "$(setting lm.order)" \
        --valid "${data}/server_valid/text" --valid "${data}/valid/text"
fi

if begins 4; then
    log "Stage 4: the baseline, ${exp}/baseline"
    fedtools init "${exp}/baseline" --config "${config}" --section baseline --seed "${seed}" \
        --method centralized --data "train=${data}/server_train" \
        --data "valid=${data}/server_valid" --asset "tokens=${exp}/tokens"
    ${train_cmd} "${exp}/baseline/log/rounds.log" \
        fedtools rounds "${exp}/baseline" --ngpu "${ngpu}"
    ${train_cmd} "${exp}/baseline/log/average.log" \
        fedtools average "${exp}/baseline" --ngpu "${ngpu}"
fi

if begins 5; then
    for method in ${methods}; do
        log "Stage 5: ${exp}/${method}"
        fedtools init "${exp}/${method}" --config "${config}" --seed "${seed}" \
            --section "methods.${method}?" --method "${method}" --data "train=${data}/train" \
            --data "valid=${data}/valid" --asset "tokens=${exp}/tokens" --start "${exp}/baseline/model.safetensors"
        ${rounds_cmd:-${train_cmd}} "${exp}/${method}/log/rounds.log" \
            fedtools rounds "${exp}/${method}" --nj "${nj}" --ngpu "${ngpu}"
        ${train_cmd} "${exp}/${method}/log/average.log" \
            fedtools average "${exp}/${method}" --ngpu "${ngpu}"
    done
fi

decode() { # system, set: N-best lists of all utterances
    log "Stage 6: $2 by ${exp}/$1"
    ${decode_cmd} "JOB=1:${nj}" "${exp}/$1/decode_$2/log/decode.JOB.log" \
        fedtools decode "${exp}/$1" "${data}/$2" "${exp}/$1/decode_$2" --lm "${exp}/lm" \
        --config "${config}" --job JOB --nj "${nj}"
    fedtools merge-nbest "${exp}/$1/decode_$2" "${data}/$2" --nj "${nj}"
}

if begins 6; then
    for system in baseline ${methods}; do
        decode "${system}" valid
        fedtools tune "${exp}/${system}/decode_valid" "${data}/valid" "${exp}/${system}/weights.yaml"
        decode "${system}" test
    done
    decode baseline server_test
fi

if begins 7; then
    for folder in "${exp}"/*/decode_*test; do
        log "Stage 7: ${folder}"
        fedtools best-path "${folder}" --weights "$(dirname "${folder}")/weights.yaml"
        fedtools score "${data}/${folder##*/decode_}" "${folder}/text" "${folder}"
    done
    for method in ${methods}; do
        log "Stage 7: baseline (A) against ${method} (B)"
        fedtools compare "${data}/test" "${exp}/baseline/decode_test/text" \
            "${exp}/${method}/decode_test/text" --out "${exp}/${method}/compare_baseline.tsv"
    done
fi

if begins 8; then
    rows=(--row "Baseline=:${exp}/baseline/decode_test")
    for method in ${methods}; do
        rows+=(--row "${exp}/${method}:${exp}/${method}/decode_test")
    done
    section=${tag,,}
    fedtools report "${results}" --section "${section//[!a-z0-9]/-}" --corpus "${corpus_name}" \
        --release "${release}" "${mini[@]}" "${rows[@]}" --plot "${results%.md}-${tag}.png" \
        --elsewhere "the baseline on the server's own accents=${exp}/baseline/decode_server_test" \
        --published "Zhu et al. 2022, table 3=conf/published.tsv" \
        --command "${command_line% }"
    log "Stage 8: wrote ${results}"
fi
