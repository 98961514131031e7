"""Inputs beyond those of `world.py`: rescoring and its privacy, sent features, audio."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import fakes
import numpy as np
import rescored_world
import simulated
import soundfile
import yaml

from fedtools.data.datadir import DataDir, write_table

# Where `soak.py` keeps the noise key, next to the record of releases.
SECRET = "secret"
PRIVATE = '--set method_conf.epsilon=8 --set method_conf.personal=["*norm*"]'
BLOCKS = '["encoder.embed.*","encoder.encoders.0.*"]'
# name -> options of FMP and of its privacy.
FMP = {
    "fmp": {"sends": "increments"},
    "fmpnoise": {"privacy": {"mechanism": "laplace", "epsilon": 1.0, "trust": "client"}},
}


def fmp_init(path: str, config: str) -> str:
    return f"init {{}}/{path} --config {{}}/{config}.yaml --method fmp --data train={{}}/stream"


def decouple_init(path: str) -> str:
    return (
        f"init {{}}/{path} --config {{}}/config.yaml --method decouplefl --data train={{}}/train "
        "--data valid={}/valid --asset tokens={}/tokens --set rounds=2 "
        f"--set method_conf.personal={BLOCKS} --set method_conf.stage1=1 "
        "--set method_conf.stage2=1"
    )


def kws_init(path: str, method: str) -> str:
    return (
        f"init {{}}/{path} --config {{}}/kws.yaml --method {method} "
        "--data train={}/clips/train --data test={}/clips/test"
    )


VARY = "--vary alpha=0,0.75 --set rounds=2"
SPOKEN = ("spoken", "dec/text")
# name, words, inputs, and other required files, like `world.Command`.
ROWS: list[tuple[str, str, Sequence[str], Sequence[str]]] = [
    ("import-kaldi", "import-nbest kaldi {}/kaldi {}/new", ["kaldi"], []),
    ("import-espnet", "import-nbest espnet {}/recog {}/new", ["recog"], []),
    ("rescore-stream", "rescore-stream {}/said {}/rescored {}/new", ["said", "rescored"], []),
    ("rescore-words", "rescore-words {}/stream --rounds 2", ["stream"], []),
    ("rescore-sweep", f"rescore-sweep {{}}/stream {{}}/new.tsv {VARY}", ["stream"], []),
    ("rescore-tune", f"rescore-tune {{}}/stream {{}}/new.yaml {VARY}", ["stream"], []),
    ("train-fmp", f"{fmp_init('new', 'fmp')} && rounds {{}}/new", ["stream", "fmp.yaml"], []),
    (
        "train-noise",
        f"{fmp_init('new', 'fmpnoise')} && rounds {{}}/new",
        ["stream", "fmpnoise.yaml", SECRET],
        [],
    ),
    ("rounds-fmp", "rounds {}/fmp", ["fmp"], ["stream", SECRET]),
    ("rounds-noise", "rounds {}/fmpnoise", ["fmpnoise", SECRET], ["stream"]),
    ("aggregate-fmp", "aggregate {}/fmpsent", ["fmpsent"], ["stream", SECRET]),
    ("aggregate-noise", "aggregate {}/fmpnoisesent", ["fmpnoisesent", SECRET], ["stream"]),
    ("reset-noise", "reset {}/fmpnoise --round 1", ["fmpnoise", SECRET], ["stream"]),
    ("privacy", "privacy {}/fmpnoise", ["fmpnoise", SECRET, "stream"], []),
    ("rescore-best", "rescore-best {}/fmp {}/new", ["fmp", "stream"], [SECRET]),
    ("aggregate-features", "aggregate {}/feats", ["feats"], ["train", "valid"]),
    ("rounds-features", "rounds {}/gathered", ["gathered"], ["train", "valid"]),
    ("decode-features", "decode {}/decoupled {}/valid {}/new", ["decoupled"], ["train", "valid"]),
    ("show-features", "show {}/decoupled", ["decoupled"], ["train", "valid"]),
    ("aggregate-kws", "aggregate {}/kwssent", ["kwssent"], ["clips"]),
    ("aggregate-private", "aggregate {}/privatesent", ["privatesent", SECRET], ["clips"]),
    ("rounds-private", "rounds {}/private", ["private", SECRET], ["clips"]),
    ("privacy-models", "privacy {}/private", ["private", SECRET], ["clips"]),
    ("publish", "publish {}/private {}/new", ["private", SECRET], ["clips"]),
    ("train-fedopt", "rounds {}/fedopt", ["fedopt"], ["clips"]),
    (
        "train-ivectors",
        "train-ivectors {}/train {}/new --gaussians 2 --dimension 2",
        ["train"],
        [],
    ),
    (
        "append-ivectors",
        "append-ivectors {}/valid {}/ivectors {}/new {}/newarks",
        ["ivectors", "valid"],
        [],
    ),
    ("extract-sounds", "extract-features {}/sounds {}/newarks", ["sounds"], []),
    ("pack-sounds", "pack-clips {}/sounds {}/new --classes {}/sounds/a", ["sounds"], []),
    ("perturb-volume", "perturb-volume {}/sounds {}/new", ["sounds"], []),
    ("validate-sounds", "utils/validate_data_dir.py {}/sounds --no-feats", ["sounds"], []),
    ("score-language", "score {}/spoken {}/dec/text {}/new --resamples 20", SPOKEN, []),
    (
        "footprints",
        "attack footprints {}/models {}/new --indicator {}/strangers --round 1",
        ["models", "strangers"],
        ["people"],
    ),
    ("a1", "attack a1 {}/prints {}/new --models {}/prints/who.tsv --resamples 20", ["prints"], []),
    (
        "attributes",
        "attack attributes {}/prints {}/new --models {}/prints/who.tsv --resamples 20",
        ["prints"],
        [],
    ),
    ("membership", "attack membership {}/exp {}/new --round 1", ["exp", "train"], ["valid"]),
    ("attack-features", "attack features {}/decoupled {}/new", ["decoupled", "train"], ["valid"]),
]


def build(root: Path, call) -> None:
    """Make the inputs, in a folder that has those of `world.py`."""
    _nbest(root)
    _rescoring(root, call)
    _features(root, call)
    _sounds(root)


def _nbest(root: Path) -> None:
    """Write N-best lists in Kaldi's format and, in two jobs, in ESPnet's."""
    lists = {f"{one}-{number}": ("a b", "b a", "") for one in "xy" for number in range(3)}
    for job in (1, 2):
        folder = root / "kaldi" / f"archives.{job}"
        folder.mkdir(parents=True)
        own = [name for name in lists if name.startswith("xy"[job - 1])]
        keys = [(f"{name}-{rank}", rank) for name in own for rank in (1, 2, 3)]
        for file in ("ac_cost", "lm_cost"):
            text = "".join(f"{key} {10.5 + rank}\n" for key, rank in keys)
            (folder / file).write_text(text)
        text = "".join(f"{key} {lists[key[:3]][rank - 1]}\n" for key, rank in keys)
        (folder / "words_text").write_text(text)
        for rank in (1, 2, 3):
            folder = root / "recog" / f"output.{job}" / f"{rank}best_recog"
            folder.mkdir(parents=True)
            text = "".join(f"{name} {lists[name][rank - 1]}\n" for name in own)
            (folder / "text").write_text(text)
            (folder / "score").write_text("".join(f"{n} tensor(-{rank}.25)\n" for n in own))


def _rescoring(root: Path, call) -> None:
    """Make a stream, its sources, and federations of it with and without noise."""
    rescored_world.make_stream(root / "stream", 6)
    data = DataDir.read(root / "stream")
    data.path = root / "said"
    data.write()
    (root / "rescored").mkdir()
    for name in ("nbest.tsv", "nnlm.scp", "unigram.tsv", "words.txt", "vocabulary.tsv"):
        if (root / "stream" / name).exists():
            shutil.copy(root / "stream" / name, root / "rescored")
    for name, options in FMP.items():
        config = {"task": "rescore", "rounds": 3, "method_conf": options}
        (root / f"{name}.yaml").write_text(yaml.safe_dump(config))
        call(fmp_init(f"{name}sent", name).split())
        call(f"sample {{}}/{name}sent".split())
        call(f"train-local {{}}/{name}sent".split())
        call(fmp_init(name, name).split())
        call(f"rounds {{}}/{name} --to 2".split())


def _features(root: Path, call) -> None:
    """Make DecoupleFL before and after features are sent, i-vectors, footprints, sent clips."""
    call(decouple_init("feats").split())
    call("sample {}/feats".split())
    call("train-local {}/feats".split())
    shutil.copytree(root / "feats", root / "gathered")
    call("aggregate {}/gathered".split())
    shutil.copytree(root / "gathered", root / "decoupled")
    call("rounds {}/decoupled --evaluate valid".split())
    call("average {}/decoupled".split())
    call("train-ivectors {}/train {}/ivectors --gaussians 2 --dimension 2".split())
    simulated.data_dir(root / "strangers", ["xen", "yan"], 2, seed=5)
    models = [f"{name}-m{number}" for name in ("ann", "bob", "cat") for number in (1, 2)]
    people = DataDir.read(simulated.data_dir(root / "people", models, 1))
    people.utt2spk = {name: client[:3] for name, client in people.utt2client.items()}
    people.write()
    call(
        "init {}/models --config {}/config.yaml --method fedavg --data train={}/people "
        "--asset tokens={}/tokens --set rounds=1".split()
    )
    call("rounds {}/models".split())
    call("attack footprints {}/models {}/prints --indicator {}/strangers --round 1".split())
    who = "".join(f"{name}\t{name[:3]}\t{'mf'[name > 'b']}\t-\n" for name in models)
    (root / "prints" / "who.tsv").write_text(f"model\tspeaker\tgender\ttalks\n{who}")
    call(kws_init("kwssent", "fedkws_ui").split())
    call("sample {}/kwssent".split())
    call("train-local {}/kwssent".split())
    call(f"{kws_init('privatesent', 'dpfedavg')} {PRIVATE}".split())
    call("sample {}/privatesent".split())
    call("train-local {}/privatesent".split())
    shutil.copytree(root / "privatesent", root / "private")
    call("aggregate {}/private".split())
    call(kws_init("fedopt", "fedopt").split())
    call("rounds {}/fedopt --to 1".split())


def _sounds(root: Path) -> None:
    """Write one recording of each format, and optional tables."""
    folder, random = root / "sounds", np.random.default_rng(0)
    folder.mkdir()
    wave = random.normal(0, 0.1, 4800)
    data = DataDir(folder, others={"spk2gender": {"a": "m"}, "utt2lang": {}})
    names = {"FLAC": "flac", "OGG": "ogg", "AIFF": "aiff", "WAV": "wav"}
    for kind, ending in names.items():
        soundfile.write(folder / f"x.{ending}", wave, 16000, format=kind)
    (folder / "x.mp3").write_bytes(fakes.tiny_mp3())
    (folder / "x.sph").write_bytes(fakes.sphere(0.3))
    data.wav_scp |= {f"a-{e}": f"{folder}/x.{e}" for e in (*names.values(), "mp3", "sph")}
    for name in data.wav_scp:
        data.utt2spk[name], data.utt2client[name], data.text[name] = "a", "a", "yes"
        data.others["utt2lang"][name] = "en"
    data.write()
    (folder / "a").write_text("yes\nno\n")
    shutil.copytree(root / "valid", root / "spoken")
    write_table(
        root / "spoken" / "utt2lang", dict.fromkeys(DataDir.read(root / "valid").text, "ja")
    )
