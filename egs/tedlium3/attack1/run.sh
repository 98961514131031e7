#!/usr/bin/env bash
# How much of the speaker a personalised acoustic model gives away. Tomashenko et al., "Privacy attacks
# for automatic speech recognition acoustic models in a federated learning framework", ICASSP 2022.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
LC_ALL=C printf -v command_line '%q ' egs/tedlium3/attack1/run.sh "$@"

stage=1
stop_stage=10
nj=2                    # jobs at the same time; no result depends on it
ngpu=0                  # 1: train and look at models on a GPU
seed=0                  # of training and of trials
partition_seed=0        # decides which speakers are in which set
unit=                   # a speaker: person, or talk, the paper's, of which both models then are;
                        # defaults of this and of the next five are in the config, section sets
partition=              # of the corpus: legacy or speaker-adaptation
hours_g=                # of speech that the global model is trained on
seconds_per_model=      # of speech that a personalised model is trained on
valid_share=            # of Train-G's utterances, to tune by and measure
held_seconds=           # of speech of a part's speaker that none of its models has, to measure on
indicator_utterances=10 # of each of the Indicator's speakers; footprints take as many times as long
speakers=               # of Train-G, Part-1 and Part-2, such as 880,736,634; default: by the hours
models_of=speaker       # two models of each speaker, or of each talk: pairs of one recording, too
mini_corpus=            # options of local/mini.py, such as "--speakers 180 --talks 2 --channels 2"
speeds=                 # training and adaptation data also faster and slower: "0.9 1.0 1.1"
global_rounds=          # of the global model's training, an epoch each; default: the config's
local_epochs=           # of a personalised model's training; default: the config's
volumes=false           # true: each utterance of these has a volume drawn at random
ivectors=true           # false: MFCC alone
ivectors_per=utterance  # what they go on over: utterance, recording or speaker, as Kaldi's do
criterion=              # ctc or lfmmi, or seq2seq of Whisper; default: the config's
pretrained=             # folder of a pretrained model; default: what the config's section says, if any;
                        # it has no i-vectors
parts=                  # of the layers, where activations are taken for A1, before and after ReLU
                        # and after BatchNorm: "affine relu norm"; default: the config's, a1.parts
layers=                 # hidden layers for A2; default: the config's, a2.layers
defences=               # of updates; default: the config's, updates.defences
first_part=attacked     # in stage 9: Part-1's models are attacked, too, or the attackers' cohort, from
                        # whom they learn, and A2 in stage 9 as well
config=                 # default: conf/mini.yaml, or conf/paper.yaml for a real corpus
tag=                    # where things go: data/<tag>, dump/<tag>, exp/<tag>
max_drop=0.02           # fail if more than this share of the corpus' lines cannot be used
others=                 # NAME=DIR...: what utils/attack_updates.sh left elsewhere, for the report
corpus_name="TED-LIUM"  # the corpus, and ...
release=                # ... its release, as tables shall call them
results=                # default: exp/<tag>/RESULTS.md

# shellcheck disable=SC2034  # printed by parse_options.sh
help_message="Usage: $0 [--option value]...
Stages: 1 data directories (TEDLIUM in db.sh is empty: a mini corpus), 2 MFCC, 3 i-vectors, 4 tokens,
  n-gram and denominator, 5 the global model, 6 personalised models, 7 attack A1, 8 attack A2,
  9 defences, membership and sex, 10 the report; README.md says what each one leaves."
. utils/parse_options.sh
. utils/recipe.sh
. utils/asr_steps.sh
. local/attacks.sh

corpus=${TEDLIUM} mini=() of=
# Their features are others.
[[ ${config##*/} != whisper* ]] || of=${config##*/} of=-${of%.yaml}
if [ -z "${TEDLIUM}" ]; then
    : "${tag:=mini${of}}" "${config:=conf/mini.yaml}"
    # Another one has a folder of its own, by its options, which runs of all tags share.
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
check_words parts 'affine|relu|norm' layers '[1-9][0-9]*'
check_word unit 'person|talk' models_of 'speaker|talk' volumes 'true|false' \
    ivectors 'true|false' ivectors_per 'utterance|recording|speaker' \
    criterion 'ctc|lfmmi|seq2seq' first_part 'attacked|cohort' ngpu '0|1'
check_tag "${tag}"
[ -z "${TEDLIUM}" ] || [ -z "${mini_corpus}" ] || fail 2 "--mini_corpus, but TEDLIUM is set in db.sh"
read -r -a spoken <<<"${mini_corpus}"
name_corpora TEDLIUM
take_pretrained
[ -z "${pretrained}" ] || ivectors=false
sp=${speeds:+_sp} iv=
[ "${volumes}" = false ] || sp+=_vol
[ "${ivectors}" = false ] || iv=_iv

# Other data need another tag: looked at for three stages before the first makes anything anew. What
# is of the models (--ivectors, --criterion, --local_epochs, --seed) fedtools init looks at.
options=(--partition "${partition}" --unit "${unit}" --seed "${partition_seed}")
options+=(--hours-g "${hours_g}" --seconds-per-model "${seconds_per_model}")
options+=(--valid "${valid_share}" ${speakers:+--speakers "${speakers}"})
[ "${models_of}" = speaker ] || options+=(--models-of "${models_of}")
[ "${indicator_utterances}" = 10 ] ||
    options+=(--indicator-utterances "${indicator_utterances}")
[ "${held_seconds}" = 10 ] || options+=(--held-seconds "${held_seconds}")
corpora+=${mini_corpus:+"mini.py ${mini_corpus} "}
! begins 1 || keep_options "${exp}" "${corpora}${options[*]}"
! begins 2 || keep_options "${exp}" "--volumes ${volumes}${speeds:+" --speeds ${speeds}"}" 2
if begins 3 && [ "${ivectors}" = true ]; then
    said=$(fedtools config "${config}" ivectors.{gaussians,dimension,hours} | tr '\n' ' ')
    said=${said% }
    [ "${ivectors_per}" = utterance ] || said+=" per ${ivectors_per}"
    keep_options "${exp}" "i-vectors' gaussians, dimension, hours: ${said}" 3
fi

if begins 1; then
    log "Stage 1: data directories in ${data}"
    [ -n "${TEDLIUM}" ] || local/mini.py "$(dirname "${corpus}")" "${spoken[@]}"
    local/prepare.py "${corpus}" "${data}" "${options[@]}" --max-drop "${max_drop}"
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
            fedtools perturb-speed "${data}/${set}" "${data}/${set}_sp" --speeds "${speeds}"
        [ "${volumes}" = false ] || fedtools perturb-volume "${data}/${set}${speeds:+_sp}" \
            "${data}/${set}${sp}" --seed "${partition_seed}"
    done
    extract_features {train_g,part1,part2}"${sp}" valid indicator "${held[@]}"
fi

if begins 3 && [ "${ivectors}" = true ]; then
    log "Stage 3: i-vectors"
    ${train_cmd} "${exp}/log/ivectors.log" fedtools train-ivectors "${data}/train_g${sp}" \
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
    assets+=(--set model.input_size=40) # the configs' are with i-vectors
fi
if begins 4 && ! "${seq2seq}"; then
    log "Stage 4: tokens, n-gram and denominator, of the transcripts of Train-G"
    train_units train_g --valid "${data}/valid/text"
    [ "${criterion}" != lfmmi ] || fedtools train-denominator "${data}/train_g/text" \
        "${exp}/tokens" "${exp}/denominator" --order "$(setting denominator.order)"
fi

if begins 5; then
    log "Stage 5: the global model, ${global}"
    plan | utils/waves.py "${list}"
    train_waves "${list}" train 1 1 --evaluate valid --average own
    tabbed "${global}" "${valid}" | decode_all decode
    tune "${valid}" <<<"${global}"
    tabbed "${global}" "decode_${valid}" "${valid}" | score score
fi

if begins 6; then
    log "Stage 6: personalised models, ${exp}/part1 and ${exp}/part2"
    plan | utils/waves.py "${list}"
    train_waves "${list}" train 2 2 --to 1
fi

if begins 7; then attack_a1; fi

if begins 8; then attack_a2; fi

if begins 9; then
    log "Stage 9: defences on both parts' models, and what else these give away"
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
    local/report.py "${exp}" "${data}" "${results}" --section "${section}" "${mini[@]}" \
        "${updates[@]/#/--updates=}" \
        --corpus "${corpus_name}" --release "${release}" --command "${command_line% }"
    log "Stage 10: wrote ${results}"
fi
