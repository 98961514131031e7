"""The systems of a run, their variants, and their names.

A system is a method with variants, "decouplefl+cnn+sit": the configuration's sections
methods.decouplefl, variants.cnn and variants.sit, which override the rest in this order.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from fedtools.core.config import lookup, read_yaml
from fedtools.core.errors import UserError
from fedtools.core.recipe_sections import Newcomers
from fedtools.models.pretrained.options import is_seq2seq

# resolve() because the folder may be a link.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from grid import folder

LABELS = ("transcripts", "continuous", "fixed")
# Variants whose stage 2 at the server is trained on labels other than a teacher's.
SERVER_LABELS = ("+server_beam", "+server_transcripts")
# Methods whose clients have an extractor of their own.
WITH_EXTRACTOR = ("fedextract", "decouplefl", "joint")


class UsageError(Exception):
    """An invalid combination of options, described in one line."""


def method_of(system: str) -> str:
    """Return the method's part of a system's name."""
    return system.partition("+")[0]


def variants_of(system: str) -> list[str]:
    """Return the names of a system's variants."""
    return system.split("+")[1:]


def sections_of(system: str) -> list[str]:
    """Return the sections of a system's variants; fixed labels are stored as transcripts."""
    names = ["transcripts" if one == "fixed" else one for one in variants_of(system)]
    return [f"variants.{name}" for name in names]


def title(system: str) -> str:
    """Return a system's name in tables: {} for the method's title, and the variants."""
    return "".join(["{}", *(f", {one.replace('_', ' ')}" for one in variants_of(system))])


def check_methods(names: Iterable[str]) -> None:
    """Raise `UsageError` unless all methods, also of $FEDTOOLS_PATH, train speech recognition."""
    command = ["fedtools", "methods", "--task", "asr", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"--methods: {done.stderr.strip().removeprefix('fedtools: ')}")


def paths(exp: str, systems: Iterable[str], seed: str) -> list[tuple[str, str]]:
    """Return each system's name and its folder of a seed."""
    return [(system, folder(exp, system, seed=seed)) for system in systems]


class Systems:
    """The systems that run.sh's options select; raises `UsageError` for an invalid combination.

    Attributes:
        options: as `read` declares them.
        labels: the labels that clients train on.
        own_labels: the configuration's labels; systems trained on these have no variant for them.
        main: the systems of --methods, with the variants of other options.
        all: the systems of `main` and of further tables, each once.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.own_labels = str(lookup(options.config, "training.labels"))
        self.labels = options.labels or self.own_labels
        if self.labels not in LABELS:
            raise UsageError(f"--labels: '{self.labels}' is not of the form {'|'.join(LABELS)}")
        check_methods(map(method_of, options.methods))
        self.main = [self._chosen(method) for method in options.methods]
        if unknown := [table for table in options.tables if table not in self.of_table]:
            raise UsageError(
                f"--tables: '{unknown[0]}' is not of the form {'|'.join(self.of_table)}"
            )
        further = [system for table in options.tables for system in self.of_table[table]]
        self.all = list(dict.fromkeys([*self.main, *further]))
        for is_wrong, problem in self._problems():
            if is_wrong:
                raise UsageError(problem)
        for section in [one for system in self.all for one in sections_of(system)]:
            try:
                lookup(options.config, section)
            except UserError as error:
                raise UsageError(f"unknown variant: {error}") from None

    def labelled(self, labels: str) -> str:
        """Return the variant for a kind of labels, "" for the configuration's."""
        return "" if labels == self.own_labels else f"+{labels}"

    def unlabelled(self, system: str) -> str:
        """Return a system's name without the labels that all of --methods are trained on."""
        return system.removesuffix(self.labelled(self.labels))

    @cached_property
    def of_table(self) -> dict[str, list[str]]:
        """Return the systems of the paper's further tables, and of the table on stage 2."""
        end = self.labelled(self.labels)
        return {
            "2": [f"centralized{self.labelled(labels)}" for labels in ("fixed", "continuous")],
            "4": [
                *(f"decouplefl{variant}{end}" for variant in ("", "+no_stage1", "+no_stage2")),
                f"joint{end}",
            ],
            "5": [f"decouplefl{variant}{end}" for variant in ("+cnn", "+cnn+sit", "", "+sit")],
            "stage2": [f"decouplefl{variant}{end}" for variant in ("", *SERVER_LABELS)],
        }

    @property
    def seq2seq(self) -> bool:
        """Return whether models have their own decoder, like Whisper."""
        return is_seq2seq(read_yaml(self.options.config).get("model", {}))

    @cached_property
    def sending(self) -> list[str]:
        """Return the systems whose clients send features."""
        mine = [system for system in self.all if method_of(system) == "decouplefl"]
        return [system for system in mine if "no_stage2" not in variants_of(system)]

    def _chosen(self, method: str) -> str:
        """Return the system for a word of --methods, with the variants that other options add."""
        options, name = self.options, method_of(method)
        labels = [variant for variant in variants_of(method) if variant in LABELS]
        if labels and not method.endswith(f"+{labels[0]}"):
            raise UsageError(f"--methods {method}: labels must come after all other variants")
        if labels and (options.sit or options.extractor):
            raise UsageError(f"--methods {method}: with labels here, add +sit and +cnn here too")
        if options.extractor and name in WITH_EXTRACTOR:
            method += f"+{options.extractor}"
        if options.sit and name == "decouplefl":
            method += "+sit"
        return method if labels else method + self.labelled(self.labels)

    def _has(self, variant: str, systems: Iterable[str]) -> bool:
        return any(variant in variants_of(system) for system in systems)

    def _problems(self) -> Iterator[tuple[bool, str]]:
        """Yield whether a combination of options is invalid, and why."""
        options = self.options
        missing = options.extractor and not self._has(options.extractor, self.main)
        yield missing, f"--extractor {options.extractor}: none of --methods has an extractor"
        missing = options.sit and not self._has("sit", self.main)
        yield missing, "--sit true: no decouplefl among --methods"
        problem = "the data of --labels fixed has no transcripts for server_transcripts"
        fixed = self.labels == "fixed" and self._has("server_transcripts", self.all)
        yield fixed, f"{problem} (--methods, --tables stage2)"
        problem = "no system of --methods and --tables sends features (DecoupleFL does)"
        yield options.attacks and not self.sending, f"--attacks true: {problem}"
        seconds = options.newcomer_seconds
        number = re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", seconds)
        problem = f"--newcomer_seconds: '{seconds}' is not a number of at least 0.1"
        yield not number or float(seconds) < 0.1, problem
        if options.clients == "speaker":
            start = "--clients speaker: "
            yield self._has("fixed", self.all), f"{start}newcomers have no fixed labels"
            problem = "joint (--methods, --tables 4) holds every client's model in memory"
            yield any(one.startswith("joint") for one in self.all), start + problem
            problem = "a client of one speaker has no other speaker to be invariant to"
            yield self._has("sit", self.all), f"{start}{problem} (--sit true, +sit, --tables 5)"


def read(parser: argparse.ArgumentParser) -> tuple[Systems, argparse.Namespace]:
    """Read the command line; exit with status 2 on an invalid combination of options."""
    add = parser.add_argument
    add("--exp", required=True, help="the directory of the experiments")
    add("--config", required=True, help="the YAML configuration")
    add("--seeds", type=str.split, required=True)
    add("--methods", type=str.split, required=True)
    add("--clients", choices=("accent", "speaker"), default="accent")
    add("--labels", default="", help="default: the configuration's")
    add("--extractor", default="")
    add("--sit", type="true".__eq__, default=False)
    add("--tables", type=str.split, default=[])
    add("--attacks", type="true".__eq__, default=False)
    add("--newcomer-seconds", default=f"{Newcomers.seconds:g}")
    options = parser.parse_args()
    try:
        return Systems(options), options
    except UsageError as error:
        print(f"run.sh: {error}", file=sys.stderr)
        sys.exit(2)
