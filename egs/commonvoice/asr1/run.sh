#!/usr/bin/env bash
# Federated and personalised ASR on Common Voice accents: from audio to a table of word error rates.
# Zhu et al., "Decoupled federated learning for ASR with non-IID data", Interspeech 2022.
# shellcheck disable=SC2034  # options that local/data.sh and local/steps.sh use
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
LC_ALL=C printf -v command_line '%q ' egs/commonvoice/asr1/run.sh "$@"

stage=1
stop_stage=9
nj=3                    # jobs at the same time; no result depends on it
ngpu=0                  # 1: train and decode on a GPU
seeds=0                 # random seeds of training; with several, tables have means and deviations
split_seed=0            # random seed of the split into sets
methods=                # default: client centralized fedavg fednorm fedextract decouplefl; mini: fewer
labels=                 # clients' labels: transcripts, continuous (a teacher's) or fixed (the baseline's)
baseline=               # variant of the config for the baseline; as_it_is: a pretrained model, untrained
extractor=              # cnn: personal convolutions only; default: the config's
sit=false               # true: DecoupleFL with speaker-invariant training
tables=                 # more of the paper's tables: 2 (labels), 4 (ablations), 5 (extractors); stage2:
                        # labels of DecoupleFL's stage 2
rounds=                 # rounds of each experiment; default: the config's
price=false             # true: time rounds of what is trained next, print an estimate, and exit
attacks=false           # true: attack the features that DecoupleFL's clients send
clients=accent          # speaker: every speaker is a client, test speakers are newcomers
newcomer_seconds=       # seconds of speech to which a newcomer's model is adapted; default: the
                        # config's, newcomers.seconds
pretrained=             # folder of a pretrained model; default: the config's section pretrained, if any
config=                 # default: conf/mini.yaml, or conf/paper.yaml for a real corpus
tag=                    # name of the run's folders: data/<tag>, dump/<tag>, exp/<tag>
accents=                # the clients' accents; default: Australia, England, India; with --clients
                        # speaker on a real corpus: any, speakers of every accent and of none
unclear=server          # rows without an accent, or with several: give to the server, or drop
hours=                  # train,valid,test hours of all clients, or their ratio; default of this and of
                        # the next two: the config's, section corpus
server_hours=           # the same for the server's own data; default without the config's: as --hours
server_fraction=        # give this fraction of every accent's speakers to the server; the config's
                        # value applies to --accents any
speaker_share=          # choose speakers with at most this fraction of a set first for valid and test
mini_tests=             # mini corpus: test speakers per accent, such as 60; default: about 14
common_sentences=drop   # sentences of valid and test in training: drop, or keep for closed vocabularies
min_seconds=            # leave out training clips that are shorter, ...
max_seconds=            # ... or longer, ...
min_chars_per_second=   # ... or have fewer characters a second, ...
max_chars_per_second=   # ... or more; default: no limits
max_drop=0.5            # fail if more than this fraction of the wanted clips, or of a set, is unusable
speeds=                 # also train on speed-perturbed audio: "0.9 1.0 1.1"
corpus_name="Common Voice"   # name of the corpus in tables
release=                # name of its release in tables; default: its folder's name
transport=files         # flower: in stage 5, three sites with the clients train over Flower on the loopback
results=                # default: exp/<tag>/RESULTS.md

help_message="Usage: $0 [--option value]...
Stages: 1 data directories (of a mini corpus if COMMONVOICE is empty in db.sh), 2 features, 3 tokens
  and n-gram, 4 the baseline, 5 every method, 6 decoding, 7 scoring, 8 attacks, newcomers, each
  client's model on each client's data, 9 the report; README.md describes the output of each stage."
. utils/parse_options.sh
. utils/recipe.sh
. utils/asr_steps.sh
. local/data.sh
. local/steps.sh

mini=() corpus=${COMMONVOICE}
if [ -z "${COMMONVOICE}" ]; then
    mini=(--mini)
    [ -z "${mini_tests}" ] || check_word mini_tests '[1-9][0-9]{0,2}'
    corpus=downloads${mini_tests:+/tests${mini_tests}}/cv-corpus-mini/en
    : "${release:=cv-corpus-mini}" "${config:=conf/mini.yaml}"
    : "${methods:=centralized fedavg decouplefl}"
    log "COMMONVOICE is empty in db.sh: this run uses the mini corpus, spoken by a synthesiser"
fi
above=$(basename "$(dirname "${corpus}")")
: "${release:=${above}}" "${config:=conf/paper.yaml}"
[ -n "${COMMONVOICE}" ] && name=${above} || name=mini
# Whisper has its own features, and so its own folders.
case ${config##*/} in whisper.yaml | private.yaml) name+=-${config##*/} name=${name%.yaml} ;; esac
: "${tag:=${name}}"
take_options "${config}" newcomer_seconds=newcomers.seconds corpus.{hours,server_hours}
hours=${hours// /,} server_hours=${server_hours// /,}
data=data/${tag} dump=dump/${tag} exp=exp/${tag}
: "${server_hours:=${hours}}" "${results:=${exp}/RESULTS.md}"
name_data               # sets options
: "${methods:=client centralized fedavg fednorm fedextract decouplefl}"
check_words seeds '0|[1-9][0-9]*' methods '[a-z0-9_]+([+][a-z0-9_]+)*'
check_word sit 'true|false' attacks 'true|false' price 'true|false' ngpu '0|1' transport 'files|flower'
[ -z "${rounds}" ] || check_word rounds '[1-9][0-9]*'
[ -z "${labels}" ] || check_word labels 'transcripts|continuous|fixed'
[ -z "${extractor}" ] || check_word extractor 'cnn'
[ -z "${baseline}" ] || check_word baseline '[a-z0-9_]+'
[ -z "${tables}" ] || check_words tables '2|4|5|stage2'
check_tag "${tag}"
pictures=${results%.md}-${tag}    # next to the page
drawings=${exp}/pictures          # of stage 8
[ "${clients}" = accent ] && plain=train || plain=train_spk
# If clients are speakers, test speakers are not clients: no client's own model is used for decoding.
[ "${clients}" = accent ] && own=() || own=(--shared)
merge_options=(--max-drop "${max_drop}")
sp=${speeds:+_sp} trained=${plain}${speeds:+_sp}    # suffix of perturbed data; clients' data
say_estimate "${mini[*]:+${config}}" "Speech recognition on ${release} by ${methods} (seeds ${seeds})"
take_pretrained
chosen=(--exp "${exp}" --config "${config}" --seeds "${seeds}" --methods "${methods}")
chosen+=(--clients "${clients}" --labels "${labels}" --extractor "${extractor}" --sit "${sit}")
chosen+=(--tables "${tables}" --attacks "${attacks}" --newcomer-seconds "${newcomer_seconds}")
# Check the options now, and not after hours of preparing a corpus.
list=${exp}/experiments planned=$(local/experiments.py all "${chosen[@]}" --data "${data}" \
    --train "${trained}" --server-train "server_train${sp}" --tokens "${tokens}" \
    --pretrained "${pretrained}" --baseline "${baseline}" --rounds "${rounds:-0}")

# Other data need another tag: check this for both stages before the first remakes anything.
corpora=${COMMONVOICE:+"COMMONVOICE=.../${above}/$(basename "${corpus}") "}
show_corpora
! begins 2 || keep_options "${exp}" "--clients ${clients}${speeds:+" --speeds ${speeds}"}" 2
! begins 1 || keep_options "${exp}" "${corpora}${options[*]}"
check_kept "${exp}" "${corpora}${options[*]}" 1 accents unclear hours server_{hours,fraction} \
    speaker_share common_sentences {min,max}_{seconds,chars_per_second} split_seed
check_kept "${exp}" "--clients ${clients}${speeds:+" --speeds ${speeds}"}" 2 clients speeds

! begins 3 || "${seq2seq}" || utils/build_kenlm.sh --background

if begins 1; then
    log "Stage 1: data directories in ${data}"
    [ -n "${COMMONVOICE}" ] ||
        run local/mini.py "${corpus%/*/*}" ${mini_tests:+--tests "${mini_tests}"}
    run local/prepare.py "${corpus}" "${data}" "${options[@]}" --max-drop "${max_drop}" --nj "${nj}"
    for set in {server_,}{train,valid,test}; do
        utils/validate_data_dir.py --no-feats "${data}/${set}"
    done
fi

if begins 2; then
    log "Stage 2: features in ${dump}"
    [ "${clients}" = accent ] ||
        run fedtools partition "${data}/train" "${data}/${plain}" --scheme map --by utt2spk
    for set in ${sp:+server_train "${plain}"}; do
        run fedtools perturb-speed "${data}/${set}" "${data}/${set}${sp}" --speeds "${speeds}"
    done
    extract_features "server_train${sp}" "${trained}" {server_,}{valid,test}
fi

if begins 3 && ! "${seq2seq}"; then
    log "Stage 3: tokens and language model, from the server's transcripts"
    train_units server_train --valid "${data}/server_valid/text" --valid "${data}/valid/text"
fi

# For each experiment of the list: EXP is its folder, OPTIONS are its options, NJ is its share of --nj.
by=(fedtools rounds)
[ "${transport}" = files ] || by=(utils/flower_rounds.sh)
train=(fedtools init EXP --config "${config}" OPTIONS '&&'
    "${by[@]}" EXP --nj NJ --ngpu "${ngpu}" --evaluate valid '&&'
    fedtools average EXP --ngpu "${ngpu}" "${own[@]}")
decode=(fedtools decode "${lm[@]}" --config "${config}" --ngpu "${ngpu}")

# Later stages do not write the list: they may run with other methods while an array still reads it.
if begins 4 || begins 5; then
    [ "${transport}" = files ] || planned=$(utils/flower_sites.py "${exp}/sites" <<<"${planned}")
    utils/waves.py "${list}" <<<"${planned}"
fi

if begins 4; then
    log "Stage 4: the baseline, ${exp}/baseline; logs in ${exp}/log"
    train_waves "${list}" train 1 1 "${train[@]}"
fi

if begins 5; then
    [[ ${planned} != *_fixed_seed* ]] || label_train
    [[ ${planned} != *weights=* ]] || tune_server
    log "Stage 5: the systems that start from the baseline, $(listed systems | wc -l) of ${list}"
    train_waves "${list}" train 2 0 "${train[@]}"
fi

if begins 6; then
    log "Stage 6: N-best lists by $(listed all | wc -l) experiments"
    decode_sets | decode_all decode "${decode[@]}"
    listed all | tune valid
fi

if begins 7; then score_sets; fi

if begins 8; then
    rm -rf "${exp}/cross.tsv" "${drawings}"
    mkdir -p "${drawings}"
    [ "${attacks}" = false ] || attack_features fedtools attack features --ngpu "${ngpu}" \
        --config "${config}" --server-data "${data}/server_train${sp}" --decoders "${exp}/decoders" \
        --text "${data}/${trained}/text"
    if [ "${clients}" = accent ]; then cross fedtools cross --ngpu "${ngpu}"; else newcomers; fi
fi

if begins 9; then
    place_pictures "${drawings}" "${pictures}" "${pictures}"-{cross,tsne-*}.png
    rows=$(local/rows.py "${chosen[@]}" --pictures "${pictures}")
    mapfile -t rows <<<"${rows}"
    run fedtools report "${results}" --section "${section}" --corpus "${corpus_name}" \
        --release "${release}" "${mini[@]}" "${rows[@]}" --plot "${pictures}.png" \
        --published "Zhu et al. 2022, table 3=conf/published.tsv" --command "${command_line% }"
    write_cards "${exp}" "${results}" "${seeds%% *}"
    log "Stage 9: wrote ${results}"
fi
