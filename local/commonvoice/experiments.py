#!/usr/bin/env python3
"""Print a run's experiments, one a line, the words of a line separated by tabs.

    experiments.py all --exp EXP --config YAML --seeds "0 1" --methods "fedavg decouplefl" [...]

all      every experiment, for utils/waves.py: its folder, the experiment it waits for, and the
         options of `fedtools init`: the baseline of each seed, and every system, which starts from
         it
cross    the experiments of --methods, for `fedtools cross`: NAME=EXP
sending  the experiments whose clients send features: wave, folder, name, and name of the picture;
         the first with a given baseline and extractor is in wave 1, and its decoder is reused by
         the others
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from systems import Systems, method_of, paths, read, sections_of, title, variants_of

from fedtools.core.errors import exit_with_message

# resolve() because the folder may be a link.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from grid import folder, words


def experiments(systems: Systems, options: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the lines of the list."""
    for seed in options.seeds:
        baseline = folder(options.exp, "baseline", seed=seed)
        begun = init(options, seed, "baseline", "centralized", options.server_train, "server_valid")
        variants = [f"variants.{options.baseline}"] if options.baseline else []
        yield [baseline, "-", *begun, *rounds(options, "baseline"), *words(section=variants)]
        for system, path in paths(options.exp, systems.all, seed):
            method, variants, train = method_of(system), variants_of(system), options.train
            # The baseline's fixed labels are the transcripts of another data directory.
            if "fixed" in variants:
                train += f"_fixed_seed{seed}"
            begun = init(options, seed, f"methods.{method}?", method, train, "valid")
            if "server_beam" in variants and not systems.seq2seq:
                # Whisper needs neither a language model nor weights.
                begun += words(asset={"lm": f"{options.exp}/lm", "weights": baseline})
            begun += words(start=f"{baseline}/model.safetensors", section=sections_of(system))
            yield [path, baseline, *begun, *rounds(options, system)]


def init(
    options: argparse.Namespace, seed: str, section: str, method: str, train: str, valid: str
) -> list[str]:
    """Return the options of `fedtools init` that every experiment has."""
    data = {"train": f"{options.data}/{train}", "valid": f"{options.data}/{valid}"}
    model = {"model.path": options.pretrained} if options.pretrained else {}
    tokens = {"tokens": options.tokens or f"{options.exp}/tokens"}
    return words(section=section, method=method, seed=seed, data=data, set=model, asset=tokens)


def rounds(options: argparse.Namespace, system: str) -> list[str]:
    """Return what sets the rounds of an experiment; DecoupleFL divides them between its stages."""
    if not (total := options.rounds):
        return []
    settings = {"rounds": total}
    if method_of(system) == "decouplefl":
        shares = {"no_stage1": 0, "no_stage2": total}
        first = next((shares[one] for one in variants_of(system) if one in shares), total // 2)
        settings |= {"method_conf.stage1": first, "method_conf.stage2": total - first}
    return words(set=settings)


def cross(systems: Systems, options: argparse.Namespace) -> Iterator[list[str]]:
    for seed in options.seeds:
        for system, path in paths(options.exp, systems.main, seed):
            yield [f"{title(system)}={path}"]


def sending(systems: Systems, options: argparse.Namespace) -> Iterator[list[str]]:
    for seed in options.seeds:
        decoders = set()
        for system, path in paths(options.exp, systems.sending, seed):
            extractor = "cnn" in variants_of(system)
            wave = "2" if extractor in decoders else "1"
            decoders.add(extractor)
            name = ", ".join(["DecoupleFL", *variants_of(system)])
            yield [wave, path, name, system.replace("+", "-")]


def main() -> None:
    parts = {"all": experiments, "cross": cross, "sending": sending}
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=parts)
    parser.add_argument("--data", default="data", help="the folder of the data directories")
    parser.add_argument("--train", default="train", help="clients' data")
    parser.add_argument("--server-train", default="server_train", help="the baseline's data")
    parser.add_argument("--baseline", default="", help="the variant of the baseline, if any")
    parser.add_argument("--tokens", default="", help="default: the tokens of stage 3")
    parser.add_argument("--pretrained", default="", help="the folder of the model, if any")
    of_each = "of each experiment; default, and 0: the YAML's"
    parser.add_argument("--rounds", type=int, default=0, help=of_each)
    with exit_with_message("experiments.py"):
        systems, options = read(parser)
        for line in parts[options.what](systems, options):
            print("\t".join(line))


if __name__ == "__main__":
    main()
