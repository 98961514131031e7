# shellcheck shell=bash
# Paths of the corpora.
#
# AMI: the folder with the meetings' audio, <MEETING>/audio/<MEETING>.Headset-<n>.wav, and with the
# manual annotations 1.6.2 (words/, segments/, corpusResources/); with --speech synthetic the
# annotations are enough. Empty: the recipe makes a mini corpus of synthetic speech in the same layout,
# and marks all figures as such.
export AMI=${AMI:-}
