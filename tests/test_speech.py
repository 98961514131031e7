"""Speaker information of speech in trials: with Resemblyzer, where available, and without."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import ROOT, Result, fedtools, inside, run

from fedtools.core.tables import read_tsv
from fedtools.score.verification import equal_error_rate

SCRIPT = ROOT / "utils" / "resemblyzer.sh"
HIDES = """
import sys
class Hides:
    def find_spec(self, name, *rest):
        if name in ("resemblyzer", "webrtcvad"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hides())
"""
SENTENCES = (
    "the weather will be cold and windy on friday morning",
    "she had your dark suit in greasy wash water all year",
    "nobody knew where the small boat had come from",
    "please put the green bottle on the kitchen table",
    "three hundred people waited outside in the pouring rain",
    "my brother lost his keys on the way to the station",
    "those shoes are far too expensive for a young child",
    "we could hear thunder behind the hills all evening",
)
SPEAKERS, MODELS = 6, 4


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, str]:
    """Return an environment with Resemblyzer, which is fetched into a folder if missing."""
    folder = tmp_path_factory.mktemp("of resemblyzer")
    before = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": before}
    done = run(SCRIPT, env=env | {"PIP_TARGET": str(folder)})
    if "pip cannot install Resemblyzer" in done.err:
        pytest.skip(f"no test of attack speech: {done.err.splitlines()[-1]}")
    done.ok()
    return env


@pytest.fixture
def hidden(tmp_path) -> dict[str, str]:
    """Return an environment without it, even if it is installed; pip would install elsewhere."""
    folder = tmp_path / "hides"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDES)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PYTHONPATH": str(folder), "PIP_TARGET": str(tmp_path / "target"), "PATH": path}


@pytest.fixture(scope="module")
def spoken(tmp_path_factory) -> Path:
    """Make a data directory: six voices, four models of each; all speech of a voice is one file."""
    pytest.importorskip("espeakng_loader")
    sys.path.append(str(ROOT / "local"))
    import voices

    synthesiser, folder = voices.Synthesiser(), tmp_path_factory.mktemp("spoken") / "data"
    folder.mkdir()
    tables: dict[str, list[str]] = {"wav.scp": [], "segments": [], "utt2spk": [], "utt2client": []}
    for number in range(SPEAKERS):
        who = voices.make_speaker(("us", "en", "au")[number % 3], number, 0)
        waves = [synthesiser.speak(text, who, text) for text in SENTENCES]
        path, start = folder / f"s{number}.wav", 0.0
        soundfile.write(path, np.concatenate(waves), voices.RATE)
        tables["wav.scp"].append(f"s{number} {path}")
        for index, wave in enumerate(waves):
            end = start + len(wave) / voices.RATE
            utt = f"s{number}-{index}"
            tables["segments"].append(f"{utt} s{number} {start:.5f} {end:.5f}")
            tables["utt2spk"].append(f"{utt} s{number}")
            tables["utt2client"].append(f"{utt} s{number}-m{index % MODELS}")
            start = end
    write(folder, tables)
    return folder


def write(folder: Path, tables: dict[str, list[str]]) -> None:
    folder.mkdir(exist_ok=True)
    for name, lines in tables.items():
        (folder / name).write_text("".join(f"{line}\n" for line in sorted(lines)))


def trials(path: Path, speakers: dict[str, str]) -> Path:
    """Return all pairs of models."""
    names = sorted(speakers)
    pairs = [(a, b) for a in names for b in names if a < b]
    kinds = ("nontarget", "target")
    path.write_text("".join(f"{a} {b} {kinds[speakers[a] == speakers[b]]}\n" for a, b in pairs))
    return path


def own(folder: Path) -> dict[str, str]:
    """Return model -> speaker."""
    lines = (folder / "utt2client").read_text().splitlines()
    utts = dict(line.split() for line in (folder / "utt2spk").read_text().splitlines())
    return {model: utts[utt] for utt, model in map(str.split, lines)}


def command(data: Path, out: Path, *lists: Path) -> tuple[str | Path, ...]:
    options = [word for path in lists for word in ("--trials", path)]
    return "attack", "speech", data, out, *options


def speech(data: Path, out: Path, *lists: Path, env: dict[str, str]) -> Result:
    return fedtools(*command(data, out, *lists), env=env)


def scores_of(path: Path) -> dict[tuple[str, str], float]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {(one, other): float(score) for one, other, score in rows}


def test_without_resemblyzer_a_line_says_what_to_install(spoken, tmp_path, hidden):
    easy = trials(tmp_path / "trials.easy", own(spoken))
    done = speech(spoken, tmp_path / "out", easy, env=hidden)
    done.fails(1, "needs Resemblyzer", "No module named 'resemblyzer'", "utils/resemblyzer.sh")
    assert not (tmp_path / "out").exists()


def test_voices_are_told_apart_and_other_labels_are_not(spoken, tmp_path, installed):
    easy, out = trials(tmp_path / "trials.easy", own(spoken)), tmp_path / "out"
    # A speaker's four models are of four voices, so their content must not help.
    mixed = tmp_path / "mixed"
    shutil.copytree(spoken, mixed)
    names = (spoken / "utt2spk").read_text().splitlines()
    swapped = [
        f"{utt} t{(int(who[1]) + int(utt[-1]) % MODELS) % SPEAKERS}"
        for utt, who in map(str.split, names)
    ]
    write(mixed, {"utt2spk": swapped})
    chance = trials(tmp_path / "trials.chance", own(mixed))
    (row,) = _rows(speech(spoken, out, easy, env=installed), out)
    assert (row["attack"], row["scores"], row["trials"]) == ("speech", "cosine", "easy")
    assert (row["targets"], row["others"]) == ("36", "240")
    assert float(row["EER%"]) <= 10
    assert float(row["low"]) <= float(row["EER%"]) <= float(row["high"])
    assert (out / "speech.easy.det.tsv").exists()
    (row,) = _rows(speech(mixed, tmp_path / "other", chance, env=installed), tmp_path / "other")
    assert float(row["EER%"]) >= 35
    _as_the_package_itself(spoken, out, installed)
    _figures_are_of_the_scores(out, easy)


def _rows(done: Result, out: Path) -> list[dict[str, str]]:
    done.ok()
    return read_tsv(out / "speech.tsv", None)


def _as_the_package_itself(data: Path, out: Path, env: dict[str, str]) -> None:
    """Check that the package alone, on the same samples, gives the same cosines."""
    program = """
import sys, soundfile, numpy as np
from resemblyzer import VoiceEncoder, normalize_volume
encoder = VoiceEncoder("cpu", verbose=False)
samples, rate = soundfile.read(sys.argv[1] + "/s3.wav", dtype="float32")
rows = [line.split() for line in open(sys.argv[1] + "/segments") if line.startswith("s3")]
waves = [samples[int(float(a) * rate) : int(float(b) * rate)] for _, _, a, b in rows]
found = [encoder.embed_utterance(normalize_volume(one, -30, increase_only=True)) for one in waves]
means = [found[0] + found[4], found[2] + found[6]]
print(np.dot(*means) / np.prod([np.linalg.norm(one) for one in means]))
"""
    cosine = float(run(sys.executable, "-c", program, data, env=env).ok().out)
    assert scores_of(out / "speech.easy")["s3-m0", "s3-m2"] == pytest.approx(cosine, abs=1e-4)


def _figures_are_of_the_scores(out: Path, easy: Path) -> None:
    kinds = [line.split() for line in easy.read_text().splitlines()]
    scores = scores_of(out / "speech.easy")
    values = np.array([scores[one, other] for one, other, _ in kinds])
    rate = equal_error_rate(values, np.array([kind == "target" for *_, kind in kinds]))
    assert read_tsv(out / "speech.tsv", None)[0]["EER%"] == f"{rate:.2f}"


def test_copies_at_other_speeds_are_no_more_speech(spoken, tmp_path, installed):
    speakers = own(spoken)
    easy = trials(
        tmp_path / "trials.easy", {m: s for m, s in speakers.items() if s in ("s0", "s1")}
    )
    fast = tmp_path / "fast"
    fedtools("perturb-speed", spoken, fast, "--speeds", "0.9 1.0 1.1").ok()
    speech(spoken, tmp_path / "one", easy, env=installed).ok()
    speech(fast, tmp_path / "two", easy, env=installed).ok()
    assert scores_of(tmp_path / "one" / "speech.easy") == pytest.approx(
        scores_of(tmp_path / "two" / "speech.easy"), abs=1e-6
    )


def test_silence_is_left_out_and_named(spoken, tmp_path, installed):
    speakers = {m: s for m, s in own(spoken).items() if s in ("s0", "s1")}
    easy = trials(tmp_path / "trials.easy", speakers)
    silent = tmp_path / "silent.wav"
    soundfile.write(silent, np.zeros(16000), 16000)
    data = tmp_path / "data"
    shutil.copytree(spoken, data)
    for name, line in (
        ("wav.scp", f"s0-9 {silent}"),
        ("segments", "s0-9 s0-9 0 0.5"),
        ("utt2spk", "s0-9 s0"),
        ("utt2client", "s0-9 s0-m0"),
    ):
        write(data, {name: [*(data / name).read_text().splitlines(), line]})
    done = speech(data, tmp_path / "out", easy, env=installed).ok()
    assert "left out because they are silent: s0-9" in done.err
    soundfile.write(silent.with_name("s0.wav"), np.zeros(16000 * 60), 16000)
    wav = (data / "wav.scp").read_text().replace(str(spoken / "s0.wav"), str(tmp_path / "s0.wav"))
    (data / "wav.scp").write_text(wav)
    done = speech(data, tmp_path / "none", easy, env=installed)
    done.fails(1, "all speech of client 's0-m0' is silence")


def test_what_trials_do_not_fit_is_told(spoken, tmp_path):
    def speak(data: Path, out: Path, *lists: Path) -> Result:
        return inside(*command(data, out, *lists))

    speakers = own(spoken)
    easy = trials(tmp_path / "trials.easy", speakers)
    again = tmp_path / "again" / "trials.easy"
    again.parent.mkdir()
    shutil.copy(easy, again)
    speak(spoken, tmp_path / "out", easy, again).fails(1, "two lists of easy trials")
    unknown = trials(tmp_path / "trials.round", {f"{m}-r0002": s for m, s in speakers.items()})
    speak(spoken, tmp_path / "out", unknown).fails(1, f"{unknown}:1: no model 's0-m0-r0002'")
    done = inside("attack", "speech", spoken, spoken, tmp_path / "out", "--trials", easy)
    done.fails(1, "'s0-m0' is also a client of another folder")
    inside("attack", "speech", spoken, "--trials", easy).fails(2, "at least one DATA and OUT")
    assert not (tmp_path / "out").exists()


def test_other_weights_are_no_oracle(spoken, tmp_path, installed):
    where = "import resemblyzer; print(resemblyzer.__path__[0])"
    package = run(sys.executable, "-c", where, env=installed).ok().out.strip()
    shutil.copytree(package, tmp_path / "resemblyzer")
    (tmp_path / "resemblyzer" / "pretrained.pt").write_bytes(b"others")
    env = installed | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{installed['PYTHONPATH']}"}
    easy = trials(tmp_path / "trials.easy", own(spoken))
    done = speech(spoken, tmp_path / "out", easy, env=env)
    done.fails(1, "resemblyzer/pretrained.pt: not the weights of Resemblyzer 0.1.4")


def test_weights_hold_nothing_but_tensors(installed):
    program = """
from pathlib import Path
import resemblyzer, torch
path = Path(resemblyzer.__file__).with_name("pretrained.pt")
print(len(torch.load(path, map_location="cpu", weights_only=True)["model_state"]))
"""
    # Three layers of an LSTM and a linear one; two more belong to GE2E's loss.
    assert run(sys.executable, "-c", program, env=installed).ok().out == "16\n"


def test_what_is_there_is_not_installed_again(installed):
    done = run(SCRIPT, env=installed | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}).ok()
    assert (done.out, done.err) == ("", "")


def test_no_wheel_is_told_in_one_line(tmp_path, hidden):
    done = run(SCRIPT, env=hidden | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""})
    assert done.code == 1 and done.err.count("\n") == 2
    assert "pip cannot install Resemblyzer: ERROR: " in done.err.splitlines()[-1]


def test_another_wheel_of_the_name_is_refused(tmp_path, hidden):
    """The hash is fixed, so another file of that name in the user's index is refused."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "Resemblyzer-0.1.4-py3-none-any.whl").write_bytes(b"PK")
    done = run(SCRIPT, env=hidden | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)})
    assert done.code == 1 and "pip cannot install" in done.err and "HASH" in done.err.upper()
    assert done.err.count("\n") == 2 and not (tmp_path / "target").exists()


def test_usage():
    done = run(SCRIPT, "folder")
    assert done.code == 2 and done.err == "resemblyzer.sh: unknown argument 'folder'; see --help\n"
    assert "utils/resemblyzer.sh" in run(SCRIPT, "--help").ok().out
