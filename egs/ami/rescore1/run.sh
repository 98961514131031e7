#!/usr/bin/env bash
# Personalised language models for rescoring by federated marginals of words. Liu and Peng,
# "Federated marginal personalization for ASR rescoring", ICASSP 2022.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
LC_ALL=C printf -v command_line '%q ' egs/ami/rescore1/run.sh "$@"

stage=1
stop_stage=10
nj=2                    # jobs at the same time; no result depends on it
price=false             # true: time rounds of what is trained next, print an estimate, and exit
ngpu=0                  # 1: train and score on a GPU
seeds=0                 # random seeds of the acoustic model and of the neural language model: "0 1 2"
rounds=                 # T, how often clients send their counts: "1 2 5 10"; default of this and of
                        # the next seven: conf/fmp.yaml's, section rescoring
dp=                     # a federation with differential privacy: laplace, paper (equations 8, 9), none
dp_unit=                # unit that epsilon protects: word, utterance, user
epsilon=                # privacy budget of all its releases together; smaller protects more
draws=                  # draws of noise for each setting of table 4
rates=                  # learning rates of federated fine-tuning; the best on dev is used
listed=                 # N: take private words from the transcripts of the first of N + 1 groups
bonuses=                # bonuses of private words in the first pass; the best on dev is used
clients=speaker         # unit of a client: speaker (in a meeting) or meeting
speech=recorded         # or synthetic: speech of AMI's words from a synthesiser, without its recordings
dev_meetings=           # with --speech synthetic: meetings of dev; default: conf/fmp.yaml's, section
                        # rescoring
lm_text=all             # text of the language models; background: without the training transcripts
arms=                   # near, far: models of near and far text, and comparison of FMP with controls;
                        # changes stages 3 and 5 to 10, see README.md
am_seed=                # with --arms: random seed of the acoustic model; --seeds are of the neural ones
background=             # text of the language models, one sentence a line; default: the mini
                        # corpus', or the training transcripts
config=                 # default: conf/mini.yaml, or conf/paper.yaml for a real corpus
order=                  # order of the n-gram; default: the config's; with --speech synthetic,
                        # conf/fmp.yaml's
finetuning=             # config of the fine-tuning baseline; default: conf/[mini_]finetuning.yaml
tag=                    # name of the run's folders: data/<tag>, dump/<tag>, exp/<tag>
max_drop=0.02           # fail if more than this fraction of the segments is unusable
corpus_name=AMI         # name of the corpus in tables
release=                # name of its release in tables; default: its folder's name
results=                # default: exp/<tag>/RESULTS.md

# shellcheck disable=SC2034  # printed by parse_options.sh
help_message="Usage: $0 [--option value]...
Stages: 1 data directories (of a mini corpus if AMI is empty in db.sh), 2 filterbanks, 3 tokens and
  n-gram, 4 the acoustic model, 5 N-best lists, 6 the neural language model and its scores of every
  word, 7 weights, 8 federations, 9 other settings and privacy, 10 the report; README.md describes
  the output of each stage."
. utils/parse_options.sh
. utils/recipe.sh
. utils/asr_steps.sh
. local/rescoring.sh
. local/arms.sh
take_options conf/fmp.yaml rescoring.{rounds,dp,dp_unit,epsilon,draws,rates,listed,bonuses}

check_word speech 'recorded|synthetic' lm_text 'all|background'
corpus=${AMI} mini=() speaking=--speech\ ${speech} bounded=
if [ "${speech}" = synthetic ]; then
    [ -n "${AMI}" ] || fail 2 "--speech synthetic: set AMI in db.sh, the annotations to be spoken"
    : "${tag:=synthetic}" "${config:=conf/mini.yaml}" "${background:=data/${tag}/background.txt}"
    : "${finetuning:=conf/mini_finetuning.yaml}"
    take_options conf/fmp.yaml order=rescoring.synthetic_order rescoring.dev_meetings
    check_words dev_meetings '[A-Za-z0-9]+'
    : "${release:=$(basename "${corpus}"), synthetic speech}"
    speaking+=" --dev_meetings ${dev_meetings}" bounded=/text
    log "--speech synthetic: the words of AMI's annotations are spoken by a synthesiser"
elif [ -z "${AMI}" ]; then
    corpus=downloads/ami-mini mini=(--mini)
    : "${tag:=mini}" "${config:=conf/mini.yaml}" "${background:=${corpus}/background.txt}"
    : "${finetuning:=conf/mini_finetuning.yaml}"
    log "AMI is empty in db.sh: this run uses the mini corpus, spoken by a synthesiser"
fi
: "${tag:=$(basename "${corpus}")}" "${config:=conf/paper.yaml}" \
    "${finetuning:=conf/finetuning.yaml}"
: "${release:=$(basename "${corpus}")}"
data=data/${tag} dump=dump/${tag} exp=exp/${tag}
: "${results:=${exp}/RESULTS.md}"
take_options "${config}" lm.order
check_words seeds '0|[1-9][0-9]*' rounds '[1-9][0-9]*' rates '[0-9.]+(e-?[0-9]+)?' \
    bonuses '[0-9]+([.][0-9]+)?'
check_word clients 'speaker|meeting' ngpu '0|1' dp 'laplace|paper|none' \
    dp_unit 'word|utterance|user' epsilon '[0-9]+([.][0-9]+)?' draws '[1-9][0-9]*' \
    listed '[1-9][0-9]*' order '[1-9]'
check_tag "${tag}"
[[ ${epsilon} = *[1-9]* ]] || fail 2 "--epsilon must be above 0, not ${epsilon}"
most=$(tr ' ' '\n' <<<"${rounds}" | sort -n | tail -n 1) private=fmp-${dp}-${dp_unit}-${epsilon}
name_corpora AMI
am_seeds=${seeds}
if [ -n "${arms}" ]; then
    check_words arms 'near|far'
    : "${am_seed:=0}"
    check_word am_seed '0|[1-9][0-9]*'
    [ -n "${background}" ] || fail 2 "--arms: give the text of other meetings with --background"
    am_seeds=${am_seed}
elif [ -n "${am_seed}" ]; then
    fail 2 "--am_seed needs --arms"
fi

say_estimate "${mini[*]:+${config}}" "Rescoring on ${release} by FMP, T = ${rounds} (seeds ${seeds})"
! begins 3 || utils/build_kenlm.sh --background

check_kept "${exp}" "${corpora}--clients ${clients} ${speaking}" 1 clients speech dev_meetings
if begins 1; then
    keep_options "${exp}" "${corpora}--clients ${clients} ${speaking}"
    log "Stage 1: data directories in ${data}"
    prepare=(local/prepare.py --client "${clients}" --max-drop "${max_drop}")
    if [ "${speech}" = synthetic ]; then
        run "${prepare[@]}" "${corpus}" "${data}/text" --speech synthetic
        read -r -a meetings <<<"${dev_meetings}"
        local/speak.py "${data}/text" "${data}" --nj "${nj}" --dev "${meetings[@]}"
    else
        [ -n "${AMI}" ] || run local/mini.py downloads
        run "${prepare[@]}" "${corpus}" "${data}"
    fi
    for set in train dev eval; do utils/validate_data_dir.py --no-feats "${data}/${set}"; done
fi

if begins 2; then
    log "Stage 2: filterbanks in ${dump}"
    extract_features train dev eval
fi

text=("${data}/train/text")
if [ "${lm_text}" = background ]; then
    text=()
    [ -n "${background}" ] || fail 2 "--lm_text background: give --background, or --speech synthetic"
fi
[ -z "${background}" ] || text+=(--plain "${background}")
if begins 3 && [ -n "${arms}" ]; then
    arm_ngrams
elif begins 3; then
    log "Stage 3: tokens and n-gram"
    run fedtools train-tokens "${data}/train/text" "${exp}/tokens" \
        --token-type "$(setting tokens.token_type)" --vocab-size "$(setting tokens.vocab_size)"
    train_lm "${text[@]}" "${exp}/lm" --order "${order}" \
        --valid "${data}/dev/text" --valid "${data}/eval/text"
fi

if begins 4; then
    log "Stage 4: the acoustic model, ${exp}/am"
    for seed in ${am_seeds}; do
        experiment "${exp}/am/seed${seed}" - "${seed}" baseline centralized train dev
    done | utils/waves.py "${exp}/experiments"
    # For each experiment: EXP is its folder, OPTIONS are its options in the list, NJ its share of --nj.
    train_waves "${exp}/experiments" train 1 0 fedtools init EXP --config "${config}" OPTIONS '&&' \
        fedtools rounds EXP --nj NJ --ngpu "${ngpu}" --evaluate valid '&&' \
        fedtools average EXP --ngpu "${ngpu}"
fi

if [ -n "${arms}" ]; then
    if begins 5; then arm_lists; fi
    if begins 6; then arm_models; fi
    if begins 7; then in_arms tune_arm; fi
    if begins 8; then in_arms rows_arm; fi
    if begins 9; then in_arms privacy_arm; fi
    if begins 10; then report_arms; fi
    exit 0
fi

if begins 5; then
    log "Stage 5: N-best lists by ${exp}/am"
    for seed in ${seeds}; do
        for set in dev eval; do tabbed "${exp}/am/seed${seed}" "${set}"; done
    done | decode_all decode fedtools decode --lm "${exp}/lm" --config "${config}" --ngpu "${ngpu}"
    for seed in ${seeds}; do echo "${exp}/am/seed${seed}"; done | tune dev
    for seed in ${seeds}; do tabbed "${exp}/am/seed${seed}" decode_eval eval; done | score score
fi

if begins 6; then
    train_nnlms fedtools train-nnlm "${text[@]}" --config "${config}" \
        --valid "${data}/dev/text" --ngpu "${ngpu}"
fi

if begins 7; then tune_weights; fi

if begins 8; then
    federate fedtools init EXP --config conf/fmp.yaml OPTIONS '&&' \
        fedtools rounds EXP --nj NJ --ngpu "${ngpu}"
fi

if begins 9; then sweep fedtools rescore-sweep; fi

if begins 10; then
    [ "${dp}" = none ] && named=() || named=(--private "${private}")
    run local/report.py "${exp}" "${data}/eval" "${results}" --seeds "${seeds}" \
        --rounds "${rounds}" "${named[@]}" --section "${section}" "${mini[@]}" \
        --corpus "${corpus_name}" --release "${release}" --command "${command_line% }"
    write_cards "${exp}" "${results}" "${seeds%% *}"
    log "Stage 10: wrote ${results}"
fi
