# shellcheck shell=bash
# Sourced by run.sh after utils/recipe.sh: the options of local/prepare.py.
# shellcheck disable=SC2034,SC2154  # run.sh's options; options

# Set the defaults that depend on other options, and the options of prepare.py. Options of later
# versions are passed only if the user gives them, so that recorded options of older experiments match.
name_data() {
    local name
    check_word clients 'accent|speaker' unclear 'server|drop' common_sentences 'drop|keep'
    [ "${clients}" = accent ] || [ -z "${COMMONVOICE}" ] || : "${accents:=any}"
    : "${accents:=au=australia,en=england,in=indian}"
    [ "${accents}" != any ] || take_options "${config}" corpus.server_fraction
    options=(--accents "${accents}" --seed "${split_seed}" --hours "${hours}")
    options+=(--server-hours "${server_hours}")
    options+=(${server_fraction:+--server-fraction "${server_fraction}"})
    [ "${unclear}" = server ] || options+=(--unclear "${unclear}")
    [ "${common_sentences}" = drop ] || options+=(--common-sentences "${common_sentences}")
    [ -z "${speaker_share}" ] || options+=(--speaker-share "${speaker_share}")
    for name in {min,max}_{seconds,chars_per_second}; do
        [ -z "${!name}" ] || options+=("--${name//_/-}" "${!name}")
    done
}
