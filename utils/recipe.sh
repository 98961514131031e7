# shellcheck shell=bash
# Sourced by a recipe's run.sh after utils/parse_options.sh: the functions that recipes share. No
# argument may be left over; path.sh, cmd.sh and db.sh of the current folder are sourced.
# shellcheck disable=SC1091,SC2034,SC2154  # the recipe's files, commands and options

fail() { # exit status, message...
    echo "$0: ${*:2}" >&2
    exit "$1"
}

[ $# -eq 0 ] || fail 2 "unexpected '$1'; a list of several words wants quotes"
. ./path.sh
. ./cmd.sh
. ./db.sh
# What computes runs where there is a GPU.
[ "${ngpu}" = 0 ] || train_cmd=${cuda_cmd} decode_cmd=${cuda_cmd}

log() { echo "$(date '+%Y-%m-%d %H:%M:%S') $*"; }
begins() { [ "${stage}" -le "$1" ] && [ "${stop_stage}" -ge "$1" ]; }

# The words of options: at least one, each as the pattern says, and none twice. The option then has
# one space between two words.
check_words() { # option, pattern, option, pattern, ...
    local word words seen
    while [ $# -gt 0 ]; do
        read -r -d '' -a words <<<"${!1}" || true
        seen=" "
        [ ${#words[@]} -gt 0 ] || fail 2 "--$1 is empty"
        for word in "${words[@]}"; do
            [[ ${word} =~ ^($2)$ ]] || fail 2 "--$1: '${word}' is not of the form $2"
            [[ ${seen} != *" ${word} "* ]] || fail 2 "--$1: ${word} comes twice"
            seen+="${word} "
        done
        printf -v "$1" '%s' "${words[*]}"
        shift 2
    done
}

# The same of options that are one word.
check_word() { # option, pattern, option, pattern, ...
    check_words "$@"
    while [ $# -gt 0 ]; do
        [[ ${!1} != *' '* ]] || fail 2 "--$1 is one word, not '${!1}'"
        shift 2
    done
}

# The tag names folders, and the section of RESULTS.md, whose name has other letters.
check_tag() { # tag; sets section
    [[ $1 =~ ^[A-Za-z0-9_][A-Za-z0-9._-]*$ ]] || fail 2 "--tag '$1': use letters, digits and . _ -"
    section=${1,,}
    section=${section//[!a-z0-9]/-}
}

# What corpora the run is of, without the folders of this machine: in front of the report's command,
# and in `corpora`.
name_corpora() { # variables of db.sh
    local name
    corpora=
    for name in "$@"; do
        [ -z "${!name}" ] || corpora+="${name}=.../$(basename "${!name}") "
    done
    command_line=${corpora}${command_line}
}

# Refuse to make data anew, with other options, below experiments that began with them.
keep_options() { # folder of the experiments, the options as text, their stage (default: 1)
    local file=$1/data_options${3:+.stage$3}
    if [ -s "${file}" ] && [ "$(<"${file}")" != "$2" ] &&
        [ -n "$(find "$1" -name config.yaml -print -quit)" ]; then
        fail 1 "the experiments in $1 are of data made with $(<"${file}"); give another --tag"
    fi
    mkdir -p "$1"
    echo "$2" >"${file}"
}
