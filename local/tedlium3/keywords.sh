#!/usr/bin/env bash
# Run the attacks of stage 9 on a keyword network's updates. Its clients are speakers, all of whom take
# part in every round, so that each speaker has a model in each of the last two rounds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../egs/tedlium3/attack1"

kws=../../speechcommands/kws1   # the keyword recipe, whose stages 1 and 2 have run ...
kws_tag=mini                    # ... with this tag
network=mhattrnn                # a network of the config
config=${kws}/conf/mini.yaml    # a configuration with a section updates
rounds=6                        # rounds of FedAvg, at least 2
spk2gender=${kws}/downloads/speech_commands_mini/spk2gender  # empty: unknown, no attack on sex
out=exp/keywords                # folder for the experiment fedavg; run.sh --others takes fedavg/attacks
defences=                       # defences of updates; default: the config's, updates.defences
seed=0
nj=2
ngpu=0

. utils/parse_options.sh
. utils/recipe.sh

clips=${kws}/dump/${kws_tag}/keywords exp=${out}/fedavg
[ -d "${clips}/train" ] || fail 1 "no ${clips}/train: run ${kws}/run.sh --config conf/mini.yaml --stop_stage 2"
[ "${rounds}" -gt 1 ] || fail 2 "--rounds ${rounds}: at least 2 are needed"
tabbed "${exp}" - --section "networks.${network}" --section methods.fedavg --method fedavg \
    --data "train=${clips}/train" --data "valid=${clips}/valid" --seed "${seed}" \
    --set clients_per_round=null --set keep_updates=true --set "rounds=${rounds}" |
    utils/waves.py "${out}/experiments"
train_waves "${out}/experiments" train 1 0 fedtools init EXP --config "${config}" OPTIONS '&&' \
    fedtools rounds EXP --nj NJ --ngpu "${ngpu}" --evaluate valid

models=()
if [ -n "${spk2gender}" ]; then
    # A speaker's models are trained on the same clips, so they count as models of one talk.
    for number in $((rounds - 1)) "${rounds}"; do
        awk -v OFS='\t' -v r="$(printf '%04d' "${number}")" \
            'NR == FNR { sex[$1] = $2; next }
            { print $1 "-r" r, $1, ($1 in sex ? sex[$1] : "--"), $1 }' \
            "${spk2gender}" "${exp}/clients.txt"
    done | cat <(printf 'model\tspeaker\tgender\ttalks\n') - >"${out}/models.tsv"
    models=(--models "${out}/models.tsv")
fi
utils/attack_updates.sh --exp "${exp}" --indicator "${clips}/test" "${models[@]}" \
    --rounds "$((rounds - 1)) ${rounds}" --defences "${defences}" --config "${config}" \
    --seed "${seed}" --nj "${nj}" --ngpu "${ngpu}"
