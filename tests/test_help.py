"""Texts of `--help`: one line per command, its inputs and outputs, and an example."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import typer
from commands import ROOT, fedtools, inside, run

GROUPS = [
    "Federation",
    "Data",
    "Language models",
    "Decoding and scoring",
    "Rescoring",
    "Privacy",
    "Attacks",
    "Reports",
]


def commands() -> dict[str, typer.core.TyperCommand]:
    """Return every command by its words, as registered in typer."""
    inside("--version").ok()
    from fedtools.cli.app import app

    def walk(group: typer.core.TyperGroup, before: str) -> Iterator[tuple[str, object]]:
        for name, one in group.commands.items():
            if hasattr(one, "commands"):
                yield from walk(one, f"{before}{name} ")
            else:
                yield before + name, one

    return dict(walk(typer.main.get_command(app), ""))


COMMANDS = commands()


def summary(name: str) -> str:
    """Return the first line of a command's docstring."""
    return COMMANDS[name].callback.__doc__.partition("\n")[0]


def paragraphs(name: str) -> list[str]:
    """Return the paragraphs of a command's docstring, without line breaks."""
    said = inside(*name.split(), "--help").ok().out
    return [" ".join(part.split()) for part in said.split("\n\n")]


def example(said: str) -> tuple[str, list[str]]:
    """Return the folder of the example, and its words as split by a shell."""
    place, line = re.search(r"^Example in (\S+):\n(.*)\Z", said, re.M | re.S).groups()
    return place, run("bash", "-c", f"printf '%s\\0' {line}").ok().out.split("\0")[:-1]


@pytest.fixture(params=[None, "1"])
def terminal(request, monkeypatch):
    """Set 80 columns; with and without rich."""
    monkeypatch.setenv("COLUMNS", "80")
    if request.param:
        monkeypatch.setenv("TYPER_USE_RICH", "0")


def test_commands_are_listed_by_what_they_do_each_in_a_line_that_is_not_cut(terminal):
    lines = fedtools("--help").ok().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith("...") and "Usage" not in line]
    heads = [line[:-1] for line in lines if re.fullmatch(r"\S.*:", line)]
    assert heads == ["Options", *GROUPS]
    listed = lines[lines.index("Federation:") :]
    rows = dict(re.split(r"  +", line[2:]) for line in listed if line.startswith("  "))
    assert rows.keys() == COMMANDS.keys()
    for name, said in rows.items():
        assert summary(name) == f"{said}.", name
    assert all(name.startswith("attack ") for name in part(listed, "Attacks"))
    assert part(listed, "Reports") == ["report", "show"]


def part(lines: list[str], head: str) -> list[str]:
    """Return the commands below a heading."""
    below = lines[lines.index(f"{head}:") + 1 :]
    below = below[: below.index("")] if "" in below else below
    return [re.split(r"  +", line[2:])[0] for line in below]


def test_a_narrow_terminal_wraps_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "52")
    said = inside("--help").ok().out
    assert max(map(len, said.splitlines())) <= 52
    for name in COMMANDS:
        # Lines may also break after a hyphen.
        assert "".join(summary(name).rstrip(".").split()) in "".join(said.split()), name


def test_a_group_within_the_group_lists_its_own():
    said = inside("attack", "--help").ok().out
    assert part(said.splitlines(), "Attacks") == [
        name.removeprefix("attack ") for name in COMMANDS if name.startswith("attack ")
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_reads_and_writes(name):
    said = paragraphs(name)
    reads, writes = (
        [one for one in said if one.startswith(word)] for word in ("Reads: ", "Writes: ")
    )
    assert len(reads) == len(writes) == 1
    named = reads[0] + writes[0]
    assert named.count(".") >= 2
    # Every typed file and folder is listed there by its name.
    command = COMMANDS[name]
    kinds = command.callback.__annotations__
    typed = {one: kinds[one.name] for one in command.params if one.name in kinds}
    for one in (one for one, kind in typed.items() if "Path" in kind):
        if one.param_type_name == "option":
            words = one.opts
        else:
            words = re.findall(r"[A-Z_]+", one.metavar or one.name.upper())
        for word in words:
            assert re.search(rf"(?<![\w-]){word}(?![\w-])", named), f"{word} in {named!r}"


@pytest.mark.parametrize("name", COMMANDS)
def test_its_example_is_one_that_the_command_takes(name, monkeypatch):
    command, shown = COMMANDS[name], []
    for columns in ("60", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        shown.append(example(inside(*name.split(), "--help").ok().out))
    # The words are the same however the line is broken.
    assert shown[0] == shown[1]
    place, words = shown[0]
    assert words[: 1 + len(name.split())] == ["fedtools", *name.split()]
    arguments = words[1 + len(name.split()) :]
    options = {word for one in command.params for word in one.opts if word.startswith("--")}
    assert {word for word in arguments if word.startswith("--")} <= options
    with command.make_context(name, list(arguments)) as context:
        assert not context.args
    assert (ROOT / place / "run.sh").is_file()
    for word in arguments:
        if word.startswith("conf/"):
            assert (ROOT / place / word).is_file(), word


@pytest.mark.parametrize(("name", "said"), [("config", "40\n3\n"), ("methods", "FedAvg")])
def test_examples_that_need_no_data_work(name, said, monkeypatch):
    place, words = example(inside(name, "--help").ok().out)
    monkeypatch.chdir(ROOT / place)
    assert said in inside(*words[1:]).ok().out


def test_what_the_example_of_a_command_lacks_is_wrong_usage():
    """The check of examples above can fail."""
    _, words = example(inside("init", "--help").ok().out)
    with pytest.raises(Exception, match="method"):
        COMMANDS["init"].make_context(
            "init", [w for w in words[2:] if w not in ("--method", "fedavg")]
        )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_and_option_is_explained(name):
    assert not [one.name for one in COMMANDS[name].params if not one.help]
