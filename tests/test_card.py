"""The leakage card: its figures' source tables and their places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import inside
from PIL import Image

from fedtools.attack.membership.attack import COLUMNS as OF_MEMBERSHIP
from fedtools.attack.recovery.recovered import COLUMNS as OF_INVERSION
from fedtools.attack.speakers.attributes import COLUMNS as OF_ATTRIBUTES
from fedtools.attack.speakers.verify import COLUMNS
from fedtools.core.tables import read_tsv, write_tsv

RUN = Path(__file__).parents[1] / "egs" / "tedlium3" / "attack1"
DEFENCES = ("none", "noise=1", "keep=*.running_*")
ATTACKERS = ("ignorant", "lazy-informed", "semi-informed")


def row(columns, **cells):
    return {**dict.fromkeys(columns, "-"), **cells}


def trial(attack, defence, attacker, layer, scores, kind, rate):
    cells = {"attack": attack, "defence": defence, "attacker": attacker, "layer": layer}
    bounds = {"low": f"{rate - 1:.2f}", "high": f"{rate + 1:.2f}"}
    return row(COLUMNS, **cells, scores=scores, trials=kind, **{"EER%": f"{rate:.2f}"}, **bounds)


@pytest.fixture
def results(tmp_path):
    """Write tables of attacks with rates that identify their source."""
    for number, defence in enumerate(DEFENCES):
        folder = tmp_path / "attacks" / f"defence{number}"
        whose = ATTACKERS if number else ("-",)
        weights, first = [], []
        for index, attacker in enumerate(whose):
            for kind, step in (("easy", 0), ("same", 100), ("other", 200)):
                base = step + 10 * number + index
                weights += [
                    trial("weights", defence, attacker, "together", "regression", kind, base + 1),
                    trial("weights", defence, attacker, "all", "cosine", kind, base + 5),
                ]
                # Without a defence h2 is the better layer; with one it is h1.
                for layer, rate in (("h1", 30 - number * 5), ("h2", 20)):
                    first.append(trial("a1", defence, attacker, layer, "both", kind, step + rate))
        write_tsv(folder / "weights.tsv", COLUMNS, weights)
        write_tsv(folder / "a1.tsv", COLUMNS, first)
    return tmp_path / "attacks"


def test_attacker_and_defence_have_a_cell_each(results):
    done = inside("attack", "card", results.parent).ok()
    cells = read_tsv(results / "card.tsv", None)
    of = {
        (one["defence"], one["attacker"]): one
        for one in cells
        if one["attack"] == "weights" and "other recording" in one["of"]
    }
    assert len(of) == 1 + 2 * (3 + 1)
    for number, defence in enumerate(DEFENCES):
        for index, attacker in enumerate(ATTACKERS if number else ("-",)):
            rate = 200 + 10 * number + index + 1
            found = of[defence, attacker]
            assert found["value"] == f"{rate:.2f}"
            assert (found["low"], found["high"]) == (f"{rate - 1:.2f}", f"{rate + 1:.2f}")
            assert found["nothing"] == "50"
            assert (found["by"], found["best_of"]) == ("together, regression", "2")
        if number:
            # The first attacker has the lowest rates here.
            found = of[defence, "strongest"]
            assert found["value"] == f"{200 + 10 * number + 1:.2f}"
            assert found["by"] == "ignorant, together, regression"
            assert found["best_of"] == "6"
    text = (results / "card.md").read_text(encoding="utf-8")
    assert done.out == text
    table = [line for line in text.splitlines() if line.startswith("| weights: same speaker, oth")]
    # A line for each attacker, even where they read the same without a defence.
    assert [line.split("|")[2].strip() for line in table] == [*ATTACKERS, "strongest"]
    assert all("201.0 [200.0, 202.0] best of 2" in line for line in table)
    assert "211.0 [210.0, 212.0] best of 6" in table[-1]
    assert "`keep=*.running_*`" in text
    for attacker in ATTACKERS:
        assert f"- {attacker} knows " in text


def test_layer_is_the_strongest_of_each_cell(results):
    """The better layer differs by the kind of trials, by the attacker, and behind a defence."""
    rates = {
        ("none", "-"): {"same": (30, 20), "other": (25, 35)},
        ("noise=1", "ignorant"): {"same": (40, 45), "other": (44, 41)},
        ("noise=1", "semi-informed"): {"same": (38, 36), "other": (43, 46)},
    }
    for number, defence in enumerate(DEFENCES[:2]):
        rows = [
            trial("a1", defence, attacker, layer, "both", kind, rate)
            for (name, attacker), of_kinds in rates.items()
            for kind, both in of_kinds.items()
            for layer, rate in zip(("h1", "h2"), both, strict=True)
            if name == defence
        ]
        write_tsv(results / f"defence{number}" / "a1.tsv", COLUMNS, rows)
    inside("attack", "card", results.parent).ok()
    found = {
        (one["of"], one["defence"], one["attacker"]): (one["by"], one["value"])
        for one in read_tsv(results / "card.tsv", None)
        if one["attack"] == "a1" and one["defence"] in DEFENCES[:2]
    }
    same, other = "same recording, literal", "same speaker, other recording, literal"
    assert found == {
        (same, "none", "-"): ("h2, both", "20.00"),
        (other, "none", "-"): ("h1, both", "25.00"),
        (same, "noise=1", "ignorant"): ("h1, both", "40.00"),
        (other, "noise=1", "ignorant"): ("h2, both", "41.00"),
        (same, "noise=1", "semi-informed"): ("h2, both", "36.00"),
        (other, "noise=1", "semi-informed"): ("h1, both", "43.00"),
        (same, "noise=1", "strongest"): ("semi-informed, h2, both", "36.00"),
        (other, "noise=1", "strongest"): ("ignorant, h2, both", "41.00"),
    }


def test_card_of_the_committed_tables_understates_nothing(tmp_path):
    """A run's tables, whose lowest rates were read off with a spreadsheet's minimum."""
    folder = tmp_path / "attacks"
    for attack, name in (("a1", "a1"), ("attributes", "attributes"), ("weights", "weights")):
        rows = read_tsv(RUN / f"RESULTS-s40-0-{attack}.tsv", None)
        for of in {row["of"] for row in rows if row["of"].startswith("defence")}:
            own = [row for row in rows if row["of"] == of]
            write_tsv(folder / of / f"{name}.tsv", [one for one in own[0] if one != "of"], own)
    inside("attack", "card", tmp_path).ok()
    cells = {
        (one["attack"], one["of"], one["defence"], one["attacker"]): float(one["value"])
        for one in read_tsv(folder / "card.tsv", None)
    }
    cohort = "same speaker, other recording, cohort"
    for defence, attacker, rate in (
        ("none", "-", 15.61), ("clip=1+noise=1", "semi-informed", 17.35),
        ("clip=1+noise=3", "semi-informed", 25.0), ("keep=*.running_*", "ignorant", 15.61),
        ("clip=1+noise=3", "strongest", 25.0), ("mean=4", "strongest", 35.83),
    ):  # fmt: skip
        assert cells["a1", cohort, defence, attacker] == rate
    assert cells["attributes", "sex", "clip=1+noise=3", "semi-informed"] == 97.4
    assert cells["attributes", "sex", "clip=1+noise=3", "strongest"] == 98.2
    whole = "same speaker, other recording"
    assert cells["weights", whole, "mean=2", "strongest"] == 9.71


def test_membership_is_compared_with_what_audio_tells(results):
    def told(attack, defence, attacker, area):
        cells = {"attack": attack, "score": "loss", "references": "round", "others_of": "same"}
        known = {"defence": defence, "attacker": attacker, "AUC%": f"{area:.2f}"}
        return row((*OF_MEMBERSHIP, "defence", "attacker"), **cells, **known)

    rows = [
        told("blind", "none", "-", 58),
        # The best of those who hear the audio alone counts.
        told("blind", "none", "-", 56),
        told("threshold", "none", "-", 60),
        told("RMIA", "none", "-", 70),
        told("RMIA", "noise=1", "ignorant", 53),
        told("RMIA", "noise=1", "semi-informed", 55),
        told("threshold", "noise=1", "semi-informed", 59),
    ]
    write_tsv(results / "membership.tsv", list(rows[0]), rows)
    inside("attack", "card", results.parent).ok()
    cells = [one for one in read_tsv(results / "card.tsv", None) if one["attack"] == "membership"]
    assert [(one["attacker"], one["value"]) for one in cells] == [
        ("-", "70.00"), ("ignorant", "53.00"), ("semi-informed", "59.00"), ("strongest", "59.00"),
    ]  # fmt: skip
    assert {one["nothing"] for one in cells} == {"58.00"}


def test_attributes_have_their_own_intervals(results):
    rows = [
        row(OF_ATTRIBUTES, attribute="sex", layer=layer, **{"AUC%": area}, AUClow="1", AUChigh="2")
        for layer, area in (("h1", "60.00"), ("h2", "80.00"))
    ]
    write_tsv(results / "defence0" / "attributes.tsv", OF_ATTRIBUTES, rows)
    inside("attack", "card", results.parent).ok()
    cells = [one for one in read_tsv(results / "card.tsv", None) if one["attack"] == "attributes"]
    assert [(one["of"], one["value"], one["low"], one["high"]) for one in cells] == [
        ("sex", "80.00", "1", "2")
    ]


def test_costs_stand_below(results):
    rows = [
        {"defence": defence, "rate": "wer", "on": on, "value": value, "low": "1", "high": "99"}
        for defence, value in (("nothing sent", "40.00"), ("none", "30.00"), ("noise=1", "35.00"))
        for on in ("own", "newcomers", "everybody")
    ]
    write_tsv(results / "utility.tsv", list(rows[0]), rows)
    inside("attack", "card", results.parent).ok()
    text = (results / "card.md").read_text(encoding="utf-8")
    assert text.index("| own") > text.index("| weights")
    assert "35.0 [1.0, 99.0]" in text


def test_page_gets_a_section_and_the_picture(results, tmp_path):
    page = tmp_path / "RESULTS.md"
    page.write_text("# Results\n\nBefore.\n", encoding="utf-8")
    for _ in range(2):
        inside("attack", "card", results.parent, "--page", page).ok()
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Results\n\nBefore.\n")
    assert text.count("begin -->") == 1
    (picture,) = tmp_path.glob("RESULTS-card-*.png")
    with Image.open(picture) as image:
        assert image.width > 300


def test_picture_is_darker_where_more_leaks(tmp_path):
    """The darkness is the mean blue of two cards that differ by one rate."""
    shades = []
    for rate in (2.0, 48.0):
        folder = tmp_path / str(rate) / "attacks"
        rows = [trial("weights", "none", "-", "all", "cosine", "easy", rate)]
        write_tsv(folder / "weights.tsv", COLUMNS, rows)
        inside("attack", "card", folder.parent).ok()
        with Image.open(folder / "card.png") as image:
            shades.append(sum(image.convert("L").histogram()[:200]))
    assert shades[0] > 2 * shades[1]


def test_nothing_to_put_on_a_card_is_one_line(tmp_path):
    (tmp_path / "attacks").mkdir()
    inside("attack", "card", tmp_path).fails(1, "no table of an attack")
    inside("attack", "card", Path("/nowhere")).fails(1, "no table of an attack")


def test_a_cell_whose_interval_contains_no_leak_is_white(tmp_path):
    """The lightest and the darkest pixel of two pictures that differ by one bound."""
    darkest = []
    for low, high in (("0.00", "81.90"), ("0.00", "49.90")):
        folder = tmp_path / high / "attacks"
        one = trial("weights", "none", "-", "all", "cosine", "easy", 20.0)
        one |= {"low": low, "high": high, "targets": 4, "others": 12, "speakers": 5}
        write_tsv(folder / "weights.tsv", COLUMNS, [one])
        text = inside("attack", "card", folder.parent).ok().out
        assert f"20.0 [{float(low)}, {float(high)}]; 5 people, 16 trials" in text
        with Image.open(folder / "card.png") as image:
            pixels = np.asarray(image.convert("RGB"), int)
        darkest.append((pixels[..., 2] - pixels[..., 0]).max())
    assert darkest[0] < 20 < 60 < darkest[1]


@pytest.mark.parametrize(
    ("measure", "low", "high", "light"),
    [
        ("label%", "0.10", "0.90", True),
        ("label%", "-0.90", "-0.10", False),
        ("WER%", "0.10", "0.90", False),
        ("WER%", "-0.90", "-0.10", True),
        ("label%", "-0.10", "0.90", False),
        ("label%", "-", "-", False),
    ],
)
def test_a_difference_from_a_control_is_light_where_it_shows_a_leak(
    tmp_path, measure, low, high, light
):
    """Its largest value is unknown, so its shade has no scale. Fewer errors are a leak."""
    cells = {"attack": "tokens", "defence": "none", "steps": "1", "items": "9"}
    one = row(OF_INVERSION, **cells, measure=measure, difference="0.50", low=low, high=high)
    write_tsv(tmp_path / "attacks/inversion.tsv", OF_INVERSION, [one])
    inside("attack", "card", tmp_path).ok()
    with Image.open(tmp_path / "attacks/card.png") as image:
        pixels = np.asarray(image.convert("RGB"), int)
    assert ((pixels[..., 2] - pixels[..., 0]).max() > 15) == light


def test_people_are_named_with_the_trials_of_all_kinds_and_trials_with_each(tmp_path):
    """As tables have them: people in the row of all trials alone."""
    rows = [
        trial("weights", "none", "-", "all", "cosine", kind, 20.0) | {"targets": own, "others": 70}
        for kind, own in (("easy", 30), ("same", 10), ("other", 20))
    ]
    rows[0]["speakers"] = 12
    write_tsv(tmp_path / "attacks/weights.tsv", COLUMNS, rows)
    inside("attack", "card", tmp_path).ok()
    found = read_tsv(tmp_path / "attacks/card.tsv", None)
    assert [(one["of"], one["people"], one["trials"]) for one in found] == [
        ("same recording", "12", "80"), ("same speaker, other recording", "12", "90"),
    ]  # fmt: skip


def test_terms_and_what_no_leak_means_stand_below(results):
    cells = {"score": "loss", "references": "round", "others_of": "same", "defence": "none"}
    columns = OF_MEMBERSHIP
    rows = [
        row(columns, **cells, attack="blind", attacker="-", **{"AUC%": "87.50"}),
        row(columns, **cells, attack="LiRA", attacker="-", **{"AUC%": "91.00"}),
    ]
    for one in rows:
        one |= {"members": 20, "others": 30, "speakers": 5}
    write_tsv(results / "membership.tsv", columns, rows)
    text = inside("attack", "card", results.parent).ok().out
    (line,) = [one for one in text.splitlines() if one.startswith("| membership")]
    assert "87.50" in line and "5 people, 50 trials" in line
    for said in (
        "- EER%: equal error rate", "lower is worse", "higher is worse", "- LiRA: ",
        "- No leak, in rows of membership: the AUC of whoever hears the audio alone",
    ):  # fmt: skip
        assert said in text
    assert "- RMIA" not in text and "- PLDA" not in text
