# shellcheck shell=bash
# Where the corpora lie.
#
# AMI: the folder with the meetings' audio, <MEETING>/audio/<MEETING>.Headset-<n>.wav, and with the
# manual annotations 1.6.2 (words/, segments/, corpusResources/). Empty: the recipe makes a mini
# corpus of synthetic speech in the same layout and says so wherever its figures appear. With --speech
# synthetic the annotations are enough.
export AMI=${AMI:-}
