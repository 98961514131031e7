"""A summary in plain text: its width, its colours, and megabytes."""

from __future__ import annotations

import io
import os
import re

import pytest

from fedtools.report.results import Interval
from fedtools.report.summary import Line, Summary, megabytes, on_terminal
from fedtools.score.crossed import Difference

LONG = "FMP, T = 10, as in table 4, epsilon 8 for one utterance; of all seeds 24 for one utterance"
LINES = [
    Line("First pass", Interval(33.84, 33.1, 34.5), None, 0, "-"),
    Line("NNLM", Interval(100.0, None, None), Difference(-0.5, -1.6, 0.5, 0.3), 20.7e9, "5 %"),
    Line(LONG, Interval(31.3, 30.3, 32.3), Difference(-2.5, -3.4, -1.7, 0.001), 1234, "100 %"),
]


def test_it_fits_into_100_columns():
    lines = Summary("WER", LINES).text().splitlines()
    assert max(map(len, lines)) <= 100
    assert re.split("  +", lines[1]) == ["First pass", "33.8 [33.1, 34.5]", "-", "-", "-"]
    assert re.split("  +", lines[2]) == ["NNLM", "100.0", "-0.5 [-1.6, 0.5]", "20700", "5 %"]
    assert re.split("  +", lines[3])[1:] == [
        "31.3 [30.3, 32.3]", "-2.5 [-3.4, -1.7]", "0.00123", "100 %",
    ]  # fmt: skip
    # The name goes on in lines of its own.
    name = [lines[3].split("  ")[0], *(line.strip() for line in lines[4:])]
    assert len(name) > 1 and " ".join(name) == LONG


def test_colours_are_for_terminals_alone(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    summary = Summary("WER", LINES)
    plain = on_terminal("Toy (mini)", summary, io.StringIO())
    assert plain.startswith("Toy (mini)\n\nMethod") and "\033" not in plain and "*" not in plain
    _, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        coloured = on_terminal("Toy (mini)", summary, terminal)
        # What is significantly better, and the heading; alignment does not change.
        assert re.findall(r"\033\[1m(.+?)\033\[0m", coloured) == ["Toy (mini)", "-2.5 [-3.4, -1.7]"]
        assert re.sub(r"\033\[[01]m", "", coloured) == plain
        monkeypatch.setenv("NO_COLOR", "1")
        assert on_terminal("Toy (mini)", summary, terminal) == plain


def test_accuracy_is_better_if_higher():
    up = Difference(2.5, 1.7, 3.4, 0.001)
    lines = [LINES[0], Line("A", LINES[0].rate, up, 0, "-")]
    assert "**2.5 [1.7, 3.4]**" in Summary("Accuracy", lines, 1).markdown()
    assert "**" not in Summary("WER", lines).markdown()


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "-"),
        (1, "0.00000100"),
        (999.6e3, "1.00"),
        (16e6, "16.0"),
        (150e6, "150"),
        (2e12, "2000000"),
    ],
)
def test_megabytes_have_three_digits(size, text):
    assert megabytes(size) == text
