# shellcheck shell=bash
# Where the corpora lie.
#
# AMI: the folder with the meetings' audio, <MEETING>/audio/<MEETING>.Headset-<n>.wav, and with the
# manual annotations 1.6.2 (words/, segments/, corpusResources/). Empty: the recipe makes a mini
# corpus of synthetic speech in the same layout and says so wherever its figures appear.
export AMI=${AMI:-}
# Or transcripts alone: a folder of <MEETING>.tsv, a turn on each line, the speaker's role, a tab, the
# words. They are spoken by a synthesiser: real words, and speech that is not.
export AMI_TRANSCRIPTS=${AMI_TRANSCRIPTS:-}
