#!/usr/bin/env python3
"""Cost of a round of keyword spotting beyond training: seconds and memory.

    python tests/bench/bench_round.py [--clients 200] [--steps 4] [--many 2434] [--rounds 500]
    python tests/bench/bench_round.py --only large

First the seconds of a round in two processes, of which training is what `Federation.work`
takes in the slower one; all else (sampling, files, aggregation, waiting) is the same for any
number of steps. Then the cost of a round that does next to nothing, in processes of our own and
in ranks, which meet in the folder alone; a round of 1,000 clients of one step with 65 k parameters,
and what it leaves on disk. Then the command from its start, and its memory: anonymous pages of the
parent and its workers, since mapped files (the data, libraries) can be dropped by the system at
any time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))


from fedtools.core.tables import format_table  # noqa: E402
from fedtools.data.clips import Clip, write_clips  # noqa: E402
from fedtools.federation.federation import Federation, Sent  # noqa: E402
from fedtools.federation.init import init, read_config  # noqa: E402
from fedtools.federation.rounds import trainer  # noqa: E402
from fedtools.federation.steps import aggregate, sample  # noqa: E402
from fedtools.methods.base import Phase  # noqa: E402

MINI = ROOT / "conf/speechcommands/mini.yaml"
TINY = {"network": "dscnn", "network_conf": {"channels": 8, "blocks": 1}}
PROCESSES = 2


def timed_work(self: Federation, clients: list[str], number: int, phase: Phase) -> Sent:
    """Train as usual, and write the seconds next to the job's logs."""
    begun = time.perf_counter()
    found = plain_work(self, clients, number, phase)
    unit = f"{clients[0]}\t{time.perf_counter() - begun}\n"
    path = self.experiment.round(number).path / "log" / f"{PROCESS}.training"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(unit)
    return found


# At import, so that the workers are patched too.
PROCESS = time.time_ns()
plain_work = Federation.work
Federation.work = timed_work


def make_clips(folder: Path, clients: int, clips: int) -> Path:
    """Make noise clips of 35 words."""
    random = np.random.default_rng(0)
    noise = random.normal(0, 1000, 100_000).astype("<i2")
    words = [f"w{word:02d}" for word in range(35)]

    def made() -> Iterator[Clip]:
        for client in range(clients):
            for clip in range(clips):
                begin = int(random.integers(len(noise) - 16000))
                name = f"c{client:04d}"
                yield Clip(f"{name}-{clip:04d}", name, words[clip % 35], noise[begin:][:16000])

    write_clips(folder, made(), words, [noise])
    return folder


def begin(path: Path, clips: Path, network: str, settings: Mapping[str, object]) -> Path:
    """Make an experiment with FedAvg; keys of settings are like `training.x`."""
    changes = [f"{key}={value}" for key, value in settings.items()]
    config = read_config(MINI, [f"networks.{network}"] if network else [], changes)
    if not network:
        config["model"] = TINY | {
            key: value for key, value in config.get("model", {}).items() if value
        }
    init(
        path, method="fedavg", config=config, where=MINI, data={"train": str(clips)},
    )  # fmt: skip
    return path


def parts_of_rounds(path: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round after the first, by part."""
    federation = Federation(path)
    parts: dict[str, list[float]] = {}
    with trainer(federation, PROCESSES, "cpu") as train:
        for number in range(1, rounds + 2):
            begun = time.perf_counter()
            sample(federation.experiment, federation.method, number, PROCESSES)
            sampled = time.perf_counter()
            train(number, PROCESSES)
            trained = time.perf_counter()
            aggregate(federation, number)
            ended = time.perf_counter()
            logs = (federation.experiment.round(number).path / "log").glob("*.training")
            jobs = [
                sum(float(line.split("\t")[1]) for line in log.read_text().splitlines())
                for log in logs
            ]
            spent = {
                "round": ended - begun,
                "sampling": sampled - begun,
                "training": max(jobs),
                "clients' files and waiting": trained - sampled - max(jobs),
                "aggregation": ended - trained,
            }
            for what, seconds in spent.items():
                if number > 1:
                    parts.setdefault(what, []).append(seconds)
    return parts


def print_costs(root: Path, options: argparse.Namespace) -> None:
    """Print the table of a round's seconds."""
    clips = make_clips(root / "some", options.clients, 40)
    rows = []
    for kept in (False, True):
        settings = {
            "clients_per_round": options.clients,
            "method_conf.local_steps": options.steps,
            "training.batch_size": 32,
            "keep_updates": str(kept).lower(),
        }
        path = begin(root / f"kept-{kept}", clips, options.network, settings)
        parts = parts_of_rounds(path, options.turns)
        fixed = [a - b for a, b in zip(parts["round"], parts["training"], strict=True)]
        training = statistics.median(parts["training"])
        shares = [
            100 * value / (value + training * steps / options.steps)
            for value in (min(fixed), max(fixed))
            for steps in (options.steps, 50)
        ]
        rows.append(
            (
                "kept" if kept else "removed",
                *(f"{statistics.median(values):.3f}" for values in parts.values()),
                f"{min(fixed):.3f}-{max(fixed):.3f}",
                f"{shares[0]:.1f}-{shares[2]:.1f} %",
                f"{shares[1]:.2f}-{shares[3]:.2f} %",
            )
        )
    header = ("updates", *parts, "fixed", f"at {options.steps} steps", "at 50 steps (computed)")
    print(
        f"Seconds of a round: {options.network}, {options.clients} clients, {options.steps} steps "
        f"of 32 clips, {PROCESSES} processes, median of {options.turns}"
    )
    print(format_table(header, rows))
    seconds = []
    for turn in range(options.turns):
        settings = {"clients_per_round": options.clients, "method_conf.local_steps": 1}
        path = begin(root / f"start-{turn}", clips, options.network, settings)
        begun = time.perf_counter()
        run_command(path, 1).wait()
        seconds.append(time.perf_counter() - begun)
    print(
        f"From the start of `fedtools rounds` to its end after round 1, {options.clients} clients "
        f"of 1 step: {statistics.median(seconds):.1f} s ({min(seconds):.1f}-{max(seconds):.1f})\n"
    )


def run_command(path: Path, rounds: int, **env: str) -> subprocess.Popen:
    """Run `fedtools rounds` up to a round."""
    command = [sys.executable, "-m", "fedtools", "rounds", path, "--to", rounds]
    command += ["--nj", PROCESSES]
    env = {**os.environ, **env}
    return subprocess.Popen([*map(str, command)], cwd=ROOT, stderr=subprocess.DEVNULL, env=env)


def print_ranks(root: Path, options: argparse.Namespace) -> None:
    """Print the fixed cost of a round in local processes and in ranks."""
    clips = make_clips(root / "ranked", 20, 10)
    rows = []
    for what in ("--nj 2", "2 ranks"):
        path = begin(
            root / what.replace(" ", ""),
            clips,
            "",
            {"clients_per_round": 4, "method_conf.local_steps": 1},
        )
        size = PROCESSES if what == "2 ranks" else 1
        env = [{"RANK": str(rank), "WORLD_SIZE": str(size)} for rank in range(size)]
        for process in [run_command(path, options.short, **one) for one in env]:
            process.wait()
        ends = [(path / f"round_{n:04d}" / ".done").stat().st_mtime for n in (5, options.short)]
        rows.append((what, f"{1000 * (ends[1] - ends[0]) / (options.short - 5):.1f}"))
    print(f"A round of 4 clients of one step of a tiny network, mean of {options.short - 5} rounds")
    print(format_table(("", "ms a round"), rows))


def print_large(root: Path, options: argparse.Namespace) -> None:
    """Print the cost of a round of 1,000 clients x 65 k parameters."""
    clips = make_clips(root / "thousand", 1000, 4)
    rows = []
    for kept in ("true", "false"):
        settings = {
            "clients_per_round": 1000,
            "method_conf.local_steps": 1,
            "keep_updates": kept,
            "training.stack": 32,
            "model.network": "transformer",
            "model.network_conf": "{layers: 2, width: 64, feedforward: 88}",
        }
        path = begin(root / f"large-{kept}", clips, "", settings)
        federation = Federation(path)
        parameters = sum(value.numel() for value in federation.task.models.build().parameters())
        parts = parts_of_rounds(path, options.turns)
        disk = sum(one.stat().st_size for one in (path / "round_0001").rglob("*") if one.is_file())
        fixed = [a - b for a, b in zip(parts["round"], parts["training"], strict=True)]
        rows.append(
            (
                {"true": "kept", "false": "removed"}[kept],
                *(f"{statistics.median(parts[name]):.2f}" for name in ("round", "training")),
                f"{statistics.median(fixed):.2f}",
                f"{statistics.median(parts['aggregation']):.2f}",
                f"{disk / 1e6:.1f}",
            )
        )
    print(f"A round of 1,000 clients of one step, {parameters} parameters, {PROCESSES} processes")
    header = ("updates", "round, s", "training, s", "all else, s", "aggregation, s", "disk, MB")
    print(format_table(header, rows))


def memory_of(process: int) -> dict[int, float]:
    """Return the anonymous memory of a process and its children, process id -> MB."""
    found = {}
    try:
        status = Path(f"/proc/{process}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if "RssAnon" in fields:
            found[process] = int(fields["RssAnon"].split()[0]) / 1024
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            for child in children.read_text().split():
                found |= memory_of(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def print_peaks(root: Path, options: argparse.Namespace) -> None:
    """Print the table of memory by number of clients."""
    clips = make_clips(root / "many", options.many, 4)
    rows = []
    for clients in (options.many // 12, options.many):
        settings = {
            "clients_per_round": clients,
            "method_conf.local_steps": 1,
            "keep_updates": "true",
        }
        path = begin(root / f"clients-{clients}", clips, "", settings)
        begun = time.perf_counter()
        command = run_command(path, 1)
        peaks: dict[int, float] = {}
        together = 0.0
        while command.poll() is None:
            now = memory_of(command.pid)
            together = max(together, sum(now.values()))
            peaks |= {who: max(size, peaks.get(who, 0)) for who, size in now.items()}
            time.sleep(0.02)
        workers = max([size for who, size in peaks.items() if who != command.pid], default=0)
        row = (peaks[command.pid], workers, together)
        seconds = time.perf_counter() - begun
        rows.append((clients, *(f"{size:.0f}" for size in row), f"{seconds:.1f}"))
    size = (clips / "clips.npy").stat().st_size >> 20
    print(f"Peak memory in MB, updates kept, 1 step each; the data are {size} MB, mapped")
    header = ("clients in a round", "parent", "largest worker", "all together", "seconds")
    print(format_table(header, rows))


def print_growth(root: Path, options: argparse.Namespace) -> None:
    """Print the table of memory by round."""
    clips = make_clips(root / "few", 20, 10)
    settings = {"clients_per_round": 4, "method_conf.local_steps": 1}
    path = begin(root / "long", clips, "", settings)
    begun = time.perf_counter()
    command = run_command(path, options.rounds)
    rows = []
    for number in (options.rounds // 10, options.rounds // 2, options.rounds - 1):
        done = path / f"round_{number:04d}" / ".done"
        while command.poll() is None and not done.exists():
            time.sleep(0.005)
        now = memory_of(command.pid)
        workers = sum(size for who, size in now.items() if who != command.pid)
        seconds = time.perf_counter() - begun
        rows.append((number, f"{now.get(command.pid, 0):.1f}", f"{workers:.1f}", f"{seconds:.0f}"))
    command.wait()
    print("Memory in MB over many rounds of 4 clients")
    print(format_table(("after round", "parent", "all workers", "seconds"), rows), end="")


PARTS = {
    "costs": print_costs,
    "ranks": print_ranks,
    "large": print_large,
    "peaks": print_peaks,
    "growth": print_growth,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--network", default="dscnn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--many", type=int, default=2434)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--short", type=int, default=65)
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for part, what in PARTS.items():
            if options.only in (None, part):
                what(Path(name), options)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
