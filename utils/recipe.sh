# shellcheck shell=bash
# Sourced by the run.sh of every recipe, after utils/parse_options.sh: what all recipes need.

if [ $# -gt 0 ]; then
    echo "$0: unexpected '$1'; a list of several words wants quotes" >&2
    exit 2
fi

# Print a line with the time.
log() { echo "$(date '+%Y-%m-%d %H:%M:%S') $*"; }

# Whether stage $1 is to be run.
begins() { [ "${stage:?}" -le "$1" ] && [ "${stop_stage:?}" -ge "$1" ]; }

# Check that option $1 has at least one of the words $3..., each of the form $2 (a regular
# expression of bash) and none twice; the option then has one space between two words.
words() {
    local word seen=" "
    [ $# -gt 2 ] || { echo "$0: --$1 is empty" >&2; exit 2; }
    for word in "${@:3}"; do
        [[ ${word} =~ ^($2)$ ]] || { echo "$0: --$1: '${word}' is not of the form $2" >&2; exit 2; }
        [[ ${seen} != *" ${word} "* ]] || { echo "$0: --$1: ${word} comes twice" >&2; exit 2; }
        seen+="${word} "
    done
    printf -v "$1" '%s' "${*:3}"
}
