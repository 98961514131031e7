"""Commands of a federation, from its beginning to its averaged model, and models in and out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtools.cli.app import command

if TYPE_CHECKING:
    from fedtools.exchange.experiment import Experiment
    from fedtools.federation.federation import Federation

EXPERIMENT = typer.Argument(..., metavar="EXP", help="The experiment's folder.")
ROUND = typer.Option(None, "--round", min=1, help="The round; default: the next incomplete one.")
KEYS = typer.Option(
    None,
    "--keys",
    metavar="KEYS",
    help="With secure sums: the folder of fedtools client-keys with the clients' private keys.",
)
NGPU = typer.Option(0, min=0, max=1, help="Number of GPUs; 1: compute on a GPU.")


@command("init", "Federation")
def init(
    experiment: Path = EXPERIMENT,
    config: Path = typer.Option(..., help="YAML with the sections model and training."),
    section: list[str] = typer.Option(
        [],
        help="A section of the YAML file to merge into its top level; may be given several times.",
    ),
    method: str = typer.Option(..., help="A method, as listed by fedtools methods."),
    data: list[str] = typer.Option(
        [],
        metavar="SPLIT=FOLDER",
        help="Data directory of train (which defines the clients), valid, ...",
    ),
    asset: list[str] = typer.Option(
        [],
        metavar="NAME=FOLDER",
        help="A folder that the task needs. For asr: tokens, made by fedtools train-tokens, or a "
        "Whisper folder; denominator with LF-MMI; lm and weights with server_labels beam. For kws: "
        "projection with normalise: projection.",
    ),
    start: Path = typer.Option(None, help="A model.safetensors to start from."),
    clients: Path = typer.Option(
        None,
        metavar="FILE",
        help="With user-level privacy: the public list of clients, also of those without data. "
        "Default: the clients that the data have.",
    ),
    sites: Path = typer.Option(
        None,
        metavar="FILE",
        help="A table with the columns client and site: who holds whose data. Default: no sites.",
    ),
    roster: Path = typer.Option(
        None,
        metavar="FILE",
        help="With --sites: a table with the columns site and key, the public keys of all sites "
        "and of server. What they send each other is then signed. Default: not.",
    ),
    client_keys: Path = typer.Option(
        None,
        metavar="FILE",
        help="With secure sums and no sites: a table of clients' public keys, which fedtools "
        "client-keys prints. Default: no secure sums.",
    ),
    facts: list[Path] = typer.Option(
        [],
        metavar="FOLDER",
        help="With --sites, in place of --data train=...: what a site tells of its clients, made "
        "there by fedtools site-facts; once for each site.",
    ),
    seed: int = typer.Option(0, min=0, help="Random seed."),
    set_: list[str] = typer.Option(
        [], "--set", help="Override an option of the YAML file: training.grad_clip=1."
    ),
) -> None:
    """Create an experiment: its options and initial state.

    Options cannot be changed later: the same command with other options fails and names the first
    difference.

    The numbers of clients and of the model's values, and the bytes of a round, are printed. If the
    YAML sets model.adapt, only a part of a base model is trained, and the size of that part is
    printed, too. The base is the model of --start or, with network hf, a Hugging Face folder. If it
    has the section attackers, some clients attack the model, and their number is printed.

    Reads: the YAML of --config; the folders of --data (the list of clients, and a fingerprint of
    the data) and of --asset; the list of --clients; the tables of --sites, --roster and
    --client-keys; the folders of --facts; the model of --start.

    Writes: EXP/config.yaml, data.yaml, software.yaml, clients.txt, sha256sums, init.safetensors,
    round_0001/global.safetensors; base.safetensors if a model is adapted; attackers.txt, the
    clients that attack, if the YAML has the section attackers; with --sites, sites.tsv and
    facts.tsv, what is known of each client, and with --roster, roster.tsv; with --client-keys,
    client_keys.tsv; and EXP/commands.sh, to which later commands add themselves.

    Example in egs/speechcommands/kws1: fedtools init exp/mini/keywords/dscnn/fedavg/seed1 \
        --config conf/mini.yaml --section networks.dscnn --section methods.fedavg --method fedavg \
        --data train=dump/mini/keywords/train --data valid=dump/mini/keywords/valid --data \
        test=dump/mini/keywords/test --seed 1
    """
    from fedtools.core.config import set_by
    from fedtools.federation.init import init as begin
    from fedtools.federation.init import read_config

    folders = _pairs(data, "--data", "SPLIT=FOLDER"), _pairs(asset, "--asset", "NAME=FOLDER")
    with set_by(set_):
        said = begin(
            experiment,
            method=method,
            config=read_config(config, section, set_),
            where=config,
            data=folders[0],
            assets=folders[1],
            start=start,
            seed=seed,
            listed=clients,
            sites=sites,
            roster=roster,
            client_keys=client_keys,
            told=facts,
        )
    if said:
        print(said)


@command("methods", "Federation")
def methods(
    names: list[str] = typer.Argument(
        None, metavar="[NAME]...", help="Methods to list; default: all."
    ),
    task: str = typer.Option(None, help="List only methods for this task: asr, kws, lm, rescore."),
) -> None:
    """List methods, their titles in tables, and their tasks.

    For a single NAME, its options follow, with defaults, values and meaning. An unknown NAME is an
    error.

    Reads: $FEDTOOLS_PATH/methods/*.py, methods of your own.

    Writes: nothing.

    Example in egs/commonvoice/asr1: fedtools methods --task asr
    """
    from fedtools.core.errors import UserError
    from fedtools.core.tables import format_table
    from fedtools.methods import METHODS
    from fedtools.tasks import TASKS

    facts = {name: TASKS.get(name, None) for name in TASKS.names()}
    if task is not None:
        TASKS.get(task, None)
    rows = []
    for name in names or METHODS.names():
        method = METHODS.get(name, None)
        able = [one for one, fact in facts.items() if set(method.needs) <= set(fact.parts)]
        if task in (None, *able):
            rows.append([name, method.title, ", ".join(able)])
        elif names:
            raise UserError(f"{name} is for task {' or '.join(able)}, not {task}")
    if not rows:
        raise UserError(f"no method is for task {task}")
    print(format_table(("name", "in tables", "tasks"), rows, "lll"), end="")
    if names and len(names) == 1:
        from fedtools.report.keys import method_text

        print(f"\n{method_text(names[0])}", end="")


@command("options", "Federation")
def options(
    page: Path = typer.Argument(None, metavar="[PAGE.md]", help="Default: print the page."),
) -> None:
    """Write the reference of all options of a configuration.

    It has all keys, with their defaults, values, meaning and source: those of experiments, methods,
    models, training, attacks and recipes.

    Reads: nothing.

    Writes: PAGE.md.

    Example in egs/speechcommands/kws1: fedtools options exp/OPTIONS.md
    """
    from fedtools.core.atomic import write_text
    from fedtools.report.reference import page as make

    if page is None:
        print(make(), end="")
    else:
        write_text(page, make())


@command("sample", "Federation")
def sample(
    experiment: Path = EXPERIMENT,
    round_: int = ROUND,
    nj: int = typer.Option(1, min=1, help="Number of jobs that share the clients."),
) -> None:
    """Sample a round's clients, by seed and round number.

    Reads: EXP/config.yaml and clients.txt.

    Writes: EXP/round_<number>/clients and jobs.

    Example in egs/commonvoice/asr1: fedtools sample exp/mini/fedavg/seed0 --nj 3
    """
    from fedtools.core.locks import lock
    from fedtools.exchange.experiment import Experiment
    from fedtools.federation import steps
    from fedtools.methods import make_method
    from fedtools.tasks.facts import check_fixed

    opened = Experiment(experiment)
    check_fixed(opened)
    options = opened.options
    method = make_method(options.method, options.method_conf, experiment / "config.yaml")
    with lock(experiment, "rounds"):
        number = round_ or opened.last_round() + 1
        print(" ".join(steps.sample(opened, method, number, nj)))
        _list_step(opened, round_, number)


@command("train-local", "Federation")
def train_local(
    experiment: Path = EXPERIMENT,
    round_: int = ROUND,
    job: int = typer.Option(1, min=1, help="Number of the job, from 1 to --nj of fedtools sample."),
    keys: Path = KEYS,
    ngpu: int = NGPU,
) -> None:
    """Train the clients of one job and write their messages.

    With secure sums, it does the step of the round that is due for these clients, if it has not
    been done; there are five, and fedtools aggregate replies to each.

    Reads: EXP/round_<number>/clients, jobs and global.safetensors; EXP/clients/<client>/; the
    training data of these clients; with secure sums --keys.

    Writes: EXP/round_<number>/update.<job>.safetensors and .tsv, and features.<client>.ark and .scp
    where the method sends features; EXP/clients/<client>/; with secure sums
    EXP/round_<number>/secure.<step>.<job> instead, and promises and secrets in --keys.

    Example in egs/commonvoice/asr1: fedtools train-local exp/mini/fedavg/seed0 --job 1
    """
    from fedtools.federation import steps

    federation = open_experiment(experiment, ngpu, keys)
    number = round_ or federation.experiment.last_round() + 1
    steps.train_job(federation, number, job)
    _list_step(federation, round_, number)


@command("aggregate", "Federation")
def aggregate(
    experiment: Path = EXPERIMENT,
    round_: int = ROUND,
    without: list[str] = typer.Option(
        [],
        metavar="SITE",
        help="Close the round without this site's messages; may be given several times. With "
        "secure sums, the site is lost from this step on; without sites, give a job's number.",
    ),
    ngpu: int = NGPU,
) -> None:
    """Validate and aggregate a round's updates.

    The result is the global state of the next round; then the round is closed. With sites, it waits
    for no site: it fails until all have answered, or are left out.

    Reads: EXP/round_<number>/clients, update.<job>.* and features.<client>.*.

    Writes: EXP/round_<number>/ledger.tsv and .done; global.safetensors of the next round;
    EXP/tensorboard/.

    Example in egs/commonvoice/asr1: fedtools aggregate exp/mini/fedavg/seed0
    """
    from fedtools.core.locks import lock
    from fedtools.federation import steps

    federation = open_experiment(experiment, ngpu)
    with lock(experiment, "rounds"):
        number = round_ or federation.experiment.last_round() + 1
        steps.aggregate(federation, number, without)
        _list_step(federation, round_, number)


@command("site-facts", "Federation")
def site_facts(
    data: Path = typer.Argument(
        ..., metavar="DATA", help="The site's data directory, or folder of packed clips."
    ),
    out: Path = typer.Argument(..., metavar="OUT", help="The folder to write."),
    task: str = typer.Option(..., help="The task of the experiment: asr or kws."),
) -> None:
    """Write what a site tells the server of its clients.

    It is all that fedtools init --facts needs to know of the site's data: names of clients, the
    number of clips or utterances of each, the kind of the data, and a sum by which the site will
    recognise them; for clips also the classes, and the entropy of each client's labels. No names of
    utterances, no transcripts and no paths are in it. What leaves the site is printed.

    Reads: DATA.

    Writes: OUT/facts.yaml and clients.tsv; for clips, classes.txt.

    Example in egs/speechcommands/kws1: fedtools site-facts dump/mini/keywords/train facts \
        --task kws
    """
    from fedtools.federation.site_facts import tell

    print(tell(data, out, task), end="")


@command("site", "Federation")
def site(
    experiment: Path = EXPERIMENT,
    name: str = typer.Option(..., "--site", metavar="NAME", help="The site."),
    request: int = typer.Option(
        None, "--round", min=1, help="Write what is asked for in this sampled round instead."
    ),
    split: str = typer.Option(
        "",
        "--evaluate",
        metavar="SPLIT",
        help="Ask the site to evaluate the models that this round starts from, on its own data.",
    ),
    key: Path = typer.Option(None, metavar="FILE", help="The server's private key."),
    out: Path = typer.Argument(..., metavar="OUT", help="The folder to write."),
) -> None:
    """Write a site's capsule, or its request in a round.

    Both are for sites that do not share EXP. The capsule, which a site needs once, has the
    configuration, the initial model and the site's own clients, but no path and no key. With
    --round, OUT is a request: the state that the site's sampled clients start from. The site's
    fedtools site-round answers it. If the experiment has a roster, both are signed.

    Reads: EXP; --key.

    Writes: the folder OUT.

    Example in egs/speechcommands/kws1: fedtools site exp/mini/keywords/dscnn/fedavg/seed0 \
        --site east capsule
    """
    from fedtools.exchange.experiment import Experiment
    from fedtools.federation.capsule import write_capsule, write_request

    if request is None and split:
        raise typer.BadParameter("needs --round", param_hint="--evaluate")
    if request is None:
        write_capsule(experiment, name, out, key)
    else:
        write_request(Experiment(experiment), request, name, out, key, split)


@command("client-keys", "Federation")
def client_keys(
    keys: Path = typer.Argument(..., metavar="KEYS", help="The folder of private keys."),
    names: list[str] = typer.Argument(None, metavar="[CLIENT]...", help="Names of clients."),
    clients: Path = typer.Option(
        None, metavar="FILE", help="A list of clients, one on each line, in place of names."
    ),
) -> None:
    """Make clients' keys for secure sums; print the public ones.

    Each client runs this where its data are, for its own name; whoever simulates a federation, for
    all. The printed rows together are the table of fedtools init --client-keys. Keys that are there
    stay as they are.

    Reads: KEYS; the list of --clients.

    Writes: KEYS/<client>.key, an Ed25519 key that only its owner can read, unless it exists.

    Example in egs/speechcommands/kws1: fedtools client-keys keys 0a2b400e 0c40e715 0e5193e6
    """
    from fedtools.core.text_files import read_words
    from fedtools.data.datadir import check_id
    from fedtools.exchange.client_keys import COLUMNS
    from fedtools.privacy.secagg.holder import Holder

    found = read_words(clients, "write one client on each line") if clients else list(names or [])
    if not found:
        raise typer.BadParameter("name a client, or give --clients", param_hint="CLIENT")
    made = Holder(keys).make_keys([check_id(name, "client", clients) for name in found])
    for row in (COLUMNS, *made.items()):
        print("\t".join(row))


@command("site-key", "Federation")
def site_key(
    key: Path = typer.Argument(..., metavar="FILE", help="The private key."),
) -> None:
    """Print the public key of a site or the server.

    The key is made first if there is none. The public keys of all sites and of the server are the
    roster with which fedtools init begins an experiment whose messages are signed.

    Reads: FILE.

    Writes: FILE, an Ed25519 key that only its owner can read, unless it exists.

    Example in egs/speechcommands/kws1: fedtools site-key east.key
    """
    from fedtools.exchange.signed import make_key

    print(make_key(key))


@command("site-round", "Federation")
def site_round(
    capsule: Path = typer.Argument(..., metavar="CAPSULE", help="The folder of fedtools site."),
    request: Path = typer.Argument(..., metavar="REQUEST", help="What the server asks for."),
    answer: Path = typer.Argument(..., metavar="ANSWER", help="The folder to write."),
    data: list[str] = typer.Option(
        ..., metavar="SPLIT=FOLDER", help="Data directory of train, with the site's clients."
    ),
    pretrained: Path = typer.Option(None, help="Folder of a pretrained model."),
    key: Path = typer.Option(None, metavar="FILE", help="The site's private key."),
    bounds: Path = typer.Option(
        None,
        metavar="YAML",
        help="What the site allows a request to make it do. Default: all but features and code in "
        "$FEDTOOLS_PATH.",
    ),
    nj: int = typer.Option(1, min=1, help="Number of processes that train clients in parallel."),
    ngpu: int = NGPU,
) -> None:
    """Train a site's clients as the server asks for.

    The same request gives the same answer, also after a kill, and for any --nj. The files of ANSWER
    belong into EXP/round_<number> at the server, whose aggregate checks them as it checks all. A
    request that is not signed by the server of the roster, that is older than the last, or that
    asks for more than --bounds allows, is refused, and so are data that are not those of fedtools
    site-facts.

    Reads: CAPSULE, REQUEST; the folders of --data and --pretrained; --key and --bounds.

    Writes: ANSWER/update.<job>.* and features.<client>.*; CAPSULE/round_<number>, clients,
    local.yaml and data.yaml.

    Example in egs/speechcommands/kws1: fedtools site-round capsule request answer \
        --data train=dump/mini/keywords/train
    """
    from fedtools.federation.bounds import Bounds, read_bounds
    from fedtools.federation.site import answer as train

    folders, model = _pairs(data, "--data", "SPLIT=FOLDER"), str(pretrained or "")
    allowed, device = read_bounds(bounds) if bounds else Bounds(), device_of(ngpu)
    print(train(capsule, folders, model, request, answer, device, nj, key, allowed))


@command("site-answer", "Federation")
def site_answer(
    experiment: Path = EXPERIMENT,
    answer: Path = typer.Argument(..., metavar="ANSWER", help="What the site has sent."),
    name: str = typer.Option(..., "--site", metavar="NAME", help="The site."),
    round_: int = typer.Option(..., "--round", min=1, help="The round of the request."),
) -> None:
    """Take a site's answer into the experiment.

    Only files that this site sends in this round are taken; if there are others, none is. What they
    hold is checked by fedtools aggregate, or evaluate --by-site.

    Reads: ANSWER; EXP/sites.tsv and round_<number>/clients.

    Writes: EXP/round_<number>/update.<job>.*, features.<client>.*, evaluation.<split>.<job>.yaml.

    Example in egs/speechcommands/kws1: fedtools site-answer \
        exp/mini/keywords/dscnn/fedavg/seed0 answer --site east --round 1
    """
    from fedtools.exchange.experiment import Experiment
    from fedtools.federation.site_answer import take_answer

    for path in take_answer(Experiment(experiment), round_, name, answer):
        print(path)


def _list_step(opened: Experiment | Federation, given: int | None, number: int) -> None:
    """List a step among the experiment's commands, with its round if that was not given.

    The steps of a secure sum are the same commands, again and again; which is next is printed.
    """
    from fedtools.exchange.commands import add_command
    from fedtools.federation.federation import Federation
    from fedtools.federation.steps import due_step

    due = ""
    if isinstance(opened, Federation):
        due, opened = due_step(opened, number), opened.experiment
    secure = bool(opened.client_keys)
    add_command(opened.path, *([] if given else ["--round", str(number)]), once=not secure)
    if due:
        print(due)


@command("reset", "Federation")
def reset(
    experiment: Path = EXPERIMENT,
    round_: int = typer.Option(..., "--round", min=1, help="The first round to be done again."),
) -> None:
    """Remove a round and all later ones, to run them again.

    The private states that clients kept in these rounds are removed too, and so are averaged
    models, which these rounds may be part of.

    Reads: EXP/config.yaml and EXP/round_<number>/.

    Writes: EXP/evaluate_<split>.tsv and EXP/tensorboard/ without these rounds; removes their files
    in EXP/round_<number>/, EXP/clients/ and EXP/server/, and model.safetensors.

    Example in egs/commonvoice/asr1: fedtools reset exp/mini/fedavg/seed0 --round 7
    """
    from fedtools.exchange.commands import add_command
    from fedtools.federation import steps

    steps.reset(open_experiment(experiment), round_)
    add_command(experiment)


@command("rounds", "Federation")
def rounds(
    experiment: Path = EXPERIMENT,
    to: int = typer.Option(None, min=1, help="The last round to run; default: as configured."),
    nj: int = typer.Option(1, min=1, help="Number of processes that train clients in parallel."),
    evaluate: str = typer.Option(
        None, metavar="SPLIT", help="Evaluate models on this split as well: valid or test."
    ),
    keys: Path = KEYS,
    ngpu: int = NGPU,
    estimate: bool = typer.Option(
        False, "--estimate", help="Only print how long the rounds that are left will take."
    ),
) -> None:
    """Run all rounds; the same command resumes a killed run.

    With --estimate, two rounds run in a temporary copy beside EXP, and the second is timed. The
    estimate holds for this machine while nothing else runs on it.

    Under srun, mpirun or torchrun, or in processes with RANK and WORLD_SIZE in their environment,
    all ranks run one federation together, on any number of machines that share the folder EXP; --nj
    is then ignored.

    Reads: EXP, and the data that fedtools init was given; with secure sums --keys.

    Writes: EXP/round_<number>/ and EXP/clients/<client>/, as sample, train-local and aggregate do;
    EXP/evaluate_<split>.tsv with --evaluate; with secure sums promises and secrets in --keys.

    Example in egs/commonvoice/asr1: fedtools rounds exp/mini/fedavg/seed0 --nj 3 --evaluate valid
    """
    if estimate:
        if to is not None:
            raise typer.BadParameter("goes without --to", param_hint="--estimate")
        _print_estimate(experiment, nj, device_of(ngpu), evaluate)
        return
    from fedtools.federation.evaluations import is_finished

    if is_finished(experiment, to, evaluate):
        print(f"{experiment}: all rounds are complete", file=sys.stderr)
        return
    from fedtools.federation.ranks import find_rank
    from fedtools.federation.rounds import run_rounds

    rank = find_rank()
    device = device_of(ngpu, rank.local if rank else None)
    run_rounds(experiment, to, nj, device, evaluate, rank, keys)


def _print_estimate(experiment: Path, nj: int, device: str, split: str | None) -> None:
    from fedtools.federation.estimate import estimate

    found = estimate(experiment, nj, device, split)
    line = f"{experiment}: {found.rounds} rounds of {found.round:.2f} s"
    if split:
        line += f", {found.evaluations} evaluations of {found.evaluation:.2f} s"
    print(f"{line}: {found.seconds / 60:.1f} minutes")


@command("evaluate", "Federation")
def evaluate(
    experiment: Path = EXPERIMENT,
    split: str = typer.Option("valid", help="Split of the experiment's data: valid, test."),
    every: int = typer.Option(None, min=1, help="Evaluate only every N-th round."),
    by_site: bool = typer.Option(
        False, "--by-site", help="Add up what sites have measured: fedtools site --evaluate."
    ),
    ngpu: int = NGPU,
) -> None:
    """Evaluate the models of every round: loss, WER or accuracy.

    Each client's model is measured on that client's data; WER is that of a greedy search. In a
    language written without spaces, characters are counted as words, so that WER is CER.

    With --by-site nothing is measured: sites have sent the sums of their clients.

    Reads: EXP/round_<number>/global.safetensors, EXP/clients/<client>/, the data of the split; with
    --by-site, EXP/round_<number>/evaluation.<split>.<job>.yaml.

    Writes: EXP/evaluate_<split>.tsv, EXP/tensorboard/; with --by-site,
    EXP/evaluate_sites_<split>.tsv.

    Example in egs/commonvoice/asr1: fedtools evaluate exp/mini/fedavg/seed0 --split valid
    """
    from fedtools.core.tables import format_table
    from fedtools.data.text_units import read_text_unit
    from fedtools.exchange.commands import add_command
    from fedtools.federation.evaluate import evaluate as measure

    federation = open_experiment(experiment, ngpu)
    if by_site:
        from fedtools.federation.site_evaluation import evaluate_sites

        found = evaluate_sites(federation, split)
        print(format_table([*found[0]], [[*row.values()] for row in found]), end="")
        add_command(experiment)
        return
    last = federation.experiment.last_round()
    rounds = range(0, last + 1, every) if every else None
    table = federation.experiment.evaluation(split)
    before = table.read_bytes() if table.exists() else b""
    header, rows = federation.facts.header, measure(federation, rounds, split)
    # Otherwise it has changed nothing, perhaps because it cannot: an archive is read, too.
    if table.read_bytes() != before:
        add_command(experiment)
    rows = [[row[name] for name in header] for row in rows]
    unit = read_text_unit(federation.task.data_path(split))
    if unit.note:
        header = [{"words": unit.plural, "wer": unit.rate}.get(name, name) for name in header]
        print(f"{unit.title} {unit.note}\n")
    print(format_table(header, rows), end="")


@command("average", "Federation")
def average(
    experiment: Path = EXPERIMENT,
    best: int = typer.Option(None, min=1, help="Number of rounds; default: as configured."),
    by: str = typer.Option(
        "loss", help="Choose rounds by loss or rate (WER, accuracy) on valid data."
    ),
    shared: bool = typer.Option(
        False, help="Write only the model for newcomers, no client's personal model."
    ),
    ngpu: int = NGPU,
) -> None:
    """Average the models of the best rounds on valid data.

    With DecoupleFL, only rounds of its last stage are considered.

    Reads: EXP/evaluate_valid.tsv, which is completed first; EXP/round_<number>/global.safetensors;
    EXP/clients/<client>/.

    Writes: EXP/model.safetensors; EXP/clients/<client>/model.safetensors where clients have
    personal models; EXP/averaged.tsv, the rounds that were averaged.

    Example in egs/commonvoice/asr1: fedtools average exp/mini/fedavg/seed0 --best 3
    """
    from fedtools.exchange.commands import add_command
    from fedtools.federation.evaluate import average as mean_of_best

    if by not in ("loss", "rate"):
        raise typer.BadParameter("loss or rate", param_hint="--by")
    paths = mean_of_best(open_experiment(experiment, ngpu), best, by, shared)
    add_command(experiment)
    for path in paths:
        print(path)


@command("adapt", "Federation")
def adapt(
    experiment: Path = EXPERIMENT,
    data: Path = typer.Argument(..., metavar="DATA_DIR", help="Data directory of the newcomers."),
    out: Path = typer.Argument(..., metavar="OUT_EXP", help="The experiment to create."),
    epochs: int = typer.Option(..., min=1, help="Epochs of adaptation, one round each."),
) -> None:
    """Create an experiment in which newcomers adapt a model.

    Each newcomer adapts the model of a trained experiment on its own data; fedtools rounds runs the
    adaptation.

    Reads: EXP/config.yaml and model.safetensors; DATA_DIR with feats.scp, text and utt2client.

    Writes: OUT_EXP, as fedtools init does.

    Example in egs/commonvoice/asr1: fedtools adapt exp/mini/fedavg/seed0 data/mini/test \
        exp/mini/newcomers --epochs 5
    """
    from fedtools.federation.adapt import adapt as begin

    begin(experiment, data, out, epochs)
    print(out)


def _pairs(texts: list[str], option: str, form: str) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value) or name in found:
            raise typer.BadParameter(f"{text!r}: write {form}, each once", param_hint=option)
        found[name] = value
    return found


def device_of(ngpu: int, local: int | None = None) -> str:
    """Return torch's name of the device; raise a `UserError` if the requested GPU is missing."""
    if not ngpu:
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        from fedtools.core.errors import UserError

        raise UserError("--ngpu 1, but torch sees no GPU", remedy="use --ngpu 0")
    return "cuda" if local is None else f"cuda:{local % torch.cuda.device_count()}"


def open_experiment(experiment: Path, ngpu: int = 0, keys: Path | None = None):
    from fedtools.federation.federation import Federation

    return Federation(experiment, device_of(ngpu), keys)


@command("config", "Federation")
def config(
    path: Path = typer.Argument(..., metavar="YAML", help="A configuration file."),
    keys: list[str] = typer.Argument(
        ..., metavar="KEY...", help="Names of options, such as tokens.vocab_size."
    ),
) -> None:
    """Print values of a configuration, for shell scripts.

    Each value is printed on a line of its own: a list with spaces between its items, a section as
    the names of its options, a decimal number as it stands in the file. Sections for recipes, and
    for commands that run before an experiment exists, are validated, and their defaults are known.

    Reads: YAML.

    Writes: nothing.

    Example in egs/commonvoice/asr1: fedtools config conf/mini.yaml tokens.vocab_size lm.order
    """
    from fedtools.attack import options as attacks
    from fedtools.core import recipe_sections as sections
    from fedtools.core.config import from_mapping, lookup, read_yaml
    from fedtools.core.errors import UserError

    known = {**sections.SECTIONS, **attacks.SECTIONS}
    content, values = read_yaml(path), []
    for key in keys:
        section, _, name = key.partition(".")
        kind = known.get(section)
        options = from_mapping(kind, content.get(section), f"{path}: {section}") if kind else None
        try:
            values.append(lookup(path, key, as_written=True))
        except UserError:
            # An option that the file leaves out has its default, if it has one.
            if getattr(options, name, None) is None:
                raise
            values.append(getattr(options, name))
    for value in values:
        print(*value) if isinstance(value, list | tuple | dict) else print(value)


@command("export", "Federation")
def export(
    experiment: Path = typer.Argument(
        ..., metavar="EXP", help="The experiment, after fedtools average."
    ),
    out: Path = typer.Argument(..., metavar="OUT", help="The folder to write."),
    client: str = typer.Option(
        None, help="Client whose model is exported, if clients have personal models."
    ),
    adapters: bool = typer.Option(
        False, "--adapters", help="For network hf: export LoRA's adapters alone, as peft's files."
    ),
    as_base: bool = typer.Option(
        False, "--as-base", help="For network hf: use the precision of the base, not float32."
    ),
) -> None:
    """Export an averaged model to ESPnet or transformers.

    An adapted model is exported whole, with its adapters merged into the weights.

    Reads: EXP/model.safetensors, or EXP/clients/<client>/model.safetensors; EXP/config.yaml and
    tokens or classes.txt; for network hf, the folder that config.yaml names.

    Writes: OUT/config.yaml, model.pth and tokens. For network hf, a folder of the same kind as the
    base: OUT/config.json, model.safetensors and the other files of such a folder, and in
    head.safetensors a head that transformers does not know. With --adapters, adapter_config.json
    and adapter_model.safetensors instead of the model.

    Example in egs/commonvoice/asr1: fedtools export exp/mini/fedavg/seed0 exp/mini/espnet
    """
    from fedtools.core.errors import UserError
    from fedtools.data.symbols import read_tokens
    from fedtools.federation.evaluate import has_average, load_average
    from fedtools.federation.federation import Federation
    from fedtools.models.acoustic.espnet import export_espnet
    from fedtools.models.adapt.adaptation import has_base
    from fedtools.models.adapt.adapters import merged
    from fedtools.models.pretrained.options import is_pretrained
    from fedtools.tasks.parts import CORPUS, MODELS

    if adapters and as_base:
        raise typer.BadParameter("cannot be combined with --adapters", param_hint="--as-base")
    federation = Federation(experiment)
    config = federation.experiment.options.model
    if client is not None and not (federation.personal and has_average(federation, client)):
        remedy = "name a client that has one, or leave out --client"
        raise UserError(f"client {client!r} has no averaged model", path=experiment, remedy=remedy)
    if is_pretrained(config):
        load_average(federation, client or "")
        _export_pretrained(federation, out, adapters, as_base)
        return
    if adapters or as_base:
        option = "--adapters" if adapters else "--as-base"
        raise typer.BadParameter("is for models of network hf", param_hint=option)
    corpus = federation.task.need(CORPUS)
    load_average(federation, client or "")
    model = federation.task.need(MODELS).build()
    for path in export_espnet(
        out,
        config,
        merged(model) if has_base(config) else model.state_dict(),
        *read_tokens(experiment),
    ):
        print(path)
    if ends := corpus.training.end_frames:
        note = f"the model expects {ends} frames of zeros after every utterance (end_frames)"
        print(f"{note}: append them to the features that ESPnet decodes", file=sys.stderr)


def _export_pretrained(federation: Federation, out: Path, adapters: bool, as_base: bool) -> None:
    """Write the model of an experiment that began with a Hugging Face folder."""
    from fedtools.core.config import from_mapping
    from fedtools.data.symbols import BPE_MODEL, TOKEN_TYPE, TOKENS
    from fedtools.models.pretrained.export import export_adapters, export_folder
    from fedtools.models.pretrained.folder import open_known
    from fedtools.models.pretrained.options import Pretrained, is_seq2seq
    from fedtools.tasks.parts import MODELS

    options = from_mapping(Pretrained, federation.experiment.options.model, "model")
    search = is_seq2seq(federation.experiment.options.model)
    folder = open_known(options.path, options.sum, search)
    models = federation.task.need(MODELS)
    names = ("classes.txt", TOKENS, BPE_MODEL, TOKEN_TYPE)
    labels = [federation.experiment.path / name for name in names]
    model = models.build()
    if adapters:
        state = models.tensors(model)
        notes = export_adapters(out, folder, model, state, labels, options.adaptation)
    else:
        notes = export_folder(out, folder, model, models.tensors(model), labels, as_base)
    print(out / ("adapter_model.safetensors" if adapters else "model.safetensors"))
    if options.normalise != "none":
        how = (
            "by layer" if options.normalise == "layer" else "as normalise.map (x - normalise.mean)"
        )
        notes.append(f"the head takes the encoder's mean over time x, normalised {how}")
    for sentence in notes:
        print(sentence, file=sys.stderr)


@command("import", "Federation")
def import_(
    sources: list[Path] = typer.Argument(
        ...,
        metavar="SOURCE...",
        help="ESPnet's config.yaml and .pth file; or a CTranslate2 folder of Whisper; or OpenAI's "
        ".pt file of Whisper.",
    ),
    out: Path = typer.Argument(..., metavar="OUT", help="The folder to write."),
    tokenizer: Path | None = typer.Option(
        None, metavar="FOLDER", help="Folder with tokenizer.json, which an OpenAI .pt file lacks."
    ),
) -> None:
    """Import a model of ESPnet or Whisper.

    ESPnet's encoder and CTC layer are imported, for fedtools init --start. Whisper is imported
    whole, as a Hugging Face folder: exactly from float32, float16 and bfloat16, and as precisely as
    possible from CTranslate2's int8.

    Reads: SOURCE; for Whisper, in SOURCE or --tokenizer, tokenizer.json and generation_config.json
    or config.json.

    Writes: OUT/model.safetensors. For ESPnet, model.yaml (the section model of a configuration) and
    tokens; for Whisper, config.json, generation_config.json, preprocessor_config.json,
    tokenizer.json and tokenizer_config.json.

    Example in egs/commonvoice/asr1: fedtools import exp/mini/espnet/config.yaml \
        exp/mini/espnet/model.pth exp/mini/imported
    """
    if len(sources) > 2:
        raise typer.BadParameter("give one SOURCE, or two for ESPnet", param_hint="SOURCE")
    if len(sources) == 2:
        if tokenizer is not None:
            problem = "is for OpenAI's .pt files, and two SOURCEs are ESPnet's"
            raise typer.BadParameter(problem, param_hint="--tokenizer")
        from fedtools.models.acoustic.espnet import import_espnet

        notes = import_espnet(*sources, out)
    else:
        from fedtools.models.pretrained.whisper_import import import_whisper

        notes = import_whisper(*sources, out, tokenizer)
    for sentence in notes:
        print(sentence)
    print(out / "model.safetensors")
