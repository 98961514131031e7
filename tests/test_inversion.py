"""Recovery of inputs and tokens from updates, with known truth and with none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import kaldi_native_fbank
import keywords
import numpy as np
import pytest
import simulated
import torch
import updates_world
from conftest import inside
from safetensors.numpy import load_file, save_file
from test_language import begin as begin_language
from test_language import world as language  # noqa: F401
from torch import nn

from fedtools.attack.options import Inversion
from fedtools.attack.recovery.bag_of_words import Output, ranked, scores_of
from fedtools.attack.recovery.griffin_lim import Front
from fedtools.attack.recovery.matching import Plan, Simulation, distance, match
from fedtools.attack.recovery.recovered import COLUMNS, Item, assigned, correlation, voices
from fedtools.attack.speakers.readout import constant_of
from fedtools.audio.features import FeatureConfig, compute
from fedtools.core.tables import read_tsv
from fedtools.data.clips import Clip, write_clips
from fedtools.data.datadir import DataDir
from fedtools.models.acoustic.plain_ctc import ctc_losses
from fedtools.models.keywords import NETWORKS
from fedtools.models.keywords.base import Network, Sizes
from fedtools.models.stacked import Linear
from fedtools.report.card import read_card

SAMPLES = 3200
PEOPLE = [f"s{number:02d}" for number in range(12)]
Rows = dict[tuple[str, str, str, str], dict[str, str]]


# --- components


def test_plain_ctc_is_torchs_and_has_a_second_gradient():
    torch.manual_seed(0)
    scores = torch.randn(4, 9, 5, dtype=torch.float64, requires_grad=True)
    # One repeats a token, one is empty, and one has no alignment.
    texts, lengths = [[1, 1, 2], [3], [], [2, 2, 2, 2]], torch.tensor([9, 7, 8, 3])
    log_probs = scores.log_softmax(-1)
    ours = ctc_losses(log_probs, lengths, texts)
    theirs = nn.functional.ctc_loss(
        log_probs.transpose(0, 1),
        torch.tensor([token for text in texts for token in text]),
        lengths,
        torch.tensor([len(text) for text in texts]),
        reduction="none",
        zero_infinity=True,
    )
    torch.testing.assert_close(ours, theirs)
    gradients = [
        torch.autograd.grad(one.sum(), scores, retain_graph=True)[0] for one in (ours, theirs)
    ]
    torch.testing.assert_close(*gradients)

    def of_two(scores: torch.Tensor) -> torch.Tensor:
        return ctc_losses(scores.log_softmax(-1), lengths[:2], texts[:2])

    assert torch.autograd.gradgradcheck(of_two, scores[:2].detach().requires_grad_())


class Tiny(nn.Module):
    """A network of frames through BatchNorm to one output."""

    def __init__(self, values: int, width: int):
        super().__init__()
        self.first, self.norm = nn.Linear(values, width), nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 3)

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        frames = torch.cat(list(inputs))
        hidden = self.norm(self.first(frames).T[None])[0].T
        return self.last(hidden.tanh()).mean(0)


def cross_entropy(model: nn.Module, inputs: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs)[None], torch.tensor([1]))


def state_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("momentum", "clip"), [(0.0, 0.0), (0.9, 0.05)])
def test_simulated_steps_are_those_of_sgd(in_float64, momentum, clip):
    """Parameter changes and BatchNorm's inputs, inferred from its statistics, are those of SGD."""
    model, inputs = Tiny(5, 4), [torch.randn(20, 5), torch.randn(7, 5)]
    start, simulation = state_of(model), Simulation(Tiny(5, 4))
    simulation.model.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=momentum)
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model, inputs).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    seen = simulation.seen(state_of(model), start, 3)
    plan = Plan(3, 0.3, momentum, clip)
    changes, moments = simulation.run(cross_entropy, inputs, plan)
    for name, value in seen.update.items():
        torch.testing.assert_close(changes[name], value, rtol=1e-4, atol=1e-9)
    # The last step's mean has the largest weight; observed means have none of their own.
    assert distance(changes, moments, seen, 0.0).item() == pytest.approx(0, abs=1e-8)
    state = simulation.model.state_dict()
    assert all((state[name].numpy() == value).all() for name, value in start.items())


def test_moments_of_one_step_are_exact(in_float64):
    model, inputs = Tiny(5, 4), [torch.randn(20, 5)]
    simulation = Simulation(model)
    start, sent = state_of(model), simulation.step(cross_entropy, inputs)
    seen = simulation.seen(sent, start, 1)
    given = model.first(inputs[0]).detach()
    torch.testing.assert_close(seen.moments["norm"], (given.mean(0), given.var(0)))
    # torch's own layer updates its statistics equally.
    model.norm.train()
    cross_entropy(model, inputs)
    for name in ("running_mean", "running_var"):
        np.testing.assert_allclose(sent[f"norm.{name}"], getattr(model.norm, name).numpy())


class Frame(nn.Module):
    """A network of a first affine layer with a bias, and a second one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return self.last(self.first(torch.cat(list(inputs))).tanh()).mean(0)


def test_matching_finds_the_frame_that_the_gradient_determines(in_float64):
    """Matching reaches the frame dW' db / |db|^2 of a first layer, without being given it."""
    model, frame = Frame(), torch.randn(1, 6)
    simulation, options = Simulation(model), Inversion(iterations=400, total_variation=0)
    start, sent = state_of(model), simulation.step(cross_entropy, [frame])
    moved = {name: value - start[name] for name, value in sent.items()}
    exact = constant_of(moved["first.weight"], moved["first.bias"])
    np.testing.assert_allclose(exact, frame[0].numpy(), rtol=1e-6)
    scales = torch.zeros(6), torch.ones(6)
    seen = simulation.seen(sent, start, 1)
    (found,) = match(simulation, cross_entropy, seen, Plan(), [1], scales, options, 0, "test")
    np.testing.assert_allclose(found[0].numpy(), exact, atol=0.02)
    # With another label, the match is worse.
    other = lambda model, inputs: nn.functional.cross_entropy(  # noqa: E731
        model(inputs)[None], torch.tensor([2])
    )
    (wrong,) = match(simulation, other, seen, Plan(), [1], scales, options, 0, "test")
    assert np.abs(wrong[0].numpy() - exact).max() > 0.2


class Spoken(nn.Module):
    """Log posteriors of frames."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 5)

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return self.last(self.first(torch.cat(list(inputs))).tanh()).log_softmax(-1)


def test_matching_finds_a_short_utterance_by_ctc(in_float64):
    def loss(model: nn.Module, inputs: list[torch.Tensor]) -> torch.Tensor:
        return ctc_losses(model(inputs)[None], torch.tensor([4]), [[1, 3]])[0]

    model, frames = Spoken(), torch.randn(4, 6)
    simulation, options = Simulation(model), Inversion(iterations=400, total_variation=0)
    seen = simulation.seen(simulation.step(loss, [frames]), state_of(model), 1)
    scales = torch.zeros(6), torch.ones(6)
    (found,) = match(simulation, loss, seen, Plan(), [4], scales, options, 0, "test")
    assert correlation(found.numpy(), frames.numpy()) > 0.95


def test_correlation_and_order():
    random = np.random.default_rng(0)
    one, other = random.normal(size=(2, 30, 4))
    # A constant per bin and a scale do not matter; the longer one is cut.
    assert correlation(2 * one + [5, 0, 0, 1], one) == pytest.approx(1)
    assert correlation(np.concatenate([one, other]), one) == pytest.approx(1)
    assert abs(correlation(one, other)) < 0.4
    assert assigned([one, other, one[::-1]], [other, one[::-1], one]) == [1, 2, 0]


def test_scores_of_an_output_layer():
    """Tokens that occur are found from the layer's weights, even without a bias."""
    random = np.random.default_rng(0)
    hidden = random.normal(1, 0.3, (40, 6))
    labels = random.choice([2, 5, 9], 40)
    expected = np.full((40, 30), 1 / 30)
    expected[np.arange(40), labels] -= 1
    start = {"o.weight": np.zeros((30, 6)), "o.bias": np.zeros(30)}
    sent = {"o.weight": -expected.T @ hidden, "o.bias": -expected.sum(0)}
    output = Output({"bias": "o.bias", "weight": "o.weight"}, np.arange(1, 30))
    counts = np.bincount(labels, minlength=30)[1:]
    kept = {name: value for name, value in sent.items() if name != "o.bias"}
    for kind, given in (("bias", sent), ("weight", kept)):
        found = scores_of(output, given, start)
        assert found.keys() == {kind}
        assert ranked(found[kind], counts)[:2] == (100, 100)
        assert ranked(found[kind], counts).counts > 0.99
        assert ranked(-found[kind], counts).area == 0
    assert scores_of(output, start, start) == {}


def test_mel_energies_of_cepstra_are_those_of_filterbanks():
    samples = np.random.default_rng(0).normal(0, 0.1, 8000).astype("f4")
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither, options.mel_opts.num_bins = 0.0, 40
    options.mel_opts.high_freq = -400.0
    computer = kaldi_native_fbank.OnlineFbank(options)
    computer.accept_waveform(16000, (samples * 32768).tolist())
    computer.input_finished()
    expected = np.stack([computer.get_frame(at) for at in range(computer.num_frames_ready)])
    cepstra = compute(samples, FeatureConfig(40, 16000, "mfcc"))
    found = Front.of("mfcc", 40).energies(cepstra)
    np.testing.assert_allclose(found, expected, atol=1e-2)


def test_sound_of_features_has_these_features():
    waves = clip_waves(np.random.default_rng(0), 16000).astype("f4") / 32768
    for kind, bins in (("fbank", 80), ("log_mel", 80)):
        config, front = FeatureConfig(bins, 16000, kind), Front.of(kind, bins)
        true = compute(waves, config)
        again = compute(front.sound(true), config)
        both = [front.energies(one)[5 : len(again) - 5].clip(0) for one in (true, again)]
        # Frames start at other positions.
        best = max(correlation(both[0][shift:], both[1]) for shift in range(4))
        assert best > 0.8, kind


# --- keyword networks


class Flat(Network):
    """A network whose first layer has a bias and sees a whole clip, given by the gradient."""

    def __init__(self, sizes: FlatSizes, clients: int, bins: int, frames: int, classes: int):
        super().__init__()
        self.hidden = Linear(clients, bins * frames, 16)
        self.head = Linear(clients, 16, classes)

    def features(self, mfcc: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        return self.hidden(mfcc.flatten(2)).tanh()


@dataclass(frozen=True)
class FlatSizes(Sizes):
    network = Flat
    title = "Flat"


def clip_waves(random: np.random.Generator, samples: int) -> np.ndarray:
    """Return short tones at random times, unique to each clip."""
    times, wave = np.arange(samples) / 16000, random.normal(0, 50, samples)
    for _ in range(6):
        begin = random.uniform(0, times[-1])
        loud = random.uniform(1000, 5000) * np.exp(-(((times - begin) / 0.03) ** 2))
        wave += loud * np.sin(2 * np.pi * random.uniform(200, 6000) * times)
    return wave


def pack(folder: Path, clips: int) -> Path:
    """Pack clips of 0.2 s, a given number per speaker."""
    random, found = np.random.default_rng(0), []
    for place, client in enumerate(PEOPLE):
        for number in range(clips):
            label = keywords.CLASSES[(place + number) % len(keywords.CLASSES)]
            wave = clip_waves(random, SAMPLES).clip(-32000, 32000).astype("<i2")
            found.append(Clip(f"{client}-{number:04d}", client, label, wave))
    write_clips(folder, found, keywords.CLASSES, [], SAMPLES)
    return folder


def begin(root: Path, name: str, clips: int, steps: int) -> Path:
    training = {"optim": "sgd", "optim_conf": {"lr": 0.05}, "batch_size": 8, "stack": 1,
                "augment": {"time_shift_ms": 0, "noise_volume": 0.0}}  # fmt: skip
    config = keywords.config_file(
        root / f"{name}.yaml",
        model={"network": "flat"},
        training=training,
        rounds=1,
        keep_updates=True,
        method_conf={"local_steps": steps},
    )
    data = pack(root / f"{name}_train", clips)
    inside(
        *("init", root / name, "--config", config, "--method", "fedavg"),
        *("--data", f"train={data}", "--data", f"valid={data}"),
    ).ok()
    inside("rounds", root / name).ok()
    return root / name


@pytest.fixture(scope="module")
def flat():
    """Register the network for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETWORKS._found, "flat", FlatSizes)
        yield


@pytest.fixture(scope="module")
def single(flat, tmp_path_factory) -> Path:
    """Let each client take two steps on its only clip."""
    return begin(tmp_path_factory.mktemp("single"), "exp", 1, 2)


def attacked(path: Path, out: Path, *more: str, iterations: int = 110) -> Rows:
    options = ("--set", f"inversion.iterations={iterations}", "--resamples", "50")
    fast = ("--set", "inversion.total_variation=0.001")
    inside("attack", "inversion", path, out, "--round", "1", *options, *fast, *more).ok()
    rows = read_tsv(out / "inversion.tsv", COLUMNS)
    keys = "defence", "steps", "measure", "against"
    return {tuple(row[key] for key in keys): row for row in rows}


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def rows(single, out) -> Rows:
    found = attacked(single, out)
    assert (out / "inversion.png").stat().st_size > 1000
    parts = read_tsv(out / "inversion_parts.tsv", ("part", "status"))
    assert {row["status"] for row in parts} == {"ok"}
    return found


def test_a_card_tells_the_difference_with_its_interval(rows, out):
    row = rows["none", "one", "correlation", "another's"]
    cells = {(one.of, one.measure): one for one in read_card(out).cells}
    cell = cells["gradient matching, one", "correlation - another's"]
    assert (cell.nothing, cell.value) == ("0", row["difference"])
    assert (cell.low, cell.high) == (row["low"], row["high"])
    assert len(cells) == len(rows)


@pytest.mark.parametrize("steps", ["one", "real, simulated"])
def test_a_clip_is_recovered_and_others_are_not(rows, steps):
    row = rows["none", steps, "correlation", "another's"]
    assert float(row["value"]) > (0.9 if steps == "one" else 0.8)
    assert abs(float(row["control"])) < 0.2
    assert (row["attacker"], row["clients"], row["items"], row["true"]) == (
        "-",
        "12",
        "12",
        "1.000",
    )
    assert 0.6 < float(row["low"]) <= float(row["difference"]) <= float(row["high"])
    nearest = rows["none", steps, "nearest%", "chance"]
    # Each word has two clips of other speakers.
    assert (nearest["value"], nearest["control"]) == ("100.0", "33.3")
    heard = rows["none", steps, "accuracy%", "another's"]
    assert abs(float(heard["value"]) - float(heard["true"])) < 20


def test_labels_of_single_clips_are_exact(rows):
    row = rows["none", "one", "label%", "chance"]
    assert (row["value"], row["control"]) == ("100.0", "25.0")
    for measure in ("AUC%", "AP%"):
        assert rows["none", "real", f"bias {measure}", "frequency"]["value"] == "100.0"


def test_of_anothers_update_nothing_is_recovered(single, tmp_path):
    """Clips of the client after the next, with other labels, are not recovered."""
    update = single / "round_0001/update.1.safetensors"
    kept, whole = load_file(update), update.read_bytes()
    try:
        save_file({name: np.roll(value, 2, 0) for name, value in kept.items()}, update)
        # Of its own update, 80 iterations recover a correlation of 0.8.
        rows = attacked(single, tmp_path, "--steps", "real", iterations=80)
    finally:
        update.write_bytes(whole)
    row = rows["none", "real, simulated", "correlation", "another's"]
    assert abs(float(row["value"])) < 0.2 and float(row["low"]) < 0 < float(row["high"])
    assert float(rows["none", "real", "bias AUC%", "frequency"]["value"]) < 70


def test_of_no_update_nothing_is_told(single, tmp_path):
    update = single / "round_0001/update.1.safetensors"
    kept, start = load_file(update), load_file(single / "round_0001/global.safetensors")
    whole = update.read_bytes()
    try:
        save_file({name: 0 * value + start[name] for name, value in kept.items()}, update)
        done = inside("attack", "inversion", single, tmp_path, "--round", "1", "--steps", "real")
    finally:
        update.write_bytes(whole)
    done.ok()
    assert "gradient matching: not applicable: nothing that training changes is sent" in done.err
    assert read_tsv(tmp_path / "inversion.tsv", COLUMNS) == []


def test_defences_are_there_before_the_attack(single, tmp_path):
    """Bias and weight of the first layer stay at the client, so no clip is recovered."""
    noise = ("--defence", "clip=1+noise=3", "--defence", "keep=hidden.*")
    rows = attacked(single, tmp_path, "--each", "2", *noise)
    assert {row["attacker"] for key, row in rows.items() if key[0] != "none"} == {"semi-informed"}
    for steps in ("one", "real, simulated"):
        values = {one: float(rows[one, steps, "correlation", "another's"]["value"])
                  for one in ("none", "clip=1+noise=3", "keep=hidden.*")}  # fmt: skip
        assert values["none"] > 0.8
        assert values["clip=1+noise=3"] < 0.6 and values["keep=hidden.*"] < 0.6
    tables = []
    for number in range(2):
        out = tmp_path / str(number)
        attacked(single, out, "--each", "2", *noise, "--defence", "mean=2", iterations=8)
        tables.append((out / "inversion.tsv").read_bytes())
    assert tables[0] == tables[1]
    command = ("attack", "inversion", single, tmp_path, "--round", "1")
    inside(*command, "--defence", "keep=no").fails(1, "no tensor that is sent matches 'no'")
    inside(*command, "--defence", "bits=8", "--defence", "bits=8").fails(
        2, "the same defence twice"
    )


def test_clips_that_are_recovered_together(flat, tmp_path):
    """With more steps than are simulated, and several clips, the grouping is reported."""
    path = begin(tmp_path, "exp", 3, 4)
    few = ("--each", "2", "--steps", "real", "--set", "inversion.unroll=3")
    rows = attacked(path, tmp_path / "out", *few, iterations=20)
    row = rows["none", "real, as one", "correlation", "another's"]
    assert (row["clients"], row["items"], row["low"]) == ("2", "6", "-")


# --- speech recognition


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> Path:
    """Let each client take a step on its only utterance; the affine layer follows BatchNorm."""
    root = tmp_path_factory.mktemp("speech")
    folder = simulated.data_dir(root / "train", PEOPLE, 1)
    data = DataDir.read(folder)
    data.utt2spk = dict(data.utt2client)
    data.write()
    model = updates_world.MODEL | {"input_size": simulated.BINS}
    return updates_world.begin(root, "exp", "--set", "keep_updates=true", model=model)


def test_tokens_of_one_utterance_are_exact(speech, tmp_path):
    few = ("--each", "2", "--set", "inversion.restarts=2", "--set", "inversion.kind=fbank")
    rows = attacked(speech, tmp_path, *few, iterations=8)
    for measure in ("AUC%", "AP%"):
        row = rows["none", "real", f"bias {measure}", "frequency"]
        assert row["value"] == "100.0" and float(row["control"]) < 95
    for steps in ("one", "real, simulated"):
        assert {key[2] for key in rows if key[1] == steps} == {"correlation", "nearest%", "WER%"}
        assert rows["none", steps, "WER%", "another's"]["items"] == "2"


def test_a_language_model_has_no_items(language, tmp_path):  # noqa: F811
    path = begin_language(language, tmp_path / "exp", "--set", "keep_updates=true")
    done = inside("attack", "inversion", path, tmp_path / "out", "--round", "1").ok()
    assert "not applicable: experiments of task lm have no items" in done.err
    assert read_tsv(tmp_path / "out/inversion.tsv", COLUMNS) == []


def test_voices_by_planted_embeddings():
    """A recovered item has its speaker's voice, another speaker's item does not."""
    random = np.random.default_rng(0)
    voice = {one: random.normal(size=8) for one in PEOPLE[:4]}
    audio = {f"{one}-{number}": voice[one] / np.linalg.norm(voice[one])
             for one in voice for number in range(2)}  # fmt: skip
    # Two clients of one speaker are in no trial.
    speaker = {one: one for one in voice} | {"s03": "s02"}
    names = list(voice)
    items = [
        Item(one, f"{one}-0", audio[f"{one}-0"], [f"{names[place - 2]}-1"], [])
        for place, one in enumerate(names)
    ]
    enrolment = {one: f"{one}-1" for one in voice}
    shares, rate = voices(items, lambda value: value, audio.__getitem__, enrolment, speaker)
    assert (shares.sums[:, [0, 2]] == 100).all() and (shares.sums[:, 1] < 100).all()
    rows = [one.row(speaker, 50, 0) for one in (shares, rate)]
    assert (rows[1]["measure"], rows[1]["value"], rows[1]["true"]) == ("EER%", "0.0", "0.0")
    assert float(rows[1]["control"]) > 30 and rows[1]["low"] == "-"
    assert (rows[0]["clients"], rows[0]["speakers"]) == (4, 3)
