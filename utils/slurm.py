#!/usr/bin/env python3
"""Run jobs on a Slurm cluster: the grammar of Kaldi's queue.pl, and of run.py beside this file.

    slurm.py [--config conf/slurm.conf] [--mem 4G] [--gpu 1] [--max-jobs-run N] ...
             [JOB=1:4] log/x.JOB.log command ... JOB

The jobs become one array job. On its node, each is run by run.py, so that logs are the same
everywhere; `path.sh` of the current directory is sourced first, if there is one. The config is in
the format of Kaldi's slurm.conf and says what each option means to sbatch:

    command sbatch --export=ALL
    option mem=* --mem-per-cpu $0
    default gpu=0
    option gpu=0 -p cpu

Exit status: 0 if every job's was; 1 if not, with the end of the failing log on stderr.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from run import PROGRAM, Request, interrupt, parse, positive, report, usage_error

# A cluster without a config of its own: memory, threads, time and GPUs as most sites have them.
DEFAULT_CONFIG = """\
command sbatch --export=ALL
option time=* --time $0
option mem=* --mem $0
option num_threads=* --cpus-per-task $0
default gpu=0
option gpu=0
option gpu=* --gres=gpu:$0
"""
# How long a file written on a node may take to be seen here through a network file system.
PATIENCE = 60.0


def read_config(text: str, name: str) -> tuple[list[str], dict[str, list[str]], dict[str, str]]:
    """Parse Kaldi's slurm.conf.

    Returns:
        the submitting command; "name=value" -> arguments for it; the options' defaults.
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
    """What sbatch is told: every option asked for, or its default, through the config."""
    for key, value in {**defaults, **asked}.items():
        if key in ("config", "max_jobs_run"):
            continue
        words = options.get(f"{key}={value}", options.get(f"{key}=*"))
        if words is None:
            usage_error(f"--{key.replace('_', '-')} {value}: no such option in {name}")
        yield from (word.replace("$0", value) for word in words)


def job_script(request: Request, done: Path) -> str:
    """The script of one element of the array."""
    number = "${SLURM_ARRAY_TASK_ID}"
    # No --gpu: run.py leaves the GPUs as Slurm has assigned them.
    threads = request.options.get("num_threads", "1")
    start = shlex.join(
        ["python3", str(Path(__file__).resolve().parent / "run.py"), "--num-threads", threads]
    )
    command = shlex.join([request.log, *request.command])
    return f"""\
#!/usr/bin/env bash
# Submitted by {PROGRAM} at {time.ctime()}
cd {shlex.quote(str(Path.cwd()))} || exit 1
if [ -f path.sh ]; then . ./path.sh; fi
{start} {request.name or "JOB"}={number} {command}
code=$?
echo "$code" > {shlex.quote(str(done))}."{number}"
exit "$code"
"""


def submit(request: Request) -> list[Path]:
    """Submit the array, wait for its end, and return the logs of the jobs that failed."""
    config = request.options.get("config")
    try:
        text = Path(config).read_text(encoding="utf-8") if config else DEFAULT_CONFIG
    except OSError as error:
        usage_error(f"--config {config}: {error.strerror}")
    except UnicodeDecodeError:
        usage_error(f"--config {config}: not UTF-8")
    name = config or "the built-in config"
    command, options, defaults = read_config(text, name)
    told = list(submit_arguments(request.options, options, defaults, name))
    array = f"{request.first}-{request.last}"
    if limit := positive(request.options, "max_jobs_run", 0):
        array += f"%{limit}"

    log = Path(request.log)
    # Kaldi keeps what it submits in q/ beside the logs.
    folder = log.parent / "q"
    script, done = folder / f"{log.stem}.sh", folder.resolve() / f"done.{log.stem}"
    numbers = range(request.first, request.last + 1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in numbers:
            Path(f"{done}.{number}").unlink(missing_ok=True)
        script.write_text(job_script(request, done), encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"{PROGRAM}: {error.filename or script}: {error.strerror}") from None
    # Slurm's own messages about an element of the array; the job's output is in its log.
    output = ["--output", str(folder / f"{log.stem}.slurm-%a.out")]
    line = [*command, "--parsable", "--wait", *output, *told, f"--array={array}", str(script)]
    wait_for(line)

    logs = {number: Path(request.fill(request.log, number)) for number in numbers}
    deadline = time.monotonic() + PATIENCE
    return [
        logs[number] for number in numbers if not ended_well(Path(f"{done}.{number}"), deadline)
    ]


def wait_for(line: list[str]) -> None:
    """Run sbatch, which returns when the array has ended; cancel the array if interrupted."""
    try:
        process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
    except OSError as error:
        usage_error(f"cannot run {line[0]}: {error.strerror}")
    job = ""
    try:
        job = process.stdout.readline().strip().partition(";")[0]
        process.wait()
    except BaseException:
        if job:
            subprocess.run(["scancel", job], check=False)
        process.kill()
        raise
    if not job:
        print(f"{PROGRAM}: sbatch failed: {shlex.join(line)}", file=sys.stderr)
        sys.exit(1)


def ended_well(done: Path, deadline: float) -> bool:
    """Whether the job's done-file says 0; no file by the deadline: the job was lost."""
    while True:
        if done.exists() and (code := done.read_text(encoding="ascii").strip()):
            return code == "0"
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
        # A listing makes a network file system look again.
        list(done.parent.iterdir())
    print(f"{PROGRAM}: no trace of {done.name}; was the job killed by Slurm?", file=sys.stderr)
    return False


def main() -> None:
    request = parse(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    if failed := submit(request):
        report(failed, request.last - request.first + 1)
        sys.exit(1)


if __name__ == "__main__":
    main()
