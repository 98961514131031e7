# shellcheck shell=bash
# Sourced by run.sh, and by Kaldi's queue.pl and slurm.pl in every job.

ROOT=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd) || return 1
export ROOT
# Kaldi's tables are sorted by bytes, so every tool must use the C locale.
export LC_ALL=C
# The first time, this makes .venv at the root, unless fedtools is installed in the active environment.
. "$ROOT/utils/environment.sh" || return 1
