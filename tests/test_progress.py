"""Progress messages of long work on stderr without a terminal."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from fedtools.client.unit import Unit
from fedtools.core import progress


@pytest.fixture
def said(monkeypatch, capfd):
    """Return all progress messages, with no time between lines."""
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", -1.0)
    return lambda: re.sub(r"\d\d:\d\d", "TIME", capfd.readouterr().err)


def test_words(said):
    with progress.Count("work", 1000, "words", done=500) as bar:
        for words in (250, 100, 150):
            bar.advance(words)
        bar.say("done")
    # A line for each item except the last, after which nothing is left.
    assert said() == (
        "work: 75 % of 1000 words, TIME left\nwork: 85 % of 1000 words, TIME left\ndone\n"
    )


def test_a_collection(said):
    assert list(progress.counted("abc", "extract train", "utterances")) == ["a", "b", "c"]
    assert said() == (
        "extract train: 33 % of 3 utterances, TIME left\n"
        "extract train: 67 % of 3 utterances, TIME left\n"
    )


def test_steps(said):
    with progress.Progress("round 7, client au", 4, done=1) as bar:
        for loss in (1.2345, 0.5, 0.25):
            bar.advance(100, lambda loss=loss: loss)
    facts = [re.sub(r"\d+ x real", "N x real", line) for line in said().splitlines()]
    assert facts == [
        f"round 7, client au: step {step}/4, loss {loss}, N x real time, TIME left"
        for step, loss in ((2, "1.23"), (3, "0.5"))
    ]


def test_a_loss_that_is_not_shown_is_not_computed(capfd):
    with progress.Progress("round 7, client au", 2) as bar:
        bar.advance(100, lambda: pytest.fail("computed"))
    assert not capfd.readouterr().err


def test_a_training_is_named_by_its_experiment():
    where = {"experiment": "fedavg/seed0"}
    assert Unit(["au"], 7, 0, None, [], **where).title == "fedavg/seed0: round 7, au"
    assert Unit(["au", "in"], 7, 0, None, []).title == "round 7, au and 1 more"


def test_each_epoch_has_its_line(said):
    lines = progress.Lines("attack", "epoch", 3, first=2)
    for number, loss in ((2, "0.5"), (3, "0.25")):
        lines.done(number, f"loss {loss}")
    assert [re.sub(r"[\d.]+ s/", "S s/", line) for line in said().splitlines()] == [
        "attack: epoch 2/3, loss 0.5, S s/epoch, TIME left",
        "attack: epoch 3/3, loss 0.25, S s/epoch, TIME left",
    ]


def test_the_time_left_is_of_what_this_process_has_done(monkeypatch, capfd):
    now = iter([100.0, 110.0, 110.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    progress.Lines("attack", "epoch", 8, first=5).done(5)
    assert capfd.readouterr().err == "attack: epoch 5/8, 10.0 s/epoch, 00:30 left\n"
