"""Clips of other lengths than a second: cutting, warnings, and networks made for them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import scripts
import soundfile
from conftest import inside
from fakes import some_words, speech_commands
from hypothesis import given, settings
from hypothesis import strategies as st
from keywords import CONFIG, config_file, pack

from fedtools.audio.speech_end import end_of_speech
from fedtools.data.clips import Clips
from fedtools.data.datadir import DataDir, write_table

RATE = 16_000
prepare = partial(scripts.prepare, "speechcommands")


def clip(begin: float, seconds: float, whole: float = 2.0, noise: float = 0.0, seed: int = 0):
    """Return a word of some seconds, from `begin`, in a recording: int16, loudest samples 9,000."""
    random = np.random.default_rng(seed)
    wave = noise * random.normal(0, 1, round(whole * RATE))
    time = np.arange(round(seconds * RATE)) / RATE
    # Louder and softer, like syllables; never less than 6 dB below the loudest.
    word = 9000 * (0.75 + 0.25 * np.cos(12 * np.pi * time)) * np.sin(2 * np.pi * 400 * time)
    at = round(begin * RATE)
    wave[at : at + len(word)] += word
    return wave.clip(-32768, 32767).astype("<i2")


@settings(max_examples=60, deadline=None)
@given(
    begin=st.floats(0.05, 0.8),
    seconds=st.floats(0.2, 1.0),
    noise=st.sampled_from([0.0, 30.0, 200.0]),
)
def test_speech_ends_where_the_word_does(begin, seconds, noise):
    found = end_of_speech(clip(begin, seconds, noise=noise), RATE)
    end = begin + seconds
    if end > 1.1:
        assert found / RATE == pytest.approx(end, abs=0.06)
    elif end < 0.97:
        assert found == 0


def test_what_is_no_speech():
    assert end_of_speech(np.zeros(2 * RATE, "<i2"), RATE) == 0
    assert end_of_speech(np.zeros(3, "<i2"), 1) == 0
    click = clip(0.2, 0.5)
    click[round(1.5 * RATE) :][:160] = 9000
    assert end_of_speech(click, RATE) == 0
    # Only speech, which does not get softer.
    assert end_of_speech(clip(0, 2), RATE) / RATE == pytest.approx(2, abs=0.06)
    assert end_of_speech(clip(0.2, 0.5)) / RATE == pytest.approx(0.7, abs=0.06)


@pytest.fixture
def data(tmp_path):
    """Make a data directory of clips, in order."""

    def make(clips):
        names = {f"s-{number:02d}": wave for number, wave in enumerate(clips)}
        for name, wave in names.items():
            soundfile.write(tmp_path / f"{name}.wav", wave, RATE, subtype="PCM_16")
        soundfile.write(tmp_path / "noise.wav", clip(0, 2), RATE, subtype="PCM_16")
        DataDir(
            tmp_path / "data",
            wav_scp={name: str(tmp_path / f"{name}.wav") for name in names},
            utt2spk=dict.fromkeys(names, "s"),
            text=dict.fromkeys(names, "yes"),
        ).write()
        (tmp_path / "classes.txt").write_text("yes\nno\n")
        write_table(tmp_path / "noise.scp", {"n": str(tmp_path / "noise.wav")})
        classes = ("--classes", tmp_path / "classes.txt", "--noise", tmp_path / "noise.scp")
        return ("pack-clips", tmp_path / "data", tmp_path / "out", *classes)

    return make


def test_words_of_two_seconds_are_told_and_packed_whole(cli, data, tmp_path):
    command = data([clip(0.1, 1.3 + 0.02 * number) for number in range(10)])
    done = cli(*command).ok()
    said = f"warning: {tmp_path / 'data'}: 10 of 10 clips lose speech beyond 1 s; give"
    assert f"{said} --clip-seconds 1.6 (run.sh: --clip_seconds)" in done.err
    # The advised length loses at most a tenth.
    assert "warning" not in cli(*command, "--clip-seconds", 1.6).ok().err
    assert cli(*command, "--clip-seconds", 2).ok().err == ""
    clips = Clips.read(tmp_path / "out")
    assert (
        clips.samples == 2 * RATE and (tmp_path / "out" / "clip_samples").read_text() == "32000\n"
    )
    wanted = [soundfile.read(tmp_path / f"s-{n:02d}.wav", dtype="int16")[0] for n in range(10)]
    np.testing.assert_array_equal(clips.waves, wanted)
    cli(*command).ok()
    assert not (tmp_path / "out" / "clip_samples").exists()
    assert Clips.read(tmp_path / "out").samples == RATE
    cli(*command, "--clip-seconds", 3).fails(1, "32000 samples of noise, a clip has 48000")
    cli(*command, "--clip-seconds", 0).fails(2, "clip-seconds")


@pytest.mark.parametrize("losing, told", [(0, False), (2, False), (3, True)])
def test_more_than_a_tenth_is_told(cli, data, losing, told):
    """All twenty are two seconds long; by their lengths each would be reported."""
    short = [clip(0.2, 0.5, noise=50, seed=number) for number in range(20 - losing)]
    command = data([*short, *[clip(0.5, 1)] * losing])
    assert ("lose speech" in cli(*command).ok().err) == told


def test_a_damaged_length_is_told(cli, data, tmp_path):
    cli(*data([clip(0.1, 1.3)]), "--clip-seconds", 2).ok()
    for text in ("32001\n", "x\n", "", "32000\n1\n"):
        (tmp_path / "out" / "clip_samples").write_text(text)
        experiment = ("init", tmp_path / "exp", "--config", config_file(tmp_path / "c.yaml"))
        more = ("--method", "fedavg", "--data", f"train={tmp_path / 'out'}")
        cli(*experiment, *more).fails(1, str(tmp_path / "out"))


NETWORKS = {
    "transformer": {"layers": 1, "width": 8, "feedforward": 8},
    "mhattrnn": {"heads": 2, "units": 4, "filters": 2},
    "resnet": {"channels": 4, "layers": 2},
    "dscnn": {"channels": 4, "blocks": 1},
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("seconds", [0.5, 2])
def test_networks_of_clips_of_another_length_train(tmp_path, network, seconds):
    length = round(seconds * RATE)
    for split in ("train", "valid"):
        pack(tmp_path / split, {"a": [1, 1, 2, 2], "b": [1, 1, 1, 1]}, length=length)
    training = CONFIG["training"] | {"augment": {"time_shift_ms": 100}, "num_threads": 1}
    model = {"network": network, "network_conf": NETWORKS[network]}
    config_file(tmp_path / "c.yaml", model=model, training=training, rounds=1)
    folders = [f"{split}={tmp_path / split}" for split in ("train", "valid")]
    begin = ("init", tmp_path / "exp", "--config", tmp_path / "c.yaml", "--method", "fedavg")
    inside(*begin, "--data", folders[0], "--data", folders[1]).ok()
    inside("rounds", tmp_path / "exp", "--evaluate", "valid").ok()
    from fedtools.federation.federation import Federation

    federation = Federation(tmp_path / "exp")
    frames = federation.task.clips.features("train").plain(slice(0, 1)).shape[1]
    assert frames == (length - 480) // 160 + 1
    if network == "transformer":
        assert federation.task.models.build().state_dict()["places"].shape[-2] == frames + 1


def test_clips_of_several_lengths_do_not_mix(tmp_path):
    clients = {"a": [1, 1, 2, 2], "b": [1, 1, 1, 1]}
    pack(tmp_path / "train", clients, length=2 * RATE)
    pack(tmp_path / "valid", clients, length=RATE)
    config_file(tmp_path / "c.yaml", rounds=1)
    begin = ("init", tmp_path / "exp", "--config", tmp_path / "c.yaml", "--method", "fedavg")
    folders = [f"{split}={tmp_path / split}" for split in ("train", "valid")]
    said = (
        "valid: clips of 1 s, those of the training data have 2 s; pack them with --clip-seconds 2"
    )
    inside(*begin, "--data", folders[0], "--data", folders[1]).fails(1, said)


def test_a_shift_of_more_than_a_clip_is_refused(tmp_path):
    pack(tmp_path / "train", {"a": [1, 1, 2, 2]}, length=4000)
    training = CONFIG["training"] | {"augment": {"time_shift_ms": 251}}
    config_file(tmp_path / "c.yaml", training=training, clients_per_round=1)
    begin = ("init", tmp_path / "exp", "--config", tmp_path / "c.yaml", "--method", "fedavg")
    inside(*begin, "--data", f"train={tmp_path / 'train'}").fails(1, "time_shift_ms 251 is longer")


def test_silence_is_as_long_as_a_clip(tmp_path):
    corpus = speech_commands(tmp_path, some_words(3, 2, 2), noise=(9.0, 4.0))
    prepare(corpus, tmp_path / "data", "--task", "keywords", "--clip-seconds", "1.5").ok()
    for split in ("train", "valid", "test"):
        data = DataDir.read(tmp_path / "data" / "keywords" / split)
        silence = [utt for utt, label in data.text.items() if label == "_silence_"]
        spans = [list(map(float, data.segments[utt].split()[1:])) for utt in silence]
        assert spans and all(end - start == pytest.approx(1.5) for start, end in spans)
        assert {data.utt2dur[utt] for utt in silence} == {"1.500"}
    short = ("--clip-seconds", "0.01")
    prepare(corpus, tmp_path / "data", "--task", "keywords", *short).fails(2, "0.1 to 60")
