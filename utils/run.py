#!/usr/bin/env python3
"""Run jobs on this machine, with the command line and the logs of Kaldi's run.pl.

    run.py [--max-jobs-run N] [--num-threads N] [--gpu N] [JOB=1:4] log/x.JOB.log command ... JOB
    run.py --ntasks N [--num-threads N] [--gpu N] log/x.log command ...

JOB (or any other name) becomes 1, 2, 3 and 4, in the name of the log and in the command. As with
run.pl, the command is a line for bash: an argument with spaces is quoted, and one without is left
to the shell, so that `\\|` is a pipe. As many jobs run at a time as there are cores for their
threads; with --gpu, as there are GPUs, and each job sees only its own. Options that only matter to
a batch system (--mem 4G, --config f, ...) are accepted and ignored.

With --ntasks, one job is N processes of the same command, which find RANK (0 to N - 1), WORLD_SIZE
and LOCAL_RANK in their environment, as with torchrun. They share the log and the GPUs;
--num-threads is per process. If one fails, the others are killed and the job fails. With --launcher
"srun ...", which slurm.py uses, that program starts them, with the line for bash as its last
argument.

Exit status: 0 if all jobs succeed; otherwise 1, with the end of the failing log on stderr. If one
of our programs ended with a line of error message, only this line and the name of the log are
printed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

LOG_LINES = 10
LOGS_SHOWN = 3
PROGRESS_SECONDS = 15
PROGRAM = Path(sys.argv[0]).name
PR_SET_PDEATHSIG = 1
# Error messages of our programs, "fedtools: ..." or "prepare.py: ...", and what line.sh adds.
MESSAGE = re.compile(r"(fedtools|\w+\.py): \S")
FAILED_LINE = re.compile(r"\S*line\.sh: line \d+ of .* failed: ")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Request:
    """A parsed command line: options by name, the job range, the log, and the command."""

    options: dict[str, str] = field(default_factory=dict)
    name: str | None = None
    first: int = 1
    last: int = 1
    log: str = ""
    command: list[str] = field(default_factory=list)

    def fill(self, text: str, job: int | str) -> str:
        """Return `text` with the job's name replaced by its number."""
        return text if self.name is None else text.replace(self.name, str(job))


def usage_error(message: str) -> NoReturn:
    """Print a message about wrong usage in one line, and exit with status 2."""
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    sys.exit(2)


def parse(arguments: list[str]) -> Request:
    """Parse Kaldi's command line: options and one JOB=a:b in any order, the log, the command."""
    request = Request()
    rest = deque(arguments)
    while rest and (rest[0].startswith("-") or is_range(rest[0])):
        word = rest.popleft()
        if is_range(word):
            take_range(request, word)
        elif word == "-V":  # qsub's "pass the environment on": it has no value
            continue
        elif not rest:
            usage_error(f"option {word} needs a value")
        elif word == "-pe":  # qsub's parallel environment: a name and a number
            rest.popleft()
            request.options["num_threads"] = rest.popleft() if rest else "1"
        elif word in ("-tc", "--max-jobs-run"):
            request.options["max_jobs_run"] = rest.popleft()
        else:
            request.options[word.lstrip("-").replace("-", "_")] = rest.popleft()
    if len(rest) < 2:
        usage_error(f"usage: {PROGRAM} [options] [JOB=1:n] log-file command [arguments]")
    request.log, *request.command = rest
    if request.name and request.last > request.first and request.name not in request.log:
        usage_error(f"{request.name}={request.first}:{request.last}, but one log: {request.log}")
    return request


def is_range(word: str) -> bool:
    """Return whether `word` looks like JOB=1:4 or JOB=3."""
    return re.fullmatch(r"[A-Za-z_]\w*=\d+(:\d+)?", word) is not None


def take_range(request: Request, word: str) -> None:
    """Set the job range of `request` from JOB=1:4; exit if it has one, or if this is empty."""
    name, _, numbers = word.partition("=")
    first, _, last = numbers.partition(":")
    if request.name is not None:
        usage_error(f"two job ranges, {request.name}=... and {word}")
    request.name, request.first, request.last = name, int(first), int(last or first)
    if not 1 <= request.first <= request.last:
        usage_error(f"{word}: job numbers must begin at 1 or above and not decrease")


def positive(options: dict[str, str], name: str, default: int) -> int:
    """Return the option as a whole number of at least 0."""
    value = options.get(name, str(default))
    if not value.isascii() or not value.isdigit():
        usage_error(f"--{name.replace('_', '-')} must be a whole number, not {value!r}")
    return int(value)


def ranks(request: Request) -> int:
    """Return the number of processes of the job, which must be the only one if above 1."""
    number = positive(request.options, "ntasks", 1)
    if number < 1:
        usage_error("--ntasks must be at least 1")
    if number > 1 and request.last > request.first:
        jobs = f"{request.name}={request.first}:{request.last}"
        usage_error(f"--ntasks {number} is for one job, not for {jobs}")
    return number


def shell_line(command: list[str]) -> str:
    """Return the command as run.pl passes it to bash; see the module's docstring."""
    return " ".join(shell_word(word) for word in command)


def shell_word(word: str) -> str:
    if re.fullmatch(r"\S+", word):
        try:
            shlex.split(word)
        except ValueError:  # an unmatched quote, on which the shell would fail
            return shlex.quote(word)
        return word
    return shlex.quote(word) if '"' in word else f'"{word}"'


def gpus() -> list[str]:
    """Return the GPUs that jobs may use: CUDA_VISIBLE_DEVICES, or all that nvidia-smi lists."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return []
    return [
        str(i) for i in range(sum(line.startswith("GPU ") for line in listed.stdout.split("\n")))
    ]


@dataclass
class Job:
    """A running job: its processes by id, and the exit code of the first that failed."""

    log: Path
    started: float
    devices: list[str]
    processes: dict[int, subprocess.Popen] = field(default_factory=dict)
    code: int = 0


class Runner:
    """A runner of a request's jobs, a limited number at a time."""

    def __init__(self, request: Request):
        self.request = request
        self.ranks = ranks(request)
        self.threads = max(1, positive(request.options, "num_threads", 1))
        self.waiting = deque(range(request.first, request.last + 1))
        self.running: dict[int, Job] = {}  # by process id; a job of several ranks has several
        self.failed: list[Path] = []
        self.shown = time.time()
        self.last_lines: dict[Path, str] = {}
        self.wanted_gpus = positive(request.options, "gpu", 0)
        self.free_gpus = deque(gpus() if self.wanted_gpus else [])
        if self.free_gpus and len(self.free_gpus) < self.wanted_gpus:
            usage_error(f"--gpu {self.wanted_gpus}, but this machine has {len(self.free_gpus)}")
        limit = max(1, len(os.sched_getaffinity(0)) // self.threads)
        if self.free_gpus:
            limit = len(self.free_gpus) // self.wanted_gpus
        self.limit = max(1, positive(request.options, "max_jobs_run", limit))

    def run(self) -> list[Path]:
        """Run all jobs; return the logs of those that failed."""
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.limit and self.has_gpus():
                self.start(self.waiting.popleft())
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in self.running:
                self.ended(pid, os.waitstatus_to_exitcode(status))
            elif not pid:
                time.sleep(0.05)
                self.show_progress()
        return self.failed

    def show_progress(self) -> None:
        """Print the last line of each log on stderr, if new, every `PROGRESS_SECONDS`.

        If there are several jobs, the log's name precedes the line.
        """
        if time.time() - self.shown < PROGRESS_SECONDS:
            return
        self.shown = time.time()
        for log in dict.fromkeys(job.log for job in self.running.values()):
            try:
                with open(log, encoding="utf-8", errors="replace") as file:
                    last = "".join(deque(file, maxlen=1)).rstrip("\n").split("\r")[-1]
            except OSError:
                continue  # reported when the job ends
            if not last.startswith("#") and last != self.last_lines.get(log):
                self.last_lines[log] = last
                name = f"{log.name}: " if self.request.last > self.request.first else ""
                print(f"{name}{last}", file=sys.stderr, flush=True)

    def has_gpus(self) -> bool:
        return not self.free_gpus or len(self.free_gpus) >= self.wanted_gpus

    def start(self, number: int) -> None:
        log = Path(self.request.fill(self.request.log, number))
        line = self.request.fill(shell_line(self.request.command), number)
        environment = dict(os.environ)
        devices = [self.free_gpus.popleft() for _ in range(self.wanted_gpus) if self.free_gpus]
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with open(log, "w", encoding="utf-8") as file:
                file.write(f"# {line}\n# Started at {time.ctime()}\n#\n")
        except OSError as error:
            raise SystemExit(f"{PROGRAM}: {log}: {error.strerror}") from None
        job = Job(log, time.time(), devices)
        if launcher := self.request.options.get("launcher"):
            self.start_process(job, f"{launcher} {shlex.quote(line)}", environment)
            return
        for rank in range(self.ranks):
            if "ntasks" in self.request.options:
                environment["RANK"] = environment["LOCAL_RANK"] = str(rank)
                environment["WORLD_SIZE"] = str(self.ranks)
            self.start_process(job, line, environment)

    def start_process(self, job: Job, line: str, environment: dict[str, str]) -> None:
        # If this program is killed, the kernel sends SIGTERM to bash, which kills its whole group.
        guarded = f"trap 'kill -KILL 0' TERM; ( {line}\n) & wait $!"
        with open(job.log, "ab") as output:
            process = subprocess.Popen(
                ["bash", "-c", guarded],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.running[process.pid] = job
        job.processes[process.pid] = process

    def ended(self, pid: int, code: int) -> None:
        """Record that a process has ended; the last one of a job ends the job."""
        job = self.running.pop(pid)
        # Lets Popen know that the process has been waited for, so that it does not wait again.
        job.processes.pop(pid).returncode = code
        if code and not job.code:
            job.code = 128 - code if code < 0 else code
            # The other ranks would wait for this one for ever.
            kill_groups(job.processes)
        if not job.processes:
            self.finish(job)

    def finish(self, job: Job) -> None:
        self.free_gpus.extend(job.devices)
        seconds = round(time.time() - job.started)
        try:
            with open(job.log, "r+", encoding="utf-8", errors="surrogateescape") as file:
                # Output may lack a final newline, such as a progress bar's.
                if not file.read().endswith("\n"):
                    file.write("\n")
                file.write(f"# Accounting: time={seconds} threads={self.threads}\n")
                ended = (
                    f"# Ended (code {job.code}) at {time.ctime()}, elapsed time {seconds} seconds"
                )
                file.write(f"{ended}\n")
        except OSError as error:
            # An incomplete log is no reason to end the other jobs.
            print(f"{PROGRAM}: {job.log}: {error.strerror}", file=sys.stderr)
        if job.code:
            self.failed.append(job.log)

    def kill(self) -> None:
        """Kill every running job and all processes that it started."""
        kill_groups(self.running)
        while self.running:
            pid, status = os.wait()
            if pid in self.running:
                self.ended(pid, os.waitstatus_to_exitcode(status))


def kill_groups(leaders: Iterable[int]) -> None:
    """Kill the process groups of the given leaders, ignoring those that have ended."""
    for pid in leaders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def die_with_parent() -> None:
    """Request SIGTERM for when the parent of this process dies (on Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def report(failed: list[Path], total: int) -> None:
    """Report failed jobs on stderr, with their program's error message or the log's end."""
    messages = {log: message(log) for log in sorted(failed)[:LOGS_SHOWN]}
    if len(failed) > 1 or not all(messages.values()):
        print(f"{PROGRAM}: {len(failed)} of {total} jobs failed", file=sys.stderr)
    for log, text in messages.items():
        if text:
            print(f"{text} (log: {log})", file=sys.stderr)
            continue
        print(f"{PROGRAM}: the end of {log}:", file=sys.stderr)
        if not log.exists():
            print("    (no such log: the job never started)", file=sys.stderr)
        for line in end_of(log):
            print("   ", line, file=sys.stderr)


def end_of(log: Path) -> list[str]:
    """Return the last lines of a log, with only the last state of a progress bar."""
    if not log.exists():
        return []
    with open(log, encoding="utf-8", errors="replace") as file:
        return [line.rstrip("\n").split("\r")[-1] for line in deque(file, maxlen=LOG_LINES)]


def message(log: Path) -> str:
    """Return the error message that the job's program ended with, or "" if there is none."""
    lines = [line for line in end_of(log) if not line.startswith("#")]
    while lines and FAILED_LINE.match(lines[-1]):
        lines.pop()
    return lines[-1] if lines and MESSAGE.match(lines[-1]) else ""


def interrupt(number: int, _frame: object) -> None:
    """Turn a signal into an exception that names it."""
    # Slurm sends SIGTERM, and the kernel sends another when the job script dies of it. The second
    # must not interrupt the handling of the first.
    ignore_signals()
    raise SystemExit(128 + number)


def catch_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, interrupt)


def ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    request = parse(sys.argv[1:])
    catch_signals()
    # If only run.sh is killed, its jobs must not go on writing into the files of its next run.
    die_with_parent()
    runner = Runner(request)
    try:
        failed = runner.run()
    except BaseException:
        ignore_signals()
        runner.kill()
        raise
    if failed:
        report(failed, request.last - request.first + 1)
        sys.exit(1)


if __name__ == "__main__":
    main()
