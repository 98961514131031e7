# shellcheck shell=bash
# Paths of the corpora.
#
# One release of Common Voice in one language, as Mozilla publishes it, unpacked: the folder with
# validated.tsv and clips/, e.g. /data/cv-corpus-22.0-2025-06-20/en. Empty: the recipe makes a mini
# corpus of synthetic speech in the same layout, and marks all figures as such.
export COMMONVOICE=${COMMONVOICE:-}
