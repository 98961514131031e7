#!/usr/bin/env python3
"""Print the list of experiments, for utils/waves.py: tasks x networks x methods x seeds, ablations.

    experiments.py EXP DUMP --seeds "0 1" --tasks keywords --networks dscnn --methods "fedavg alt"
        [--ablations clips|true] [--landscape-clips 100] [--pretrained FOLDER]

A line is an experiment's folder, "-" since none waits for another, and options of `fedtools init`,
separated by tabs. It fails where centralised training is among the methods, but fewer than two
clients have so many clips of the last task: figure 4 could not be drawn, and it is better to know
that before hours of training. Ablations are, of what is chosen,

    clips   ALT with as many clips a round as FedAvg, instead of as many steps: ALT gives steps to
            clients with many clips, so that as many steps are more clips
    true    the same, and FedKWS-UI with other values of mu and lambda (figure 3): for DSCNN and
            ResNet, on the first task, with the first seed
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from fedtools.files.clips import Clips, read_classes
from fedtools.files.errors import UserError, exit_with_message

VARIED = {
    "smoothing": ("0.0", "0.1", "0.3", "0.5"),
    "adversarial": ("0.0", "0.0001", "0.01", "0.1"),
}


def line(
    options: argparse.Namespace, task: str, network: str, method: str, seed: str, *settings: str
) -> list[str]:
    """An experiment; the first of its settings, if there are any, is in its folder's name."""
    data = f"{options.dump}/{task}"
    varied = f".{settings[0].removeprefix('method_conf.')}" if settings else ""
    told = ["--method", method, "--seed", seed]
    for split in ("train", "valid", "test"):
        told += ["--data", f"{split}={data}/{split}"]
    for section in (f"networks.{network}", f"methods.{method}", of_task(data, method)):
        told += ["--section", section]
    for setting in settings:
        told += ["--set", setting]
    if options.pretrained:
        told += ["--set", f"model.path={options.pretrained}"]
    return [f"{options.exp}/{task}/{network}/{method}{varied}/seed{seed}", "-", *told]


def of_task(data: str, method: str) -> str:
    """The section of a method's options for tasks of so many classes, if the YAML has one."""
    return f"tasks.{len(read_classes(Path(data) / 'train' / 'classes.txt'))}.{method}?"


def grid(options: argparse.Namespace) -> Iterator[list[str]]:
    for task in options.tasks:
        for network in options.networks:
            for method in options.methods:
                for seed in options.seeds:
                    yield line(options, task, network, method, seed)


def ablations(options: argparse.Namespace) -> Iterator[list[str]]:
    first = options.tasks[0], options.seeds[0]
    for network in options.networks:
        if options.ablations == "true" and "fedkws_ui" in options.methods:
            for name, values in VARIED.items() if network in ("dscnn", "resnet") else ():
                for value in values:
                    varied = f"method_conf.{name}={value}"
                    yield line(options, first[0], network, "fedkws_ui", first[1], varied)
        for task in options.tasks if "alt" in options.methods else ():
            for seed in options.seeds:
                settings = "method_conf.conserve=clips", "method_conf.base_ratio=0.0"
                yield line(options, task, network, "alt", seed, *settings)


def check_figure_4(options: argparse.Namespace) -> None:
    """Insist on two clients whose models figure 4 can lead to, where it is to be drawn."""
    folder = Path(options.dump) / options.tasks[-1] / "train"
    if "centralized" not in options.methods or not options.landscape_clips:
        return
    enough = int((Clips.read(folder).sizes >= options.landscape_clips).sum())
    if enough < 2:
        wanted = f"two clients of {options.landscape_clips} clips"
        remedy = "give a smaller --landscape_clips"
        raise UserError(f"figure 4 wants {wanted}, there are {enough}", remedy=remedy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("exp", metavar="EXP")
    parser.add_argument("dump", metavar="DUMP")
    for name in ("seeds", "tasks", "networks", "methods"):
        parser.add_argument(f"--{name}", type=str.split, required=True)
    parser.add_argument("--ablations", choices=("true", "clips", "false"), default="false")
    parser.add_argument("--landscape-clips", type=int, default=0, help="0: no figure 4")
    parser.add_argument("--pretrained", default="", help="Folder of the networks' model, if any.")
    options = parser.parse_args()
    with exit_with_message("experiments.py"):
        check_figure_4(options)
        lines = [*grid(options)]
        if options.ablations != "false":
            lines += ablations(options)
        for words in lines:
            print("\t".join(words))


if __name__ == "__main__":
    main()
