# shellcheck shell=bash
# Sourced by a recipe's run.sh after utils/parse_options.sh: the functions that recipes share. Fails if
# an argument is left over; sources path.sh, cmd.sh and db.sh of the current folder.
# shellcheck disable=SC1091,SC2034,SC2154  # the recipe's files, commands and options

fail() { # exit status, message...
    echo "$0: ${*:2}" >&2
    exit "$1"
}

[ $# -eq 0 ] || fail 2 "unexpected argument '$1'; put a list of several words in quotes"
. ./path.sh
. ./cmd.sh
. ./db.sh
# With a GPU, training and decoding use cuda_cmd; other jobs keep the CPU command.
cpu_cmd=${train_cmd}
[ "${ngpu}" = 0 ] || train_cmd=${cuda_cmd} decode_cmd=${cuda_cmd}

# Run the last command of a pipe in this shell, so that its children end if this shell is killed.
shopt -s lastpipe

log() { echo "$(date '+%Y-%m-%d %H:%M:%S') $*"; }

# Whether a stage is to run. Of its commands, the first one is printed.
begins() { # stage
    told=false
    [ "${stage}" -le "$1" ] && [ "${stop_stage}" -ge "$1" ]
}

# Print a command, unless the stage has printed one.
told=false
tell() { # command that prints it...
    "${told}" || "$@"
    told=true
}

# Run a command here, or as a job; array and each run one for each line of a list.
run() { # command...
    tell printf '   %s\n' "$(printf ' %q' "$@")"
    "$@"
}

job() { # command of cmd.sh, log, command...
    local words=("${@:3}")
    tell printf '   %s\n' "$(printf ' %q' "${words[@]/%JOB/1}")"
    $1 "${@:2}"
}

# Set options that the command line has left empty to the values of a YAML; values of a list are
# separated by spaces. An option has the name of the last part of its key, unless a name is given.
take_options() { # YAML, [name=]key...
    local value key number=0 keys=("${@:2}")
    value=$(fedtools config "$1" "${keys[@]#*=}")
    while IFS= read -r value; do
        key=${keys[number]%%=*} number=$((number + 1))
        key=${key##*.}
        [ -n "${!key}" ] || printf -v "${key}" '%s' "${value}"
    done <<<"${value}"
}

# Say what a run will do, and the time, downloads and disk that its configuration's section `estimate`
# states, which only a configuration for a corpus of the recipe's own can have.
say_estimate() { # YAML, empty for another corpus than its own; what the run does
    local facts
    log "$2; stages ${stage} to ${stop_stage}"
    if [ -n "$1" ] && facts=$(fedtools config "$1" estimate.{minutes,fetches,disk_gb} 2>/dev/null); then
        mapfile -t facts <<<"${facts}"
        log "All stages with the defaults of $1 take ${facts[0]} minutes on two idle cores," \
            "fetch ${facts[1]}, and need ${facts[2]} GB of disk"
    else
        log "Time and disk depend on corpus and options; --price true estimates the time of training"
    fi
}

# Begin to provide the packages and the folder, `pretrained`, that a configuration of pretrained models
# needs; a folder that the user gives is not fetched. For other configurations, do nothing. Stages that
# only read audio go on meanwhile, unless fetching has failed; the others call `await_pretrained` first.
fetching=()
fetch_pretrained() { # YAML
    local name
    name=$(fedtools config "$1" pretrained.whisper)
    [ -n "${pretrained}" ] || [ "${name}" != none ] || return 0
    utils/pretrained.sh &
    fetching=($!)
    [ -z "${pretrained}" ] || return 0
    pretrained=downloads/whisper-${name}
    utils/whisper.sh "${name}" "${pretrained}" &
    fetching+=($!)
}

check_pretrained() {
    local process
    for process in "${fetching[@]}"; do
        kill -0 "${process}" 2>/dev/null || wait "${process}" || exit
    done
}

await_pretrained() {
    local process
    for process in "${fetching[@]}"; do wait "${process}" || exit; done
    fetching=()
}

# Check the words of options: at least one, each matching the pattern, and none twice. Sets the option
# to its words with single spaces between them.
check_words() { # option, pattern, option, pattern, ...
    local word words seen
    while [ $# -gt 0 ]; do
        read -r -d '' -a words <<<"${!1}" || true
        seen=" "
        [ ${#words[@]} -gt 0 ] || fail 2 "--$1 is empty"
        for word in "${words[@]}"; do
            [[ ${word} =~ ^($2)$ ]] || fail 2 "--$1: '${word}' is not of the form $2"
            [[ ${seen} != *" ${word} "* ]] || fail 2 "--$1: ${word} is given twice"
            seen+="${word} "
        done
        printf -v "$1" '%s' "${words[*]}"
        shift 2
    done
}

# Check options of exactly one word in the same way.
check_word() { # option, pattern, option, pattern, ...
    check_words "$@"
    while [ $# -gt 0 ]; do
        [[ ${!1} != *' '* ]] || fail 2 "--$1 must be one word, not '${!1}'"
        shift 2
    done
}

# Check the tag, which names folders and, in lower case, the section of RESULTS.md.
check_tag() { # tag; sets section
    [[ $1 =~ ^[A-Za-z0-9_][A-Za-z0-9._-]*$ ]] || fail 2 "--tag '$1': use letters, digits and . _ -"
    section=${1,,}
    section=${section//[!a-z0-9]/-}
}

# Set `corpora` to the run's corpora without the paths of this machine, and put it before the command
# that the report shows.
name_corpora() { # variables of db.sh
    local name
    corpora=
    for name in "$@"; do
        [ -z "${!name}" ] || corpora+="${name}=.../$(basename "${!name}") "
    done
    show_corpora
}

# Put `corpora` before the command that the report shows, and shorten the path of a pretrained model.
show_corpora() {
    local name
    command_line=${corpora}${command_line}
    [ -n "${pretrained:-}" ] || return 0
    printf -v name '%q' "${pretrained}"
    command_line=${command_line/"--pretrained ${name}"/"--pretrained .../${name##*/}"}
}

# Refuse to remake data with other options if experiments have begun with them, and record the options.
keep_options() { # folder of the experiments, the options as text, their stage (default: 1)
    local file=$1/data_options${3:+.stage$3}
    if [ -s "${file}" ] && [ "$(<"${file}")" != "$2" ] &&
        [ -n "$(find "$1" -name config.yaml -print -quit)" ]; then
        fail 1 "the experiments in $1 use data made with $(<"${file}"); give another --tag"
    fi
    mkdir -p "$1"
    echo "$2" >"${file}"
}

# Check, when the stage that makes data is not run, that options of it on the command line are those
# that the data were made with.
check_kept() { # folder of the experiments, the options as text, their stage, the names of the options
    local name file=$1/data_options stage_of=$3
    [ "${stage_of}" = 1 ] || file+=.stage${stage_of}
    ! begins "${stage_of}" && [ -s "${file}" ] && [ "$(<"${file}")" != "$2" ] || return 0
    for name in "${@:4}"; do
        [[ ${given_options} != *" ${name} "* ]] ||
            fail 1 "--${name}: stage ${stage_of} made the data with $(<"${file}"), not with $2;" \
                "give the same options, or run stage ${stage_of} again with another --tag"
    done
}

# Print a line of a list: words separated by tabs.
tabbed() { # words...
    local line
    printf -v line '\t%s' "$@"
    printf '%s\n' "${line:1}"
}

# Run an array with a job for each line of a list, --nj at a time: the command with the line's words,
# see line.sh. After '&&', as in a shell, follows another one.
array() { # command of cmd.sh, log, list, its first and last line (0: to the end), command...
    local last=$5 word line=(utils/line.sh "$3" JOB)
    tell utils/line.sh -n "$3" "$4" "${@:6}"
    for word in "${@:6}"; do
        line+=("${word}")
        [ "${word}" != '&&' ] || line+=(utils/line.sh "$3" JOB)
    done
    [ "${last}" -gt 0 ] || last=$(wc -l <"$3")
    $1 --max-jobs-run "${nj}" "JOB=$4:${last}" "$2" "${line[@]}"
}

# Do the same for the lines of standard input; do nothing if there are none.
each() { # command of cmd.sh, name of the list and the logs, command...
    local list=${logs:-${exp}/log}/$2.list
    mkdir -p "${list%/*}"
    cat >"${list}"
    [ ! -s "${list}" ] || array "$1" "${list%.list}.JOB.log" "${list}" 1 0 "${@:3}"
}

# Print the sentences in the output of the jobs of `each`, in order, each job's below its line of the
# list. Tables, whose columns are two spaces apart, stay in the logs, which the line names.
show() { # name of the list and the logs
    local line job=0 path=${logs:-${exp}/log}/$1
    while IFS= read -r line; do
        job=$((job + 1))
        [ -z "$(printed "${path}.${job}.log" | sed -n '/  /p')" ] || line+=": ${path}.${job}.log"
        log "${line//$'\t'/ }"
        printed "${path}.${job}.log" | sed '/  /d; /^$/d'
    done <"${path}.list"
}

# Write the leakage card of each experiment whose folder `attacks` has tables to a page, for one seed.
write_cards() { # folder of experiments, page, seed
    local folder
    find "$1" -type d -name attacks | sort | while IFS= read -r folder; do
        [[ ${folder} != */seed[0-9]*/attacks || ${folder} = */seed"$3"/attacks ]] || continue
        [ -n "$(find "${folder}" -name '*.tsv' -print -quit)" ] || continue
        fedtools attack card "${folder%/attacks}" --page "$2" >/dev/null
    done
}

# Copy the pictures of an earlier stage next to the page, where those of an earlier run are removed.
place_pictures() { # folder, start of their new names, pictures of an earlier run
    local file folder=$1 start=$2
    shift 2
    [ -d "${folder}" ] || return 0
    rm -f "$@"
    for file in "${folder}"/*; do [ ! -e "${file}" ] || cp "${file}" "${start}-${file##*/}"; done
}

printed() { sed '/^#/d' "$@"; } # logs

# Train the experiments of a list that waves.py made, those of a wave in parallel, by commands with '&&'
# between them: init, rounds, and average or none. In these, EXP is an experiment's folder, OPTIONS are
# its options in the list, and NJ is its share of --nj: if a wave has fewer experiments, the clients of
# each train in parallel too. A killed experiment continues. All experiments of a wave are begun before
# one of them trains, and experiments of later waves that an earlier run has begun are checked first of
# all, so that changed options are reported at once and not after hours.
train_waves() { # list, name of the logs, first and last wave (0: to the end), commands...
    local waves first last=0 name=${exp}/log/$2 init
    [ -s "$1" ] || fail 1 "$1: no experiments"
    mkdir -p "${exp}/log"
    mapfile -d '' -t init < <(part 1 "${@:5}")
    begun "$1" "$3" >"${name}.begun.list"
    begin "${name}.begun.log" "${name}.begun.list" 1 0 "${init[@]}"
    mapfile -t waves < <(cut -f 1 "$1")
    while [ "${last}" -lt ${#waves[@]} ]; do
        first=$((last + 1)) last=$((last + 1))
        while [ "${waves[last]-}" = "${waves[first - 1]}" ]; do last=$((last + 1)); done
        [ "${waves[first - 1]}" -ge "$3" ] || continue
        [ "$4" -eq 0 ] || [ "${waves[first - 1]}" -le "$4" ] || continue
        tell utils/line.sh -n "$1" "${first}" "${init[@]}"
        begin "${name}.init.log" "$1" "${first}" "${last}" "${init[@]}"
        train_wave "$1" "${name}.JOB.log" "${first}" "${last}" "${@:5}"
    done
}

# Print the words of one of several commands, each word with a zero byte at its end.
part() { # number of the command, commands...
    local word number=1
    for word in "${@:2}"; do
        if [ "${word}" = '&&' ]; then
            number=$((number + 1))
        elif [ "${number}" -eq "$1" ]; then
            printf '%s\0' "${word}"
        fi
    done
}

# With --price true: print how long the rounds take that a wave has left, and exit if it has any. Of
# experiments that differ only in the last part of their path, the seed, one is timed.
price_wave() { # list, logs, its first and last line, command that runs rounds...
    local name log rounds row firsts=() said total=0
    local one=(fedtools rounds --estimate --nj "${nj}" --ngpu "${ngpu}")
    local -A number=()
    [[ ! " $* " =~ " --evaluate "([a-z]+)" " ]] || one+=(--evaluate "${BASH_REMATCH[1]}")
    while IFS=$'\t' read -r _ name _; do
        rounds=$(sed -n 's/^rounds: //p' "${name}/config.yaml") row=${name%/*}
        [ ! -e "${name}/round_$(printf '%04d' "${rounds}")/.done" ] || continue
        [ -n "${number[${row}]-}" ] || firsts+=("${name}")
        number[${row}]=$((${number[${row}]:-0} + 1))
    done < <(sed -n "$3,$4p" "$1")
    [ ${#firsts[@]} -gt 0 ] || return 0
    for name in "${firsts[@]}"; do
        row=${name%/*} log=${2/JOB/price.${name//\//-}}
        ${train_cmd} "${log}" "${one[@]}" "${name}"
        said=$(printed "${log}" | grep ' minutes$')
        log "${said} (${number[${row}]} of these)"
        said=${said##*: }
        total=$(awk "BEGIN { print ${total} + ${number[${row}]} * ${said% *} }")
    done
    log "In all ${total} minutes, one after the other; the same command without --price true trains them"
    exit
}

# Print the lines of later waves whose experiments have begun and whose data all exist.
begun() { # list, wave
    local line words index
    while IFS= read -r line; do
        mapfile -t -d $'\t' words < <(printf '%s\t' "${line}")
        [ "${words[0]}" -gt "$2" ] && [ -e "${words[1]}/config.yaml" ] || continue
        for index in "${!words[@]}"; do
            case ${words[index]} in
                --data | --asset | --start) [ -e "${words[index + 1]#*=}" ] || continue 2 ;;
            esac
        done
        printf '%s\n' "${line}"
    done <"$1"
}

# Begin the experiments of some lines of a list that waves.py made, and repeat each warning once.
begin() { # log, list, its first and last line (0: to the end), command that begins one...
    [ -s "$2" ] || return 0
    ${cpu_cmd} "$1" utils/begin.py --nj "${nj}" "${@:2}"
    printed "$1" | awk '!seen[$0]++' >&2
}

train_wave() { # list, logs, its first and last line, commands...
    local at job training averaging wide=$(($4 - $3 + 1))
    mapfile -d '' -t training < <(part 2 "${@:5}")
    mapfile -d '' -t averaging < <(part 3 "${@:5}")
    for at in "${!training[@]}"; do
        [ "${training[at]}" != NJ ] || training[at]=$((nj > wide ? nj / wide : 1))
    done
    ! "${price:-false}" || price_wave "${@:1:4}" "${training[@]}"
    if [ -z "${rounds_cmd:-}" ]; then
        [ ${#averaging[@]} = 0 ] || training+=('&&' "${averaging[@]}")
        array "${train_cmd}" "$2" "$1" "$3" "$4" "${training[@]}"
        return
    fi
    # One experiment after the other, each in all processes that cmd.sh asks for.
    for job in $(seq "$3" "$4"); do
        ${rounds_cmd} "${2/JOB/"${job}"}" utils/line.sh "$1" "${job}" "${training[@]}"
        [ ${#averaging[@]} = 0 ] ||
            ${train_cmd} "${2/JOB/average."${job}"}" utils/line.sh "$1" "${job}" "${averaging[@]}"
    done
}
