"""The systems of a run, their variants, and what they are called.

A system is a method with variants, "decouplefl+cnn+sit": the configuration's sections
methods.decouplefl, variants.cnn and variants.sit, laid over the rest in this order.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cached_property

from fedtools.files.config import lookup, read_yaml
from fedtools.files.errors import UserError
from fedtools.files.sections import Newcomers
from fedtools.models.pretrained.options import is_seq2seq

LABELS = ("transcripts", "continuous", "fixed")
# What the server's stage 2 is trained on, in place of a teacher's labels.
SERVER_LABELS = ("+server_beam", "+server_transcripts")
# Methods whose clients have an extractor of their own.
WITH_EXTRACTOR = ("fedextract", "decouplefl", "joint")


class UsageError(Exception):
    """Options that do not go together, in one line."""


def method_of(system: str) -> str:
    """The method's part of a system's name."""
    return system.partition("+")[0]


def variants_of(system: str) -> list[str]:
    """The names of a system's variants."""
    return system.split("+")[1:]


def title(system: str) -> str:
    """What a system is called in tables: its method's title, which {} stands for, and variants."""
    return "".join(["{}", *(f", {one.replace('_', ' ')}" for one in variants_of(system))])


def check_methods(names: Iterable[str]) -> None:
    """Insist that methods, also those of $FEDTOOLS_PATH, can train speech recognition."""
    command = ["fedtools", "methods", "--task", "asr", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"--methods: {done.stderr.strip().removeprefix('fedtools: ')}")


def paths(exp: str, systems: Iterable[str], seed: str) -> list[tuple[str, str]]:
    """Each system's name and folder, of one seed."""
    return [(system, f"{exp}/{system}/seed{seed}") for system in systems]


class Systems:
    """The systems that options of run.sh ask for; `UsageError` if they do not go together.

    Attributes:
        options: as `add_options` declares them.
        labels: what clients train on.
        own_labels: what the configuration says of it; a system of these has no variant for them.
        main: those of --methods, with the variants of other options.
        all: these and those of further tables, each once.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.own_labels = str(lookup(options.config, "training.labels"))
        self.labels = options.labels or self.own_labels
        if self.labels not in LABELS:
            raise UsageError(f"--labels: '{self.labels}' is not of the form {'|'.join(LABELS)}")
        check_methods(map(method_of, options.methods))
        self.main = [self._chosen(method) for method in options.methods]
        further = [system for table in options.tables for system in self.of_table[table]]
        self.all = list(dict.fromkeys([*self.main, *further]))
        self._check_main()
        self._check_clients()
        self._check_variants()

    def labelled(self, labels: str) -> str:
        """The variant of a system that is trained on such labels; none for the default."""
        return "" if labels == self.own_labels else f"+{labels}"

    def unlabelled(self, system: str) -> str:
        """A system's name without the labels that all of --methods are trained on."""
        return system.removesuffix(self.labelled(self.labels))

    @cached_property
    def of_table(self) -> dict[str, list[str]]:
        """The systems of the paper's further tables, and of one of its stage 2."""
        end = self.labelled(self.labels)
        return {
            "2": [f"centralized{self.labelled(labels)}" for labels in ("fixed", "continuous")],
            "4": [
                f"{name}{end}"
                for name in ("decouplefl", "decouplefl+no_stage1", "decouplefl+no_stage2", "joint")
            ],
            "5": [f"decouplefl{variant}{end}" for variant in ("+cnn", "+cnn+sit", "", "+sit")],
            "stage2": [f"decouplefl{variant}{end}" for variant in ("", *SERVER_LABELS)],
        }

    @property
    def seq2seq(self) -> bool:
        """Whether models have a decoder of their own, as Whisper."""
        return is_seq2seq(read_yaml(self.options.config).get("model", {}))

    @cached_property
    def sending(self) -> list[str]:
        """Those whose clients send features."""
        mine = [system for system in self.all if method_of(system) == "decouplefl"]
        return [system for system in mine if "no_stage2" not in variants_of(system)]

    def _chosen(self, method: str) -> str:
        """The system of a word of --methods, with the variants that other options add to it."""
        options, name = self.options, method_of(method)
        labels = [variant for variant in variants_of(method) if variant in LABELS]
        if labels and not method.endswith(f"+{labels[0]}"):
            raise UsageError(f"--methods {method}: labels stand behind all other variants")
        if labels and (options.sit or options.extractor):
            raise UsageError(f"--methods {method}: give +sit and +cnn by name where labels are")
        if options.extractor and name in WITH_EXTRACTOR:
            method += f"+{options.extractor}"
        if options.sit and name == "decouplefl":
            method += "+sit"
        return method if labels else method + self.labelled(self.labels)

    def _has(self, variant: str, systems: Iterable[str]) -> bool:
        return any(variant in variants_of(system) for system in systems)

    def _check_main(self) -> None:
        options = self.options
        if options.extractor and not self._has(options.extractor, self.main):
            problem = f"--extractor {options.extractor}: none of --methods has an extractor"
            raise UsageError(problem)
        if options.sit and not self._has("sit", self.main):
            raise UsageError("--sit true: no decouplefl among --methods")
        if self.labels == "fixed" and self._has("server_transcripts", self.all):
            problem = "data of --labels fixed have no transcripts for server_transcripts"
            raise UsageError(f"{problem} (--methods, --tables stage2)")
        if options.attacks and not self.sending:
            problem = "no DecoupleFL among --methods and --tables that sends features"
            raise UsageError(f"--attacks true: {problem}")

    def _check_clients(self) -> None:
        """Refuse what clients that are speakers cannot do."""
        seconds = self.options.newcomer_seconds
        number = re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", seconds)
        if not number or float(seconds) < 0.1:
            raise UsageError(f"--newcomer_seconds: '{seconds}' is not a number from 0.1 on")
        if self.options.clients == "accent":
            return
        problem = ""
        if self._has("fixed", self.all):
            problem = "newcomers have no fixed labels"
        elif any(system.startswith("joint") for system in self.all):
            problem = "joint (--methods, --tables 4) holds every client's model in memory"
        elif self._has("sit", self.all):
            problem = "a client of one speaker has none to be invariant to"
            problem += " (--sit true, +sit, --tables 5)"
        if problem:
            raise UsageError(f"--clients speaker: {problem}")

    def _check_variants(self) -> None:
        variants = [name for system in self.all for name in variants_of(system)]
        # Of fixed labels, transcripts are made.
        for name in dict.fromkeys("transcripts" if one == "fixed" else one for one in variants):
            try:
                lookup(self.options.config, f"variants.{name}")
            except UserError as error:
                raise UsageError(f"unknown variant: {error}") from None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of run.sh that systems depend on."""

    def words(text: str) -> list[str]:
        return text.split()

    parser.add_argument("--exp", required=True, help="the folder of the experiments")
    parser.add_argument("--config", required=True, help="a YAML")
    parser.add_argument("--seeds", type=words, required=True)
    parser.add_argument("--methods", type=words, required=True)
    parser.add_argument("--clients", choices=("accent", "speaker"), default="accent")
    parser.add_argument("--labels", default="", help="default: the configuration's")
    parser.add_argument("--extractor", default="")
    parser.add_argument("--sit", type="true".__eq__, default=False)
    parser.add_argument("--tables", type=words, default=[])
    parser.add_argument("--attacks", type="true".__eq__, default=False)
    parser.add_argument("--newcomer-seconds", default=f"{Newcomers.seconds:g}")


def read(parser: argparse.ArgumentParser) -> tuple[Systems, argparse.Namespace]:
    """Read a command line; options that do not go together end the program with status 2."""
    add_options(parser)
    options = parser.parse_args()
    try:
        return Systems(options), options
    except UsageError as error:
        print(f"run.sh: {error}", file=sys.stderr)
        sys.exit(2)
