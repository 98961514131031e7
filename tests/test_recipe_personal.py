"""The Common Voice recipe with personal layers: labels, attacks, tables, speakers as clients."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import yaml
from asr_checkout import TINY, command, make_checkout
from asr_world import table
from conftest import run
from scripts import program

EXTRACTOR = ["encoder.embed.*", "encoder.encoders.0.*"]


def checkout(folder: Path) -> Path:
    """Make a checkout with a configuration that has all methods and variants."""
    recipe = make_checkout(folder)
    config = copy.deepcopy(TINY)
    config["model"]["encoder_conf"]["num_blocks"] = 2
    config["training"] |= {"labels": "continuous", "decay": 0.9}
    config["baseline"]["training"] = {"labels": "transcripts"}
    personal = {"personal": EXTRACTOR}
    config["methods"] |= {
        "fedextract": {"method_conf": personal},
        "decouplefl": {"method_conf": {**personal, "stage1": 1, "stage2": 1}},
        "joint": {"method_conf": personal},
    }
    config["variants"] = {
        "transcripts": {"training": {"labels": "transcripts"}},
        "continuous": {"training": {"labels": "continuous"}},
        "server_beam": {"training": {"server_labels": "beam", "search": config["decode"]}},
        "server_transcripts": {"training": {"server_labels": "transcripts"}},
        "cnn": {"method_conf": {"personal": EXTRACTOR[:1]}},
        "sit": {"method_conf": {"speaker_invariance": 1.0}},
        "no_stage1": {"method_conf": {"stage1": 0, "stage2": 2}},
        "no_stage2": {"method_conf": {"stage1": 2, "stage2": 0}},
    }
    config["newcomers"] = {"epochs": 1}
    (recipe / "tiny.yaml").write_text(yaml.safe_dump(config))
    return recipe


def run_with(recipe: Path, *more: str) -> Path:
    """Run the recipe with other options; return the folder of its experiments."""
    words, environment = command(recipe, *more)
    at = words.index("client fedavg")
    del words[at - 1 : at + 1]
    run(*words, env=environment).ok()
    return recipe / "exp" / "fake"


@pytest.fixture(scope="module")
def labelled(tmp_path_factory) -> Path:
    """Run DecoupleFL and centralised training on labels of the baseline, and attacks."""
    recipe = checkout(tmp_path_factory.mktemp("labelled"))
    methods = ("--methods", "centralized decouplefl+cnn", "--labels", "fixed", "--sit", "true")
    return run_with(recipe, *methods, "--attacks", "true")


def test_fixed_labels_are_the_baselines_hypotheses(labelled):
    data = labelled.parent.parent / "data" / "fake"
    found = table(labelled / "baseline/seed3/decode_train_sp/text")
    spoken = {name: text for name, text in found.items() if text}
    assert table(data / "train_sp_fixed_seed3" / "text") == spoken
    right = table(data / "train_sp" / "text")
    assert spoken.keys() <= right.keys() and spoken != {name: right[name] for name in spoken}
    for system in ("centralized+fixed", "decouplefl+cnn+sit+fixed"):
        config = yaml.safe_load((labelled / system / "seed3" / "config.yaml").read_text())
        assert Path(config["data"]["train"]).name == "train_sp_fixed_seed3"
        assert config["training"]["labels"] == "transcripts"


def test_variants_are_laid_over_a_method(labelled):
    config = yaml.safe_load((labelled / "decouplefl+cnn+sit+fixed/seed3/config.yaml").read_text())
    assert config["method_conf"]["personal"] == EXTRACTOR[:1]
    assert (config["method_conf"]["stage1"], config["rounds"]) == (1, 4)


STAGE_2 = "DecoupleFL's stage 2 is trained on a teacher's labels of the features sent"


def test_the_report_has_attacks_and_maps(labelled):
    page = (labelled / "RESULTS.md").read_text()
    assert "| DecoupleFL, cnn, sit " in page and "| Centralized " in page
    assert f"models are trained on the baseline's hypotheses by beam search. {STAGE_2}" in page
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| I, same audio ")]
    assert [row[2].strip() for row in rows] == ["EER%", "top1%", "MRR"]
    for name in ("cross", "tsne-decouplefl-cnn-sit-fixed"):
        assert f"(RESULTS-fake-{name}.png)" in page
        assert (labelled / f"RESULTS-fake-{name}.png").read_bytes()[:4] == b"\x89PNG"
    # All models except FedAvg-like ones belong to one client each.
    crossed = (labelled / "cross.tsv").read_text().splitlines()
    assert len(crossed) == 1 + 9 and all(line.startswith("DecoupleFL") for line in crossed[1:])


def test_a_page_of_another_name_has_the_pictures_of_earlier_stages(labelled, tmp_path):
    methods = ("--methods", "centralized decouplefl+cnn", "--labels", "fixed", "--sit", "true")
    more = ("--attacks", "true", "--stage", "9", "--results", str(tmp_path / "other.md"))
    stale = tmp_path / "other-fake-tsne-no-method.png"
    stale.write_bytes(b"")
    run_with(labelled.parent.parent, *methods, *more)
    linked = re.findall(r"!\[.*\]\((.*)\)", (tmp_path / "other.md").read_text())
    names = ("", "-cross", "-tsne-decouplefl-cnn-sit-fixed")
    assert linked[:3] == [f"other-fake{name}.png" for name in names]
    for name in names:
        picture = (tmp_path / f"other-fake{name}.png").read_bytes()
        assert picture == (labelled / f"RESULTS-fake{name}.png").read_bytes()
    assert not stale.exists()


def test_tables_have_their_systems(tmp_path, monkeypatch):
    """Those of both tables are listed, and those of table 2 are run to their report."""
    recipe = checkout(tmp_path)
    more = ("--methods", "fedextract", "--labels", "transcripts", "--speeds", "")
    exp = run_with(recipe, *more, "--tables", "2 4", "--stop_stage", "4")
    lines = (exp / "experiments").read_text().splitlines()
    systems = {Path(line.split("\t")[1]).parent.name for line in lines}
    ablations = ("decouplefl", "decouplefl+no_stage1", "decouplefl+no_stage2", "joint")
    ablations = tuple(f"{name}+transcripts" for name in ablations)
    # The configuration's labels are a teacher's: no variant of them, nor a second training.
    of_table_2 = {"baseline", "centralized", "centralized+fixed", "fedextract+transcripts"}
    assert systems == of_table_2 | set(ablations) and len(lines) == 8
    run_with(recipe, *more, "--tables", "2", "--stage", "5")
    assert {path.name for path in exp.iterdir() if (path / "seed3").is_dir()} == of_table_2
    page = (exp / "RESULTS.md").read_text()
    assert "models are trained on their transcripts." in page and STAGE_2 not in page
    _, _, after = page.partition("table 2 of Zhu et al.")
    rows = [line.split("|")[1].strip() for line in after.splitlines() if line.startswith("| ")]
    assert rows[1:4] == ["Baseline", "Centralized, fixed", "Centralized, continuous"]
    # What the report is told of table 4; `{}` is the method's title.
    monkeypatch.chdir(recipe)
    monkeypatch.setenv("PATH", command(recipe)[1]["PATH"])
    chosen = ("--exp", "exp/fake", "--config", "tiny.yaml", "--seeds", "3", *more[:4])
    told = program("local/commonvoice/rows.py", "--pictures", "x", *chosen, "--tables", "2 4").ok()
    assert f"models are trained on their transcripts. {STAGE_2}" in told.out
    named = re.findall(r"^--also\ntable 4 of Zhu et al\.=(.*)=(.*)$", told.out, re.M)
    names = ("Baseline", "{}", "{}, no stage1", "{}, no stage2", "{}")
    folders = [f"exp/fake/{name}/seed3" for name in ("baseline", *ablations)]
    scored = [f"{folder}:{folder}/decode_test" for folder in folders]
    scored[0] = scored[0].removeprefix(folders[0])
    assert named == list(zip(names, scored, strict=True))


def test_speakers_as_clients_and_newcomers(tmp_path):
    recipe = checkout(tmp_path)
    more = ("--clients", "speaker", "--newcomer_seconds", "0.8")
    exp = run_with(recipe, "--methods", "decouplefl", *more)
    data, path = recipe / "data" / "fake", exp / "decouplefl" / "seed3"
    speakers = set(table(data / "train" / "utt2spk").values())
    # In a real corpus, they are speakers of any accent.
    assert {name.partition("-")[0] for name in speakers} == {"any"}
    assert "--accents any " in (exp / "data_options").read_text()
    assert " --server-fraction 0.4 " in (exp / "data_options").read_text()
    # A speaker recorded at several speeds is one client.
    assert set((path / "clients.txt").read_text().split()) == speakers
    # Thousands of personal models would be useless: no test speaker has one.
    assert list(path.glob("clients/*/round_*/personal.safetensors"))
    assert not list(path.glob("clients/*/model.safetensors"))
    assert (path / "model.safetensors").exists()
    assert {name.split("-")[0] for name in table(data / "train_spk_sp" / "utt2spk")} > {"sp1.1"}
    first, rest = (table(data / name / "utt2spk") for name in ("test_first", "test_rest"))
    assert set(first.values()) == set(rest.values()) and not first.keys() & rest.keys()
    assert not set(rest.values()) & speakers
    assert set((path / "newcomers" / "clients.txt").read_text().split()) == set(first.values())
    for out in (path / "decode_test_rest", path / "newcomers" / "decode_test_rest_spk"):
        assert table(out / "text").keys() == rest.keys()
    page = (exp / "RESULTS.md").read_text()
    assert "labels of a teacher that follows the model." in page and STAGE_2 not in page
    assert "| DecoupleFL, adapted " in page.partition("newcomers, on their speech after")[2]
    assert "Test speakers are not clients" in page
    # As if stage 8 had been left out.
    (path / "newcomers" / "decode_test_rest_spk" / "wer.tsv").unlink()
    run_with(recipe, "--methods", "decouplefl", *more, "--stage", "9")
    page = (exp / "RESULTS.md").read_text()
    assert "| DecoupleFL " in page and "adapted" not in page


SPEAKERS = ("--clients", "speaker")
UNSENT = "no system of --methods and --tables sends features (DecoupleFL does)"
ALONE = "--clients speaker: a client of one speaker has no other speaker to be invariant to"


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> Path:
    return checkout(tmp_path_factory.mktemp("untrained"))


@pytest.fixture
def refusing(untrained, monkeypatch) -> Path:
    """Return a recipe's folder, which is the current one, with its programs."""
    monkeypatch.chdir(untrained)
    monkeypatch.setenv("PATH", command(untrained)[1]["PATH"])
    return untrained


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--methods", "fedavg", "--sit", "true"), "--sit true: no decouplefl among --methods"),
        (("--methods", "fedavg", "--extractor", "cnn"), "none of --methods has an extractor"),
        (("--methods", "fedavg decouple"), "--methods: unknown method 'decouple'"),
        (("--methods", "fmp+no_stage2"), "--methods: fmp is for task rescore, not asr"),
        (("--methods", "fedextract+fixed+cnn"), "labels must come after all other variants"),
        (
            ("--methods", "decouplefl+transcripts", "--sit", "true"),
            "decouplefl+transcripts: with labels here, add +sit and +cnn here too",
        ),
        (
            ("--methods", "decouplefl+server_transcripts", "--labels", "fixed"),
            "the data of --labels fixed has no transcripts for server_transcripts",
        ),
        (("--methods", "fedavg", "--attacks", "true"), f"--attacks true: {UNSENT}"),
        (("--methods", "fedavg decouplefl+no_stage2", "--attacks", "true"), UNSENT),
        (("--methods", "decouplefl+foo"), "unknown variant: tiny.yaml: no option 'variants.foo'"),
        (
            ("--methods", "fedavg", "--newcomer_seconds", "0.05"),
            "'0.05' is not a number of at least 0.1",
        ),
        (
            ("--methods", "fedavg", "--newcomer_seconds", "1m"),
            "'1m' is not a number of at least 0.1",
        ),
        ((*SPEAKERS, "--methods", "decouplefl", "--sit", "true"), ALONE),
        ((*SPEAKERS, "--methods", "fedavg decouplefl+cnn+sit"), ALONE),
        ((*SPEAKERS, "--methods", "fedavg", "--tables", "5"), ALONE),
        ((*SPEAKERS, "--methods", "joint"), "holds every client's model in memory"),
        (
            (*SPEAKERS, "--methods", "fedavg", "--tables", "4"),
            "holds every client's model in memory",
        ),
    ],
)
def test_options_that_would_change_nothing_are_refused(refusing, options, said):
    """By the program that lists the experiments, in which the recipe puts its options."""
    chosen = {"--exp": "exp/fake", "--config": "tiny.yaml", "--seeds": "3", "--sit": "false"}
    chosen |= {"--methods": "fedavg", "--clients": "accent", "--newcomer-seconds": "60"}
    given = dict(zip(options[::2], options[1::2], strict=True))
    chosen |= {name.replace("_", "-"): value for name, value in given.items()}
    words = (word for pair in chosen.items() for word in pair)
    result = program("local/commonvoice/experiments.py", "all", *words).fails(2, "run.sh: ", said)
    assert result.out == "" and result.err.count("\n") == 1


def test_the_recipe_ends_with_what_its_list_refuses(refusing):
    """Before its first stage; no option is lost on the way."""
    words, environment = command(refusing, "--methods", "fedavg decouplefl+server_transcripts")
    for more, said in (
        (("--labels", "fixed"), "has no transcripts for server_transcripts"),
        (("--newcomer_seconds", "1m"), "'1m' is not a number of at least 0.1"),
        ((*SPEAKERS, "--sit", "true"), ALONE),
        ((*SPEAKERS, "--tables", "4"), "holds every client's model in memory"),
        (("--methods", "fedavg joint", "--attacks", "true"), f"--attacks true: {UNSENT}"),
        (("--methods", "fedavg client", "--extractor", "cnn"), "has an extractor"),
    ):
        run(*words, *more, env=environment).fails(2, said)
    assert not (refusing / "data").exists()
