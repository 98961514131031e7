"""The experiments of tests/net.py, and the small worlds that they start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Case:
    """An experiment, and the commands run on its models.

    Attributes:
        world: the folder of its data, and of a configuration <world>.yaml.
        settings: options in the form of `--set`.
        measured: the split that models are measured on, if any.
        after: commands, of which EXP is the experiment, WORLD the data and OUT a folder; they are
            run only after the first way.
    """

    world: str
    method: str
    settings: tuple[str, ...] = ()
    measured: str = ""
    after: tuple[str, ...] = ()


EXTRACTOR = 'method_conf.personal=["encoder.embed.*", "encoder.encoders.0.*"]'
CONTINUOUS = ("training.labels=continuous", "training.decay=0.7")
STAGES = (EXTRACTOR, "rounds=6", "method_conf.stage1=2", "method_conf.stage2=2")
ANEW = "training.keep_teacher=false"
HEADS = ("model.network_conf.head_share=0.6", "method_conf.private=head")
MEAN = "average EXP --best 1"
AVERAGED = ("average EXP --best 2", "decode EXP WORLD/valid OUT/average --lm WORLD/lm")
GREEDY = "decode EXP WORLD/valid OUT/greedy --model round:2"
CROSSED = "cross WORLD/valid OUT/cross.tsv {}=EXP"
ADAPTED = ("adapt EXP WORLD/new OUT/adapted --epochs 2", "rounds OUT/adapted")
TUNED = ("tune OUT/average WORLD/valid OUT/weights.yaml", "best-path OUT/average")
SWEPT = "rescore-sweep WORLD/train OUT/sweep.tsv --set rounds=3 --vary alpha=0,0.5"


def asr(method: str, *settings: str, after: tuple[str, ...] = (GREEDY,)) -> Case:
    return Case("asr", method, settings, "valid", after)


def kws(method: str, *settings: str, after: tuple[str, ...] = (MEAN,)) -> Case:
    return Case("kws", method, settings, "valid", after)


def lm(method: str, *settings: str) -> Case:
    return Case("lm", method, settings, "train", ("rescore-best EXP OUT",))


def fmp(*settings: str, privacy: str = "", after: tuple[str, ...] = ()) -> Case:
    if privacy:
        settings = (*settings, f"method_conf.privacy={{{privacy}}}")
        after = (*after, "privacy EXP")
    return Case("rescore", "fmp", settings, "", ("rescore-best EXP OUT", *after))


def _protected(**more: str) -> str:
    options = {"mechanism": "laplace", "epsilon": "2.0", "cap": "4.0", **more}
    return ", ".join(f"{name}: {value}" for name, value in options.items())


CASES = {
    "asr-fedavg": asr("fedavg", after=(*AVERAGED, *TUNED, GREEDY, "export EXP OUT/espnet")),
    "asr-fedavg-kept": asr(
        "fedavg", "method_conf={weighting: utterances, local_epochs: 2, keep_optimizer: true}"
    ),
    "asr-fedavg-continuous": asr("fedavg", *CONTINUOUS),
    "asr-fedavg-new-teacher": asr("fedavg", *CONTINUOUS, ANEW),
    "asr-fedprox": asr("fedprox", "method_conf.proximal=0.7"),
    "asr-fedmmd": asr("fedmmd", "method_conf.discrepancy=0.5"),
    "asr-fedopt": asr("fedopt", "method_conf.optimizer=adam"),
    "asr-fednorm": asr("fednorm", *CONTINUOUS),
    "asr-fedextract": asr("fedextract", EXTRACTOR, after=(*AVERAGED, CROSSED, *ADAPTED)),
    "asr-client": asr("client", after=(*AVERAGED, CROSSED, "export EXP OUT/espnet --client au")),
    "asr-client-new-teacher": asr("client", *CONTINUOUS, ANEW),
    "asr-centralized": asr("centralized"),
    "asr-centralized-continuous": asr("centralized", *CONTINUOUS),
    "asr-decouplefl": asr("decouplefl", *CONTINUOUS, *STAGES, after=(*AVERAGED, CROSSED)),
    "asr-decouplefl-invariance": asr(
        "decouplefl", *CONTINUOUS, *STAGES, "method_conf.speaker_invariance=1.0"
    ),
    "asr-joint": asr("joint", EXTRACTOR, after=(*AVERAGED, CROSSED)),
    "kws-fedavg": kws("fedavg"),
    "kws-fedavg-personal": kws("fedavg", 'method_conf.personal=["head.*"]'),
    "kws-centralized": kws("centralized"),
    "kws-fedprox": kws("fedprox", "method_conf.proximal=0.7"),
    "kws-fedmmd": kws("fedmmd", "method_conf.discrepancy=0.5"),
    "kws-fedopt": kws("fedopt", "method_conf.optimizer=yogi"),
    "kws-fedkws_ui": kws("fedkws_ui"),
    "kws-fedkws_ui-head": kws("fedkws_ui", *HEADS, "method_conf.smooth_by_utility=true"),
    "kws-alo": kws("alo"),
    "kws-alt": kws("alt"),
    "lm-fedavg": lm("fedavg"),
    "lm-fedopt": lm("fedopt"),
    "lm-fedprox": lm("fedprox", "method_conf.proximal=0.7"),
    "rescore-fmp": fmp("method_conf.scale=0.8", after=(SWEPT,)),
    "rescore-fmp-increments": fmp("method_conf.sends=increments", "clients_per_round=2"),
    "rescore-fmp-laplace": fmp(
        privacy=_protected(), after=(f"{SWEPT} --set mechanism=laplace --set epsilon=2",)
    ),
    "rescore-fmp-laplace-clients": fmp(privacy=_protected(trust="client", unit="word")),
    "rescore-fmp-laplace-users": fmp(
        *("method_conf.sends=cumulative", "method_conf.groups=clock", "method_conf.span=48"),
        privacy=_protected(unit="user"),
    ),
    "rescore-fmp-paper": fmp(
        privacy="mechanism: paper, epsilon: 1.0", after=(f"{SWEPT} --set mechanism=paper",)
    ),
}

# --- worlds


def make_worlds(root: Path) -> None:
    """Make data of each task and a configuration next to them, by the tests' own builders."""
    # Imported here, since only processes other than the one that forks may use them.
    import keyword_world
    import keywords
    import simulated

    worlds = {name: root / name for name in ("asr", "kws", "lm", "rescore")}
    asr_world = worlds["asr"]
    clients = ["au", "en", "in"]
    simulated.data_dir(asr_world / "train", clients, 4)
    simulated.data_dir(asr_world / "valid", clients, 2, seed=1)
    simulated.data_dir(asr_world / "new", ["nz", "sa"], 4, seed=2)
    simulated.config_file(asr_world / "config.yaml", rounds=3, clients_per_round=2)
    kws_world = keyword_world.make_world(made(worlds["kws"]))
    (kws_world / "valid").symlink_to("test")
    changed = {"rounds": 2, "evaluate_every": 1, "clients_per_round": 4, "keep_updates": True}
    keywords.config_file(kws_world / "config.yaml", **keyword_world.CONFIG | changed)
    _language(worlds["lm"])
    (made(worlds["rescore"]) / "config.yaml").write_text("{task: rescore, rounds: 3}\n")
    (worlds["rescore"] / "train").symlink_to("../lm/made")


def made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _language(world: Path) -> None:
    import numpy as np
    from rescored_world import WORDS, make_stream

    make_stream(world / "made")
    random = np.random.default_rng(1)
    lines = [" ".join(random.choice(WORDS, 3)) for _ in range(60)]
    (world / "plain").write_text("".join(f"{line}\n" for line in lines))
    sizes = {"embed_unit": 8, "att_unit": 8, "head": 2, "unit": 16, "layer": 1}
    options = {"lm_conf": sizes | {"dropout_rate": 0.1}, "epochs": 1, "optim_conf": {"lr": 0.01}}
    (world / "nnlm.yaml").write_text(yaml.safe_dump({"nnlm": options}))
    (made(world / "weights") / "weights.yaml").write_text("lm_weight: 2.0\nword_score: 0.5\n")
    training = {"optim": "sgd", "optim_conf": {"lr": 0.05}, "batch_sentences": 2}
    config = {"task": "lm", "rounds": 3, "model": options["lm_conf"], "training": training}
    (world / "config.yaml").write_text(yaml.safe_dump(config))


WORLD_COMMANDS = (
    "train-tokens asr/train/text asr/tokens --token-type char",
    "train-lm asr/train/text asr/lm --order 2",
    "train-nnlm --plain lm/plain --config lm/nnlm.yaml --valid lm/made/text lm/nnlm",
    "rescore lm/made lm/nnlm lm/rescored",
    "rescore-stream lm/made lm/rescored lm/train",
)


def init_command(case: Case, exp: Path) -> list[str]:
    """Return the init command, with relative data paths since noise depends on its hash."""
    world, method = case.world, case.method
    words = ["init", str(exp), "--config", f"{world}/config.yaml", "--method", method]
    words += ["--data", f"train={world}/train"]
    if case.measured not in ("", "train"):
        words += ["--data", f"{case.measured}={world}/{case.measured}"]
    if world == "asr":
        words += ["--asset", "tokens=asr/tokens"]
    if world == "lm":
        words += ["--asset", "weights=lm/weights", "--start", "lm/nnlm/model.safetensors"]
    settings = ("keep_updates=true", *case.settings)
    return [*words, *(word for setting in settings for word in ("--set", setting))]
