#!/usr/bin/env python3
"""Print the list of experiments, for utils/waves.py: tasks x networks x methods x seeds, ablations.

    experiments.py EXP DUMP --tasks keywords --networks dscnn --methods "fedavg alt" [...]

If a network of --config caches the outputs of frozen layers, the first experiment on all clips
computes them, and the others wait for it: otherwise all would load the pretrained model. The script
fails if centralised training is among the methods, but fewer than two clients have
--landscape-clips clips of the last task: figure 4 could not be drawn, and it is better to know that
before hours of training.

If the YAML of --grid has a section grid, this has the rows of each network and the seeds of each
row. The list then has those of them that the other options select, and no ablations:

    grid:
      transformer:
        fedavg: 0 1 2 3 4
        fedavg.rounds=450: 0 1 2
        alo.private_steps=50,adversarial=0.1: 0

A network whose model has `normalise: projection` takes EXP/<task>/projection, which stage 3 fits on
validation clips; no experiment of the list has these then.

With --server-clips 25,67, there are also rows `centralized.server_clips=25` and `=67`: a server
that trains alone on the sets that prepare.py made, with the options of a section baseline, if any.

Ablations, for the chosen tasks, networks, methods and seeds:

    clips   ALT with as many clips a round as FedAvg, instead of as many steps: ALT gives more steps
            to clients with many clips, so that the same number of steps uses more clips
    true    the same, and FedKWS-UI with other values of mu and lambda (figure 3): for DSCNN and
            ResNet, on the first task, with the first seed
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from options import OF_EXPERIMENT, ROW, SERVER_CLIPS, changes_of, server_set, sizes

from fedtools.core.config import option_error, read_yaml, unknown
from fedtools.core.errors import UserError, exit_with_message
from fedtools.data.clips import Clips, read_classes

# resolve() because the folder may be a link.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from grid import folder, words

VARIED = {
    "smoothing": ("0.0", "0.1", "0.3", "0.5"),
    "adversarial": ("0.0", "0.0001", "0.01", "0.1"),
}
SEEDS = ("0", "1", "2")


def line_of(options: argparse.Namespace, task: str, network: str, row: str, seed: str) -> list[str]:
    """Return the line of a row's experiment: a method, and options changed from the config's."""
    path, (method, _, changed) = f"{options.dump}/{task}", row.partition(".")
    changes = changes_of(changed)
    alone = changes.pop(SERVER_CLIPS, "")
    models = models_of(options.config)
    projected = [name for name, one in models.items() if one.get("normalise") == "projection"]
    # What a projection was fitted on validates nothing.
    splits = ("train", "test") if projected else ("train", "valid", "test")
    data = {split: f"{path}/{split}" for split in splits}
    sections = [f"networks.{network}", f"methods.{method}", of_task(path, method)]
    if alone:
        data["train"] = f"{path}/{server_set(alone)}"
        sections.append("baseline?")
    begun = words(method=method, seed=seed, data=data, section=sections)
    for option, value in changes.items():
        section = "" if option in OF_EXPERIMENT else "method_conf."
        begun += words(set=f"{section}{option}={value}")
        if option == "conserve":
            # With a base ratio of 0, the method solves for the ratio that conserves.
            begun += words(set="method_conf.base_ratio=0.0")
    if options.rounds and "rounds" not in changes:
        begun += words(set=f"rounds={options.rounds}")
    if network in projected:
        begun += words(asset={"projection": f"{options.exp}/{task}/projection"})
    if options.pretrained and models.get(network, {}).get("network", "hf") == "hf":
        begun += words(set=f"model.path={options.pretrained}")
    return [folder(options.exp, task, network, row, seed=seed), "-", *begun]


@cache
def models_of(config: Path | None) -> dict[str, dict[str, Any]]:
    """Return network -> its options of the model, of the networks of a configuration."""
    whole = read_yaml(config) if config else {}
    networks, shared = whole.get("networks") or {}, whole.get("model") or {}
    return {name: shared | ((own or {}).get("model") or {}) for name, own in networks.items()}


def of_task(data: str, method: str) -> str:
    """Return the optional section of a method's options for a task's number of classes."""
    return f"tasks.{len(read_classes(Path(data) / 'train' / 'classes.txt'))}.{method}?"


def read_rows(path: Path) -> dict[str, dict[str, list[str]]]:
    """Read network -> row -> seeds from the section grid of a YAML; return {} without one.

    Raises:
        UserError: if the section is not of that form.
    """
    content, found = read_yaml(path), dict[str, dict[str, list[str]]]()
    form = "write network: {method.option=value: 0 1 2}"
    if not isinstance(section := content.get("grid") or {}, dict):
        raise UserError("grid is not a section", path=path, remedy=form)
    for network, rows in section.items():
        _check_known(content, "networks", str(network), path)
        if not isinstance(rows, dict):
            raise UserError(f"grid.{network} is not a section", path=path, remedy=form)
        for row, seeds in rows.items():
            numbers = str(seeds).split()
            if not ROW.fullmatch(str(row)) or not numbers or not all(map(str.isdecimal, numbers)):
                problem = f"grid.{network}: '{row}: {seeds}' is not a row with seeds"
                raise UserError(problem, path=path, remedy=form)
            _check_known(content, "methods", str(row).partition(".")[0], path)
            found.setdefault(str(network), {})[str(row)] = numbers
    return found


def _check_known(content: Mapping[str, Any], section: str, name: str, path: Path) -> None:
    if name not in (known := content.get(section) or {}):
        raise option_error(f"grid: {unknown(name, known, section[:-1])}", path, name)


def experiments(options: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the lines of the list, as if no experiment waited for another."""
    own = read_rows(options.grid) if options.grid else {}
    alone = [f"centralized.{SERVER_CLIPS}={clips}" for clips in options.server_clips]
    every = dict.fromkeys([*alone, *options.methods], options.seeds or SEEDS)
    for task in options.tasks:
        for network in options.networks:
            for row, seeds in (own.get(network, {}) if own else every).items():
                if not own or row.partition(".")[0] in options.methods:
                    chosen = [seed for seed in seeds if seed in (options.seeds or seeds)]
                    yield from (line_of(options, task, network, row, seed) for seed in chosen)
    if not own and options.ablations != "false":
        yield from ablations(options, options.seeds or SEEDS)


def ablations(options: argparse.Namespace, seeds: Sequence[str]) -> Iterator[list[str]]:
    for network in options.networks:
        if options.ablations == "true" and "fedkws_ui" in options.methods:
            for name, values in VARIED.items() if network in ("dscnn", "resnet") else ():
                for row in [f"fedkws_ui.{name}={value}" for value in values]:
                    yield line_of(options, options.tasks[0], network, row, seeds[0])
        for task in options.tasks if "alt" in options.methods else ():
            yield from (
                line_of(options, task, network, "alt.conserve=clips", seed) for seed in seeds
            )


def check_figure_4(options: argparse.Namespace, lines: Sequence[Sequence[str]]) -> None:
    """Raise `UserError` if fewer than two clients have the clips for figure 4.

    It is drawn from the lines' centralised model of the last task, if there is one.
    """
    last, least = options.tasks[-1], options.landscape_clips
    start = f"{options.exp}/{last}/"
    if least and any(one.startswith(start) and "/centralized/" in one for one, *_ in lines):
        enough = int((Clips.read(Path(options.dump) / last / "train").sizes >= least).sum())
        if enough < 2:
            problem = f"figure 4 needs two clients with {least} clips, but there are {enough}"
            raise UserError(problem, remedy="give a smaller --landscape_clips")


def await_outputs(config: Path, lines: Sequence[list[str]]) -> None:
    """Let the experiments of networks with cached outputs wait for the first that computes them."""
    networks, firsts = read_yaml(config).get("networks") or {}, dict[tuple[str, str], str]()
    for one, *_ in lines:
        task, network, row = one.split("/")[-4:-1]
        model = (networks.get(network) or {}).get("model") or {}
        if model.get("cache_frozen") and f".{SERVER_CLIPS}=" not in row:
            firsts.setdefault((task, network), one)
    for line in lines:
        task, network = line[0].split("/")[-4:-2]
        if (first := firsts.get((task, network), line[0])) != line[0]:
            line[1] = first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("exp", metavar="EXP")
    parser.add_argument("dump", metavar="DUMP")
    for name in ("--tasks", "--networks", "--methods"):
        parser.add_argument(name, type=str.split, required=True)
    default = "default: 0 1 2, or all seeds of a grid"
    parser.add_argument("--seeds", type=str.split, default=[], help=default)
    parser.add_argument("--config", type=Path, metavar="YAML", help="of the experiments")
    has = "a configuration whose section grid, if it has one, has the rows"
    parser.add_argument("--grid", type=Path, metavar="YAML", help=has)
    has_alone = "sizes of the sets of a server that trains alone"
    parser.add_argument("--ablations", choices=("true", "clips", "false"), default="false")
    parser.add_argument("--server-clips", type=sizes, default=[], metavar="N,N,...", help=has_alone)
    parser.add_argument("--landscape-clips", type=int, default=0, help="0: no figure 4")
    parser.add_argument("--rounds", default="", help="of each row without its own; default: YAML's")
    parser.add_argument("--pretrained", default="", help="folder of the networks' model, if any")
    options = parser.parse_args()
    with exit_with_message("experiments.py"):
        lines = [*experiments(options)]
        check_figure_4(options, lines)
        if options.config:
            await_outputs(options.config, lines)
        for line in lines:
            print("\t".join(line))


if __name__ == "__main__":
    main()
