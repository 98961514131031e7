#!/usr/bin/env bash
# What the models that an experiment's clients sent give away of them, behind one defence after the
# other, to attackers who know the defence and who do not, and what each defence costs: attacks on the
# weights that were changed, A1, A2, membership and attributes, and their leakage card, in one folder.
set -euo pipefail

exp=                    # the experiment: of any task for the attack on weights, of task asr or kws,
                        # whose clients send models, for the others
indicator=              # speech of people who have no model: features for asr, clips for kws;
                        # without it weights alone are attacked, which need no speech
out=                    # gets card.md, membership.tsv, utility.tsv, and a folder for each defence;
                        # default: attacks in the folder of --exp
rounds=1                # whose models; with "3 4" a client's models of two rounds are of one speaker
with=                   # other experiments, whose models are compared with those of --exp; attributes
                        # are of all, A2, membership and what a defence costs of --exp alone
cohort=                 # experiments of other people, whom attacks on weights and A1 learn from; default:
                        # of each trial, those in --exp and --with of neither of its two
models=                 # model, speaker, gender, talks: trials by recording, too, and attributes
tables=                 # of other attributes: utt2X or spk2X
part=                   # of a TDNN's layers: affine, relu or norm, see run.sh; default: the last of
                        # the config's a1.parts
a2=                     # an experiment of people that the attacker knows, for attack A2; default: no A2
layers=                 # hidden layers for A2; default: the config's, a2.layers
splits=valid            # of the experiment's data, to measure what a defence costs: on people who are
                        # clients, and on others
config=                 # YAML with sections a1, a2, weights and updates; default: the attacks' own values
defences=               # each + of several, none first; default: the config's, updates.defences
membership=             # of these, those behind which membership is attacked; default: all without mean
each=                   # utterances or clips of a client whose membership is attacked, at most;
                        # default: the config's, updates.each
references=             # other clients whose models are references for membership, at most
shadows=                # pairs of models that the attacker trains for each client
inversion=0             # clients whose update is inverted, behind the same defences; 0: none
held=                   # splits on which nobody trains: others of the same speaker
permutations=           # of people's classes, for what attributes are by chance; default of these four:
                        # the config's updates.references, shadows, held and permutations
seed=0
nj=2
ngpu=0

# shellcheck disable=SC2034  # printed by parse_options.sh
help_message="Usage: $0 --exp DIR [--indicator DIR] [--option value]...
To --defences add keep=PATTERN,..., tensors of this model that clients do not send."
. "$(dirname "${BASH_SOURCE[0]}")/parse_options.sh"
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

[ -n "${exp}" ] || fail 2 "--exp is missing"
: "${out:=${exp}/attacks}"
# An experiment's own has no such section, so that it gives their defaults.
: "${config:=${exp}/config.yaml}"
take_options "${config}" updates.{defences,each,references,shadows,held} \
    updates.permutations part=a1.parts a2.layers
part=${part##* }
check_words rounds '[1-9][0-9]*' defences '[a-z]+=[^+ ]+([+][a-z]+=[^+ ]+)*|none' \
    layers '[1-9][0-9]*'
check_word inversion '0|[1-9][0-9]*'
[[ ${defences} = none?( *) ]] ||
    fail 2 "--defences '${defences}': none comes first, which others are compared with"
read -r -a others <<<"${with}"
experiments=("${exp}" "${others[@]}")
logs=${out}/log # of each and show
of_rounds=() protected=() members=() held_out=() measured=() known=()
trials=(${models:+--models "${models}"}) attributes=(${models:+--models "${models}"})
read -r -a strangers <<<"${cohort}"
for folder in "${strangers[@]}"; do known+=(--cohort "${folder}"); done
every=("${experiments[@]}" "${strangers[@]}")
for round in ${rounds}; do of_rounds+=(--round "${round}"); done
for split in ${held}; do held_out+=(--held "${split}"); done
for split in ${splits}; do measured+=(--split "${split}"); done
for table in ${tables}; do attributes+=(--table "${table}"); done
read -r -a list <<<"${defences}"
for defence in "${list[@]}"; do
    protected+=(--defence "${defence}")
    [[ -n ${membership} || +${defence} = *+mean=* ]] || members+=(--defence "${defence}")
done
read -r -a chosen <<<"${membership}"
for defence in "${chosen[@]}"; do members+=(--defence "${defence}"); done

log "Updates behind ${#list[@]} defences, ${out}/defence*"
for number in "${!list[@]}"; do
    tabbed "${experiments[@]}" "${out}/defence${number}" --defence "${list[number]}"
done | each "${train_cmd}" weights fedtools attack weights "${of_rounds[@]}" "${known[@]}" \
    "${trials[@]}" --config "${config}" --seed "${seed}" --ngpu "${ngpu}"
show weights

if [ -n "${indicator}" ]; then
    log "Footprints behind ${#list[@]} defences, ${out}/defence*"
    for number in "${!list[@]}"; do
        for index in "${!every[@]}"; do
            for job in $(seq "${nj}"); do
                tabbed "${every[index]}" "${out}/defence${number}/footprints${index}" \
                    --defence "${list[number]}" --job "${job}"
            done
        done
    done | each "${train_cmd}" footprints fedtools attack footprints --indicator "${indicator}" \
        "${of_rounds[@]}" --part "${part}" --seed "${seed}" --nj "${nj}" --ngpu "${ngpu}"

    log "Attacks on them"
    for number in "${!list[@]}"; do
        folder=${out}/defence${number} folders=() undefended=() apart=()
        for index in "${!every[@]}"; do
            plain=(--undefended "${out}/defence0/footprints${index}")
            [ "${number}" != 0 ] || plain=()
            if [ "${index}" -lt ${#experiments[@]} ]; then
                folders+=("${folder}/footprints${index}") undefended+=("${plain[@]}")
            else
                apart+=(--cohort "${folder}/footprints${index}" "${plain[@]}")
            fi
        done
        tabbed a1 "${folders[@]}" "${folder}" "${undefended[@]}" "${apart[@]}" "${trials[@]}" \
            --seed "${seed}" --config "${config}"
        [ ${#attributes[@]} = 0 ] || tabbed attributes "${folders[@]}" "${folder}" \
            "${undefended[@]}" "${attributes[@]}" --permutations "${permutations}" --seed "${seed}"
    done | each "${cpu_cmd}" attacks fedtools attack
    show attacks

    if [ -n "${a2}" ]; then
        log "Attack A2, hidden layers ${layers}, with what is learnt of ${a2}"
        for number in "${!list[@]}"; do
            for layer in ${layers}; do
                # Its trials are of --exp alone.
                tabbed "${a2}" "${exp}" "${out}/defence${number}/a2" --layer "${layer}" \
                    --defence "${list[number]}"
            done
        done | each "${train_cmd}" a2 fedtools attack a2 --indicator "${indicator}" \
            "${of_rounds[@]}" "${trials[@]}" --config "${config}" --seed "${seed}" --ngpu "${ngpu}"
        show a2
    fi

    log "What defences cost, on ${splits}"
    ${train_cmd} "${out}/log/utility.log" fedtools attack utility "${exp}" "${out}/utility.tsv" \
        --round "${rounds%% *}" "${measured[@]}" "${protected[@]}" --seed "${seed}" --ngpu "${ngpu}"

    log "Membership of round ${rounds%% *}"
    ${train_cmd} "${out}/log/membership.log" fedtools attack membership "${exp}" "${out}" \
        --round "${rounds%% *}" --each "${each}" --references "${references}" \
        --shadows "${shadows}" "${held_out[@]}" "${members[@]}" --seed "${seed}" --ngpu "${ngpu}"
fi

if [ "${inversion}" != 0 ]; then
    log "Inversion of ${inversion} clients' updates of round ${rounds%% *}"
    ${train_cmd} "${out}/log/inversion.log" fedtools attack inversion "${exp}" "${out}" \
        --round "${rounds%% *}" --each "${inversion}" "${protected[@]}" --config "${config}" \
        --seed "${seed}" --ngpu "${ngpu}"
fi

log "The leakage card, ${out}/card.md"
fedtools attack card "${exp}" --results "${out}"
