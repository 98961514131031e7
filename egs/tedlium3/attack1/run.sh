#!/usr/bin/env bash
# Attacks that identify the speaker of a personalised acoustic model. Tomashenko et al., "Privacy attacks
# for automatic speech recognition acoustic models in a federated learning framework", ICASSP 2022.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
LC_ALL=C printf -v command_line '%q ' egs/tedlium3/attack1/run.sh "$@"

stage=1
stop_stage=10
nj=2                    # jobs at the same time; no result depends on it
price=false             # true: time rounds of what is trained next, print an estimate, and exit
ngpu=0                  # 1: train and attack models on a GPU
seed=0                  # random seed of training and of trials
partition_seed=0        # random seed of the partition into sets
unit=                   # definition of a speaker: person, or talk, as in the paper, so that both models
                        # are of one talk; defaults of this and the next five: the config's, section sets
partition=              # the corpus' own split: legacy or speaker-adaptation
hours_g=                # hours of speech that the global model is trained on
seconds_per_model=      # seconds of speech that a personalised model is trained on
valid_share=            # fraction of Train-G's utterances for tuning and measurement
held_seconds=           # seconds of speech per speaker of a part, outside all models, for measurement
indicator_utterances=10 # utterances per speaker of the Indicator; footprints' time is proportional
speakers=               # speakers in Train-G, Part-1 and Part-2, such as 880,736,634; default: by hours
models_of=speaker       # two models per speaker, or talk: per talk, so that some pairs share a recording
mini_corpus=            # options of local/mini.py, such as "--speakers 180 --talks 2 --channels 2"
speeds=                 # speed perturbation of training and adaptation data: "0.9 1.0 1.1"
rounds=                 # rounds of the global model's training, an epoch each; default: the config's
global_rounds=          # an older name of --rounds
local_epochs=           # epochs of a personalised model's training; default: the config's
volumes=false           # true: random volume for each utterance of training and adaptation data
ivectors=true           # false: MFCC alone
ivectors_per=utterance  # unit over which i-vectors accumulate: utterance, recording or speaker
criterion=              # ctc or lfmmi, or Whisper's seq2seq; default: the config's
pretrained=             # folder of a pretrained model; default: the config's section pretrained, if any;
                        # such models have no i-vectors
parts=                  # parts of a layer whose activations A1 uses, after ReLU and after BatchNorm:
                        # "relu norm"; default: the config's, a1.parts
layers=                 # hidden layers for A2; default: the config's, a2.layers
defences=               # defences of updates; default: the config's, updates.defences
first_part=attacked     # Part-1's models in stage 9: attacked too, or cohort: attackers are trained on
                        # them, and A2 runs in stage 9 as well
config=                 # default: conf/mini.yaml, or conf/paper.yaml for a real corpus
tag=                    # name of the run's folders: data/<tag>, dump/<tag>, exp/<tag>
max_drop=0.02           # fail if more than this fraction of the corpus' lines is unusable
others=                 # NAME=DIR...: other results of utils/attack_updates.sh, for the report
corpus_name="TED-LIUM"  # name of the corpus in tables
release=                # name of its release in tables; default: its folder's name
results=                # default: exp/<tag>/RESULTS.md

# shellcheck disable=SC2034  # printed by parse_options.sh
help_message="Usage: $0 [--option value]...
Stages: 1 data directories (of a mini corpus if TEDLIUM is empty in db.sh), 2 MFCC, 3 i-vectors,
  4 tokens, n-gram and denominator, 5 the global model, 6 personalised models, 7 attack A1, 8 attack
  A2, 9 defences, membership and sex, 10 the report; README.md describes the output of each stage."
. utils/parse_options.sh
. utils/recipe.sh
. utils/asr_steps.sh
. local/attacks.sh
: "${rounds:=${global_rounds}}"
[ -z "${rounds}" ] || check_word rounds '[1-9][0-9]*'

corpus=${TEDLIUM} mini=() of=
# Whisper has its own features, and so its own folders.
[[ ${config##*/} != whisper* ]] || of=${config##*/} of=-${of%.yaml}
if [ -z "${TEDLIUM}" ]; then
    : "${tag:=mini${of}}" "${config:=conf/mini.yaml}"
    # A mini corpus of other options has its own folder, which runs of all tags share.
    name=${mini_corpus//--/}
    corpus=downloads${mini_corpus:+/${name// /-}}/TEDLIUM_release-mini mini=(--mini)
    log "TEDLIUM is empty in db.sh: this run uses the mini corpus, spoken by a synthesiser"
fi
: "${tag:=$(basename "${corpus}")${of}}" "${config:=conf/paper.yaml}"
: "${release:=$(basename "${corpus}")}"
take_options "${config}" sets.{unit,partition,hours_g,seconds_per_model,valid_share} \
    sets.held_seconds a1.parts a2.layers updates.defences
data=data/${tag} dump=dump/${tag} exp=exp/${tag}
: "${results:=${exp}/RESULTS.md}"
[ -n "${criterion}" ] || take_options "${config}" model.criterion
check_words parts 'relu|norm' layers '[1-9][0-9]*'
check_word unit 'person|talk' models_of 'speaker|talk' volumes 'true|false' \
    ivectors 'true|false' ivectors_per 'utterance|recording|speaker' \
    criterion 'ctc|lfmmi|seq2seq' first_part 'attacked|cohort' ngpu '0|1'
check_tag "${tag}"
[ -z "${TEDLIUM}" ] || [ -z "${mini_corpus}" ] ||
    fail 2 "--mini_corpus cannot be used if TEDLIUM is set in db.sh"
read -r -a spoken <<<"${mini_corpus}"
name_corpora TEDLIUM
say_estimate "${mini[*]:+${config}}" "Attacks on personalised models of ${release} (seed ${seed})"
take_pretrained
[ -z "${pretrained}" ] || ivectors=false
sp=${speeds:+_sp} iv=
[ "${volumes}" = false ] || sp+=_vol
[ "${ivectors}" = false ] || iv=_iv

# Other data need another tag: check this for three stages before the first remakes anything. Options of
# models (--ivectors, --criterion, --local_epochs, --seed) are checked by fedtools init.
options=(--partition "${partition}" --unit "${unit}" --seed "${partition_seed}")
options+=(--hours-g "${hours_g}" --seconds-per-model "${seconds_per_model}")
options+=(--valid "${valid_share}" ${speakers:+--speakers "${speakers}"})
[ "${models_of}" = speaker ] || options+=(--models-of "${models_of}")
[ "${indicator_utterances}" = 10 ] ||
    options+=(--indicator-utterances "${indicator_utterances}")
[ "${held_seconds}" = 10 ] || options+=(--held-seconds "${held_seconds}")
corpora+=${mini_corpus:+"mini.py ${mini_corpus} "}
! begins 1 || keep_options "${exp}" "${corpora}${options[*]}"
check_kept "${exp}" "${corpora}${options[*]}" 1 partition unit partition_seed hours_g speakers \
    seconds_per_model valid_share models_of indicator_utterances held_seconds mini_corpus
check_kept "${exp}" "--volumes ${volumes}${speeds:+" --speeds ${speeds}"}" 2 volumes speeds
! begins 2 || keep_options "${exp}" "--volumes ${volumes}${speeds:+" --speeds ${speeds}"}" 2
if begins 3 && [ "${ivectors}" = true ]; then
    sizes=$(fedtools config "${config}" ivectors.{gaussians,dimension,hours} | tr '\n' ' ')
    sizes=${sizes% }
    [ "${ivectors_per}" = utterance ] || sizes+=" per ${ivectors_per}"
    keep_options "${exp}" "i-vectors' gaussians, dimension, hours: ${sizes}" 3
fi

! begins 4 || "${seq2seq}" || utils/build_kenlm.sh --background

if begins 1; then
    log "Stage 1: data directories in ${data}"
    [ -n "${TEDLIUM}" ] || run local/mini.py "$(dirname "${corpus}")" "${spoken[@]}"
    run local/prepare.py "${corpus}" "${data}" "${options[@]}" --max-drop "${max_drop}"
    mapfile -t held < <(held_sets)
    for set in train_g valid part1 part2 indicator "${held[@]}"; do
        utils/validate_data_dir.py --no-feats "${data}/${set}"
    done
fi
mapfile -t held < <(held_sets)

if begins 2; then
    log "Stage 2: MFCC in ${dump}"
    [ -n "${pretrained}" ] || feature_options=(--kind mfcc --num-mel-bins 40)
    for set in train_g part1 part2; do
        [ -z "${speeds}" ] ||
            run fedtools perturb-speed "${data}/${set}" "${data}/${set}_sp" --speeds "${speeds}"
        [ "${volumes}" = false ] || run fedtools perturb-volume "${data}/${set}${speeds:+_sp}" \
            "${data}/${set}${sp}" --seed "${partition_seed}"
    done
    extract_features {train_g,part1,part2}"${sp}" valid indicator "${held[@]}"
fi

if begins 3 && [ "${ivectors}" = true ]; then
    log "Stage 3: i-vectors"
    job "${train_cmd}" "${exp}/log/ivectors.log" fedtools train-ivectors "${data}/train_g${sp}" \
        "${exp}/ivectors" --gaussians "$(setting ivectors.gaussians)" \
        --dimension "$(setting ivectors.dimension)" --hours "$(setting ivectors.hours)"
    for set in {train_g,part1,part2}"${sp}" valid indicator "${held[@]}"; do
        tabbed "${data}/${set}" "${exp}/ivectors" "${data}/${set}${iv}" "${dump}/${set}${iv}"
    done | each "${cpu_cmd}" append fedtools append-ivectors --per "${ivectors_per}"
fi

assets=() train=train_g${sp}${iv} valid=valid${iv} global=${exp}/global list=${exp}/experiments
[ "${criterion}" != lfmmi ] || assets=(--asset "denominator=${exp}/denominator")
assets+=(--set "model.criterion=${criterion}")
if [ -n "${pretrained}" ]; then
    assets+=(--set "model.path=${pretrained}")
elif [ "${ivectors}" = false ]; then
    assets+=(--set model.input_size=40) # the configs' input sizes include i-vectors
fi
if begins 4 && ! "${seq2seq}"; then
    log "Stage 4: tokens, n-gram and denominator, from the transcripts of Train-G"
    train_units train_g --valid "${data}/valid/text"
    [ "${criterion}" != lfmmi ] || fedtools train-denominator "${data}/train_g/text" \
        "${exp}/tokens" "${exp}/denominator" --order "$(setting denominator.order)"
fi

if begins 5; then
    log "Stage 5: the global model, ${global}"
    plan | utils/waves.py "${list}"
    # For each experiment: EXP is its folder, OPTIONS are its options in the list, NJ its share of --nj.
    train_waves "${list}" train 1 1 fedtools init EXP --config "${config}" OPTIONS '&&' \
        fedtools rounds EXP --nj NJ --ngpu "${ngpu}" --evaluate valid '&&' \
        fedtools average EXP --ngpu "${ngpu}"
    tabbed "${global}" "${valid}" |
        decode_all decode fedtools decode "${lm[@]}" --config "${config}" --ngpu "${ngpu}"
    tune "${valid}" <<<"${global}"
    tabbed "${global}" "decode_${valid}" "${valid}" | score score
fi

if begins 6; then
    log "Stage 6: personalised models, ${exp}/part1 and ${exp}/part2"
    plan | utils/waves.py "${list}"
    train_waves "${list}" train 2 2 fedtools init EXP --config "${config}" OPTIONS '&&' \
        fedtools rounds EXP --nj NJ --ngpu "${ngpu}" --to 1
fi

if begins 7; then attack_a1; fi

if begins 8; then
    log "Stage 8: attack A2, hidden layers ${layers}"
    for layer in ${layers}; do
        tabbed "${exp}/part1" "${exp}/part2" "${exp}/a2" --layer "${layer}"
    done | each "${train_cmd}" a2 fedtools attack a2 --indicator "${data}/indicator${iv}" \
        --models "${data}/models.tsv" --seed "${seed}" --config "${config}" --ngpu "${ngpu}"
    show a2
fi

if begins 9; then
    log "Stage 9: attacks on both parts' models under defences"
    splits=newcomers
    [ ! -d "${data}/part2_held" ] || splits="held newcomers"
    others_are=(--with "${exp}/part1")
    [ "${first_part}" = attacked ] ||
        others_are=(--cohort "${exp}/part1" --a2 "${exp}/part1" --layers "${layers%% *}")
    utils/attack_updates.sh --exp "${exp}/part2" "${others_are[@]}" --splits "${splits}" \
        --indicator "${data}/indicator${iv}" --models "${data}/models.tsv" --part "${parts##* }" \
        --defences "${defences}" --config "${config}" --seed "${seed}" --nj "${nj}" --ngpu "${ngpu}"
fi

if begins 10; then
    updates=() attacks=${exp}/part2/attacks of="Part-1 and Part-2:Part-2"
    [ "${first_part}" = attacked ] || of=Part-2
    [ ! -e "${attacks}/card.md" ] || updates=("${of}=${attacks}")
    for other in ${others}; do updates+=("${other}"); done
    run local/report.py "${exp}" "${data}" "${results}" --section "${section}" "${mini[@]}" \
        "${updates[@]/#/--updates=}" \
        --corpus "${corpus_name}" --release "${release}" --command "${command_line% }"
    log "Stage 10: wrote ${results}"
fi
