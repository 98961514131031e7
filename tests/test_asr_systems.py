"""The list of local/commonvoice/experiments.py: systems, their dependencies and options."""

from __future__ import annotations

import sys

from conftest import ROOT, Result, run

SCRIPT = ROOT / "local/commonvoice/experiments.py"
MINI = ROOT / "conf/commonvoice/mini.yaml"


def listed(what: str, *more: str) -> list[list[str]]:
    return [line.split("\t") for line in call(what, *more).ok().out.splitlines()]


def call(what: str, *more: str) -> Result:
    fixed = ("--exp", "exp", "--config", MINI, "--train", "train_sp", "--server-train", "server")
    return run(sys.executable, SCRIPT, what, *fixed, "--seeds", "0 7", *more)


def options(words: list[str], name: str) -> list[str]:
    return [words[index + 1] for index, word in enumerate(words) if word == f"--{name}"]


def test_every_system_waits_for_its_baseline_and_begins_with_it():
    methods = ("--methods", "fedavg decouplefl", "--extractor", "cnn", "--tables", "2 4")
    lines = {line[0]: line[1:] for line in listed("all", *methods)}
    systems = {
        "fedavg": ["methods.fedavg?"],
        "decouplefl+cnn": ["methods.decouplefl?", "variants.cnn"],
        # Table 2; the configuration's own labels are from a teacher.
        "centralized+fixed": ["methods.centralized?", "variants.transcripts"],
        "centralized": ["methods.centralized?"],
        # Table 4.
        "decouplefl": ["methods.decouplefl?"],
        "decouplefl+no_stage1": ["methods.decouplefl?", "variants.no_stage1"],
        "decouplefl+no_stage2": ["methods.decouplefl?", "variants.no_stage2"],
        "joint": ["methods.joint?"],
    }
    expected = [f"exp/{name}/seed{seed}" for seed in (0, 7) for name in ("baseline", *systems)]
    assert list(lines) == expected
    for seed in ("0", "7"):
        baseline = f"exp/baseline/seed{seed}"
        awaited, *words = lines[baseline]
        assert awaited == "-" and options(words, "section") == ["baseline"]
        assert options(words, "data") == ["train=data/server", "valid=data/server_valid"]
        assert not options(words, "start")
        for system, sections in systems.items():
            awaited, *words = lines[f"exp/{system}/seed{seed}"]
            assert awaited == baseline and options(words, "section") == sections
            assert options(words, "start") == [f"{baseline}/model.safetensors"]
            assert options(words, "seed") == [seed]
            own = f"_fixed_seed{seed}" if system.endswith("+fixed") else ""
            assert options(words, "data") == [f"train=data/train_sp{own}", "valid=data/valid"]


def test_rounds_are_those_of_every_system_and_divided_between_stages():
    lines = listed("all", "--methods", "fedavg decouplefl", "--tables", "4", "--rounds", "5")
    found = {line[0]: options(line, "set") for line in lines if line[0].endswith("seed7")}
    stages = {"decouplefl": (2, 3), "decouplefl+no_stage1": (0, 5), "decouplefl+no_stage2": (5, 0)}
    expected = {
        f"exp/{one}/seed7": ["rounds=5"] for one in ("baseline", "fedavg", "joint", *stages)
    }
    for name, pair in stages.items():
        wanted = [f"method_conf.stage{number}={rounds}" for number, rounds in enumerate(pair, 1)]
        expected[f"exp/{name}/seed7"] += wanted
    assert found == expected
    assert not any(options(line, "set") for line in listed("all", "--methods", "decouplefl"))


def test_the_first_of_each_extractor_leaves_others_its_decoder():
    methods = ("--methods", "client decouplefl", "--tables", "4 5", "--attacks", "true")
    waves = {path: int(wave) for wave, path, *_ in listed("sending", *methods)}
    ends = {"": 1, "+no_stage1": 2, "+cnn": 1, "+cnn+sit": 2, "+sit": 2}
    assert waves == {
        f"exp/decouplefl{end}/seed{seed}": wave for seed in (0, 7) for end, wave in ends.items()
    }


def test_a_search_of_the_server_has_its_n_gram_and_its_own_weights():
    methods = ("--methods", "decouplefl+server_beam fedavg+transcripts", "--tables", "stage2")
    lines = {line[0]: line[1:] for line in listed("all", *methods)}
    assert list(lines)[1:5] == [
        f"exp/{name}/seed0"
        for name in (
            "decouplefl+server_beam", "fedavg+transcripts", "decouplefl",
            "decouplefl+server_transcripts",
        )
    ]  # fmt: skip
    for seed in ("0", "7"):
        words = lines[f"exp/decouplefl+server_beam/seed{seed}"]
        assert options(words, "asset") == [
            "tokens=exp/tokens", "lm=exp/lm", f"weights=exp/baseline/seed{seed}",
        ]  # fmt: skip
        other = lines[f"exp/decouplefl+server_transcripts/seed{seed}"]
        assert options(other, "asset") == ["tokens=exp/tokens"]
        assert options(lines[f"exp/fedavg+transcripts/seed{seed}"], "section") == [
            "methods.fedavg?", "variants.transcripts",
        ]  # fmt: skip


def test_whisper_searches_by_its_decoder_from_what_it_is():
    config = ("--config", ROOT / "conf/commonvoice/whisper.yaml", "--baseline", "as_it_is")
    more = (
        "--methods",
        "fedavg decouplefl+server_beam",
        "--labels",
        "fixed",
        "--tokens",
        "whisper",
    )
    lines = {line[0]: line[1:] for line in listed("all", *config, *more)}
    assert options(lines["exp/baseline/seed0"], "section") == ["baseline", "variants.as_it_is"]
    words = lines["exp/decouplefl+server_beam+fixed/seed0"]
    assert options(words, "asset") == ["tokens=whisper"]
    assert options(words, "section")[1:] == ["variants.server_beam", "variants.transcripts"]
    assert options(words, "data")[0] == "train=data/train_sp_fixed_seed0"


def test_wrong_options_end_in_one_line():
    wrong = call("all", "--methods", "fedavg", "--attacks", "true").fails(2, "sends features")
    assert wrong.err.startswith("run.sh: --attacks true: ") and wrong.err.count("\n") == 1
    call("all", "--methods", "fedavg", "--config", "none.yaml").fails(1, "none.yaml")
