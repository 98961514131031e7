"""The server's half: rounds of an experiment, whose sites are Flower's nodes.

All that is known lies in the experiment's folder, so that a killed run is followed by another
`flwr run` of the same app, which goes on. The server's configuration, $FEDTOOLS_FLOWER, has

    experiment = "exp/fedavg"        its folder
    where = "."                      where fedtools init ran, if it named data by relative paths
    site = ["--key", "server.key"]   more words for `fedtools site`, `sample` and `aggregate`
    sample = []
    aggregate = []

A node is of the site whose name it was registered with: whoever registers a node's key gives it.
A node without a name, which is possible where nodes need no key, is asked for its site.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from .folder import Problem, fedtools, one_line, read_folder, settings, words, write_folder

app = ServerApp()
# Seconds: messages outlive any round, and whom one waits for is said this often.
TTL = 30 * 24 * 3600.0
REMIND = 60.0
# Of a secure sum.
STEPS = ("keys", "shares", "masked", "survivors", "unmask")
# For the process of a killed run to end.
PATIENT = 60.0


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds that are left."""
    try:
        own = settings("experiment")
        experiment, sites = Experiment(own), Sites(grid)
        experiment.check(str(context.run_config["experiment"]))
        with experiment.alone():
            for number in range(1, int(context.run_config["rounds"]) + 1):
                if not (experiment.round(number) / ".done").exists():
                    run_round(grid, experiment, sites, number, context.run_config)
        say(f"all {context.run_config['rounds']} rounds are complete")
    except Problem as problem:
        # The last line of the log, after Flower's traceback.
        say(f"stopped: {problem}")
        raise RuntimeError(str(problem)) from None


def say(text: str) -> None:
    """Print a line into the log of the run."""
    print(f"fedtools: {text}", flush=True)


@dataclass
class Experiment:
    """An experiment's folder at the server, and the commands that work on it."""

    own: dict[str, Any]

    @property
    def path(self) -> Path:
        """Return the experiment's folder."""
        return Path(self.own["folder"] / self.own["experiment"])

    @property
    def scratch(self) -> Path:
        """Return a folder for what is on its way, on the same disk."""
        return self.path / ".flower"

    def round(self, number: int) -> Path:
        """Return the folder of a round."""
        return self.path / f"round_{number:04d}"

    def check(self, label: str) -> None:
        """Raise a `Problem` if it is not the experiment that the app was made for."""
        sums = self.path / "sha256sums"
        if not sums.is_file() or hashlib.sha256(sums.read_bytes()).hexdigest() != label:
            remedy = "make the app with fedtools flower app, or correct the configuration"
            raise Problem(f"{self.path}: not the experiment that this app is for; {remedy}")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the experiment's lock of runs; a killed one may take a moment to end.

        Raises:
            Problem: if another run holds it.
        """
        self.scratch.mkdir(mode=0o700, exist_ok=True)
        with open(self.scratch / "lock", "ab") as file:
            for _ in range(int(PATIENT)):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(1)
                else:
                    yield
                    return
        raise Problem(f"{self.path}: another run is at work on it; flwr stop ends it")

    def run(self, *arguments: str | Path) -> str:
        """Run a command of fedtools, with what the configuration has for it."""
        where = self.own["folder"] / self.own.get("where", ".")
        return fedtools([*arguments, *words(self.own, str(arguments[0]))], where)

    def jobs(self) -> dict[str, int]:
        """Return each site's number in the names of its files: its place in C order."""
        names = sorted(set(self._sites().values()), key=str.encode)
        return {name: number for number, name in enumerate(names, 1)}

    def turn(self, number: int) -> int:
        """Return how often the server has replied in a round: a secure sum has five steps."""
        replies = self.round(number).glob("secure.*.reply")
        return len({path.name.split(".")[1] for path in replies})

    def asked(self, number: int) -> dict[str, list[str]]:
        """Return the sampled clients of each site that has any, and was not left out."""
        sites = self._sites()
        found: dict[str, list[str]] = {}
        for client in (self.round(number) / "clients").read_text("utf-8").split():
            found.setdefault(sites[client], []).append(client)
        return {site: own for site, own in found.items() if not self._left(number, site).exists()}

    def leave_out(self, number: int, sites: Iterable[str]) -> None:
        """Ask sites no more in a round."""
        for site in sites:
            self._left(number, site).touch()

    def _left(self, number: int, site: str) -> Path:
        return self.round(number) / f".left.{self.jobs()[site]}"

    def _sites(self) -> dict[str, str]:
        rows = (self.path / "sites.tsv").read_text("utf-8").splitlines()[1:]
        cut = [row.partition("\t") for row in rows]
        return {client: site for client, _, site in cut}

    def mark(self, number: int, site: str) -> Path:
        """Return a file that lists a site's answer when all of it is there."""
        return self.round(number) / f".answered.{self.turn(number)}.{self.jobs()[site]}"

    def has_answer(self, number: int, site: str) -> bool:
        """Return whether a site has answered in a round."""
        mark = self.mark(number, site)
        if not mark.exists():
            return False
        return all((self.round(number) / name).exists() for name in json.loads(mark.read_text()))

    def request(self, number: int, site: str, most: int) -> RecordDict:
        """Return what a site is asked in a round."""
        out = self.scratch / "request"
        shutil.rmtree(out, ignore_errors=True)
        self.scratch.mkdir(mode=0o700, exist_ok=True)
        self.run("site", self.path, "--site", site, "--round", str(number), out)
        record = RecordDict({"request": read_folder(out, most)})
        shutil.rmtree(out)
        return record

    def keep(self, number: int, site: str, record: Any, most: int) -> int:
        """Put a site's answer into the round's folder, and return its bytes.

        Raises:
            Problem: if a file is not one that this site may send.
        """
        job, clients = self.jobs()[site], self.asked(number)[site]
        for name in record:
            head, _, rest = name.partition(".")
            # A client's name may have dots.
            whose = rest.rpartition(".")[0] in clients if head == "features" else False
            step, _, ours = rest.rpartition(".")
            step_of = head == "secure" and step == STEPS[self.turn(number)] and ours == str(job)
            if not whose and not step_of and not name.startswith(f"update.{job}."):
                raise Problem(f"{name[:80]!r} is no file of this site")
        staged = self.scratch / "answer"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(mode=0o700, parents=True)
        names = write_folder(record, staged, most)
        sizes = [(staged / name).stat().st_size for name in names]
        for name in names:
            os.replace(staged / name, self.round(number) / name)
        (staged / "mark").write_text(json.dumps(names))
        os.replace(staged / "mark", self.mark(number, site))
        staged.rmdir()
        return sum(sizes)


@dataclass
class Sites:
    """Which node is which site's, as far as is known."""

    grid: Grid
    said: dict[int, str] = field(default_factory=dict)
    hellos: dict[str, int] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def online(self, wanted: Iterable[str]) -> dict[str, Any]:
        """Return the nodes of sites that are there; ask those who they are that have no name."""
        self._hear()
        found: dict[str, Any] = {}
        for node in sorted(self.grid.get_nodes(), key=lambda one: one.registered_at):
            name = node.name or self.said.get(node.node_id)
            if name is None:
                if node.node_id not in self.hellos.values():
                    self._greet(node.node_id)
            elif name not in wanted:
                self._warn(f"a node says that it is site {name!r}, which is not in sites.tsv")
            elif name in found:
                self._warn(f"two nodes are of site {name!r}; the first that registered is asked")
            else:
                found[name] = node
        return found

    def _greet(self, node: int) -> None:
        message = Message(RecordDict(), node, "query", ttl=TTL)
        for one in self.grid.push_messages([message]):
            self.hellos[one] = node

    def _hear(self) -> None:
        for reply in self.grid.pull_messages([*self.hellos]) if self.hellos else ():
            node = self.hellos.pop(reply.metadata.reply_to_message_id)
            problem = reason(reply, "hello")
            if not problem:
                self.said[node] = one_line(reply.content["hello"].get("site"))
            else:
                self._warn(f"a node does not say which site it is: {problem}")

    def _warn(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            say(one_line(text))


def reason(reply: Message, wanted: str) -> str:
    """Return why a reply is not what was wanted, in one line; "" if it is."""
    if reply.has_error():
        return one_line(reply.error.reason or f"error {reply.error.code}")
    if "error" in reply.content:
        return one_line(reply.content["error"].get("line", "an error without a reason"))
    return "" if wanted in reply.content else f"it has no {wanted}"


@dataclass
class Asked:
    """A question that waits for its answer."""

    message: str
    node: int
    # When the node was last started: a node that was restarted has forgotten its messages.
    started: str


class Question:
    """The question of one round to all its sites, and who has answered."""

    def __init__(self, grid: Grid, experiment: Experiment, sites: Sites, number: int, config: Any):
        self.grid, self.experiment, self.sites = grid, experiment, sites
        self.number, self.most = number, int(config["max-bytes"])
        self.again = float(config["again"])
        self.clients = experiment.asked(number)
        self.waiting: dict[str, Asked] = {}
        # When a site may be asked once more.
        self.due: dict[str, float] = {}
        self.nodes: dict[str, Any] = {}

    def missing(self) -> list[str]:
        """Return the sites that have not answered."""
        return [s for s in self.clients if not self.experiment.has_answer(self.number, s)]

    def ask(self) -> None:
        """Ask the sites that are there and were not asked yet."""
        self.nodes, now = self.sites.online(self.experiment.jobs()), time.monotonic()
        for site in self.missing():
            node, asked = self.nodes.get(site), self.waiting.get(site)
            if not node:
                continue
            if asked and (asked.node, asked.started) == (node.node_id, node.last_activated_at):
                continue
            if asked:
                say(f"round {self.number}: site {site} was restarted, and is asked again")
            if now < self.due.get(site, now):
                continue
            content = self.experiment.request(self.number, site, self.most)
            message = Message(content, node.node_id, "train", ttl=TTL, group_id=str(self.number))
            (sent,) = self.grid.push_messages([message]) or [None]
            if sent:
                self.waiting[site] = Asked(sent, node.node_id, node.last_activated_at)

    def hear(self) -> None:
        """Take the answers that have come, in any order, one in memory at a time."""
        for site, asked in [*self.waiting.items()]:
            for reply in self.grid.pull_messages([asked.message]):
                del self.waiting[site]
                problem = reason(reply, "answer")
                if not problem:
                    problem = self._keep(site, reply)
                if problem:
                    self.due[site] = time.monotonic() + self.again
                    then = f"asked again in {self.again:g} s"
                    say(f"round {self.number}: site {site}: {problem}; {then}")

    def _keep(self, site: str, reply: Message) -> str:
        record = reply.content["answer"]
        try:
            size = self.experiment.keep(self.number, site, record, self.most)
        except Problem as problem:
            return str(problem)
        say(f"round {self.number}: site {site} has answered, {size} bytes")
        return ""


def run_round(grid: Grid, experiment: Experiment, sites: Sites, number: int, config: Any) -> None:
    """Sample a round, and ask its sites until it is complete: once, or in each step of a sum."""
    experiment.run("sample", experiment.path, "--round", str(number))
    while not (experiment.round(number) / ".done").exists():
        run_turn(grid, experiment, sites, number, config)
    say(f"round {number} is complete")


def run_turn(grid: Grid, experiment: Experiment, sites: Sites, number: int, config: Any) -> None:
    """Ask the sites of a round until all have answered or are too late, and aggregate."""
    question = Question(grid, experiment, sites, number, config)
    begun, patience = time.monotonic(), float(config["patience"])
    told, last = 0.0, [""]
    while missing := question.missing():
        question.ask()
        question.hear()
        waited = time.monotonic() - begun
        if patience and waited > patience:
            break
        if missing != last or waited - told > REMIND:
            there = [f"{one}{'' if one in question.nodes else ' (not there)'}" for one in missing]
            say(f"round {number}: waiting for {', '.join(there)}")
            told, last = waited, missing
        time.sleep(float(config["poll"]))
    missing = question.missing()
    left = [word for site in missing for word in ("--without", site)]
    if left:
        say(f"round {number}: closed {' '.join(left)}, after {patience:g} s")
    experiment.run("aggregate", experiment.path, "--round", str(number), *left)
    experiment.leave_out(number, missing)
