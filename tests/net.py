"""A net: hashes of all that federations write, by method, task and way of running.

    python tests/net.py                       compare with what is recorded in tests/net.tsv
    python tests/net.py --record              record
    python tests/net.py --only asr-fedavg lm  cases whose names begin so
    python tests/net.py --against REF         compare with another commit, on any machine

Every case runs in one job, in three, killed and gone on, and in two ranks, and must write the same
bytes each time. Left out is what holds times, hosts, paths and versions. Bytes depend on the
processor and on torch: elsewhere than where they were recorded only the ways are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

TESTS = Path(__file__).resolve().parent
ROOT, TABLE = TESTS.parent, TESTS / "net.tsv"
sys.path.append(str(TESTS / "soak"))

# (case, file) -> the beginning of the SHA-256 of what it holds, or what went wrong.
Hashes = dict[tuple[str, str], str]
FAILED = "(run)"
JOBS, KILLS, RANKS = 3, 3, 2

# --- what is run


@dataclass(frozen=True)
class Case:
    """An experiment, and what is made of its models.

    Attributes:
        world: the folder of data that it begins with, and of a configuration <world>.yaml.
        settings: options, as `--set` has them.
        measured: the split that models are measured on, if any.
        after: commands, of which EXP is the experiment, WORLD the data and OUT a folder; they are
            run after the first way alone.
    """

    world: str
    method: str
    settings: tuple[str, ...] = ()
    measured: str = ""
    after: tuple[str, ...] = ()


EXTRACTOR = 'method_conf.personal=["encoder.embed.*", "encoder.encoders.0.*"]'
CONTINUOUS = ("training.labels=continuous", "training.decay=0.7")
STAGES = (EXTRACTOR, "rounds=6", "method_conf.stage1=2", "method_conf.stage2=2")
ANEW = "training.keep_teacher=false"
HEADS = ("model.network_conf.head_share=0.6", "method_conf.private=head")
MEAN = "average EXP --best 1"
AVERAGED = ("average EXP --best 2", "decode EXP WORLD/valid OUT/average --lm WORLD/lm")
GREEDY = "decode EXP WORLD/valid OUT/greedy --model round:2"
CROSSED = "cross WORLD/valid OUT/cross.tsv {}=EXP"
ADAPTED = ("adapt EXP WORLD/new OUT/adapted --epochs 2", "rounds OUT/adapted")
TUNED = ("tune OUT/average WORLD/valid OUT/weights.yaml", "best-path OUT/average")
SWEPT = "rescore-sweep WORLD/train OUT/sweep.tsv --set rounds=3 --vary alpha=0,0.5"


def asr(method: str, *settings: str, after: tuple[str, ...] = (GREEDY,)) -> Case:
    return Case("asr", method, settings, "valid", after)


def kws(method: str, *settings: str, after: tuple[str, ...] = (MEAN,)) -> Case:
    return Case("kws", method, settings, "valid", after)


def lm(method: str, *settings: str) -> Case:
    return Case("lm", method, settings, "train", ("rescore-best EXP OUT",))


def fmp(*settings: str, privacy: str = "", after: tuple[str, ...] = ()) -> Case:
    if privacy:
        settings = (*settings, f"method_conf.privacy={{{privacy}}}")
        after = (*after, "privacy EXP")
    return Case("rescore", "fmp", settings, "", ("rescore-best EXP OUT", *after))


def _protected(**more: str) -> str:
    options = {"mechanism": "laplace", "epsilon": "2.0", "cap": "4.0", **more}
    return ", ".join(f"{name}: {value}" for name, value in options.items())


CASES = {
    "asr-fedavg": asr("fedavg", after=(*AVERAGED, *TUNED, GREEDY, "export EXP OUT/espnet")),
    "asr-fedavg-kept": asr(
        "fedavg", "method_conf={weighting: utterances, local_epochs: 2, keep_optimizer: true}"
    ),
    "asr-fedavg-continuous": asr("fedavg", *CONTINUOUS),
    "asr-fedavg-new-teacher": asr("fedavg", *CONTINUOUS, ANEW),
    "asr-fedprox": asr("fedprox", "method_conf.proximal=0.7"),
    "asr-fedmmd": asr("fedmmd", "method_conf.discrepancy=0.5"),
    "asr-fedopt": asr("fedopt", "method_conf.optimizer=adam"),
    "asr-fednorm": asr("fednorm", *CONTINUOUS),
    "asr-fedextract": asr("fedextract", EXTRACTOR, after=(*AVERAGED, CROSSED, *ADAPTED)),
    "asr-client": asr("client", after=(*AVERAGED, CROSSED, "export EXP OUT/espnet --client au")),
    "asr-client-new-teacher": asr("client", *CONTINUOUS, ANEW),
    "asr-centralized": asr("centralized"),
    "asr-centralized-continuous": asr("centralized", *CONTINUOUS),
    "asr-decouplefl": asr("decouplefl", *CONTINUOUS, *STAGES, after=(*AVERAGED, CROSSED)),
    "asr-decouplefl-invariance": asr(
        "decouplefl", *CONTINUOUS, *STAGES, "method_conf.speaker_invariance=1.0"
    ),
    "asr-joint": asr("joint", EXTRACTOR, after=(*AVERAGED, CROSSED)),
    "kws-fedavg": kws("fedavg"),
    "kws-fedavg-personal": kws("fedavg", 'method_conf.personal=["head.*"]'),
    "kws-centralized": kws("centralized"),
    "kws-fedprox": kws("fedprox", "method_conf.proximal=0.7"),
    "kws-fedmmd": kws("fedmmd", "method_conf.discrepancy=0.5"),
    "kws-fedopt": kws("fedopt", "method_conf.optimizer=yogi"),
    "kws-fedkws_ui": kws("fedkws_ui"),
    "kws-fedkws_ui-head": kws("fedkws_ui", *HEADS, "method_conf.smooth_by_utility=true"),
    "kws-alo": kws("alo"),
    "kws-alt": kws("alt"),
    "lm-fedavg": lm("fedavg"),
    "lm-fedopt": lm("fedopt"),
    "lm-fedprox": lm("fedprox", "method_conf.proximal=0.7"),
    "rescore-fmp": fmp("method_conf.scale=0.8", after=(SWEPT,)),
    "rescore-fmp-increments": fmp("method_conf.sends=increments", "clients_per_round=2"),
    "rescore-fmp-laplace": fmp(
        privacy=_protected(), after=(f"{SWEPT} --set mechanism=laplace --set epsilon=2",)
    ),
    "rescore-fmp-laplace-clients": fmp(privacy=_protected(trust="client", unit="word")),
    "rescore-fmp-laplace-users": fmp(
        *("method_conf.sends=cumulative", "method_conf.groups=clock", "method_conf.span=48"),
        privacy=_protected(unit="user"),
    ),
    "rescore-fmp-paper": fmp(
        privacy="mechanism: paper, epsilon: 1.0", after=(f"{SWEPT} --set mechanism=paper",)
    ),
}

# --- worlds


def make_worlds(root: Path) -> None:
    """Data of each task and a configuration beside them; all of it by the tests' own builders."""
    # Here, since another process than the one that forks may use them alone.
    import keyword_world
    import keywords
    import simulated

    worlds = {name: root / name for name in ("asr", "kws", "lm", "rescore")}
    asr_world = worlds["asr"]
    clients = ["au", "en", "in"]
    simulated.data_dir(asr_world / "train", clients, 4)
    simulated.data_dir(asr_world / "valid", clients, 2, seed=1)
    simulated.data_dir(asr_world / "new", ["nz", "sa"], 4, seed=2)
    simulated.config_file(asr_world / "config.yaml", rounds=3, clients_per_round=2)
    kws_world = keyword_world.make_world(_made(worlds["kws"]))
    (kws_world / "valid").symlink_to("test")
    changed = {"rounds": 2, "evaluate_every": 1, "clients_per_round": 4, "keep_updates": True}
    keywords.config_file(kws_world / "config.yaml", **keyword_world.CONFIG | changed)
    _language(worlds["lm"])
    (_made(worlds["rescore"]) / "config.yaml").write_text("{task: rescore, rounds: 3}\n")
    (worlds["rescore"] / "train").symlink_to("../lm/made")


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _language(world: Path) -> None:
    import numpy as np
    from rescored_world import WORDS, make_stream

    make_stream(world / "made")
    random = np.random.default_rng(1)
    lines = [" ".join(random.choice(WORDS, 3)) for _ in range(60)]
    (world / "plain").write_text("".join(f"{line}\n" for line in lines))
    sizes = {"embed_unit": 8, "att_unit": 8, "head": 2, "unit": 16, "layer": 1}
    options = {"lm_conf": sizes | {"dropout_rate": 0.1}, "epochs": 1, "optim_conf": {"lr": 0.01}}
    (world / "nnlm.yaml").write_text(yaml.safe_dump({"nnlm": options}))
    (_made(world / "weights") / "weights.yaml").write_text("lm_weight: 2.0\nword_score: 0.5\n")
    training = {"optim": "sgd", "optim_conf": {"lr": 0.05}, "batch_sentences": 2}
    config = {"task": "lm", "rounds": 3, "model": options["lm_conf"], "training": training}
    (world / "config.yaml").write_text(yaml.safe_dump(config))


WORLD_COMMANDS = (
    "train-tokens asr/train/text asr/tokens --token-type char",
    "train-lm asr/train/text asr/lm --order 2",
    "train-nnlm --plain lm/plain --config lm/nnlm.yaml --valid lm/made/text lm/nnlm",
    "rescore lm/made lm/nnlm lm/rescored",
    "rescore-stream lm/made lm/rescored lm/train",
)


def init_command(case: Case, exp: Path) -> list[str]:
    """Paths of data are relative: what noise is drawn for has a sum of the configuration."""
    world, method = case.world, case.method
    words = ["init", str(exp), "--config", f"{world}/config.yaml", "--method", method]
    words += ["--data", f"train={world}/train"]
    if case.measured not in ("", "train"):
        words += ["--data", f"{case.measured}={world}/{case.measured}"]
    if world == "asr":
        words += ["--asset", "tokens=asr/tokens"]
    if world == "lm":
        words += ["--asset", "weights=lm/weights", "--start", "lm/nnlm/model.safetensors"]
    settings = ("keep_updates=true", *case.settings)
    return [*words, *(word for setting in settings for word in ("--set", setting))]


# --- ways of running


class Failed(Exception):
    """A command that did not end as it should."""


def begin(
    commands: Sequence[Sequence[str]],
    root: Path,
    log: Path,
    prepare: Callable[[], None] = lambda: None,
    **env: str,
) -> int:
    """Begin commands in a fork of this process, in the folder of worlds; returns the process."""
    import forks

    with open(log, "ab") as output:
        return forks.fork(commands, root, output.fileno(), env=env, prepare=prepare)


def end(child: int, log: Path) -> None:
    """Wait for a process that `begin` began; `Failed` with its last line if it failed."""
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        said = log.read_text(errors="replace").splitlines() or [""]
        raise Failed(f"exit {code}: {said[-1]}")


def count_renames(folder: Path, listed: Path, last: int = 0) -> None:
    """Note every file that gets its place in a folder; before the one of this number, die."""
    count, inside = 0, str(folder)

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event == "os.rename" and os.fspath(arguments[1]).startswith(inside):
            count += 1
            with open(listed, "a") as file:
                file.write(".")
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


class Runner:
    """One case, in all ways.

    Attributes:
        folder: of the case; each way has a folder in it, and the experiment is exp there.
    """

    def __init__(self, name: str, root: Path):
        self.name, self.case, self.root, self.folder = name, CASES[name], root, root / "runs" / name

    def run(self) -> Hashes:
        """What every way writes, and which ways write otherwise than the first."""
        first: dict[str, str] = {}
        found: dict[str, str] = {}
        for way in (self.one, self.three, self.killed, self.ranks):
            _made(self.folder / way.__name__)
            try:
                way()
            except Failed as error:
                found[f"{FAILED} {way.__name__}"] = str(error)
                if not first:
                    break
                continue
            hashes = dict(self.hashes(way.__name__))
            first = first or hashes
            for file in sorted(first.keys() | hashes.keys()):
                if first.get(file) != hashes.get(file):
                    found[f"{file} ({way.__name__})"] = hashes.get(file, "missing")
        if first:
            try:
                self.after()
                found = dict(self.hashes("one")) | found
            except Failed as error:
                found[f"{FAILED} after"] = str(error)
        return {(self.name, file): value for file, value in found.items()}

    def one(self) -> None:
        listed = self.folder / "renames"
        exp = self.exp("one")
        self._fork("one", [self.rounds("one")], lambda: count_renames(exp, listed), begun=False)

    def after(self) -> None:
        """What is made of models, of those of the first way alone."""
        out = {"EXP": str(self.exp("one")), "WORLD": self.case.world}
        out["OUT"] = str(_made(self.folder / "one" / "out"))
        self._fork("one", [_filled(line, out) for line in self.case.after])

    def three(self) -> None:
        """Each step a command; the last job first."""
        rounds = len(list(self.exp("one").glob("round_*/.done")))
        exp, commands = str(self.exp("three")), []
        for _ in range(rounds):
            commands.append(["sample", exp, "--nj", str(JOBS)])
            for job in range(JOBS, 0, -1):
                commands.append(["train-local", exp, "--job", str(job)])
            commands.append(["aggregate", exp])
        self._fork("three", [*commands, self.rounds("three")], begun=False)

    def killed(self) -> None:
        """Before the same file each time, a quarter of all further on."""
        listed = self.folder / "renames"
        share = max(1, len(listed.read_text()) // (KILLS + 1))
        exp = self.exp("killed")
        self._fork("killed", [], begun=False)
        for _ in range(KILLS):
            child = begin(
                [self.rounds("killed")],
                self.root,
                self.log("killed"),
                lambda: count_renames(exp, self.folder / "more", share),
                **self.env("killed"),
            )
            status = os.waitpid(child, 0)[1]
            if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
                raise Failed("came to its end before it was killed")
        self._fork("killed", [self.rounds("killed")])

    def ranks(self) -> None:
        self._fork("ranks", [], begun=False)
        children = [
            begin(
                [self.rounds("ranks")],
                self.root,
                self.log("ranks"),
                **self.env("ranks"),
                RANK=str(rank),
                WORLD_SIZE=str(RANKS),
            )
            for rank in range(RANKS)
        ]
        for child in children:
            end(child, self.log("ranks"))

    def exp(self, way: str) -> Path:
        return self.folder / way / "exp"

    def log(self, way: str) -> Path:
        return self.folder / way / "log"

    def env(self, way: str) -> dict[str, str]:
        """Noise that is the same each time, and is nobody's."""
        key = self.folder / way / "noise.key"
        if not key.exists():
            key.touch(0o600)
            key.write_text("00" * 32)
        return {"FEDTOOLS_NOISE_KEY": str(key), "FEDTOOLS_NONCE": "0" * 32}

    def rounds(self, way: str) -> list[str]:
        measured = ["--evaluate", self.case.measured] if self.case.measured else []
        return ["rounds", str(self.exp(way)), *measured]

    def _fork(
        self,
        way: str,
        commands: Sequence[Sequence[str]],
        prepare: Callable[[], None] = lambda: None,
        begun: bool = True,
    ) -> None:
        """Run commands to their end, after `init` where nothing has begun."""
        first = [] if begun else [init_command(self.case, self.exp(way))]
        child = begin([*first, *commands], self.root, self.log(way), prepare, **self.env(way))
        end(child, self.log(way))

    # --- what is hashed

    def hashes(self, way: str) -> Iterator[tuple[str, str]]:
        """Each file, or kind of clients' files, of a way."""
        parts: dict[str, list[bytes]] = {}
        names = (self.folder / way, b"RUN"), (self.root, b"ROOT")
        for path in sorted((self.folder / way).rglob("*")):
            name = path.relative_to(self.folder / way)
            if path.is_file() and not is_left_out(name):
                content = path.read_bytes()
                for folder, word in names:
                    content = content.replace(os.fsencode(folder), word)
                if path.suffix == ".tsv":
                    content = without_seconds(content)
                parts.setdefault(name_of(name), []).append(content)
        for folder in sorted(self.exp(way).glob("round_*")):
            if messages := messages_of(folder):
                parts[f"exp/{folder.name}/messages"] = messages
        for name, contents in sorted(parts.items()):
            digests = b"".join(hashlib.sha256(one).digest() for one in contents)
            yield name, hashlib.sha256(digests).hexdigest()[:16]


def _filled(line: str, names: dict[str, str]) -> list[str]:
    for name, path in names.items():
        line = line.replace(name, path)
    return line.split()


# Times, hosts, versions, sums of files with times, what jobs have to themselves.
LEFT_OUT = {"log", "noise.key", "software.yaml", "sha256sums", ".done", "jobs"}
FOLDERS_LEFT_OUT = {".locks", "ranks", "tensorboard"}


def is_left_out(name: Path) -> bool:
    return (
        name.name in LEFT_OUT
        or bool(FOLDERS_LEFT_OUT & set(name.parts))
        # Cut into jobs otherwise in each way; see `messages_of`.
        or name.name.startswith("update.")
        # With the sum of feats.scp, which has absolute paths.
        or name.match("nbest.*.yaml")
    )


def name_of(name: Path) -> str:
    """A file's name, all clients' as one."""
    parts = list(name.parts)
    if parts[1:2] == ["clients"] and len(parts) > 3:
        parts[2] = "*"
    return "/".join(parts)


def without_seconds(table: bytes) -> bytes:
    """A table without the column of that name."""
    rows = [line.split(b"\t") for line in table.splitlines()]
    if not rows or b"seconds" not in rows[0]:
        return table
    at = rows[0].index(b"seconds")
    return b"".join(b"\t".join([*row[:at], *row[at + 1 :]]) + b"\n" for row in rows)


def messages_of(folder: Path) -> list[bytes]:
    """What each client of a round sent, whichever job has it."""
    from safetensors.numpy import load_file

    sent = {}
    for path in folder.glob("update.*.tsv"):
        header, *rows = without_seconds(path.read_bytes()).splitlines(keepends=True)
        tensors = path.with_suffix(".safetensors")
        values = load_file(tensors) if tensors.exists() else {}
        for index, row in enumerate(rows):
            own = [name.encode() + values[name][index].tobytes() for name in sorted(values)]
            sent[row] = b"".join([header, row, *own])
    return [sent[row] for row in sorted(sent)]


# --- all cases


def machine() -> str:
    """What bytes depend on."""
    import torch

    vendor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("vendor_id"):
            vendor = line.split(":")[1].strip()
            break
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {vendor}"


def run_cases(names: Sequence[str], root: Path, workers: int) -> Hashes:
    """Run cases, so many at the same time."""
    import forks

    forks.preload(["fedtools.federation.rounds", "espnet2.asr.espnet_model", "torch._dynamo"])
    make_worlds(root)
    end(begin([line.split() for line in WORLD_COMMANDS], root, root / "log"), root / "log")
    left, running, found = list(names), {}, {}
    while left or running:
        while left and len(running) < workers:
            name = left.pop(0)
            running[
                _in_fork(lambda name=name: write(found_in(root, name), Runner(name, root).run()))
            ] = name
        child, status = os.waitpid(-1, 0)
        name = running.pop(child)
        if status:
            raise SystemExit(f"net.py: {name}: see above")
        found |= read(found_in(root, name))
        shutil.rmtree(root / "runs" / name)
    return found


def _in_fork(work: Callable[[], None]) -> int:
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def found_in(root: Path, name: str) -> Path:
    return root / f"{name}.tsv"


def write(path: Path, hashes: Hashes, about: Sequence[str] = ()) -> None:
    lines = [f"# {one}" for one in about]
    lines += ["\t".join([case, file, value]) for (case, file), value in sorted(hashes.items())]
    path.write_text("".join(f"{line}\n" for line in lines))


def read(path: Path) -> Hashes:
    rows = (line.split("\t") for line in path.read_text().splitlines() if line[:1] != "#")
    return {(case, file): value for case, file, value in rows}


def recorded(table: Path) -> tuple[str, Hashes]:
    """Which machine a table is from, and what it has."""
    if not table.exists():
        return "nothing", {}
    return table.read_text().partition("\n")[0].removeprefix("# "), read(table)


def compared(ours: Hashes, theirs: Hashes | None) -> list[tuple[str, str, str]]:
    """Rows of (method, file, way) that differ; `theirs` is None where ways alone are compared."""
    rows = []
    for case, file in sorted(ours):
        if file.startswith(FAILED):
            rows.append((case, ours[case, file], file.split()[-1]))
        elif file.endswith(")"):
            name, _, way = file.rstrip(")").rpartition(" (")
            rows.append((case, name, way))
    if theirs is not None:
        own = {key: value for key, value in ours.items() if not is_fault(key[1])}
        there = {case for case, _ in theirs}
        rows += [(case, "(not recorded)", "all") for case in sorted({c for c, _ in own} - there)]
        rows += [
            (*key, "all" if key in own and key in theirs else "gone" if key in theirs else "new")
            for key in sorted(own.keys() | theirs.keys())
            if key[0] in there and own.get(key) != theirs.get(key) and not is_fault(key[1])
        ]
    return rows


def is_fault(file: str) -> bool:
    """Whether it is no file but says how a way failed, or what it wrote otherwise."""
    return file.startswith(FAILED) or file.endswith(")")


def hashes_at(ref: str, names: Sequence[str], folder: Path, workers: int) -> Hashes:
    """What another commit writes, with this program and that commit's builders."""
    tree, out = folder / "tree", folder / "theirs.tsv"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), ref], check=True)
    try:
        shutil.copy(__file__, tree / "tests" / "net.py")
        command = [sys.executable, str(tree / "tests" / "net.py"), "--write", str(out)]
        command += ["--workers", str(workers), "--only", *names]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tree)}, check=True)
        return read(out)
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def chosen(prefixes: Iterable[str] | None) -> list[str]:
    if prefixes is None:
        return list(CASES)
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in CASES):
            raise SystemExit(f"net.py: no case {prefix!r}; there are {', '.join(CASES)}")
    return [name for name in CASES if name.startswith(tuple(prefixes))]


def show(rows: Sequence[tuple[str, str, str]]) -> None:
    table = [("method", "file", "way"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write tests/net.tsv")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose names begin so")
    parser.add_argument("--against", metavar="REF", help="compare with a commit")
    parser.add_argument("--table", type=Path, default=TABLE, help="in place of tests/net.tsv")
    parser.add_argument("--write", type=Path, metavar="TSV", help="write hashes, compare nothing")
    parser.add_argument("--workers", type=int, default=2, help="cases at the same time")
    options = parser.parse_args()
    names, begun = chosen(options.only), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="net-") as folder:
        ours = run_cases(names, _made(Path(folder) / "ours"), options.workers)
        if options.write:
            write(options.write, ours)
            return
        theirs = None
        if options.against:
            theirs = hashes_at(options.against, names, Path(folder), options.workers)
    if options.record:
        if not any(is_fault(file) for _, file in ours):
            kept = recorded(options.table)[1] if options.only else {}
            others = {key: value for key, value in kept.items() if key[0] not in names}
            write(options.table, others | ours, [machine()])
    elif not options.against:
        about, table = recorded(options.table)
        if about == machine():
            theirs = {key: value for key, value in table.items() if key[0] in names}
        else:
            print(f"recorded with {about}; here is {machine()}: only ways are compared")
    rows = compared(ours, theirs)
    if rows:
        show(rows)
    print(f"{len(names)} cases, {len(ours)} files, {len(rows)} differ, "
          f"{time.monotonic() - begun:.0f} s")  # fmt: skip
    raise SystemExit(bool(rows))


if __name__ == "__main__":
    main()
