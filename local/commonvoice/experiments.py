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
from collections.abc import Iterator

from systems import Systems, method_of, paths, read, title, variants_of

from fedtools.core.errors import exit_with_message


def experiments(systems: Systems, options: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the lines of the list."""
    for seed in options.seeds:
        ((_, baseline),) = paths(options.exp, ["baseline"], seed)
        yield [
            *(baseline, "-"),
            *init(options, seed, "baseline", "centralized", options.server_train, "server_valid"),
            *rounds_of(options, "baseline"),
            *(["--section", f"variants.{options.baseline}"] if options.baseline else []),
        ]
        for system, path in paths(options.exp, systems.all, seed):
            method, train, sections = method_of(system), options.train, []
            for variant in variants_of(system):
                # The baseline's fixed labels are the transcripts of another data directory.
                if variant == "fixed":
                    train, variant = f"{train}_fixed_seed{seed}", "transcripts"
                sections += ["--section", f"variants.{variant}"]
            begun = init(options, seed, f"methods.{method}?", method, train, "valid")
            if "server_beam" in variants_of(system) and not systems.seq2seq:
                # Whisper needs neither a language model nor weights.
                begun += ["--asset", f"lm={options.exp}/lm", "--asset", f"weights={baseline}"]
            start = ["--start", f"{baseline}/model.safetensors"]
            yield [path, baseline, *begun, *start, *sections, *rounds_of(options, system)]


def init(
    options: argparse.Namespace, seed: str, section: str, method: str, train: str, valid: str
) -> list[str]:
    """Return the options of `fedtools init` that every experiment has."""
    words = ["--section", section, "--method", method, "--seed", seed]
    words += ["--data", f"train={options.data}/{train}", "--data", f"valid={options.data}/{valid}"]
    if options.pretrained:
        words += ["--set", f"model.path={options.pretrained}"]
    return [*words, "--asset", f"tokens={options.tokens or f'{options.exp}/tokens'}"]


def rounds_of(options: argparse.Namespace, system: str) -> list[str]:
    """Return what sets the rounds of an experiment; DecoupleFL divides them between its stages."""
    if not options.rounds:
        return []
    words = ["--set", f"rounds={options.rounds}"]
    if method_of(system) == "decouplefl":
        shares = {"no_stage1": 0, "no_stage2": options.rounds}
        halves = options.rounds // 2
        first = next((shares[one] for one in variants_of(system) if one in shares), halves)
        words += ["--set", f"method_conf.stage1={first}"]
        words += ["--set", f"method_conf.stage2={options.rounds - first}"]
    return words


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
        for words in parts[options.what](systems, options):
            print("\t".join(words))


if __name__ == "__main__":
    main()
