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
seeds=0                 # of training; with several, tables have means and standard deviations
split_seed=0            # decides which speakers are in which set
methods="client centralized fedavg"
config=                 # default: conf/mini.yaml, or conf/paper.yaml for a real corpus
tag=                    # where things go: data/<tag>, dump/<tag>, exp/<tag>
accents="au=australia,en=england,in=indian"
hours=                  # train,valid,test hours of all clients, or their ratio; default: 100,10,10, mini 20,6,7
server_hours=           # the same of the server's own data; default: as hours, mini 56,2,3.5
server_fraction=        # take this share of every accent's speakers as the server's, e.g. 0.4
max_drop=0.5            # fail if more than this share of the wanted clips is unusable
speeds=                 # also train on audio spoken faster and slower: "0.9 1.0 1.1"
corpus_name="Common Voice"   # the corpus, and ...
release=                # ... its release, as tables shall call them
results=                # default: exp/<tag>/RESULTS.md

# shellcheck disable=SC2034  # printed by parse_options.sh
help_message="Usage: $0 [--stage N] [--stop_stage N] [--nj N] [--ngpu 0|1] [--seeds \"0 1 2\"]
          [--split_seed N] [--methods \"client centralized fedavg\"] [--config YAML] [--tag NAME]
          [--accents NAME=ACCENT,...] [--hours H,H,H] [--server_hours H,H,H] [--server_fraction X]
          [--max_drop X] [--speeds \"0.9 1.0 1.1\"] [--corpus_name NAME] [--release NAME]
          [--results FILE]
Stages: 1 data directories (and the mini corpus, if COMMONVOICE in db.sh is empty), 2 features,
  3 tokens and n-gram, 4 the baseline, 5 every method, 6 decoding, 7 scoring, 8 the report;
  README.md beside this script says what each one leaves."
. utils/parse_options.sh
. utils/recipe.sh
. local/steps.sh

mini=() rows=() corpus=${COMMONVOICE}
if [ -z "${COMMONVOICE}" ]; then
    mini=(--mini)
    corpus=downloads/cv-corpus-mini/en
    : "${tag:=mini}" "${release:=cv-corpus-mini}" "${config:=conf/mini.yaml}"
    : "${hours:=20,6,7}" "${server_hours:=56,2,3.5}"
    log "COMMONVOICE is empty in db.sh: this run uses the mini corpus, spoken by a synthesiser"
fi
above=$(basename "$(dirname "${corpus}")")
: "${tag:=${above}}" "${release:=${above}}" "${config:=conf/paper.yaml}" "${hours:=100,10,10}"
data=data/${tag} dump=dump/${tag} exp=exp/${tag}
: "${server_hours:=${hours}}" "${results:=${exp}/RESULTS.md}"
[[ ${ngpu} -gt 0 ]] && train_cmd=${cuda_cmd}
check_words seeds '0|[1-9][0-9]*' methods '[a-z0-9_]+'
check_tag "${tag}"
sp=${speeds:+_sp}       # how names of training data of several speeds end

if begins 1; then
    log "Stage 1: data directories in ${data}"
    [ -n "${COMMONVOICE}" ] || local/mini.py downloads
    local/prepare.py "${corpus}" "${data}" --accents "${accents}" --seed "${split_seed}" \
        --hours "${hours}" --server-hours "${server_hours}" --max-drop "${max_drop}" \
        ${server_fraction:+--server-fraction "${server_fraction}"}
    for set in {server_,}{train,valid,test}; do
        utils/validate_data_dir.py --no-feats "${data}/${set}"
    done
fi

if begins 2; then
    log "Stage 2: features in ${dump}"
    for set in ${sp:+server_train train}; do
        fedtools perturb-speed "${data}/${set}" "${data}/${set}${sp}" --speeds "${speeds}"
    done
    extract_features {server_,}{"train${sp}",valid,test}
fi

if begins 3; then
    log "Stage 3: tokens and language model, from the server's transcripts"
    train_units server_train --valid "${data}/server_valid/text" --valid "${data}/valid/text"
fi

for seed in ${seeds}; do
    baseline=${exp}/baseline/seed${seed}
    if begins 4; then
        log "Stage 4: the baseline, ${baseline}"
        train "${baseline}" "${seed}" baseline centralized "server_train${sp}" server_valid
    fi
    begins 5 || continue
    for method in ${methods}; do
        log "Stage 5: ${exp}/${method}/seed${seed}"
        train "${exp}/${method}/seed${seed}" "${seed}" "methods.${method}?" "${method}" \
            "train${sp}" valid --start "${baseline}/model.safetensors"
    done
done

for seed in ${seeds}; do
    for system in baseline ${methods}; do
        path=${exp}/${system}/seed${seed} row="" tests=test
        baseline=${exp}/baseline/seed${seed}/decode_test
        [ "${system}" != baseline ] || tests="test server_test" row="Baseline=:${baseline}"
        rows+=(--row "${row:-${path}:${path}/decode_test}")
        if begins 6; then
            for set in valid ${tests}; do
                log "Stage 6: ${set} by ${path}"
                decode "${path}" "${set}"
                [ "${set}" != valid ] ||
                    fedtools tune "${path}/decode_valid" "${data}/valid" "${path}/weights.yaml"
            done
        fi
        begins 7 || continue
        log "Stage 7: ${path}"
        for set in ${tests}; do score "${path}" "${set}"; done
        [ "${system}" = baseline ] || fedtools compare "${data}/test" "${baseline}/text" \
            "${path}/decode_test/text" --out "${path}/compare_baseline.tsv"
    done
done

if begins 8; then
    own="the baseline on the server's own accents"
    for seed in ${seeds}; do
        rows+=(--elsewhere "${own}=${exp}/baseline/seed${seed}/decode_server_test")
    done
    fedtools report "${results}" --section "${section}" --corpus "${corpus_name}" \
        --release "${release}" "${mini[@]}" "${rows[@]}" --plot "${results%.md}-${tag}.png" \
        --published "Zhu et al. 2022, table 3=conf/published.tsv" --command "${command_line% }"
    log "Stage 8: wrote ${results}"
fi
