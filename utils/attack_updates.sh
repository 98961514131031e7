#!/usr/bin/env bash
# What the models that an experiment's clients sent give away of them, behind one defence after the
# other, and what each defence costs: attacks on the weights that were changed, A1, membership and
# attributes, in one folder.
set -euo pipefail

exp=                    # the experiment: of any task for the attack on weights, of task asr or kws,
                        # whose clients send models, for the others
indicator=              # speech of people who have no model: features for asr, clips for kws;
                        # without it weights alone are attacked, which need no speech
out=                    # gets defences.tsv, membership.tsv, and a folder for each defence
rounds=1                # whose models; with "3 4" a client's models of two rounds are of one speaker
with=                   # other experiments, whose models are compared with those of --exp; attributes
                        # are of all, membership and what a defence costs of --exp alone
cohort=                 # experiments of other people, by which updates are centred; default: of each
                        # trial, those in --exp and --with of neither of its two
models=                 # model, speaker, gender, talks: trials by recording, too, and attributes
part=                   # of a TDNN's layers: affine, relu or norm, see run.sh; default: the last of
                        # the config's a1.parts
split=valid             # of the experiment's data, to measure what a defence costs
config=                 # YAML with sections a1, weights and updates; default: the attacks' own values
defences=               # each + of several, none first; default: the config's, updates.defences
each=                   # utterances or clips of a client whose membership is attacked, at most;
                        # default: the config's, updates.each
references=             # other clients whose models are references for membership, at most
shadows=                # pairs of models that the attacker trains for each client
held=                   # splits on which nobody trains: others of the same speaker; default of these
                        # three: the config's updates.references, shadows and held
seed=0
nj=2
ngpu=0

# shellcheck disable=SC2034  # printed by parse_options.sh
help_message="Usage: $0 --exp DIR --out DIR [--indicator DIR] [--option value]...
To --defences add keep=PATTERN,..., tensors of this model that clients do not send."
. "$(dirname "${BASH_SOURCE[0]}")/parse_options.sh"
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

for name in exp out; do [ -n "${!name}" ] || fail 2 "--${name} is missing"; done
# An experiment's own has no such section, so that it gives their defaults.
: "${config:=${exp}/config.yaml}"
take_options "${config}" updates.{defences,each,references,shadows,held} part=a1.parts
part=${part##* }
check_words rounds '[1-9][0-9]*' defences '[a-z]+=[^+ ]+([+][a-z]+=[^+ ]+)*|none'
[[ ${defences} = none?( *) ]] ||
    fail 2 "--defences '${defences}': none comes first, which others are compared with"
read -r -a others <<<"${with}"
experiments=("${exp}" "${others[@]}")
logs=${out}/log # of each and show
of_rounds=() named=() protected=() splits=() known=() attributes=(${models:+--models "${models}"})
read -r -a folders <<<"${cohort}"
for folder in "${folders[@]}"; do known+=(--cohort "${folder}"); done
for round in ${rounds}; do of_rounds+=(--round "${round}"); done
for split in ${held}; do splits+=(--held "${split}"); done
read -r -a list <<<"${defences}"
for number in "${!list[@]}"; do
    named+=("${list[number]}" "${out}/defence${number}")
    protected+=(--defence "${list[number]}")
done

log "Updates behind ${#list[@]} defences, ${out}/defence*"
for number in "${!list[@]}"; do
    tabbed "${experiments[@]}" "${out}/defence${number}" --defence "${list[number]}"
done | each "${train_cmd}" weights fedtools attack weights "${of_rounds[@]}" "${known[@]}" \
    "${attributes[@]}" --config "${config}" --seed "${seed}" --ngpu "${ngpu}"
show weights
[ -n "${indicator}" ] || exit 0

log "Footprints behind ${#list[@]} defences, ${out}/defence*"
for number in "${!list[@]}"; do
    for index in "${!experiments[@]}"; do
        for job in $(seq "${nj}"); do
            tabbed "${experiments[index]}" "${out}/defence${number}/footprints${index}" \
                --defence "${list[number]}" --job "${job}"
        done
    done
done | each "${train_cmd}" footprints fedtools attack footprints --indicator "${indicator}" \
    "${of_rounds[@]}" --part "${part}" --seed "${seed}" --nj "${nj}" --ngpu "${ngpu}"

log "Attacks on them"
for number in "${!list[@]}"; do
    folder=${out}/defence${number} folders=()
    for index in "${!experiments[@]}"; do folders+=("${folder}/footprints${index}"); done
    tabbed a1 "${folders[@]}" "${folder}" "${attributes[@]}" --seed "${seed}" \
        --config "${config}"
    [ -z "${models}" ] ||
        tabbed attributes "${folders[@]}" "${folder}" "${attributes[@]}" --seed "${seed}"
done | each "${cpu_cmd}" attacks fedtools attack
show attacks

log "What defences cost, on ${split}"
${train_cmd} "${out}/log/utility.log" fedtools attack utility "${exp}" "${out}/utility.tsv" \
    --round "${rounds%% *}" --split "${split}" "${protected[@]}" --seed "${seed}" --ngpu "${ngpu}"
fedtools attack defences "${out}/defences.tsv" --utility "${out}/utility.tsv" "${named[@]}"

log "Membership of round ${rounds%% *}"
${train_cmd} "${out}/log/membership.log" fedtools attack membership "${exp}" "${out}" \
    --round "${rounds%% *}" --each "${each}" --references "${references}" --shadows "${shadows}" \
    "${splits[@]}" --seed "${seed}" --ngpu "${ngpu}"
