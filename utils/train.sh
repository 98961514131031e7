#!/usr/bin/env bash
# Train one experiment that begin.py has begun: run its rounds, and average the best ones. A killed
# experiment continues.
#
#   train.sh [--option value]... WAVE EXP AWAITED [OPTION]...
#
# The arguments after the options are a line of a list that waves.py made.
set -euo pipefail

steps="rounds average"  # one of these, or both
nj=1                    # clients that train at the same time; no result depends on it
ngpu=0                  # 1: train on a GPU
to=                     # the last round; default: the config's
evaluate=               # the data on which models are measured; default: none
average=                # models to average over the best rounds: shared, or own (each client's, too);
                        # default: none

# shellcheck disable=SC2034  # printed by parse_options.sh
help_message="Usage: $0 [--option value]... WAVE EXP AWAITED [OPTION]..."
. "$(dirname "${BASH_SOURCE[0]}")/parse_options.sh"

exp=$2
for step in ${steps}; do
    case ${step} in
        rounds)
            fedtools rounds "${exp}" --nj "${nj}" --ngpu "${ngpu}" ${to:+--to "${to}"} \
                ${evaluate:+--evaluate "${evaluate}"}
            ;;
        average)
            options=()
            [ "${average}" != shared ] || options=(--shared)
            [ -z "${average}" ] || fedtools average "${exp}" --ngpu "${ngpu}" "${options[@]}"
            ;;
    esac
done
