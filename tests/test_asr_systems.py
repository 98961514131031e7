"""What local/commonvoice/experiments.py lists: systems, whom they wait for, and their options."""

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
        # Table 2; the configuration's own labels are a teacher's.
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


def test_the_first_of_each_extractor_leaves_others_its_decoder():
    methods = ("--methods", "client decouplefl", "--tables", "4 5", "--attacks", "true")
    waves = {path: int(wave) for wave, path, *_ in listed("sending", *methods)}
    ends = {"": 1, "+no_stage1": 2, "+cnn": 1, "+cnn+sit": 2, "+sit": 2}
    assert waves == {
        f"exp/decouplefl{end}/seed{seed}": wave for seed in (0, 7) for end, wave in ends.items()
    }


def test_wrong_options_end_in_one_line():
    wrong = call("all", "--methods", "fedavg", "--attacks", "true").fails(2, "sends features")
    assert wrong.err.startswith("run.sh: --attacks true: ") and wrong.err.count("\n") == 1
    call("all", "--methods", "fedavg", "--config", "none.yaml").fails(1, "none.yaml")
