"""The experiments of tests/net.py; net_worlds.py has the small worlds that they start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from net_worlds import INIT


@dataclass(frozen=True)
class Case:
    """An experiment, and the commands run on its models.

    Attributes:
        world: the folder of its data, and of a configuration config.yaml.
        settings: options in the form of `--set`.
        measured: the split that models are measured on, if any.
        after: commands, of which EXP is the experiment, PLACE the same from the folder of worlds,
            WORLD the data and OUT a folder; they are run only after the first way.
        init: further words of `init`.
    """

    world: str
    method: str
    settings: tuple[str, ...] = ()
    measured: str = ""
    after: tuple[str, ...] = ()
    init: tuple[str, ...] = ()


EXTRACTOR = 'method_conf.personal=["encoder.embed.*", "encoder.encoders.0.*"]'
CONTINUOUS = ("training.labels=continuous", "training.decay=0.7")
STAGES = (EXTRACTOR, "rounds=6", "method_conf.stage1=2", "method_conf.stage2=2")
UPPER = "model.adapt={rank: 2, targets: ['layers.2.*']}"
QUIET = "training.augment={time_shift_ms: 0, noise_volume: 0.0}"
BACKDOOR = "attackers={share: 0.5, kind: backdoor}"
LAYERS = 'method_conf.personal=["encoder.layers.[0-1].*"]'
# So that training is saved, and a kill may fall, between any two steps.
OFTEN = ("training.save_interval_steps=1",)
STEPS = ("training.batch_bins=1500", *OFTEN)
ANEW = "training.keep_teacher=false"
MEAN = "average EXP --best 1"
AVERAGED = ("average EXP --best 2", "decode EXP WORLD/valid OUT/average --lm WORLD/lm")
GREEDY = "decode EXP WORLD/valid OUT/greedy --model round:2"
CROSSED = "cross WORLD/valid OUT/cross.tsv {}=EXP"
ADAPTED = ("adapt EXP WORLD/new OUT/adapted --epochs 2", "rounds OUT/adapted")
TUNED = ("tune OUT/average WORLD/valid OUT/weights.yaml", "best-path OUT/average")
CHARACTERS = ("--asset", "tokens=whisper/tokens")
PIECES = ("--asset", "tokens=whisper/model")
FEW = "--others 0 --resamples 20"
# Sections of a page, and their pictures, have names that are made from the path.
ATTACKED = (
    f"attack weights PLACE OUT/attacks --set weights.scores=parts {FEW}",
    "attack footprints PLACE OUT/footprints --indicator WORLD/indicator --round 1",
    f"attack a1 OUT/footprints OUT/attacks {FEW}",
    "attack membership PLACE OUT/attacks --round 1 --each 2 --references 2 --shadows 1 "
    "--resamples 20",
    GREEDY,
    "best-path OUT/greedy",
    "score WORLD/valid OUT/greedy/text OUT/score --resamples 20",
    "report OUT/RESULTS.md --section mini --corpus made --release 1 --row FedAvg=PLACE:OUT/score "
    "--plot OUT/wer.png --date 2026-01-01 --command net.py",
    "attack card PLACE --results OUT/attacks --page OUT/RESULTS.md",
)
# Clients keep the statistics of BatchNorm, and take turns.
PRIVATE = "method_conf={epsilon: 8, clip: 0.1, client_method: fednorm, cohorts: 2, local_steps: 2}"
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


def lora(combine: str) -> Case:
    how = f"model.adapt={{rank: 2, targets: ['*linear_q', '*linear_v'], combine: {combine}}}"
    start = ("--start", "asr/begun/init.safetensors")
    return Case("asr", "fedavg", (how,), "valid", (MEAN, GREEDY), start)


def whisper(method: str, *settings: str, kind: str = "ctc") -> Case:
    """Return a case that trains adapters of Whisper's encoder, or of all of it, without text."""
    settings = (f"model.criterion={kind}", "training.labels=continuous", *settings)
    init = PIECES if kind == "seq2seq" else CHARACTERS
    return Case("whisper", method, (*settings, "training.decay=0.5"), init=init)


def clips(*settings: str) -> Case:
    return Case("clips", "fedavg", settings)


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
    "asr-private": asr(
        *("dpfedavg", "sampling=poisson", "method_conf={epsilon: 8, clip: 0.1}"),
        after=("privacy EXP",),
    ),
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
    "asr-client-often": asr("client", *STEPS),
    "asr-centralized-often": asr("centralized", *CONTINUOUS, *STEPS),
    "asr-fedextract-often": asr("fedextract", EXTRACTOR, "method_conf.keep_optimizer=true", *STEPS),
    "asr-decouplefl-often": asr(
        *("decouplefl", *CONTINUOUS, *STAGES, "method_conf.speaker_invariance=1.0", *STEPS)
    ),
    "asr-attackers": asr("fedavg", "attackers={share: 0.5, kind: ipm}"),
    "asr-lora-mean": lora("mean"),
    "asr-lora-fixed_a": lora("fixed_a"),
    "asr-lora-svd": lora("svd"),
    "asr-lora-residual": lora("residual"),
    "whisper-ctc": whisper("fedavg"),
    "whisper-seq2seq": whisper("fedavg", kind="seq2seq"),
    "whisper-frozen": whisper("fedavg", UPPER, "model.cache_frozen=true"),
    "whisper-decouplefl": whisper("decouplefl", LAYERS, *STAGES[1:]),
    "voices-fedavg": Case("voices", "fedavg", (), "valid", ATTACKED),
    "kws-fedavg": kws("fedavg"),
    "kws-fedavg-personal": kws("fedavg", 'method_conf.personal=["head.*"]'),
    "kws-centralized": kws("centralized"),
    "kws-fedprox": kws("fedprox", "method_conf.proximal=0.7"),
    "kws-fedmmd": kws("fedmmd", "method_conf.discrepancy=0.5"),
    "kws-fedopt": kws("fedopt", "method_conf.optimizer=yogi"),
    "kws-fedkws_ui": kws("fedkws_ui"),
    "kws-alo": kws("alo"),
    "kws-alt": kws("alt"),
    # A stack has no checkpoints.
    "kws-fedkws_ui-often": kws("fedkws_ui", *OFTEN, "training.stack=1"),
    # They train twice in a round, on their own clips and on poisoned ones.
    "kws-attackers-often": kws(
        *("fedavg", "attackers={share: 0.5, kind: minmax, goal: backdoor}", *OFTEN),
        "training.stack=1",
        after=("attack backdoor PLACE --split valid --resamples 20",),
    ),
    "lm-private": lm("dpfedavg", "method_conf={epsilon: 8, clip: 0.1}"),
    "kws-private": Case(
        *("kws", "dpfedavg", ("clients_per_round=null", PRIVATE)),
        after=("privacy EXP",),
    ),
    "kws-lora": Case(
        *("kws", "fedavg", ("model.adapt={rank: 2, targets: ['pointwise*', first]}",), "valid"),
        *((MEAN,), ("--start", "kws/begun/init.safetensors")),
    ),
    "clips-whisper": clips(),
    "clips-frozen": clips(UPPER, "model.cache_frozen=true", QUIET),
    "clips-attackers": clips(UPPER, "model.cache_frozen=true", QUIET, BACKDOOR),
    "lm-fedavg": lm("fedavg"),
    "lm-fedopt": lm("fedopt"),
    "lm-fedprox": lm("fedprox", "method_conf.proximal=0.7"),
    "lm-fedopt-often": lm("fedopt", *OFTEN),
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
    "counts": Case("counts", "counting", (), "train"),
}
# Of each task and kind of state, for the short run of the tests.
SHORT = (
    "asr-client-often",
    "asr-centralized-often",
    "asr-fedextract-often",
    "asr-decouplefl-often",
    "asr-lora-residual",
    "whisper-frozen",
    "voices-fedavg",
    "kws-fedkws_ui-often",
    "kws-lora",
    "lm-fedopt-often",
    "rescore-fmp-laplace-clients",
    "counts",
)
# Killed by SIGKILL, one of each task; others are stopped by an exception.
SIGKILLED = (
    "asr-client-often",
    "kws-fedkws_ui-often",
    "lm-fedopt-often",
    "rescore-fmp-laplace-clients",
    "counts",
)


def init_command(case: Case, exp: Path) -> list[str]:
    """Return the init command, with relative data paths since noise depends on its hash."""
    world, method = case.world, case.method
    words = ["init", str(exp), "--config", f"{world}/config.yaml", "--method", method]
    words += ["--data", f"train={world}/train"]
    if case.measured not in ("", "train"):
        words += ["--data", f"{case.measured}={world}/{case.measured}"]
    words += [*INIT.get(world, ()), *case.init]
    settings = ("keep_updates=true", *case.settings)
    return [*words, *(word for setting in settings for word in ("--set", setting))]
