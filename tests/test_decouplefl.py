"""FedNorm, FedExtract, DecoupleFL and a teacher's labels against an oracle, on sent files."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import simulated
import torch
from asr_world import (
    CLIP,
    EPSILON,
    RATE,
    TRAIN,
    TRAINING,
    WARMUP,
    State,
    assert_near,
    batch_of,
    begin,
    load,
    model_of,
    table,
    tokens_of,
)
from conftest import inside, ledger
from decouplefl_world import (
    CUT,
    DECAY,
    EXTRACTOR,
    TEACHER,
    collapsed,
    final,
    learned_world,
    stages,
    start,
)
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from fedtools.client.invariance import SpeakerClassifier, turned_round
from fedtools.core.seeds import seed64
from fedtools.data.ark import write_ark
from fedtools.data.datadir import DataDir
from fedtools.exchange.sent_features import sent_names, write_features
from fedtools.models.acoustic.asr import build_model, log_posteriors
from fedtools.models.acoustic.extractor import Cut
from fedtools.tasks.asr.data import Batch
from fedtools.tasks.asr.labels import ContinuousLabels


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return learned_world(tmp_path_factory.mktemp("decouplefl"))


class Student:
    """A model and its teacher on all utterances of a client, straightforwardly."""

    def __init__(
        self,
        world: Path,
        *clients: str,
        trained: tuple[str, ...] = ("",),
        options: dict | None = None,
    ):
        options = options or model_of(0.0)
        self.model, self.teacher = (build_model(options, tokens_of(world)) for _ in range(2))
        self.batch = batch_of(world, "train", *clients)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name.startswith(trained))
        self.parameters = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, lr=RATE, eps=EPSILON)
        self.steps = 0

    def begin(self, state: State) -> None:
        load(self.model, state)
        load(self.teacher, state).eval()

    def labels(self) -> tuple[Tensor, Tensor]:
        """Label each utterance alone, so that no padding is heard."""
        found = []
        lengths = self.batch["speech_lengths"]
        for speech, length in zip(self.batch["speech"], lengths, strict=True):
            with torch.no_grad():
                encoded, _ = self.teacher.encode(speech[None, :length].clone(), length[None])
                found.append(torch.tensor(collapsed(self.teacher.ctc.log_softmax(encoded)[0])))
        padded = nn.utils.rnn.pad_sequence(found, True, -1)
        return padded, torch.tensor([len(one) for one in found])

    def loss(self) -> Tensor:
        text, lengths = self.labels()
        batch = {name: value.clone() for name, value in self.batch.items()}
        loss, _, _ = self.model(**batch | {"text": text, "text_lengths": lengths})
        return loss.sum()

    def backward(self) -> None:
        self.loss().backward()

    def step(self) -> None:
        self.model.train()
        self.steps += 1
        warm = WARMUP**0.5 * min(self.steps**-0.5, self.steps * WARMUP**-1.5)
        self.optimizer.param_groups[0]["lr"] = RATE * warm
        self.optimizer.zero_grad()
        self.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        new = dict(self.model.named_parameters())
        for name, value in self.teacher.named_parameters():
            value.data = DECAY * value.data + (1 - DECAY) * new[name].data

    def state(self) -> State:
        return {name: value.numpy().copy() for name, value in self.model.state_dict().items()}


# --- labels


def test_a_teacher_labels_and_follows(world, tmp_path):
    """The teacher follows equations 5 to 7 of Zhu et al., and persists over three rounds."""
    path = start(world, tmp_path / "exp", "client")
    inside("rounds", path, "--to", "3").ok()
    begun = load_file(path / "init.safetensors")
    for client in TRAIN:
        student = Student(world, client)
        student.begin(begun)
        for _ in range(3):
            student.step()
        assert_near(final(path, client, 3), student.state(), begun)


def masking(folder: Path, width: int) -> dict:
    """Return, and write, options of a deterministic SpecAugment that masks `width` bins."""
    conf = {"apply_time_warp": False, "apply_time_mask": False, "num_freq_mask": 1}
    conf["freq_mask_width_range"] = [width, width + 1]
    model = model_of(0.0) | {"specaug": "specaug", "specaug_conf": conf}
    simulated.config_file(folder / "masked.yaml", model=model, training=TRAINING)
    return model


def link(world: Path, folder: Path) -> Path:
    """Make a world of the same files, for other configurations."""
    for name in ("train", "valid", "tokens", "start.safetensors"):
        (folder / name).symlink_to(world / name)
    return folder


def test_a_teacher_hears_what_is_masked_for_the_student(world, tmp_path):
    options = masking(link(world, tmp_path), simulated.BINS - 1)
    path = start(tmp_path, tmp_path / "exp", "client", config="masked")
    inside("rounds", path, "--to", "2").ok()
    begun = load_file(path / "init.safetensors")
    student = Student(world, "au", options=options)
    student.begin(begun)
    for _ in range(2):
        student.step()
    assert_near(final(path, "au", 2), student.state(), begun)


def test_a_teacher_may_begin_anew_in_each_round(world, tmp_path):
    path = start(world, tmp_path / "exp", "client", "--set", "training.keep_teacher=false")
    inside("rounds", path, "--to", "3").ok()
    begun = load_file(path / "init.safetensors")
    student = Student(world, "au")
    student.begin(begun)
    for _ in range(3):
        student.teacher.load_state_dict(student.model.state_dict())
        student.step()
    assert_near(final(path, "au", 3), student.state(), begun)


def test_labels_of_a_teacher_are_no_transcripts(world, tmp_path):
    """Labels are the same without a `text`, with transcripts, and with wrong ones."""
    found = []
    for name in ("none", "right", "wrong"):
        root = tmp_path / name
        shutil.copytree(world, root, ignore=shutil.ignore_patterns("baseline"))
        text = root / "train" / "text"
        if name == "none":
            text.unlink()
        elif name == "wrong":
            lines = text.read_text().splitlines()
            text.write_text("".join(f"{line.split()[0]} a\n" for line in lines))
        path = start(root, root / "exp", "decouplefl", *CUT, *stages(2, 2), config="random")
        inside("rounds", path).ok()
        found.append([(path / f"round_{at:04d}/global.safetensors").read_bytes() for at in (1, 7)])
        found[-1] += [
            one.read_bytes() for one in sorted(path.glob("clients/*/round_0002/personal.*"))
        ]
    assert found[0] == found[1] == found[2] and len(found[0]) == 2 + len(TRAIN)
    assert found[0][0] != found[0][1]


def silent(world: Path, folder: Path) -> tuple[str, str]:
    """Return options whose initial model outputs only blanks."""
    state = load_file(world / "start.safetensors")
    state["ctc.ctc_lo.bias"][0] += 100
    save_file(state, folder / "silent.safetensors")
    return "--start", str(folder / "silent.safetensors")


def test_a_client_whose_labels_are_all_empty_is_told_and_goes_on(world, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg", *silent(world, tmp_path), *TEACHER)
    done = inside("rounds", path, "--to", "2").ok()
    assert "round 1, au: 100 % of its labels are empty" in done.err
    status = {(row["round"], row["client"]): row["status"] for row in ledger(path)}
    assert status == {(str(at), name): "collapsed" for at in (1, 2) for name in TRAIN} | {
        (str(at), "-"): "ok" for at in (1, 2)
    }
    shown = [line.split() for line in inside("show", path).ok().out.splitlines()]
    assert shown[0][-2:] == ["refused", "collapsed"]
    found = {line[0]: line[-2:] for line in shown[1:]}
    assert found.pop("server") == ["0", "0"] and found.pop("total") == ["0", "6"]
    assert found == {name: ["0", "2"] for name in TRAIN}
    spoken = start(world, tmp_path / "spoken", "fedavg")
    inside("rounds", spoken, "--to", "1").ok()
    assert {row["status"] for row in ledger(spoken)} == {"ok"}


@pytest.mark.parametrize(("method", "rounds"), [("centralized", (1, 2)), ("decouplefl", (2, 3))])
def test_a_server_whose_labels_are_all_empty_is_told_and_goes_on(world, tmp_path, method, rounds):
    more = (*CUT, *stages(0, 2)) if method == "decouplefl" else ("--set", "rounds=2")
    path = begin(world, tmp_path / "exp", method, *silent(world, tmp_path), *TEACHER, *more)
    done = inside("rounds", path).ok()
    said = [line for line in done.err.splitlines() if "empty" in line]
    everybody = ", ".join(f"{client} (100 %)" for client in TRAIN)
    assert said == [f"round {at}, server: empty labels for {everybody}" for at in rounds]
    told = {(int(row["round"]), row["client"]) for row in ledger(path) if row["status"] != "ok"}
    assert told == {(at, client) for at in rounds for client in TRAIN}
    shown = [line.split() for line in inside("show", path).ok().out.splitlines()]
    assert {line[0]: line[-2:] for line in shown[1:]} == {
        **{client: ["0", "2"] for client in TRAIN},
        "server": ["0", "0"],
        "total": ["0", "6"],
    }
    # A client takes part when it sends features, and when the classifier is sent back.
    took_part = {line[0]: line[1] for line in shown[1:]}
    assert {took_part[client] for client in TRAIN} == {"2" if method == "decouplefl" else "0"}


def test_of_the_clients_at_a_server_those_without_labels_are_told(world, tmp_path):
    """Nothing is said in en's audio; a third of the labels is no collapse."""
    root = link(world, tmp_path)
    (root / "train").unlink()
    shutil.copytree(world / "train", root / "train")
    data, random = DataDir.read(root / "train"), np.random.default_rng(0)
    matrices = {name: kaldiio.load_mat(data.feats_scp[name]) for name in data.utterances}
    for name in data.client_utterances("en"):
        matrices[name] = random.normal(0, 0.1, (80, simulated.BINS)).astype("f4")
    data.feats_scp = write_ark(root / "train" / "other.ark", sorted(matrices.items()))
    data.write()
    (root / "plain.yaml").symlink_to(world / "plain.yaml")
    path = start(root, root / "exp", "centralized", "--set", "rounds=1")
    done = inside("rounds", path).ok()
    said = [line for line in done.err.splitlines() if "empty" in line]
    assert said == ["round 1, server: empty labels for en (100 %)"]
    assert [row["client"] for row in ledger(path) if row["status"] == "collapsed"] == ["en"]


def test_a_collapse_is_told_where_data_have_no_clients(world, tmp_path):
    for name in ("train", "valid"):
        shutil.copytree(world / name, tmp_path / name)
        (tmp_path / name / "utt2client").unlink()
    for name in ("tokens", "plain.yaml"):
        (tmp_path / name).symlink_to(world / name)
    more = (*silent(world, tmp_path), *TEACHER, "--set", "rounds=1")
    path = begin(tmp_path, tmp_path / "exp", "centralized", *more)
    done = inside("rounds", path).ok()
    assert "round 1, server: empty labels for all (100 %)" in done.err
    assert [(row["client"], row["status"]) for row in ledger(path)] == [("-", "collapsed")]
    inside("show", path).ok()


def test_labels_are_counted_for_each_client_also_where_the_server_trains_on_all(world):
    """One of three clients without any label would be a third of all, which is not a collapse."""
    model, teacher = (build_model(model_of(0.0), tokens_of(world)) for _ in range(2))
    owners = torch.tensor([0, 1, 1, 2, 0, 2])

    def posteriors(_: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        # The blank is the first token: client 1 always gets it, and client 2 once.
        best = torch.where((owners == 1) | (torch.arange(6) == 5), 0, 1)
        return nn.functional.one_hot(best, 3)[:, None].float(), torch.ones(6, dtype=torch.long)

    labels = ContinuousLabels(model, teacher, DECAY, posteriors=posteriors)
    for _ in range(2):
        labels.labelled(Batch(clients=owners))
    assert labels.empty_labels == {0: 0.0, 1: 1.0, 2: 0.5}
    other = ContinuousLabels(model, teacher, DECAY, posteriors=posteriors)
    other.load({name: np.asarray(value) for name, value in labels.state().items()})
    other.labelled(Batch(clients=owners[:1].expand(6)))
    assert other.empty_labels == {0: 3 / 10, 1: 1.0, 2: 0.5}
    other.new_round()
    assert other.empty_labels == {}


# --- personal layers


@pytest.mark.parametrize(
    ("method", "more", "own"),
    [
        ("fednorm", (), lambda name: "norm" in name),
        ("fedextract", CUT, lambda name: name.startswith(EXTRACTOR)),
    ],
)
def test_two_rounds_with_personal_layers(world, tmp_path, method, more, own):
    """By equations 1 and 2, everything is trained, and the rest is the mean over clients."""
    path = start(world, tmp_path / "exp", method, *more, "--set", "method_conf.keep_optimizer=true")
    inside("rounds", path, "--to", "2").ok()
    begun = load_file(path / "init.safetensors")
    students = {client: Student(world, client) for client in TRAIN}
    for student in students.values():
        student.begin(begun)
    for _ in range(2):
        for student in students.values():
            student.step()
        states = [student.state() for student in students.values()]
        mean = {name: np.mean([one[name] for one in states], 0) for name in begun if not own(name)}
        for student, state in zip(students.values(), states, strict=True):
            load(student.model, state | mean)
    sent = load_file(path / "round_0001" / "update.1.safetensors")
    assert sent.keys() == mean.keys() and {*begun} - {*mean}
    for client, student in students.items():
        assert_near(final(path, client, 2), student.state(), begun)
    kept = [final(path, client, 2) for client in TRAIN]
    for name in {*begun} - {*mean}:
        assert not np.array_equal(kept[0][name], kept[1][name])


def test_who_comes_back_finds_its_own_layers(world, tmp_path):
    """Two clients are drawn in a round; the others keep their layers until their next round."""
    options = ("--set", "method_conf.keep_optimizer=true", "--set", "clients_per_round=2")
    path = start(world, tmp_path / "exp", "fedextract", *CUT, *options)
    inside("rounds", path, "--to", "5").ok()
    rows = [(int(row["round"]), row["client"]) for row in ledger(path) if row["client"] != "-"]
    took_part = {client: [at for at, who in rows if who == client] for client in TRAIN}
    assert any(late - early > 1 for ats in took_part.values() for early, late in pairwise(ats))
    begun = load_file(path / "init.safetensors")
    students = {client: Student(world, client) for client in TRAIN}
    for student in students.values():
        student.begin(begun)
    shared = {name: begun[name] for name in begun if not name.startswith(EXTRACTOR)}
    for number in range(1, 6):
        drawn = [students[client] for at, client in rows if at == number]
        assert len(drawn) == 2
        for student in drawn:
            load(student.model, student.state() | shared)
            student.step()
        shared = {name: np.mean([one.state()[name] for one in drawn], 0) for name in shared}
    for client, student in students.items():
        assert_near(final(path, client, 5), student.state() | shared, begun)


def begin_with_batch_norm(world: Path, folder: Path, method: str, *more: str) -> Path:
    """Begin an experiment whose model is a conformer."""
    model = model_of(0.0)
    options = {**model["encoder_conf"], "cnn_module_kernel": 3}
    model |= {"encoder": "conformer", "encoder_conf": options}
    simulated.config_file(link(world, folder) / "conformer.yaml", model=model, training=TRAINING)
    return begin(folder, folder / "exp", method, *TEACHER, *more, config="conformer")


@pytest.mark.parametrize(
    ("method", "more", "sent"),
    [("fednorm", (), ()), ("fedextract", CUT, ("encoder.encoders.1.",))],
)
def test_personal_statistics_of_batch_norm_never_leave(world, tmp_path, method, more, sent):
    """They are in no message, and no client starts with those of another."""
    path = begin_with_batch_norm(world, tmp_path, method, *more)
    inside("rounds", path, "--to", "2").ok()

    def statistics(file: Path) -> State:
        state = load_file(file)
        return {name: state[name] for name in state if ".running_" in name}

    begun = statistics(path / "init.safetensors")
    shared = {name for name in begun if name.startswith(sent)} if sent else set()
    assert len(begun) == 4 and len(shared) == 2 * len(sent)
    messages = [*path.glob("round_*/update.*.safetensors"), *path.glob("round_*/global.*")]
    assert len(messages) >= 5
    for file in messages:
        assert statistics(file).keys() == shared, file
    kept = [
        statistics(path / f"clients/{client}/round_0002/personal.safetensors") for client in TRAIN
    ]
    for name in begun.keys() - shared:
        assert len({one[name].tobytes() for one in (begun, *kept)}) == 1 + len(TRAIN), name


# --- the cut


@pytest.mark.parametrize("encoder", ["transformer", "conformer", "branchformer"])
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_the_two_parts_are_the_model(encoder, blocks):
    """Outputs are equal in training too, with the same random numbers, if positions draw none."""
    options = {"output_size": 16, "attention_heads": 2, "num_blocks": 3}
    if encoder == "branchformer":
        options |= {"cgmlp_linear_units": 32}
    else:
        options |= {"linear_units": 32}
    torch.manual_seed(0)
    config = {"input_size": 20, "encoder": encoder, "encoder_conf": options}
    model = build_model(config, ["<blank>", "a", "b", "<sos/eos>"])
    names = {
        name
        for name, _ in model.named_parameters()
        if name.startswith(("encoder.embed.", *(f"encoder.encoders.{n}." for n in range(blocks))))
    }
    cut = Cut.above(model, names, 20)
    assert (cut.blocks, cut.size) == (blocks, 16)
    batch = {"speech": torch.randn(3, 90, 20), "speech_lengths": torch.tensor([90, 61, 40])}
    with torch.no_grad():
        whole, lengths = log_posteriors(model.eval(), batch)
        features, frames = cut.extract(model, batch)
        parts = cut.classify(model, features, frames)
    assert frames.tolist() == lengths.tolist()
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(parts[row, :length], whole[row, :length], atol=1e-5)
    assert cut.share == pytest.approx(49 * 16 / (200 * 20)) and cut.step == 4


@pytest.mark.parametrize(("layer", "step"), [("conv2d2", 2), ("conv2d6", 6), ("conv2d8", 8)])
def test_the_step_of_the_convolutions(layer, step):
    options = {"output_size": 16, "attention_heads": 2, "linear_units": 32, "num_blocks": 1}
    config = {"input_size": 80, "encoder": "transformer"}
    config["encoder_conf"] = options | {"input_layer": layer}
    model = build_model(config, ["<blank>", "a", "<sos/eos>"])
    names = {name for name, _ in model.named_parameters() if name.startswith("encoder.embed.")}
    assert Cut.above(model, names, 80).step == step


@pytest.mark.parametrize(
    "patterns",
    ['["encoder.embed.*", "encoder.encoders.1.*"]', '["encoder.encoders.0.*"]', '["encoder.*"]'],
)
def test_what_is_no_bottom_of_the_model_is_refused(world, tmp_path, patterns):
    options = ("--config", world / "plain.yaml", "--method", "decouplefl")
    done = inside(
        *("init", tmp_path / "exp", *options, "--data", f"train={world / 'train'}"),
        *("--asset", f"tokens={world / 'tokens'}", "--set", f"method_conf.personal={patterns}"),
    )
    done.fails(1, "method_conf.personal: an extractor is encoder.embed.*", "first of 2 blocks")
    assert not (tmp_path / "exp").exists()


# --- DecoupleFL


@pytest.fixture(scope="module")
def decoupled(world) -> Path:
    """Run two rounds of stage 1 and three of stage 2, deterministically."""
    more = ("--set", "method_conf.bits=32")
    path = start(world, world / "decoupled", "decouplefl", *CUT, *stages(2, 3), *more)
    inside("rounds", path, "--evaluate", "valid").ok()
    return path


def test_stage_1_trains_extractors_below_the_classifier_as_it_is(world, decoupled):
    begun = load_file(decoupled / "init.safetensors")
    for at in (2, 3):
        sent = load_file(decoupled / f"round_{at:04d}" / "global.safetensors")
        assert all(np.array_equal(sent[name], begun[name]) for name in sent)
        assert not any(name.startswith(EXTRACTOR) for name in sent)
    for client in TRAIN:
        student = Student(world, client, trained=EXTRACTOR)
        student.begin(begun)
        student.step()
        student.step()
        assert_near(final(decoupled, client, 2), student.state(), begun)
    assert not list(decoupled.glob("round_000[12]/update.*.safetensors"))


@pytest.mark.parametrize("invariance", [0.0, 1.0])
def test_the_classifiers_batch_norm_does_not_move_in_stage_1(world, tmp_path, invariance):
    """The teacher's does not move either; the extractor's does."""
    more = (*CUT, *stages(2, 0), "--set", f"method_conf.speaker_invariance={invariance}")
    path = begin_with_batch_norm(world, tmp_path, "decouplefl", *more)
    inside("rounds", path).ok()
    begun = load_file(path / "init.safetensors")
    teacher = load_file(path / "clients/au/round_0002/objective.safetensors")
    statistics = [name for name in begun if name.endswith(("running_mean", "running_var"))]
    assert len(statistics) == 4
    for name in statistics:
        moved = not np.array_equal(teacher[f"teacher.{name}"], begun[name])
        assert moved == name.startswith("encoder.encoders.0.")


def extracted(state: State, world: Path, speech: Tensor) -> Tensor:
    """Return the outputs of the convolutions and the first transformer block for one utterance."""
    model = load(build_model(model_of(0.0), tokens_of(world)), state).eval()
    length = torch.tensor([len(speech)])
    with torch.no_grad():
        values, _ = model.normalize(speech[None].clone(), length)
        hidden, _ = model.encoder.embed(values, torch.ones(1, 1, len(speech), dtype=torch.bool))
        mask = torch.ones(1, 1, hidden.shape[1], dtype=torch.bool)
        return model.encoder.encoders[0](hidden, mask)[0][0]


def test_what_a_client_sends_are_the_features_of_its_audio_without_names(world, decoupled):
    speakers, places = table(world / "train" / "utt2spk"), table(world / "train" / "feats.scp")
    for client in TRAIN:
        ark = decoupled / "round_0003" / f"features.{client}.ark"
        sent = dict(kaldiio.load_ark(str(ark)))
        state = final(decoupled, client, 2)
        own = [torch.tensor(kaldiio.load_mat(places[n])) for n in places if n.startswith(client)]
        expected = [extracted(state, world, speech).numpy() for speech in own]
        assert len(sent) == len(expected) == TRAIN[client]
        # The order is arbitrary and must not matter.
        for matrix in sent.values():
            near = [
                one
                for one in expected
                if one.shape == matrix.shape and np.allclose(one, matrix, atol=2e-4)
            ]
            assert len(near) == 1
        raw = ark.read_bytes() + ark.with_suffix(".scp").read_bytes()
        for name, speaker in speakers.items():
            assert name.encode() not in raw and speaker.encode() not in raw
        # The position in the file carries no information either.
        assert list(sent) == sorted(sent)


def test_the_order_of_what_is_sent_tells_nothing(world, decoupled):
    """Utterances are sorted by speaker in data directories, and shuffled in sent features."""
    client = "au"
    places = table(world / "train" / "feats.scp")
    own = [name for name in places if name.startswith(client)]
    lengths = [len(kaldiio.load_mat(places[name])) for name in own]
    sent = dict(kaldiio.load_ark(str(decoupled / "round_0003" / f"features.{client}.ark")))
    frames = [len(sent[name]) for name in sorted(sent)]
    assert frames != [((length - 1) // 2 - 1) // 2 for length in lengths]
    # The server has everything except the client's filterbanks, which determine the features.
    spoken = kaldiio.load_mat(places[own[0]]).tobytes()
    other = bytes([spoken[0] ^ 1]) + spoken[1:]
    orders = [sent_names(secret, client, 50) for secret in (spoken, other)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    named = [((lengths[at] - 1) // 2 - 1) // 2 for at in range(len(own))]
    by_name = dict(zip(sent_names(spoken, client, len(own)), named, strict=True))
    assert [by_name[name] for name in sorted(sent)] == frames


class OnFeatures(Student):
    """The server, utterance by utterance: slow and simple."""

    def __init__(self, world: Path, sent: Path, masked: int = 0):
        super().__init__(
            world, *TRAIN, trained=("encoder.encoders.1.", "encoder.after_norm.", "ctc.")
        )
        arks = sorted(sent.glob("features.*.ark"))
        self.sent = [torch.tensor(m) for ark in arks for _, m in kaldiio.load_ark(str(ark))]
        self.masked = masked

    def posteriors(self, model: nn.Module, features: Tensor) -> Tensor:
        mask = torch.ones(1, 1, len(features), dtype=torch.bool)
        hidden = model.encoder.encoders[1](features[None], mask)[0]
        return model.ctc.log_softmax(model.encoder.after_norm(hidden))[0]

    def loss(self) -> Tensor:
        losses = []
        for features in self.sent:
            with torch.no_grad():
                labels = torch.tensor([collapsed(self.posteriors(self.teacher, features))])
            left = features.clone()
            left[:, : self.masked] = 0
            log_probs = self.posteriors(self.model, left)
            size, frames = torch.tensor([labels.shape[1]]), torch.tensor([len(features)])
            one = nn.functional.ctc_loss(log_probs[:, None], labels, frames, size, reduction="sum")
            losses.append(one)
        return torch.stack(losses).mean()


def test_stage_2_trains_the_classifier_on_what_was_sent(world, decoupled):
    begun = load_file(decoupled / "init.safetensors")
    student = OnFeatures(world, decoupled / "round_0003")
    student.begin(begun)
    for at in (4, 5, 6):
        student.step()
        found = load_file(decoupled / f"round_{at + 1:04d}" / "global.safetensors")
        expected = {name: student.state()[name] for name in found}
        assert_near(found, expected, {name: begun[name] for name in found})
    # The clients evaluate with it after it is sent back.
    last = load_file(decoupled / "round_0008" / "global.safetensors")
    assert all(np.array_equal(last[name], found[name]) for name in found)


def test_stage_2_masks_features_for_the_student_alone(world, tmp_path):
    """Sent features are of clean audio."""
    size = simulated.CONFIG["model"]["encoder_conf"]["output_size"]
    # An equal share of a frame of features, less the frames that convolutions remove.
    width = simulated.BINS - 1
    assert round(width * (49 * size * 4) / (200 * simulated.BINS)) == size - 1
    masking(link(world, tmp_path), width)
    more = ("--set", "method_conf.bits=32")
    path = start(
        tmp_path, tmp_path / "exp", "decouplefl", *CUT, *stages(0, 2), *more, config="masked"
    )
    inside("rounds", path).ok()
    begun = load_file(path / "init.safetensors")
    student = OnFeatures(world, path / "round_0001", masked=size - 1)
    student.begin(begun)
    student.step()
    student.step()
    found = load_file(path / "round_0004" / "global.safetensors")
    expected = {name: student.state()[name] for name in found}
    assert_near(found, expected, {name: begun[name] for name in found})


def test_the_ledger_counts_files(decoupled):
    rows = ledger(decoupled)
    classifier = (decoupled / "round_0001" / "global.safetensors").stat().st_size
    for client in TRAIN:
        paths = decoupled.glob(f"round_0003/features.{client}.*")
        features = sum(path.stat().st_size for path in paths)
        own = {int(row["round"]): row for row in rows if row["client"] == client}
        up = {at: int(row["bytes_up"]) for at, row in own.items()}
        down = {at: int(row["bytes_down"]) for at, row in own.items()}
        assert up == {1: 0, 2: 0, 3: features, 7: 0}
        # Once at the start, and once when it has changed.
        assert down == {1: classifier, 2: 0, 3: 0, 7: classifier}
        assert [own[at]["client_epochs"] for at in own] == ["1", "1", "0", "0"]
    server = {int(row["round"]): row["server_epochs"] for row in rows if row["client"] == "-"}
    assert server == {1: "0", 2: "0", 3: "0", 4: "1", 5: "1", 6: "1", 7: "0"}


@pytest.mark.parametrize(("bits", "error"), [(32, 0.0), (16, 2**-16), (8, 2**-8)])
def test_bits_of_what_is_sent(tmp_path, bits, error):
    matrix = np.random.default_rng(0).normal(size=(500, 64)).astype("f4")
    sent = write_features(tmp_path, "au", [("au-0", matrix)], bits)
    assert sent == pytest.approx(matrix.size * bits / 8, abs=100)
    found = kaldiio.load_mat(f"{tmp_path}/features.au.ark:5")
    assert np.abs(found - matrix).max() <= error * (matrix.max() - matrix.min())


def test_a_client_that_sends_what_it_may_not_is_refused_and_the_rest_goes_on(world, tmp_path):
    path = start(world, tmp_path / "exp", "decouplefl", *CUT, *stages(1, 1), config="random")
    inside("rounds", path, "--to", "1").ok()
    inside("sample", path, "--round", "2").ok()
    inside("train-local", path, "--round", "2").ok()
    scp = path / "round_0002" / "features.en.scp"
    # Utterance ids of another client.
    scp.write_text(scp.read_text().replace("en-", "au-", 1))
    done = inside("aggregate", path, "--round", "2").ok()
    assert "en: refused: features.en.scp" in done.err and "is not named en-0000000" in done.err
    inside("rounds", path).ok()
    status = {row["client"]: row["status"] for row in ledger(path) if row["round"] == "2"}
    assert status["au"] == status["in"] == "ok" and status["en"].startswith("refused: features.en")
    size = scp.stat().st_size + scp.with_suffix(".ark").stat().st_size
    (up,) = {r["bytes_up"] for r in ledger(path) if r["round"] == "2" and r["client"] == "en"}
    assert int(up) == size
    # Its features are ignored, as if they did not exist.
    other = shutil.copytree(path, tmp_path / "other")
    for name in ("features.en.scp", "features.en.ark"):
        (other / "round_0002" / name).unlink()
    inside("reset", other, "--round", "3").ok()
    inside("rounds", other).ok()
    last = "round_0005/global.safetensors"
    assert (other / last).read_bytes() == (path / last).read_bytes()


def test_features_that_changed_after_they_were_taken(world, tmp_path):
    path = start(world, tmp_path / "exp", "decouplefl", *CUT, *stages(1, 2), config="random")
    inside("rounds", path, "--to", "3").ok()
    scp, ark = (path / "round_0002" / f"features.en.{kind}" for kind in ("scp", "ark"))
    names, values = scp.read_text(), ark.read_bytes()
    for file, changed in (
        (scp, names.replace("en-", "au-", 1).encode()),
        (ark, values[:-1] + bytes([values[-1] ^ 1])),
        (ark, None),
    ):
        before = file.read_bytes()
        file.write_bytes(changed) if changed else file.unlink()
        problem = "changed since it was written" if changed else "missing"
        inside("rounds", path).fails(1, f"{file}: {problem}")
        assert not (path / "round_0004" / ".done").exists()
        if changed:
            inside("attack", "features", path, tmp_path / "attacks").fails(1, f"{file}: {problem}")
        file.write_bytes(before)
    inside("rounds", path).ok()


def test_hours_of_which_features_are_taken(world, decoupled, tmp_path):
    """With a limit just below a client's frames none of it is used; at its frames, all."""
    sent = dict(kaldiio.load_ark(str(decoupled / "round_0003/features.au.ark")))
    frames = sum(map(len, sent.values()))
    # One for each 4 of 10 ms; no client has more than this one.
    for most, refused in ((frames - 1, ["au"]), (frames, [])):
        more = ("--set", f"method_conf.max_hours={(most - 0.5) * 4 / 360_000}")
        path = start(world, tmp_path / f"{most}", "decouplefl", *CUT, *stages(0, 1), *more)
        done = inside("rounds", path).ok()
        status = {row["client"]: row["status"] for row in ledger(path) if row["round"] == "1"}
        assert [client for client in TRAIN if status[client] != "ok"] == refused
        said = f"au: refused: features.au.scp:{TRAIN['au']}: "
        assert (said in done.err) == bool(refused)
        assert (f"{frames} in all; at most 4000 and {most} of 16 are taken" in done.err) == bool(
            refused
        )
    for wrong in ("0", "-1", ".inf", "2e6"):
        options = ("--config", world / "plain.yaml", "--method", "decouplefl", *CUT)
        inside(
            *("init", tmp_path / "wrong", *options, "--data", f"train={world / 'train'}"),
            *("--asset", f"tokens={world / 'tokens'}", "--set", f"method_conf.max_hours={wrong}"),
        ).fails(1, "max_hours")


def test_without_a_stage(world, tmp_path):
    """In the ablations of table 4, the round of features is the first, or there is none."""
    path = start(world, tmp_path / "no1", "decouplefl", *CUT, *stages(0, 2))
    inside("rounds", path).ok()
    assert (path / "round_0001" / "features.au.ark").exists()
    assert not list(path.glob("clients/*/round_*/personal.*"))
    assert (path / "round_0004" / ".done").exists()
    path = start(world, tmp_path / "no2", "decouplefl", *CUT, *stages(2, 0))
    inside("rounds", path).ok()
    assert not list(path.glob("round_*/features.*")) and (path / "round_0002" / ".done").exists()
    assert not (path / "round_0003" / ".done").exists()


def test_messages_that_are_not_kept_leave_the_features_that_are_needed(world, tmp_path):
    more = ("--set", "keep_updates=false")
    path = start(world, tmp_path / "exp", "decouplefl", *CUT, *stages(1, 2), *more, config="random")
    inside("rounds", path).ok()
    kept = start(world, tmp_path / "kept", "decouplefl", *CUT, *stages(1, 2), config="random")
    inside("rounds", kept).ok()
    last = "round_0006/global.safetensors"
    assert (path / last).read_bytes() == (kept / last).read_bytes()
    assert {one.parent.name for one in path.glob("round_*/update.*")} == {"round_0002"}
    assert {one.parent.name for one in path.glob("round_*/features.*")} == {"round_0002"}


def test_jointly(world, tmp_path):
    """Joint training has an extractor per client, one classifier, and one loss over all data."""
    path = start(world, tmp_path / "exp", "joint", *CUT)
    inside("rounds", path, "--to", "2").ok()
    begun = load_file(path / "init.safetensors")
    students = {client: Student(world, client) for client in TRAIN}
    first = students["au"]
    for student in students.values():
        student.begin(begun)
        for name, value in first.model.named_parameters():
            if not name.startswith(EXTRACTOR):
                owner, _, last = name.rpartition(".")
                setattr(student.model.get_submodule(owner), last, value)
    parameters = {id(p): p for s in students.values() for p in s.model.parameters()}
    optimizer = torch.optim.Adam(parameters.values(), lr=RATE, eps=EPSILON)
    total = sum(TRAIN.values())
    for step in (1, 2):
        warm = WARMUP**0.5 * min(step**-0.5, step * WARMUP**-1.5)
        optimizer.param_groups[0]["lr"] = RATE * warm
        optimizer.zero_grad()
        for client, student in students.items():
            student.model.train()
            # ESPnet's loss is a mean over the utterances of a batch.
            (student.loss() * TRAIN[client] / total).backward()
        nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        optimizer.step()
        for student in students.values():
            new = dict(student.model.named_parameters())
            for name, value in student.teacher.named_parameters():
                value.data = DECAY * value.data + (1 - DECAY) * new[name].data
    for client, student in students.items():
        assert_near(final(path, client, 2), student.state(), begun)


# --- speaker-invariant training


def test_the_gradient_of_equation_3():
    """The extractor descends the ASR loss and ascends the speaker loss; all else descends both."""
    torch.manual_seed(0)
    features = torch.randn(4, 6, 5, dtype=torch.float64, requires_grad=True)
    lengths, speakers = torch.tensor([6, 5, 4, 3]), torch.tensor([0, 1, 2, 0])
    classifier = SpeakerClassifier(5, 7, 3).double()
    weight = torch.tensor([0.3, 0.5, 0.0, 2.0], dtype=torch.float64)[:, None, None]

    def gradients(loss: Tensor) -> list[Tensor]:
        return torch.autograd.grad(loss, [features, *classifier.parameters()], allow_unused=True)

    def spoken(values: Tensor) -> Tensor:
        return nn.functional.cross_entropy(classifier(values, lengths), speakers)

    found = gradients(features.square().sum() + spoken(turned_round(features, weight)))
    of_asr, of_speakers = gradients(features.square().sum()), gradients(spoken(features))
    torch.testing.assert_close(found[0], of_asr[0] - weight * of_speakers[0])
    for one, expected in zip(found[1:], of_speakers[1:], strict=True):
        torch.testing.assert_close(one, expected)
    # Frames after an utterance's end are ignored.
    assert of_speakers[0][3, 3:].abs().max() == 0 and of_speakers[0][3, :3].abs().max() > 0


class Invariant(Student):
    """A client that unlearns its speakers, with separately computed gradients of the two losses."""

    def __init__(self, world: Path, client: str, units: int):
        super().__init__(world, client, trained=EXTRACTOR)
        owners, speakers = (table(world / "train" / name) for name in ("utt2client", "utt2spk"))
        own = [speakers[name] for name, owner in owners.items() if owner == client]
        self.speakers = torch.tensor([sorted(set(own)).index(one) for one in own])
        torch.manual_seed(seed64(0, "speakers", client))
        self.classifier = SpeakerClassifier(16, units, len(set(own)))
        self.extractor = self.parameters
        self.parameters = [*self.extractor, *self.classifier.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=RATE, eps=EPSILON)
        self.weight = 0.0
        self.model.encoder.encoders[0].register_forward_hook(self.hear)

    def hear(self, block: nn.Module, given: tuple, made: tuple[Tensor, Tensor]) -> None:
        self.features, mask = made
        self.lengths = mask.sum((1, 2))

    def backward(self) -> None:
        of_asr = torch.autograd.grad(self.loss(), self.extractor, retain_graph=True)
        spoken = nn.functional.cross_entropy(self.logits(), self.speakers)
        own = list(self.classifier.parameters())
        of_features, *of_speakers = torch.autograd.grad(
            spoken, [self.features, *own], retain_graph=True
        )
        # As often as the utterance has frames, over which CTC sums its loss.
        against = -self.weight * self.lengths[:, None, None] * of_features
        turned = torch.autograd.grad(self.features, self.extractor, against)
        for parameter, one, other in zip(self.extractor, of_asr, turned, strict=True):
            parameter.grad = one + other
        for parameter, one in zip(own, of_speakers, strict=True):
            parameter.grad = one

    def logits(self) -> Tensor:
        """Return logits of each utterance's frame statistics, normalised over utterances."""
        rows = [one[:length] for one, length in zip(self.features, self.lengths, strict=True)]
        vectors = torch.stack([torch.cat([row.mean(0), row.std(0, correction=0)]) for row in rows])
        mean, variance = vectors.mean(0), vectors.var(0, correction=0)
        moved = {"mean": mean.detach(), "variance": vectors.var(0).detach()}
        for name, value in moved.items():
            kept = getattr(self.classifier, name)
            kept.copy_(0.9 * kept + 0.1 * value)
        vectors = (vectors - mean) / (variance + 1e-5).sqrt()
        logits = self.classifier.output(self.classifier.hidden(vectors).relu())
        right = logits.argmax(1) == self.speakers
        for speaker, one in zip(self.speakers, right, strict=True):
            self.classifier.heard[1, speaker] += 1
            self.classifier.heard[0, speaker] += one
        return logits


def test_two_rounds_against_a_speaker_classifier(world, tmp_path):
    """Equation 3, and lambda in 4 steps of 20: Ganin's warm-up is a hyperbolic tangent from 0."""
    options = ("speaker_invariance=0.5", "speaker_units=8", "local_epochs=2")
    more = [part for one in options for part in ("--set", f"method_conf.{one}")]
    path = start(world, tmp_path / "exp", "decouplefl", *CUT, *stages(10, 0), *more)
    done = inside("rounds", path, "--to", "2").ok()
    begun = load_file(path / "init.safetensors")
    for client in ("au", "en"):
        student = Invariant(world, client, units=8)
        student.begin(begun)
        first = {name: one.numpy().copy() for name, one in student.classifier.state_dict().items()}
        for step in range(4):
            if step % 2 == 0:
                student.classifier.heard.zero_()
            student.weight = 0.5 * np.tanh(5 * step / 20)
            student.step()
            if step % 2:
                right, heard = student.classifier.heard.tolist()
                assert sum(heard) == 2 * TRAIN[client]
                share, most = (100 * one / sum(heard) for one in (sum(right), max(heard)))
                said = f"accuracy {share:.0f} %, chance {most:.0f} %"
                assert f"round {1 + step // 2}, {client}: speaker classifier {said}" in done.err
        assert_near(final(path, client, 2), student.state(), begun)
        kept = load_file(path / "clients" / client / "round_0002" / "speakers.safetensors")
        learnt = {name: one.numpy() for name, one in student.classifier.state_dict().items()}
        assert_near(kept, learnt, first)


def test_training_against_a_speaker_classifier(world, tmp_path):
    """The classifier persists at the client; lambda matters; a lone speaker trains without."""
    found = {}
    for weight in (0.0, 5.0):
        more = ("--set", f"method_conf.speaker_invariance={weight}")
        path = start(world, tmp_path / f"{weight}", "decouplefl", *CUT, *stages(3, 0), *more)
        done = inside("rounds", path).ok()
        said = "round 1, in: only one speaker, trained without speaker invariance"
        assert (said in done.err) == bool(weight)
        found[weight] = {client: final(path, client, 3) for client in TRAIN}
        kept = sorted(one.parent.name for one in path.glob("clients/au/round_*/speakers.*"))
        assert kept == (["round_0003"] if weight else [])
        assert not any("speakers" in str(one) for one in path.glob("round_*/*"))
    for client in TRAIN:
        one, other = (found[weight][client] for weight in found)
        # All of in's utterances are of one speaker.
        same = all(np.array_equal(one[name], other[name]) for name in one)
        assert same == (client == "in")
