"""Small valid inputs of every command, which the soak test damages, and the commands.

A new command is a line in `COMMANDS`; a builder makes its inputs, which `inputs` names.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fakes
import keywords
import more_inputs
import numpy as np
import simulated
import soundfile

from fedtools.data.datadir import DataDir

ROOT = Path(__file__).resolve().parent.parent.parent
Call = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class Command:
    """A command on files of the world, run in the world's folder.

    Attributes:
        name: its name in the table of results.
        words: the command line, whose words may have "{}" for the world's absolute path; the first
            is a `fedtools` command, or a script of this project. "&&" separates commands.
        inputs: files and folders that it reads; one file among them is damaged.
        also: files that must exist but are left intact.
    """

    name: str
    words: str
    inputs: Sequence[str]
    also: Sequence[str] = field(default=())


def asr_init(path: str) -> str:
    return (
        f"init {{}}/{path} --config {{}}/config.yaml --method fedavg --data train={{}}/train "
        "--data valid={}/valid --asset tokens={}/tokens"
    )


def kws_init(path: str) -> str:
    return (
        f"init {{}}/{path} --config {{}}/kws.yaml --method fedkws_ui "
        "--data train={}/clips/train --data test={}/clips/test"
    )


# --- inputs -------------------------------------------------------------------------------------

DATA = ("raw", "audio")
ASR = ("config.yaml", "tokens", "train", "valid")
KWS = ("kws.yaml", "clips")
LOCAL = "local/speechcommands"
GRID = "grid/keywords/dscnn/fedkws_ui/seed0"
REPORT = "--section mini --corpus C --release 1"

COMMANDS = [
    Command("config", "config {}/config.yaml model.input_size training.optim", ["config.yaml"]),
    Command("validate_data_dir", "utils/validate_data_dir.py {}/train --no-wav", ["train"]),
    Command("validate_raw", "utils/validate_data_dir.py {}/raw --no-feats", DATA),
    Command("extract-features", "extract-features {}/raw {}/arks", DATA),
    Command("merge-features", "merge-features {}/cut {}/jobs --nj 2", ["cut", "jobs"], ["audio"]),
    Command("partition", "partition {}/raw {}/parts --scheme iid --clients 2", ["raw"]),
    Command("partition-map", "partition {}/raw {}/parts --scheme map --by utt2spk", ["raw"]),
    Command("combine-data", "combine-data {}/both {}/train {}/strangers", ["train", "strangers"]),
    Command("subset-data", "subset-data {}/train {}/part --clients au", ["train"]),
    Command("subset-utterances", "subset-data {}/raw {}/part --utterances 2", ["raw"]),
    Command("train-tokens", "train-tokens {}/train/text {}/new --token-type char", ["train/text"]),
    Command("train-bpe", "train-tokens {}/train/text {}/new --vocab-size 12", ["train/text"]),
    Command("train-lm", "train-lm {}/train/text {}/new --order 2", ["train/text"]),
    Command(
        "train-lm-token",
        "train-lm --plain {}/plain {}/new --order 2 --unit token --tokens {}/bpe",
        ["plain", "bpe"],
    ),
    Command("init", asr_init("new"), ASR),
    Command(
        "init-start",
        asr_init("new") + " --start {}/exp/init.safetensors",
        ["exp/init.safetensors", *ASR],
    ),
    Command("init-kws", kws_init("new"), KWS),
    Command("train-asr", f"{asr_init('new')} && rounds {{}}/new --to 1", ["config.yaml"], ASR),
    Command("train-kws", f"{kws_init('new')} && rounds {{}}/new --to 1", ["kws.yaml"], KWS),
    Command("begin-asr", "rounds {}/begun --to 1", ["train", "begun"], ["valid"]),
    Command("sample", "sample {}/begun", ["begun"], ["train", "valid"]),
    Command("train-local", "train-local {}/sampled", ["sampled"], ["train", "valid"]),
    Command("aggregate", "aggregate {}/trained", ["trained"], ["train", "valid"]),
    Command("rounds", "rounds {}/exp --to 3", ["exp"], ["train", "valid"]),
    Command("evaluate", "evaluate {}/exp", ["exp", "valid"], ["train"]),
    Command("average", "average {}/exp", ["exp"], ["train", "valid"]),
    Command("show", "show {}/exp", ["exp"]),
    Command("decode", "decode {}/exp {}/valid {}/out", ["exp", "valid"], ["train"]),
    Command(
        "decode-lm",
        "decode {}/exp {}/valid {}/out --lm {}/lm --config {}/decode.yaml",
        ["lm", "decode.yaml"],
        ["exp", "train", "valid"],
    ),
    Command("merge-nbest", "merge-nbest {}/parts {}/valid --nj 2", ["parts", "valid/utt2spk"]),
    Command(
        "perturb-speed",
        "perturb-speed {}/words {}/new",
        ["words/utt2spk", "words/wav.scp"],
        ["audio"],
    ),
    Command("tune", "tune {}/dec {}/valid {}/new.yaml", ["dec/nbest.tsv", "valid/text"], ["valid"]),
    Command("best-path", "best-path {}/dec", ["dec/nbest.tsv"]),
    Command(
        "best-path-weights",
        "best-path {}/dec --weights {}/weights.yaml",
        ["weights.yaml"],
        ["dec"],
    ),
    Command("score", "score {}/valid {}/dec/text {}/new --resamples 20", ["valid", "dec/text"]),
    Command(
        "compare",
        "compare {}/valid {}/dec/text {}/valid/text --out {}/new.tsv --resamples 20",
        ["valid", "dec/text"],
    ),
    Command("export", "export {}/exp {}/new", ["exp"], ["train", "valid"]),
    Command("import", "import {}/espnet/config.yaml {}/espnet/model.pth {}/new", ["espnet"]),
    Command(
        "report",
        f"report {{}}/R.md {REPORT} --row FedAvg={{}}/exp:{{}}/score --plot {{}}/w.png",
        ["R.md", "score/wer.tsv", "exp"],
    ),
    Command(
        "report-published",
        f"report {{}}/R.md {REPORT} --row A=:{{}}/score --published P={{}}/published.tsv",
        ["score/wer.tsv", "published.tsv"],
    ),
    Command(
        "pack-clips",
        "pack-clips {}/words {}/new --classes {}/classes.txt --noise {}/noise.scp",
        ["words", "classes.txt", "noise.scp", "audio"],
    ),
    Command("rounds-kws", f"rounds {{}}/{GRID} --to 3", [GRID, "clips"]),
    Command("evaluate-kws", f"evaluate {{}}/{GRID} --split test", [GRID, "clips"]),
    Command("detection", f"detection {{}}/{GRID}", [GRID], ["clips"]),
    Command("clip-scores", f"clip-scores {{}}/{GRID}", [GRID], ["clips"]),
    Command(
        "false-alarms",
        f"false-alarms {{}}/{GRID} --data words={{}}/words",
        [GRID, "words", "audio"],
        ["clips"],
    ),
    Command(
        "report-keywords",
        f"{LOCAL}/report.py {{}}/grid {{}}/R.md {REPORT}",
        [GRID],
        ["clips"],
    ),
    Command(
        "plot-clients", f"{LOCAL}/plot_clients.py {{}}/clips/train {{}}/c.png", ["clips/train"]
    ),
    Command(
        "landscape",
        f"{LOCAL}/landscape.py {{}}/{GRID} {{}}/l.png --points 2 --epochs 1 --min-clips 1 "
        "--config {}/kws.yaml",
        [GRID, "clips", "kws.yaml"],
    ),
    Command(
        "prepare-commonvoice",
        "local/commonvoice/prepare.py {}/cv-corpus-17.0/en {}/new "
        "--accents au=australia,en=england --max-drop 0.5",
        ["cv-corpus-17.0"],
    ),
    Command(
        "prepare-speechcommands",
        "local/speechcommands/prepare.py {}/speech_commands {}/new --max-drop 0.5",
        ["speech_commands"],
    ),
    *(Command(*row) for row in more_inputs.ROWS),
]


# --- builders -----------------------------------------------------------------------------------


def build(root: Path, call: Call) -> None:
    """Make the inputs of all commands in a folder.

    Args:
        call: runs a command line in the form of `Command.words`; raises if it fails.
    """
    _audio(root)
    _corpora(root)
    _speech(root, call)
    _clips(root, call)
    more_inputs.build(root, call)


def _audio(root: Path) -> None:
    """Make recordings, and data directories that name them: of sentences, and of single words."""
    random = np.random.default_rng(0)
    (root / "audio").mkdir()
    raw, words = DataDir(root / "raw"), DataDir(root / "words")
    for number in range(6):
        speaker = "ab"[number % 2]
        name, file = f"{speaker}-{number}", root / "audio" / f"{number}.wav"
        soundfile.write(file, random.normal(0, 0.1, 4800), 16000, subtype="PCM_16")
        raw.wav_scp[name] = words.wav_scp[name] = str(file)
        raw.utt2spk[name] = words.utt2spk[name] = speaker
        raw.utt2client[name] = f"client{number % 3}"
        raw.utt2dur[name] = "0.3"
        raw.text[name], words.text[name] = "a b", ("yes", "no")[number % 2]
    raw.write()
    words.write()
    noise = root / "audio" / "noise.wav"
    soundfile.write(noise, random.normal(0, 0.1, 20000), 16000, subtype="PCM_16")
    (root / "noise.scp").write_text(f"noise {noise}\n")
    (root / "classes.txt").write_text("yes\nno\n")


def _corpora(root: Path) -> None:
    fakes.common_voice(root, fakes.some_clips(6, 1))
    words = fakes.some_words(1, 1, 1, [*fakes.KEYWORDS, "zero", "bed"])
    fakes.speech_commands(root, words)


def _speech(root: Path, call: Call) -> None:
    """Make features with transcripts, and models and hypotheses from them."""
    simulated.data_dir(root / "train", ["au", "en"], 3, 0)
    simulated.data_dir(root / "valid", ["au", "en"], 2, 1)
    simulated.config_file(root / "config.yaml", average=1, rounds=2)
    (root / "decode.yaml").write_text("decode:\n  beam_size: 10\n  nbest: 3\n  lm_weight: 0.5\n")
    (root / "published.tsv").write_text("Method\tWER\nTheirs\t1.0\n")
    (root / "R.md").write_text("# Results\n")
    text = [line.partition(" ")[2] for line in (root / "train/text").read_text().splitlines()]
    (root / "plain").write_text("".join(f"{line}\n" for line in text))
    call("train-tokens {}/train/text {}/tokens --token-type char".split())
    call("train-tokens {}/train/text {}/bpe --vocab-size 12".split())
    call("train-lm {}/train/text {}/lm --order 2".split())
    call("extract-features {}/raw {}/jobs --job 1 --nj 2".split())
    call("extract-features {}/raw {}/jobs --job 2 --nj 2".split())
    shutil.copytree(root / "raw", root / "cut")
    call(asr_init("exp").split())
    shutil.copytree(root / "exp", root / "begun")
    call(["sample", "{}/exp"])
    shutil.copytree(root / "exp", root / "sampled")
    call(["train-local", "{}/exp"])
    shutil.copytree(root / "exp", root / "trained")
    call(["rounds", "{}/exp", "--to", "2", "--evaluate", "valid"])
    call(["average", "{}/exp"])
    for job in (1, 2):
        call(f"decode {{}}/exp {{}}/valid {{}}/parts --job {job} --nj 2".split())
    call("decode {}/exp {}/valid {}/dec --lm {}/lm --config {}/decode.yaml".split())
    call("tune {}/dec {}/valid {}/weights.yaml".split())
    call("best-path {}/dec --weights {}/weights.yaml".split())
    call("score {}/valid {}/dec/text {}/score --resamples 20".split())
    call("export {}/exp {}/espnet".split())


def _clips(root: Path, call: Call) -> None:
    """Make packed clips, and an experiment at the path that the keyword report reads."""
    keywords.pack(root / "clips/train", {"ann": [2, 2, 4, 3], "bob": [1, 1, 3, 4]})
    keywords.pack(root / "clips/test", {"eve": [2, 2, 2, 2]})
    keywords.config_file(root / "kws.yaml", rounds=2)
    call(kws_init(GRID).split())
    call(f"rounds {{}}/{GRID} --to 2 --evaluate test".split())
    call(f"detection {{}}/{GRID}".split())
