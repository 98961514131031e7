# shellcheck shell=bash
# How jobs are run: a program and its options, in the syntax of Kaldi's run.pl and queue.pl.
#
# On this machine, at most --nj jobs at a time, and at most as many jobs with --gpu 1 as GPUs:
export train_cmd="utils/run.py"
export cuda_cmd="utils/run.py --gpu 1"
export decode_cmd="utils/run.py"

# On a Slurm cluster; partitions and the like are set in conf/slurm.conf:
# export train_cmd="utils/slurm.py --config ../../../conf/slurm.conf --mem 4G"
# export cuda_cmd="utils/slurm.py --config ../../../conf/slurm.conf --mem 16G --gpu 1"
# export decode_cmd="utils/slurm.py --config ../../../conf/slurm.conf --mem 4G"
# A federation's rounds as four processes, on one node or several (ntasks in conf/slurm.conf):
# export rounds_cmd="utils/slurm.py --config ../../../conf/slurm.conf --mem 16G --ntasks 4"

# On a grid engine, with Kaldi's own script:
# export train_cmd="queue.pl --mem 4G"
# export cuda_cmd="queue.pl --mem 16G --gpu 1"
# export decode_cmd="queue.pl --mem 4G"
