#!/usr/bin/env python3
"""Print the list of experiments, for utils/waves.py: tasks x networks x methods x seeds, ablations.

    experiments.py EXP DUMP --seeds "0 1" --tasks keywords --networks dscnn --methods "fedavg alt"
        [--config YAML] [--grid YAML] [--ablations clips|true] [--server-clips 25,67]
        [--landscape-clips 100] [--rounds 6] [--pretrained FOLDER]

A line is an experiment's folder, the experiment that it waits for, "-" if none, and options of
`fedtools init`, separated by tabs. If a network of --config caches the outputs of frozen layers,
the first experiment on all clips computes them, and the others wait for it: otherwise all would
load the pretrained model. The script fails if centralised training is among the methods, but fewer
than two clients have --landscape-clips clips of the last task: figure 4 could not be drawn, and it
is better to know that before hours of training.

If the YAML of --grid has a section grid, this has the rows of each network and the seeds of each
row. The list then has those of them that the other options select, and no ablations:

    grid:
      transformer:
        fedavg: 0 1 2 3 4
        fedavg.rounds=450: 0 1 2
        alo.private_steps=50,adversarial=0.1: 0

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from options import OF_EXPERIMENT, ROW, SERVER_CLIPS, changes_of, server_set, sizes

from fedtools.core.config import option_error, read_yaml, unknown
from fedtools.core.errors import UserError, exit_with_message
from fedtools.data.clips import Clips, read_classes

VARIED = {
    "smoothing": ("0.0", "0.1", "0.3", "0.5"),
    "adversarial": ("0.0", "0.0001", "0.01", "0.1"),
}


def line(options: argparse.Namespace, task: str, network: str, row: str, seed: str) -> list[str]:
    """Return the line of a row's experiment: a method, and options changed from the config's."""
    data = f"{options.dump}/{task}"
    match = ROW.fullmatch(row)
    assert match
    method, *changed = match.groups(default="")
    changes = dict(changes_of(*changed))
    alone = changes.pop(SERVER_CLIPS, "")
    words = ["--method", method, "--seed", seed]
    for split in ("train", "valid", "test"):
        of = server_set(alone) if alone and split == "train" else split
        words += ["--data", f"{split}={data}/{of}"]
    sections = [f"networks.{network}", f"methods.{method}", of_task(data, method)]
    for section in [*sections, "baseline?"] if alone else sections:
        words += ["--section", section]
    for option, value in changes.items():
        section = "" if option in OF_EXPERIMENT else "method_conf."
        words += ["--set", f"{section}{option}={value}"]
        if option == "conserve":
            # With a base ratio of 0, the method solves for the ratio that conserves.
            words += ["--set", "method_conf.base_ratio=0.0"]
    if options.rounds and "rounds" not in changes:
        words += ["--set", f"rounds={options.rounds}"]
    if options.pretrained:
        words += ["--set", f"model.path={options.pretrained}"]
    return [f"{options.exp}/{task}/{network}/{row}/seed{seed}", "-", *words]


def of_task(data: str, method: str) -> str:
    """Return the optional section of a method's options for a task's number of classes."""
    return f"tasks.{len(read_classes(Path(data) / 'train' / 'classes.txt'))}.{method}?"


def rows_of(path: Path) -> dict[str, dict[str, list[str]]]:
    """Read network -> row -> seeds from the section grid of a YAML; return {} without one.

    Raises:
        UserError: if the section is not of that form.
    """
    content, found = read_yaml(path), dict[str, dict[str, list[str]]]()
    section = content.get("grid") or {}
    form = "write network: {method.option=value: 0 1 2}"
    if not isinstance(section, dict):
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


def chosen_rows(
    options: argparse.Namespace, rows: Mapping[str, Mapping[str, Sequence[str]]]
) -> Iterator[list[str]]:
    """Yield the experiments of those rows of a grid that the options select."""
    for task in options.tasks:
        for network in options.networks:
            for row, seeds in rows.get(network, {}).items():
                if row.partition(".")[0] in options.methods:
                    for seed in seeds:
                        if seed in (options.seeds or seeds):
                            yield line(options, task, network, row, seed)


def grid(options: argparse.Namespace) -> Iterator[list[str]]:
    alone = [f"centralized.{SERVER_CLIPS}={clips}" for clips in options.server_clips]
    for task in options.tasks:
        for network in options.networks:
            for method in [*alone, *options.methods]:
                for seed in options.seeds:
                    yield line(options, task, network, method, seed)


def ablations(options: argparse.Namespace) -> Iterator[list[str]]:
    first = options.tasks[0], options.seeds[0]
    for network in options.networks:
        if options.ablations == "true" and "fedkws_ui" in options.methods:
            for name, values in VARIED.items() if network in ("dscnn", "resnet") else ():
                for value in values:
                    yield line(options, first[0], network, f"fedkws_ui.{name}={value}", first[1])
        for task in options.tasks if "alt" in options.methods else ():
            for seed in options.seeds:
                yield line(options, task, network, "alt.conserve=clips", seed)


def check_figure_4(options: argparse.Namespace, lines: Sequence[Sequence[str]]) -> None:
    """Raise `UserError` if figure 4 is to be drawn, but fewer than two clients have the clips.

    It is drawn if the lines have a centralised model of the last task.
    """
    last = options.tasks[-1]
    starts = f"{options.exp}/{last}/"
    drawn = any(path.startswith(starts) and "/centralized/" in path for path, *_ in lines)
    if not drawn or not options.landscape_clips:
        return
    folder = Path(options.dump) / last / "train"
    enough = int((Clips.read(folder).sizes >= options.landscape_clips).sum())
    if enough < 2:
        wanted = f"two clients with {options.landscape_clips} clips"
        remedy = "give a smaller --landscape_clips"
        raise UserError(f"figure 4 needs {wanted}, but there are {enough}", remedy=remedy)


def await_outputs(config: Path, lines: Sequence[list[str]]) -> None:
    """Let the experiments of networks with cached outputs wait for the first that computes them."""
    networks, firsts = read_yaml(config).get("networks") or {}, dict[tuple[str, str], str]()
    for folder, *_ in lines:
        task, network, row = Path(folder).parts[-4:-1]
        model = (networks.get(network) or {}).get("model") or {}
        if model.get("cache_frozen") and f".{SERVER_CLIPS}=" not in row:
            firsts.setdefault((task, network), folder)
    for words in lines:
        task, network = Path(words[0]).parts[-4:-2]
        first = firsts.get((task, network), words[0])
        words[1] = "-" if words[0] == first else first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("exp", metavar="EXP")
    parser.add_argument("dump", metavar="DUMP")
    for name in ("tasks", "networks", "methods"):
        parser.add_argument(f"--{name}", type=str.split, required=True)
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
        if rows := rows_of(options.grid) if options.grid else {}:
            lines = [*chosen_rows(options, rows)]
        else:
            options.seeds = options.seeds or ["0", "1", "2"]
            lines = [*grid(options)]
            if options.ablations != "false":
                lines += ablations(options)
        check_figure_4(options, lines)
        if options.config:
            await_outputs(options.config, lines)
        for words in lines:
            print("\t".join(words))


if __name__ == "__main__":
    main()
