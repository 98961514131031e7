#!/usr/bin/env bash
# Train one model centrally on AN4's official split, for comparison with ESPnet's recipe. Run this in
# egs/commonvoice/asr1 with the folder that holds AN4 as Kaldi data directories:
#
#   local/an4.sh .../an4          # has {train,test}; WER in exp/an4/baseline/decode_test
#
# Decoding weights are tuned and the best epochs chosen on 8 of the 74 training speakers, who are held
# out of training.
set -euo pipefail

stage=1
stop_stage=4
nj=2
ngpu=0
seed=0
config=conf/an4.yaml
tag=an4
speeds="0.9 1.0 1.1"
# shellcheck disable=SC2034  # printed by parse_options.sh
help_message="Usage: $0 [--option value]... AN4
Stages: 1 data directories and features, 2 tokens and n-gram, 3 training, 4 decoding and scoring"
. utils/parse_options.sh
if [ $# -ne 1 ]; then
    echo "$0: give the folder of AN4's data directories, after any options" >&2
    exit 2
fi
an4=$1
set --
. utils/recipe.sh
# shellcheck source=../../utils/asr_steps.sh
. utils/asr_steps.sh
data=data/${tag} dump=dump/${tag} exp=exp/${tag} baseline=exp/${tag}/baseline

! begins 2 || utils/build_kenlm.sh --background

if begins 1; then
    log "Stage 1: data directories in ${data}, features in ${dump}"
    run fedtools subset-data "${an4}/train" "${data}/valid" --speakers 8 --rest "${data}/train"
    fedtools subset-data "${an4}/test" "${data}/test" --speakers 10
    fedtools perturb-speed "${data}/train" "${data}/train_sp" --speeds "${speeds}"
    for set in train_sp valid test; do
        utils/validate_data_dir.py --no-feats "${data}/${set}"
    done
    extract_features train_sp valid test
fi

if begins 2; then
    log "Stage 2: tokens and language model"
    train_units train --valid "${data}/valid/text"
fi

if begins 3; then
    log "Stage 3: training"
    experiment "${baseline}" - "${seed}" baseline centralized train_sp valid |
        utils/waves.py "${exp}/experiments"
    train_waves "${exp}/experiments" train 1 0 fedtools init EXP --config "${config}" OPTIONS '&&' \
        fedtools rounds EXP --nj NJ --ngpu "${ngpu}" --evaluate valid '&&' \
        fedtools average EXP --ngpu "${ngpu}"
fi

if begins 4; then
    log "Stage 4: decoding"
    for set in valid test; do tabbed "${baseline}" "${set}"; done |
        decode_all decode fedtools decode --lm "${exp}/lm" --config "${config}" --ngpu "${ngpu}"
    tune valid <<<"${baseline}"
    for set in valid test; do tabbed "${baseline}" "decode_${set}" "${set}"; done | score score
fi
