"""Work done for a row of a table, against counts by hand from the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from asr_world import begin, make_world
from decouplefl_world import CUT, EXTRACTOR, stages
from reported import CLIENTS, FIRST, arguments, make_experiment, markdown_row
from safetensors.numpy import load_file
from test_report import make_scores

from fedtools.core.tables import write_tsv
from fedtools.exchange.experiment import Experiment, write_sums
from fedtools.report.results import Cost, read_cost, server_text

# For two utterances of each client.
SECONDS = {"australia": (600.5, 1200), "england": (60, 40), "indian": (3000, 700.25)}


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    """Make clients of half an epoch a round, or a server, on data with known durations."""
    monkeypatch.chdir(tmp_path)
    tables: dict[str, list[str]] = {"utt2dur": [], "utt2client": [], "utt2spk": []}
    for client in CLIENTS:
        for index, seconds in enumerate(SECONDS[client]):
            for table, value in (("utt2dur", seconds), ("utt2client", client), ("utt2spk", client)):
                tables[table].append(f"{client}-{index} {value}\n")
    Path("data").mkdir()
    for table, lines in tables.items():
        Path("data", table).write_text("".join(lines))
    for name, epochs in (("fedavg", {"client_epochs": 0.5}), ("centralized", {"server_epochs": 1})):
        path = make_experiment(Path("exp", name), **epochs)
        config = (path / "config.yaml").read_text()
        (path / "config.yaml").write_text(config.replace("data: {}", "data: {train: data}"))
        sums = {one: path / one for one in ("config.yaml", "clients.txt", FIRST)}
        write_sums(path / "sha256sums", sums)
        make_scores(Path("score", name), 23, 20, 28)
    return tmp_path


ROWS = {name: f"exp/{name.lower()}:score/{name.lower()}" for name in ("FedAvg", "Centralized")}


def averaged(name: str, rounds: dict[str, str]) -> None:
    rows = [{"client": client, "rounds": numbers} for client, numbers in rounds.items()]
    write_tsv(Path("exp", name, "averaged.tsv"), ("client", "rounds"), rows)


def test_speech_steps_computation_and_rounds_stand_in_the_row(cli, recipe):
    averaged("fedavg", {"all": "1 2", "australia": "2 4", "england": "3 4", "indian": "2 3"})
    averaged("centralized", {"all": "3"})
    cli(*arguments(**ROWS)).ok()
    page = Path("RESULTS.md").read_text()
    # Two epochs each of 5,600.75 s, 3.1 h; four at the server.
    assert markdown_row(page, "FedAvg")[-4:] == ["50 %", "60", "3.1 h", "2 of 2–4"]
    assert markdown_row(page, "Centralized")[-4:] == ["100 %", "-", "6.2 h", "1 of 3"]


@pytest.mark.parametrize("numbers", ["", "2 x", "1  2"])
def test_rounds_that_are_none_are_refused(cli, recipe, numbers):
    averaged("fedavg", {"all": numbers or "-1"})
    said = cli(*arguments(**ROWS)).fails(1, "exp/fedavg/averaged.tsv:2: ", "not a list of rounds")
    assert "run fedtools average" in said.err


def test_a_server_trains_a_share_of_the_model(tmp_path):
    world = make_world(tmp_path)
    path = begin(world, tmp_path / "exp", "decouplefl", *CUT, *stages(1, 2))
    sizes = {name: value.size for name, value in load_file(path / "init.safetensors").items()}
    own = sum(size for name, size in sizes.items() if name.startswith(EXTRACTOR))
    share = 1 - own / sum(sizes.values())
    cost = read_cost(Experiment(path))
    assert 0.2 < share < 0.8 and cost.server_share == pytest.approx(share)
    assert Cost(client_epochs=50, server_epochs=50, server_share=0.5).computation == 75
    assert server_text(Cost(server_epochs=50, server_share=0.5)) == "0.5 * 50"
    assert server_text(Cost(server_epochs=100)) == "100" and server_text(Cost()) == "-"
    other = begin(world, tmp_path / "no2", "decouplefl", *CUT, *stages(3, 0))
    assert read_cost(Experiment(other)).server_share == 1
