#!/usr/bin/env python3
"""Run jobs on a Slurm cluster, with the command line of Kaldi's queue.pl and of our run.py.

    slurm.py [--config conf/slurm.conf] [--mem 4G] [--gpu 1] [--max-jobs-run N] ...
             [JOB=1:4] log/x.JOB.log command ... JOB
    slurm.py --ntasks N ... log/x.log command ...

The jobs become one array job. On its node, each is run by run.py, so that logs are the same
everywhere; `path.sh` of the current directory is sourced first, if it exists. The config is in the
format of Kaldi's slurm.conf and translates each option to arguments of sbatch:

    command sbatch --export=ALL
    option mem=* --mem-per-cpu $0
    default gpu=0
    option gpu=0 -p cpu

With --ntasks, one job is N processes of the command, on as many nodes as the config's arguments
give. srun starts them, all write to one log, and they find RANK, WORLD_SIZE and LOCAL_RANK in their
environment. If one fails, srun ends the others and the job fails.

An interrupted slurm.py cancels its array. If it is killed with kill -9, or its machine goes down,
its array continues. So the array's id is kept in q/ next to the logs until the array has ended, and
the next run with the same log first cancels that array and waits until Slurm has ended its last
job. It does not let the array finish, because the new run may have other options or another number
of jobs, whose results the old jobs would overwrite. Little is lost, as our commands continue from
the files they find.

Exit status: 0 if all jobs succeed; otherwise 1, with the end of the failing log on stderr.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from run import (
    PROGRAM,
    Request,
    catch_signals,
    die_with_parent,
    ignore_signals,
    parse,
    positive,
    ranks,
    report,
    usage_error,
)

# The config if none is given: memory, threads, time and GPUs as on most sites.
DEFAULT_CONFIG = """\
command sbatch --export=ALL
option time=* --time $0
option mem=* --mem $0
option num_threads=* --cpus-per-task $0
option ntasks=* --ntasks $0
default gpu=0
option gpu=0
option gpu=* --gres=gpu:$0
"""
# Seconds that a file written on a node may take to appear here on a network file system.
PATIENCE = 60.0
# Seconds that Slurm may take to end a cancelled job: by default it kills a job that ignores SIGTERM
# after 30 seconds, and gives up after 60 more if it cannot be killed.
CANCEL_PATIENCE = 120.0
# Seconds that sbatch, once started, may take to write the id of the array.
SUBMIT_PATIENCE = 10.0


def read_config(text: str, name: str) -> tuple[list[str], dict[str, list[str]], dict[str, str]]:
    """Parse Kaldi's slurm.conf.

    Returns:
        The submission command; "name=value" -> its arguments; the options' defaults.
    """
    command: list[str] = []
    options: dict[str, list[str]] = {}
    defaults: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        try:
            kind, *words = shlex.split(line, comments=True) or [""]
        except ValueError as error:
            usage_error(f"{name}:{number}: {str(error).lower()}: {line.strip()!r}")
        if kind == "command" and words:
            command = words
        elif kind == "option" and words and "=" in words[0]:
            options[words[0]] = words[1:]
        elif kind == "default" and len(words) == 1 and "=" in words[0]:
            key, _, value = words[0].partition("=")
            defaults[key] = value
        elif kind:
            usage_error(f"{name}:{number}: neither command, option nor default: {line.strip()!r}")
    if not command:
        usage_error(f"{name}: no line 'command sbatch ...'")
    return command, options, defaults


def submit_arguments(
    asked: dict[str, str], options: dict[str, list[str]], defaults: dict[str, str], name: str
) -> Iterator[str]:
    """Yield sbatch's arguments for every given option or default, as the config translates it."""
    for key, value in {**defaults, **asked}.items():
        if key in ("config", "max_jobs_run"):
            continue
        words = options.get(f"{key}={value}", options.get(f"{key}=*"))
        if words is None:
            usage_error(f"--{key.replace('_', '-')} {value}: no such option in {name}")
        yield from (word.replace("$0", value) for word in words)


def job_script(request: Request, done: Path) -> str:
    """Return the script of one element of the array."""
    number = "${SLURM_ARRAY_TASK_ID}"
    # Without --gpu, run.py leaves the GPUs as Slurm has assigned them.
    threads = request.options.get("num_threads", "1")
    start = ["python3", str(Path(__file__).resolve().parent / "run.py"), "--num-threads", threads]
    if "ntasks" in request.options:
        start += ["--launcher", launcher(ranks(request))]
    command = shlex.join([request.log, *request.command])
    return f"""\
#!/usr/bin/env bash
# Submitted by {PROGRAM} at {time.ctime()}
# When the job is cancelled, run.py ends what it runs; this waits for it, so that Slurm does too.
trap : TERM
cd {shlex.quote(str(Path.cwd()))} || exit 1
if [ -f path.sh ]; then . ./path.sh; fi
# Slurm 22.05 and later do not pass this on to srun by themselves.
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
{shlex.join(start)} {request.name or "JOB"}={number} {command}
code=$?
echo "$code" > {shlex.quote(str(done))}."{number}"
exit "$code"
"""


def launcher(number: int) -> str:
    """Return the command that starts `number` processes in a job, to be followed by a bash line."""
    names = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID"
    start = f"srun --ntasks={number} --kill-on-bad-exit=1 --export=ALL bash -c"
    return f"{start} '{names} exec bash -c \"$0\"'"


def submit(request: Request) -> list[Path]:
    """Submit the array, wait for its end, and return the logs of the jobs that failed."""
    ranks(request)
    config = request.options.get("config")
    try:
        text = Path(config).read_text(encoding="utf-8-sig") if config else DEFAULT_CONFIG
    except OSError as error:
        usage_error(f"--config {config}: {error.strerror}")
    except UnicodeDecodeError:
        usage_error(f"--config {config}: not UTF-8")
    name = config or "the built-in config"
    command, options, defaults = read_config(text, name)
    arguments = list(submit_arguments(request.options, options, defaults, name))
    array = f"{request.first}-{request.last}"
    if limit := positive(request.options, "max_jobs_run", 0):
        array += f"%{limit}"

    log = Path(request.log)
    # Kaldi keeps the scripts that it submits in q/ next to the logs.
    folder = log.parent / "q"
    script, done = folder / f"{log.stem}.sh", folder / f"done.{log.stem}"
    memory = folder / f"{log.stem}.id"
    codes = {n: Path(f"{done}.{n}") for n in range(request.first, request.last + 1)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cancel_earlier(memory)
        for path in set(codes.values()) & set(folder.iterdir()):
            path.unlink(missing_ok=True)
        script.write_text(job_script(request, done.absolute()), encoding="utf-8")
        memory.write_text("")
    except OSError as error:
        raise SystemExit(f"{PROGRAM}: {error.filename or script}: {error.strerror}") from None
    # Slurm's own messages about an element of the array; the job's output is in its log.
    output = ["--output", str(folder / f"{log.stem}.slurm-%a.out")]
    line = [*command, "--parsable", "--wait", *output, *arguments, f"--array={array}", str(script)]
    wait_for(line, memory, lambda: set(codes.values()) <= set(folder.iterdir()), request.last)

    deadline = time.monotonic() + PATIENCE
    ended = {number: exit_code(path, deadline) for number, path in codes.items()}
    if all(ended.values()):
        memory.unlink(missing_ok=True)
    return [Path(request.fill(request.log, n)) for n, code in ended.items() if code != "0"]


def wait_for(line: list[str], memory: Path, done: Callable[[], bool], last: int) -> None:
    """Submit the array, whose last job has number `last`, and wait; cancel it if interrupted.

    sbatch --wait notices the end, also of lost jobs, but after a while it polls only every 32
    seconds; `done` returns whether all jobs have left their exit codes, without delay.
    """
    try:
        # sbatch itself writes the id, in a session of its own, so that no id is lost even if this
        # program is killed while sbatch submits.
        with open(memory, "wb") as output:
            process = subprocess.Popen(
                line, stdout=output, stdin=subprocess.DEVNULL, start_new_session=True
            )
    except OSError as error:
        memory.unlink(missing_ok=True)
        usage_error(f"cannot run {line[0]}: {error.strerror}")
    started = time.monotonic()
    try:
        while process.poll() is None and not done():
            time.sleep(min(2.0, 0.1 + (time.monotonic() - started) / 20))
    except BaseException:
        ignore_signals()
        deadline = time.monotonic() + SUBMIT_PATIENCE
        while not remembered(memory) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if job := remembered(memory):
            subprocess.run(["scancel", *job], check=False)
        else:
            memory.unlink(missing_ok=True)
        process.kill()
        raise
    process.kill()
    process.wait()
    if not remembered(memory):
        memory.unlink(missing_ok=True)
        print(f"{PROGRAM}: sbatch failed: {shlex.join(line)}{too_large(last)}", file=sys.stderr)
        sys.exit(1)


def too_large(last: int) -> str:
    """Return what to say if the cluster has no arrays up to job `last`; "" if it has."""
    try:
        told = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, check=False
        ).stdout
    except OSError:
        return ""
    limit = re.search(r"^MaxArraySize\s*=\s*([0-9]+)", told, re.MULTILINE)
    if not limit or last < int(limit[1]):
        return ""
    most = f"the cluster's arrays end at job {int(limit[1]) - 1} (MaxArraySize), and this one at"
    return f"; {most} {last}: lower --nj, or run fewer experiments at a time"


def remembered(memory: Path) -> list[str]:
    """Read the array that `memory` names, as scancel's arguments: its cluster, if any, and id."""
    try:
        text = memory.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    # A line without its newline is still being written.
    job, _, cluster = text.partition("\n")[0].partition(";") if "\n" in text else ("", "", "")
    return [*(["--clusters", cluster] if cluster else []), job] if job else []


def cancel_earlier(memory: Path) -> None:
    """Cancel the array that a killed run of the same log has left, and wait until it has ended."""
    deadline = time.monotonic() + SUBMIT_PATIENCE
    while not (job := remembered(memory)) and memory.exists() and time.monotonic() < deadline:
        time.sleep(0.1)  # the sbatch of a run that was just killed may be about to write the id
    if not job:
        return
    *cluster, number = job
    deadline, reported = time.monotonic() + CANCEL_PATIENCE, False
    while problem := still_there([*cluster, "--jobs", number]):
        if time.monotonic() > deadline:
            print(
                f"{PROGRAM}: {memory}: array {number} of an earlier run does not end: {problem}; "
                f"cancel it with scancel {number}, then remove {memory}",
                file=sys.stderr,
            )
            sys.exit(1)
        if not reported:
            print(f"{PROGRAM}: cancelling array {number} of an earlier run", file=sys.stderr)
            reported = True
        subprocess.run(["scancel", *job], check=False, capture_output=True)
        time.sleep(1)


def still_there(arguments: list[str]) -> str:
    """Return squeue's lines on an array that may still run, or "" if Slurm has ended all of it."""
    line = ["squeue", "--noheader", "--format", "%i is %T", *arguments]
    # Variables such as SQUEUE_PARTITION would hide jobs.
    variables = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}
    try:
        listed = subprocess.run(line, capture_output=True, text=True, check=False, env=variables)
    except OSError as error:
        usage_error(f"cannot run squeue: {error.strerror}")
    if "Invalid job id" in listed.stderr:
        return ""  # ended long ago, and no longer known to Slurm
    if listed.returncode:
        return (listed.stderr.strip() or f"squeue failed ({listed.returncode})").split("\n")[-1]
    jobs = [job for job in listed.stdout.split("\n") if " is " in job]
    return ", ".join(jobs[:3])


def exit_code(done: Path, deadline: float) -> str:
    """Return the exit code in the job's done-file, or "" if it is missing after the deadline."""
    while True:
        if done.exists() and (code := done.read_text(encoding="ascii").strip()):
            return code
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
        # Listing the folder makes a network file system refresh it.
        list(done.parent.iterdir())
    print(f"{PROGRAM}: no trace of {done.name}; was the job killed by Slurm?", file=sys.stderr)
    return ""


def main() -> None:
    request = parse(sys.argv[1:])
    catch_signals()
    # If only run.sh is killed, its jobs must not go on writing into the files of its next run.
    die_with_parent()
    if failed := submit(request):
        report(failed, request.last - request.first + 1)
        sys.exit(1)


if __name__ == "__main__":
    main()
