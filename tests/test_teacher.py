"""Teachers over several steps a round, whose labels change: correct and with planted mistakes.

All start from an untrained model, whose labels change from step to step, and are not the student's.
Every planted mistake must give a result other than the command's; otherwise the test could not
detect it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import simulated
import torch
from asr_world import (
    State,
    assert_near,
    batch_of,
    begin,
    load,
    mean_of,
    model_of,
    some_data,
    table,
    tokens_of,
)
from conftest import inside
from decouplefl_world import EXTRACTOR, PERSONAL, collapsed, final
from safetensors.numpy import load_file
from torch import Tensor, nn

from fedtools.core.tables import read_tsv, write_tsv
from fedtools.data.ark import write_ark
from fedtools.data.datadir import DataDir
from fedtools.data.nbest import read_nbest
from fedtools.federation.federation import Federation
from fedtools.models.acoustic.asr import build_model

# With 20 bins, the convolutions would not use the last.
BINS, SIZE, FRAMES = 19, simulated.CONFIG["model"]["encoder_conf"]["output_size"], 71
# One is left, so that SpecAugment's choice is deterministic.
MASKED = {"bins": BINS - 1, "features": SIZE - 1}
TRAIN, VALID = {"au": 4, "en": 3}, {"au": 2, "en": 2}
RATE, EPSILON, CLIP, DECAY = 0.01, 1e-3, 1.0, 0.8
CLASSIFIER = ("encoder.encoders.1.", "encoder.after_norm.", "ctc.")
ROUNDS, STEPS = 2, 3

SWAPPED, EARLY, STUDENT = "decay swapped", "teacher before the step", "labels of the student"
ANEW, ONCE = "new teacher in each round", "masks in the first step of a round alone"
SHARED = "one teacher for all clients"
MISTAKES = (SWAPPED, EARLY, STUDENT, ANEW, ONCE)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make data, and models that mask half of the filterbanks, or of the features."""
    root = tmp_path_factory.mktemp("teacher")
    for seed, (name, counts) in enumerate((("train", TRAIN), ("valid", VALID))):
        same_lengths(some_data(root / name, counts, seed))
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    training = {
        "optim": "adam",
        "optim_conf": {"lr": RATE, "eps": EPSILON},
        "grad_clip": CLIP,
        "batch_bins": 10_000_000,
        "labels": "continuous",
        "decay": DECAY,
    }
    # The same share of 16 values is masked as of 19 bins.
    for name in MASKED:
        model = masking(MASKED["bins"])
        simulated.config_file(root / f"{name}.yaml", model=model, training=training)
    return root


def same_lengths(path: Path) -> None:
    """Repeat or cut all utterances to equal length, so that no padding is used."""
    data, same = DataDir.read(path), {}
    for name in data.utterances:
        matrix = kaldiio.load_mat(data.feats_scp[name])[:, :BINS]
        same[name] = np.resize(matrix, (FRAMES, BINS))
    data.feats_scp = write_ark(path / "same.ark", sorted(same.items()))
    data.utt2num_frames = dict.fromkeys(data.utterances, str(FRAMES))
    data.write()


def masking(width: int) -> dict:
    """Return a model whose SpecAugment masks a number of bins."""
    conf = {"apply_time_warp": False, "apply_time_mask": False, "num_freq_mask": 1}
    conf["freq_mask_width_range"] = [width, width + 1]
    return model_of(0.0) | {"input_size": BINS, "specaug": "specaug", "specaug_conf": conf}


def start(world: Path, path: Path, method: str, *options: str, config: str = "bins") -> Path:
    more = (word for one in options for word in ("--set", one))
    return begin(world, path, method, *more, config=config)


class Learner:
    """A student and its teacher on batches of utterances; or with a mistake.

    Args:
        options: options of the model.
        batch: filterbanks of all utterances.
        trained: the prefixes of trained parameters' names.
    """

    def __init__(
        self,
        world: Path,
        options: dict,
        batch: dict[str, Tensor],
        trained: Sequence[str] = ("",),
        mistake: str = "",
    ):
        self.model, self.teacher = (build_model(options, tokens_of(world)) for _ in range(2))
        self.batch, self.mistake, self.augment = batch, mistake, self.model.specaug
        parameters = dict(self.model.named_parameters())
        self.chosen = [parameters[name] for name in parameters if name.startswith(tuple(trained))]
        self.forget()
        self.seen: list[list[list[int]]] = []

    def forget(self) -> None:
        self.optimizer = torch.optim.Adam(self.chosen, lr=RATE, eps=EPSILON)

    def begin(self, state: State) -> None:
        load(self.model, state)
        load(self.teacher, state).eval()

    def new_round(self) -> None:
        self.model.specaug = self.augment
        if self.mistake == ANEW:
            self.teacher.load_state_dict(self.model.state_dict())

    def posteriors(self, model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
        """Return posteriors of each utterance alone, (T, tokens), without padding."""
        found = []
        for speech, length in zip(batch["speech"], batch["speech_lengths"], strict=True):
            encoded, _ = model.encode(speech[None, :length].clone(), length[None])
            found.append(model.ctc.log_softmax(encoded)[0])
        return found

    def labels(self, batch: dict[str, Tensor]) -> list[list[int]]:
        model = self.model.eval() if self.mistake == STUDENT else self.teacher
        with torch.no_grad():
            self.seen.append([collapsed(one) for one in self.posteriors(model, batch)])
        return self.seen[-1]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean of the utterances' CTC losses."""
        labels = [torch.tensor(one) for one in self.labels(batch)]
        losses = [
            nn.functional.ctc_loss(
                one[:, None], label[None], torch.tensor([len(one)]), torch.tensor([len(label)]),
                reduction="sum",
            )
            for one, label in zip(self.posteriors(self.model.train(), batch), labels, strict=True)
        ]  # fmt: skip
        return torch.stack(losses).mean()

    def step(self, batch: dict[str, Tensor] | None = None) -> None:
        self.optimizer.zero_grad()
        self.loss(batch or self.batch).backward()
        nn.utils.clip_grad_norm_(self.chosen, CLIP)
        if self.mistake == EARLY:
            self.follow()
        self.optimizer.step()
        if self.mistake != EARLY:
            self.follow()
        if self.mistake == ONCE:
            self.model.specaug = None

    def follow(self) -> None:
        """Apply equation 7 to all parameters, trained or not."""
        kept = 1 - DECAY if self.mistake == SWAPPED else DECAY
        new = dict(self.model.named_parameters())
        for name, value in self.teacher.named_parameters():
            value.data = kept * value.data + (1 - kept) * new[name].data

    def state(self) -> State:
        return {name: value.numpy().copy() for name, value in self.model.state_dict().items()}


def assert_far(found: State, wrong: State, begun: State) -> None:
    """Check that states differ by at least ten times the tolerance of `assert_near`."""
    apart, moved = (
        sum(np.square(one[name].astype("f8") - wrong[name]).sum() for name in wrong) ** 0.5
        for one in (begun | found, begun)
    )
    assert apart > 1e-2 * moved, apart / moved


def check(found: State, learner: Learner, begun: State) -> None:
    """Check that the learner's state is equal, or far from it with a mistake."""
    (assert_far if learner.mistake else assert_near)(found, learner.state(), begun)
    if not learner.mistake:
        # Otherwise the source and time of labels would not matter.
        assert len({str(labels) for labels in learner.seen}) > 3


@pytest.mark.parametrize(
    ("method", "trained", "options"),
    [
        ("client", ("",), ()),
        ("decouplefl", EXTRACTOR, (f"method_conf.personal={PERSONAL}", "method_conf.stage1=9")),
    ],
)
def test_a_teacher_of_one_client(world, tmp_path, method, trained, options):
    """Equations 5 to 7 of Zhu et al. hold over rounds of three steps, and in stage 1."""
    options += (f"method_conf.local_epochs={STEPS}",)
    path = start(world, tmp_path / "exp", method, *options)
    inside("rounds", path, "--to", str(ROUNDS)).ok()
    begun = load_file(path / "init.safetensors")
    told_apart = MISTAKES if method == "client" else ()
    for client, mistake in (("au", ""), ("en", ""), *(("en", one) for one in told_apart)):
        batch = batch_of(world, "train", client)
        learner = Learner(world, masking(MASKED["bins"]), batch, trained, mistake)
        learner.begin(begun)
        for _ in range(ROUNDS):
            learner.new_round()
            for _ in range(STEPS):
                learner.step()
        check(final(path, client, ROUNDS), learner, begun)


def test_every_client_has_a_teacher_of_its_own(world, tmp_path):
    """FedAvg's students start each round with the mean, and with a new Adam."""
    path = start(world, tmp_path / "exp", "fedavg", f"method_conf.local_epochs={STEPS}")
    inside("rounds", path, "--to", str(ROUNDS)).ok()
    begun = load_file(path / "init.safetensors")
    found = load_file(path / f"round_{ROUNDS + 1:04d}" / "global.safetensors")
    for mistake in ("", ANEW, SHARED):
        learners = [
            Learner(world, masking(MASKED["bins"]), batch_of(world, "train", one), mistake=mistake)
            for one in TRAIN
        ]
        for learner in learners:
            learner.begin(begun)
            if mistake == SHARED:
                learner.teacher = learners[0].teacher
        state = begun
        for _ in range(ROUNDS):
            for learner in learners:
                load(learner.model, state)
                learner.forget()
                learner.new_round()
                for _ in range(STEPS):
                    learner.step()
            state = mean_of([learner.state() for learner in learners])
        load(learners[0].model, state)
        check(found, learners[0], begun)


def test_a_decay_of_an_epoch_is_that_of_all_its_steps(world, tmp_path):
    """With two batches an epoch, 0.64 an epoch is 0.8 a step, whose teachers are known."""
    bins = f"training.batch_bins={2 * FRAMES * BINS}"
    found, begun = [], {}
    for name, *options in (
        ("step", f"training.decay={DECAY}"),
        ("epoch", f"training.decay={DECAY**2}", "training.decay_per=epoch"),
        ("other", f"training.decay={DECAY**2}"),
    ):
        path = start(world, tmp_path / name, "client", bins, *options)
        inside("rounds", path, "--to", "3").ok()
        begun = load_file(path / "init.safetensors")
        found.append([final(path, client, 3) for client in TRAIN])
    for step, epoch, other in zip(*found, strict=True):
        assert_near(epoch, step, begun)
        with pytest.raises(AssertionError):
            assert_near(other, step, begun)


class OnFeatures(Learner):
    """The server, which trains the classifier on features."""

    def posteriors(self, model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
        found = []
        for features, length in zip(batch["speech"], batch["speech_lengths"], strict=True):
            values, mask = features[None, :length].clone(), torch.ones(1, 1, length).bool()
            if model.training and model.specaug is not None:
                values, _ = model.specaug(values, length[None])
            hidden = model.encoder.encoders[1](values, mask)[0]
            found.append(model.ctc.log_softmax(model.encoder.after_norm(hidden))[0])
        return found


def test_a_teacher_of_the_server_on_features(world, tmp_path):
    """Stage 2 has rounds of four steps with two utterances each; only the order is the code's."""
    options = (f"method_conf.personal={PERSONAL}", "method_conf.bits=32", "method_conf.stage1=0")
    options += (f"method_conf.stage2={ROUNDS}", f"training.batch_bins={int(2.5 * FRAMES * BINS)}")
    path = start(world, tmp_path / "exp", "decouplefl", *options, config="features")
    inside("rounds", path).ok()
    begun, federation = load_file(path / "init.safetensors"), Federation(path)
    plans = []
    for number in range(2, 2 + ROUNDS):
        place = federation.learner(number)
        plans.append([dict(batch) for (batch,) in place.source.batches(1, None, "train").stream(0)])
    assert {len(plan) for plan in plans} == {-(-sum(TRAIN.values()) // 2)}
    check_clean(world, path / "round_0001", begun)
    for mistake in ("", *MISTAKES):
        learner = OnFeatures(world, masking(MASKED["features"]), {}, CLASSIFIER, mistake)
        learner.begin(begun)
        for plan in plans:
            learner.new_round()
            for batch in plan:
                learner.step(batch)
        found = load_file(path / f"round_{ROUNDS + 2:04d}" / "global.safetensors")
        check(begun | found, learner, begun)


def check_clean(world: Path, folder: Path, begun: State) -> None:
    """Check that sent features are the first layers' outputs on unmasked audio."""
    model = load(build_model(masking(MASKED["features"]), tokens_of(world)), begun).eval()
    for client in TRAIN:
        ark = dict(kaldiio.load_ark(str(folder / f"features.{client}.ark")))
        batch = batch_of(world, "train", client)
        with torch.no_grad():
            values, _ = model.normalize(batch["speech"], batch["speech_lengths"])
            hidden, _ = model.encoder.embed(values, torch.ones(1, 1, FRAMES).bool())
            own = model.encoder.encoders[0](hidden, torch.ones(1, 1, hidden.shape[1]).bool())[0]
        # Their order carries no information.
        near = [[np.allclose(one, other, atol=2e-4) for other in ark.values()] for one in own]
        assert np.sum(near, 0).tolist() == np.sum(near, 1).tolist() == [1] * TRAIN[client]


def test_a_teacher_of_models_that_have_a_classifier_in_common(world, tmp_path):
    path = start(world, tmp_path / "exp", "joint", f"method_conf.personal={PERSONAL}")
    inside("rounds", path, "--to", "5").ok()
    begun = load_file(path / "init.safetensors")
    for mistake in ("", SWAPPED, STUDENT, ANEW):
        learners = {
            one: Learner(
                world, masking(MASKED["bins"]), batch_of(world, "train", one), mistake=mistake
            )
            for one in TRAIN
        }
        first = learners["au"]
        for learner in learners.values():
            learner.begin(begun)
            for name, value in first.model.named_parameters():
                if not name.startswith(EXTRACTOR):
                    owner, _, last = name.rpartition(".")
                    setattr(learner.model.get_submodule(owner), last, value)
        parameters = {id(p): p for one in learners.values() for p in one.model.parameters()}
        optimizer = torch.optim.Adam(parameters.values(), lr=RATE, eps=EPSILON)
        for _ in range(5):
            optimizer.zero_grad()
            for client, learner in learners.items():
                learner.new_round()
                share = TRAIN[client] / sum(TRAIN.values())
                (learner.loss(learner.batch) * share).backward()
            nn.utils.clip_grad_norm_(parameters.values(), CLIP)
            optimizer.step()
            for learner in learners.values():
                learner.follow()
        for client, learner in learners.items():
            check(final(path, client, 5), learner, begun)


# --- evaluation, averaging and decoding of DecoupleFL's clients


@pytest.fixture(scope="module")
def decoupled(world) -> Path:
    """Run two rounds of stage 1 and three of stage 2, on transcripts, with validation."""
    options = (f"method_conf.personal={PERSONAL}", "method_conf.stage1=2", "method_conf.stage2=3")
    path = start(world, world / "decoupled", "decouplefl", *options)
    inside("rounds", path, "--evaluate", "valid").ok()
    return path


LAST = 7


def after(path: Path, client: str, number: int) -> State:
    """Return a client's model after a round: its own extractor, and the classifier sent then."""
    state = load_file(path / "init.safetensors")
    for before in range(1, number + 1):
        own = path / "clients" / client / f"round_{before:04d}" / "personal.safetensors"
        state |= load_file(own) if own.exists() else {}
    return state | load_file(path / f"round_{number + 1:04d}" / "global.safetensors")


def ready(world: Path, state: State) -> nn.Module:
    return load(build_model(masking(MASKED["bins"]), tokens_of(world)), state).eval()


def test_clients_are_measured_with_the_classifier_of_the_round(world, decoupled):
    rows = read_tsv(decoupled / "evaluate_valid.tsv", None)
    assert len(rows) == (LAST + 1) * len(VALID)
    for row in rows:
        model = ready(world, after(decoupled, row["client"], int(row["round"])))
        with torch.no_grad():
            loss, _, _ = model(**batch_of(world, "valid", row["client"]))
        assert float(row["loss"]) == pytest.approx(loss.item(), rel=1e-4)
    for client in VALID:
        losses = [row["loss"] for row in rows if row["client"] == client]
        # Later training made a difference.
        assert len(set(losses)) == 1 + 2 + 3


@pytest.fixture(scope="module")
def averaged(decoupled) -> dict[str, State]:
    """Return the means of the command's chosen rounds: four are requested, three differ."""
    told = inside("average", decoupled, "--best", "4").ok().err
    found = {}
    for client in TRAIN:
        (line,) = [one for one in told.splitlines() if f"clients/{client}: mean of rounds" in one]
        rounds = [int(word) for word in line.partition("rounds ")[2].split()]
        # Rounds of stage 2; the last one sends the classifier back, and repeats the sixth.
        assert rounds == [4, 5, 7]
        found[client] = mean_of([after(decoupled, client, number) for number in rounds])
    return found


def test_the_best_round_of_stage_1_is_averaged_with_none_of_stage_2(decoupled, tmp_path):
    path = shutil.copytree(decoupled, tmp_path / "exp")
    rows = read_tsv(path / "evaluate_valid.tsv", None)
    for row in rows:
        # Ever worse, so that only stage 1 would be averaged; round 3 trains nothing.
        number = int(row["round"])
        row["loss"] = f"{2 if number == 3 else number:.6f}"
    write_tsv(path / "evaluate_valid.tsv", list(rows[0]), rows)
    inside("average", path, "--best", "2").ok()
    found = {row["client"]: row["rounds"] for row in read_tsv(path / "averaged.tsv", None)}
    assert found == dict.fromkeys(("all", *TRAIN), "4 5")
    inside("reset", path, "--round", "4").ok()
    assert not (path / "averaged.tsv").exists()
    inside("average", path, "--best", "2").ok()
    found = {row["client"]: row["rounds"] for row in read_tsv(path / "averaged.tsv", None)}
    # The third round sends features of the second one's models.
    assert found == dict.fromkeys(("all", *TRAIN), "1 3")


def test_averages_are_of_the_classifiers_of_their_rounds(decoupled, averaged):
    for client, mean in averaged.items():
        found = load_file(decoupled / "clients" / client / "model.safetensors")
        assert found.keys() == mean.keys()
        for name, value in mean.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("which", ["average", f"round:{LAST}", "round:4"])
def test_clients_are_decoded_with_the_classifier_of_the_round(
    world, decoupled, averaged, tmp_path, which
):
    inside("decode", decoupled, world / "valid", tmp_path / "out", "--model", which).ok()
    owners, places = (table(world / "valid" / name) for name in ("utt2client", "feats.scp"))
    for name, (hypothesis,) in read_nbest(tmp_path / "out" / "nbest.tsv").items():
        client = owners[name]
        number = int(which.partition(":")[2] or 0)
        state = after(decoupled, client, number) if number else averaged[client]
        model, speech = ready(world, state), torch.tensor(kaldiio.load_mat(places[name]))
        with torch.no_grad():
            encoded, _ = model.encode(speech[None].clone(), torch.tensor([len(speech)]))
        best = model.ctc.log_softmax(encoded)[0].max(1).values.double().sum().item()
        assert hypothesis.acoustic == pytest.approx(best, abs=1e-3)
