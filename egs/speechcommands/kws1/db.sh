# shellcheck shell=bash
# Paths of the corpora.
#
# Speech Commands v1 or v2 as Google publishes it, unpacked: the folder with one folder for each
# word, validation_list.txt, testing_list.txt and _background_noise_. Empty: the recipe unpacks its
# own corpus, real speech of 560 people in the same layout; or, with --config conf/mini.yaml, makes a
# mini corpus of synthetic speech, and marks all figures as such.
export SPEECHCOMMANDS=${SPEECHCOMMANDS:-}
# The separate test archive of the task of 12 classes (speech_commands_test_set_v0.02, unpacked),
# with _silence_ and _unknown_. Empty: the test list, with silence and unknown made as for training.
export SPEECHCOMMANDS_TEST=${SPEECHCOMMANDS_TEST:-}
