# shellcheck shell=bash
# Paths of the corpora.
#
# TED-LIUM release 3, unpacked: the folder with legacy/, speaker-adaptation/ and data/, e.g.
# /data/TEDLIUM_release-3. Empty: the recipe makes a mini corpus of synthetic speech in the same
# layout, and marks all figures as such.
export TEDLIUM=${TEDLIUM:-}
