# shellcheck shell=bash
# Sourced by a script after its defaults: options on its command line set the variables of the same
# name, and other arguments stay in "$@".
#
#   stage=1
#   help_message="Usage: ..."       # what --help prints above the options
#   . utils/parse_options.sh        # --stage 3, --stage=3; --stop-stage 5 is --stop_stage 5
#
# An option is a variable that the script itself assigns at the beginning of a line above that one;
# anything else that begins with "-" is an error, exit 2, and so is a missing value. "--" ends the
# options. If the default is true or false, the value must be too; stage, stop_stage, nj, ngpu and
# seed take whole numbers. --help prints the help_message, then the options as the script defines
# them, with defaults and comments; a comment may continue in lines that begin with blanks and a "#".
# Stages of which none is left to run, or beyond the default of stop_stage, are an error; --stop_stage 0
# checks the options alone. The variable given_options has the names of the options on the command line,
# each between blanks.
#
# From here on the script and the commands that it calls are in the C locale: in Turkish and Estonian
# locales [a-z] lacks letters, and in many locales numbers have a decimal comma.
export LC_ALL=C

# All names here begin with "_", so that they do not clash with a script's options.
_po_error() {
    echo "${BASH_SOURCE[-1]}: $*" >&2
    exit 2
}

# Print the lines of options, name=..., that the sourcing script $1 has above its line $2, and the
# continuation lines of their comments.
_po_lines() {
    local _po_file _po_line _po_number=0 _po_seen=" help_message " _po_within=false
    # The script may have changed directory since it was called by a relative path.
    for _po_file in "$1" "${OLDPWD:-.}/$1" "${1##*/}"; do
        if [[ -r $_po_file && $(sed -n "$2p" "$_po_file") == *parse_options.sh* ]]; then
            while IFS= read -r _po_line && ((++_po_number < $2)); do
                if [[ $_po_line =~ ^(export\ +)?([a-z][A-Za-z0-9_]*)= ]] &&
                    [[ $_po_seen != *" ${BASH_REMATCH[2]} "* ]]; then
                    _po_seen+="${BASH_REMATCH[2]} "
                    _po_within=true
                    printf '%s\n' "${_po_line#"${BASH_REMATCH[1]}"}"
                elif [[ $_po_within == true && $_po_line =~ ^[[:blank:]]+# ]]; then
                    printf '%s\n' "$_po_line"
                else
                    _po_within=false
                fi
            done <"$_po_file"
            return
        fi
    done
    _po_error "parse_options.sh cannot read the script that sources it; source it from a file"
}

_po_help() {
    local _po_line
    printf '%s\n' "${help_message:-"Usage: $0 [--option value]..."}" "Options and their defaults:"
    for _po_line in "${_po_shown[@]}"; do
        [[ $_po_line == [[:blank:]]* ]] && _po_line="    $_po_line" || _po_line="  --$_po_line"
        printf '%s\n' "$_po_line"
    done
}

# Set the variables, and set _po_used to the number of arguments that were options.
_po_parse() {
    local _po_total=$# _po_option _po_name _po_value _po_default
    while [[ $# -gt 0 && $1 == -?* ]]; do
        _po_option=$1
        shift
        case $_po_option in
            --) break ;;
            --help | -h)
                _po_help
                exit 0
                ;;
            --*=*)
                _po_value=${_po_option#*=}
                _po_option=${_po_option%%=*}
                ;;
            --*)
                [[ $# -gt 0 ]] || _po_error "$_po_option needs a value"
                _po_value=$1
                if [[ $1 == --* ]] && _po_is_known "${1%%=*}"; then
                    _po_error "$_po_option needs a value, not the option $1"
                fi
                shift
                ;;
        esac
        if ! _po_is_known "$_po_option"; then
            _po_error "unknown option $_po_option; options:$(printf ' --%s' "${_po_known[@]}")"
        fi
        _po_name=${_po_option#--}
        _po_name=${_po_name//-/_}
        _po_default=${!_po_name-}
        if [[ $_po_default =~ ^(true|false)$ && ! $_po_value =~ ^(true|false)$ ]]; then
            _po_error "$_po_option must be true or false, not '$_po_value'"
        fi
        case $_po_name in
            stage | stop_stage | nj | ngpu | seed)
                [[ $_po_value =~ ^-?[0-9]+$ ]] ||
                    _po_error "$_po_option must be a whole number, not '$_po_value'"
                ;;
        esac
        printf -v "$_po_name" '%s' "$_po_value"
        given_options+="$_po_name "
    done
    _po_used=$((_po_total - $#))
}

# Check that a script with stages has one left to run; its last one is the default of stop_stage.
# shellcheck disable=SC2154  # the script's options
_po_check_stages() {
    if [ "$stage" -gt "$_po_last" ]; then
        _po_error "--stage $stage: the last stage is $_po_last"
    elif [[ $stop_stage -gt 0 && $stage -gt $stop_stage ]]; then
        _po_error "--stage $stage is after --stop_stage $stop_stage, so no stage would run"
    fi
}

_po_is_known() {
    local _po_name=${1#--} _po_other
    [[ $1 == --* ]] || return 1
    for _po_other in "${_po_known[@]}"; do
        [[ ${_po_name//-/_} != "$_po_other" ]] || return 0
    done
    return 1
}

_po_shown=$(_po_lines "${BASH_SOURCE[1]-}" "${BASH_LINENO[0]}") || exit
mapfile -t _po_shown <<<"$_po_shown"
_po_known=()
for _po_line in "${_po_shown[@]}"; do
    [[ $_po_line != [a-z]* ]] || _po_known+=("${_po_line%%=*}")
done
# shellcheck disable=SC2034  # for the script
given_options=" "
_po_last=${stop_stage-}
_po_parse "$@"
shift "$_po_used"
[[ -z ${stage-} || -z $_po_last ]] || _po_check_stages
unset -v _po_shown _po_known _po_line _po_used _po_last
unset -f _po_error _po_lines _po_help _po_parse _po_is_known _po_check_stages
