#!/usr/bin/env bash
# Attack the models that an experiment's clients send, under each of several defences, by attackers who
# know the defence and who do not, and measure the cost of each defence. Attacks are on weight changes,
# A1, A2, membership and attributes; results and their leakage card go to one folder. After a stop, the same
# command goes on with what is left; OUT/done has what is complete, and is removed to do everything again.
set -euo pipefail

exp=                    # the experiment: of any task for the attack on weights; of task asr or kws, with
                        # clients that send models, for the others
indicator=              # speech of people who have no model: features for asr, clips for kws; default:
                        # attack only weights, which needs no speech
out=                    # folder for card.md, membership.tsv, utility.tsv, and a folder for each defence;
                        # default: attacks in the folder of --exp
rounds=1                # rounds whose models are attacked; with "3 4" a speaker has models of two rounds
with=                   # other experiments whose models are compared with those of --exp, and attacked
                        # for attributes; A2, membership and the cost of defences use --exp alone
cohort=                 # experiments of other people, on which attacks on weights and A1 are trained;
                        # default: the people in --exp and --with are split into five parts, and a trial
                        # uses those that have neither of its two
models=                 # table of model, speaker, gender, talks: adds trials by recording, and attributes
tables=                 # tables of other attributes: utt2X or spk2X
part=                   # part of a TDNN's layers: relu or norm, see run.sh; default: the last of the
                        # config's a1.parts
a2=                     # an experiment of people that the attacker knows, for attack A2; default: no A2
layers=                 # hidden layers for A2; default: the config's, a2.layers
splits=valid            # splits of the experiment's data on which the cost of defences is measured: of
                        # people who are clients, and of others
config=                 # YAML with sections a1, a2, weights and updates; default: the attacks' defaults
defences=               # defences, none first, parts of one joined by +; default: updates.defences
membership=             # defences under which membership is attacked; default: all without mean
each=                   # maximum of utterances or clips per client whose membership is attacked, 0:
                        # no attack on membership; default: the config's, updates.each
references=             # maximum of other clients whose models are references for membership
shadows=                # pairs of models that the attacker trains for each client
inversion=0             # number of clients whose update is inverted under the same defences; 0: none
held=                   # splits of the same speakers on which no model is trained
permutations=           # permutations of classes, for attributes' chance level; default of these four:
                        # the config's updates.references, shadows, held and permutations
seed=0                  # random seed
nj=2                    # jobs at the same time; no result depends on it
ngpu=0                  # 1: compute on a GPU

# shellcheck disable=SC2034  # printed by parse_options.sh
help_message="Usage: $0 --exp DIR [--indicator DIR] [--option value]...
A defence keep=PATTERN,... withholds the tensors of the model that match: clients do not send them."
. "$(dirname "${BASH_SOURCE[0]}")/parse_options.sh"
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

[ -n "${exp}" ] || fail 2 "--exp is missing"
: "${out:=${exp}/attacks}"
# An experiment's config.yaml has no such sections, so that defaults apply.
: "${config:=${exp}/config.yaml}"
take_options "${config}" updates.{defences,each,references,shadows,held} \
    updates.permutations part=a1.parts a2.layers
part=${part##* }
check_words rounds '[1-9][0-9]*' defences '[a-z]+=[^+ ]+([+][a-z]+=[^+ ]+)*|none' \
    layers '[1-9][0-9]*'
check_word each '0|[1-9][0-9]*' inversion '0|[1-9][0-9]*'
[[ ${defences} = none?( *) ]] ||
    fail 2 "--defences '${defences}': 'none' must be first, because others are compared with it"
read -r -a others <<<"${with}"
experiments=("${exp}" "${others[@]}")
logs=${out}/log # for each and show
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

# Print small files that results depend on.
inputs() {
    local one round file files=("${config}" ${models:+"${models}"})
    for one in "${every[@]}" ${a2:+"${a2}"}; do
        files+=("${one}"/{config,data,code}.yaml)
        for round in ${rounds}; do
            printf -v file '%s/round_%04d/.done' "${one}" "${round}"
            files+=("${file}")
        done
    done
    for one in ${tables}; do files+=("${one}"); done
    [ -z "${indicator}" ] || files+=("${indicator}"/{feats.scp,utt2spk,sha256sums})
    for file in "${files[@]}"; do [ ! -f "${file}" ] || cat "${file}"; done
}
state=$(inputs | sha256sum)
once=(utils/once.sh "${out}/done" "${state%% *}")

log "Weight changes under ${#list[@]} defences, ${out}/defence*"
for number in "${!list[@]}"; do
    tabbed "${experiments[@]}" "${out}/defence${number}" --defence "${list[number]}"
done | each "${train_cmd}" weights "${once[@]}" fedtools attack weights "${of_rounds[@]}" "${known[@]}" \
    "${trials[@]}" --config "${config}" --seed "${seed}" --ngpu "${ngpu}"
show weights

if [ -n "${indicator}" ]; then
    log "Footprints under ${#list[@]} defences, ${out}/defence*"
    for number in "${!list[@]}"; do
        for index in "${!every[@]}"; do
            for job in $(seq "${nj}"); do
                tabbed "${every[index]}" "${out}/defence${number}/footprints${index}" \
                    --defence "${list[number]}" --job "${job}"
            done
        done
    done | each "${train_cmd}" footprints "${once[@]}" fedtools attack footprints --indicator "${indicator}" \
        "${of_rounds[@]}" --part "${part}" --seed "${seed}" --nj "${nj}" --ngpu "${ngpu}"

    log "Attacks on footprints"
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
    done | each "${cpu_cmd}" attacks "${once[@]}" fedtools attack
    show attacks

    if [ -n "${a2}" ]; then
        log "Attack A2, hidden layers ${layers}, trained on ${a2}"
        for number in "${!list[@]}"; do
            for layer in ${layers}; do
                # A2's trials are of --exp alone.
                tabbed "${a2}" "${exp}" "${out}/defence${number}/a2" --layer "${layer}" \
                    --defence "${list[number]}"
            done
        done | each "${train_cmd}" a2 "${once[@]}" fedtools attack a2 --indicator "${indicator}" \
            "${of_rounds[@]}" "${trials[@]}" --config "${config}" --seed "${seed}" --ngpu "${ngpu}"
        show a2
    fi

    log "Cost of defences, on ${splits}"
    ${train_cmd} "${out}/log/utility.log" "${once[@]}" fedtools attack utility "${exp}" "${out}/utility.tsv" \
        --round "${rounds%% *}" "${measured[@]}" "${protected[@]}" --seed "${seed}" --ngpu "${ngpu}"
fi

if [ -n "${indicator}" ] && [ "${each}" != 0 ]; then
    log "Membership of round ${rounds%% *}"
    ${train_cmd} "${out}/log/membership.log" "${once[@]}" fedtools attack membership "${exp}" "${out}" \
        --round "${rounds%% *}" --each "${each}" --references "${references}" \
        --shadows "${shadows}" "${held_out[@]}" "${members[@]}" --seed "${seed}" --ngpu "${ngpu}"
fi

if [ "${inversion}" != 0 ]; then
    invert=(fedtools attack inversion "${exp}" "${out}" --seed "${seed}" --ngpu "${ngpu}"
        --round "${rounds%% *}" --each "${inversion}" "${protected[@]}" --config "${config}")
    ${train_cmd} "${out}/log/estimate.log" "${once[@]}" "${invert[@]}" --estimate
    log "Inversion of ${inversion} clients' updates of round ${rounds%% *}:" \
        "$(printed "${out}/log/estimate.log")"
    ${train_cmd} "${out}/log/inversion.log" "${once[@]}" "${invert[@]}"
fi

log "The leakage card, ${out}/card.md"
fedtools attack card "${exp}" --results "${out}"
