# shellcheck shell=bash
# Sourced by a script after its defaults: options on its command line set the variables of the same
# name, what is left stays in "$@".
#
#   stage=1
#   help_message="Usage: ..."
#   . utils/parse_options.sh        # --stage 3, --stage=3; --stop-stage 5 is --stop_stage 5
#
# An option is a variable that the script itself assigns at the beginning of a line above that one;
# anything else that begins with "-" is an error, exit 2, and so is a missing value. "--" ends the
# options. Where the default is true or false, the value must be; stage, stop_stage, nj, ngpu and
# seed take whole numbers. --help prints the help_message.

# The names may not meet those of a script's options, which do not begin with "_".
_po_error() {
    echo "${BASH_SOURCE[-1]}: $*" >&2
    exit 2
}

# Print the options that the sourcing script $1 defines above its line $2.
_po_names() {
    local _po_file _po_line _po_number=0 _po_seen=" "
    # The script may have changed directory since it was called by a relative path.
    for _po_file in "$1" "${OLDPWD:-.}/$1" "${1##*/}"; do
        if [[ -r $_po_file && $(sed -n "$2p" "$_po_file") == *parse_options.sh* ]]; then
            while IFS= read -r _po_line && ((++_po_number < $2)); do
                [[ $_po_line =~ ^(export\ +)?([a-z][A-Za-z0-9_]*)= ]] || continue
                _po_line=${BASH_REMATCH[2]}
                if [[ $_po_line != help_message && $_po_seen != *" $_po_line "* ]]; then
                    _po_seen+="$_po_line "
                    printf '%s\n' "$_po_line"
                fi
            done <"$_po_file"
            return
        fi
    done
    _po_error "parse_options.sh cannot read the script that sources it; source it from a file"
}

# Set the variables; leave in _po_used how many arguments were options.
_po_parse() {
    local _po_total=$# _po_option _po_name _po_value _po_default
    while [[ $# -gt 0 && $1 == -?* ]]; do
        _po_option=$1
        shift
        case $_po_option in
            --) break ;;
            --help | -h)
                printf '%s\n' "${help_message:-No help for this script.}"
                exit 0
                ;;
            --*=*)
                _po_value=${_po_option#*=}
                _po_option=${_po_option%%=*}
                ;;
            --*)
                [[ $# -gt 0 ]] || _po_error "$_po_option wants a value"
                _po_value=$1
                if [[ $1 == --* ]] && _po_is_known "${1%%=*}"; then
                    _po_error "$_po_option wants a value, not the option $1"
                fi
                shift
                ;;
        esac
        if ! _po_is_known "$_po_option"; then
            _po_error "unknown option $_po_option; there are:$(printf ' --%s' "${_po_known[@]}")"
        fi
        _po_name=${_po_option#--}
        _po_name=${_po_name//-/_}
        _po_default=${!_po_name-}
        if [[ $_po_default =~ ^(true|false)$ && ! $_po_value =~ ^(true|false)$ ]]; then
            _po_error "$_po_option is true or false, not '$_po_value'"
        fi
        case $_po_name in
            stage | stop_stage | nj | ngpu | seed)
                [[ $_po_value =~ ^-?[0-9]+$ ]] ||
                    _po_error "$_po_option is a whole number, not '$_po_value'"
                ;;
        esac
        printf -v "$_po_name" '%s' "$_po_value"
    done
    _po_used=$((_po_total - $#))
}

_po_is_known() {
    local _po_name=${1#--} _po_other
    [[ $1 == --* ]] || return 1
    for _po_other in "${_po_known[@]}"; do
        [[ ${_po_name//-/_} != "$_po_other" ]] || return 0
    done
    return 1
}

_po_known=$(_po_names "${BASH_SOURCE[1]-}" "${BASH_LINENO[0]}") || exit
mapfile -t _po_known <<<"$_po_known"
_po_parse "$@"
shift "$_po_used"
unset -v _po_known _po_used
unset -f _po_error _po_names _po_parse _po_is_known
