"""Two federations, of which one lacks a client's data: what moves, and by how much.

The bound that user-level privacy rests on is checked on files that real commands wrote: the sums
of the clients' whole numbers, and what the server makes of them, differ by what this client sent,
which is no longer than C, and by nothing else. Each way in which a federation could break the bound
is put into it, to see that the check finds it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import asr_world
import keywords
import net_worlds
import numpy as np
import private_world as world
import pytest
from commands import inside
from private_world import CLIENTS, STEPS, released, rows_of, vector
from seeds import commit_seed

from fedtools.data.datadir import DataDir
from fedtools.exchange.states import load_state
from fedtools.privacy.clipping import Grid
from fedtools.server import aggregate
from fedtools.server.server import Server
from fedtools.tasks.kws.clips import ClipFeatures

# The client with the most clips, one in the middle, and one with a single clip.
CHOSEN = ["1e1", "4e4", "7e7"]
CLIP = 0.05
# Without noise, what the server computes of two sums can be compared.
QUIET = ("method_conf.epsilon=null", "method_conf.noise=0")
ADAMW = ("training.optim=adamw", "training.optim_conf={lr: 0.01}")
SETTINGS = {
    "sgd": (),
    "adamw": ADAMW,
    "epochs": ("method_conf.local_steps=0", "method_conf.local_epochs=2"),
    "whole stack": ("training.stack=7", *ADAMW),
    "fedprox": ("method_conf.client_method=fedprox", "method_conf.client_conf={proximal: 0.1}"),
    "fedmmd": ("method_conf.client_method=fedmmd",),
    "fednorm": ("method_conf.client_method=fednorm",),
    "alo": ("method_conf.client_method=alo",),
    "one gradient": ("method_conf.local_steps=1", "training.batch_size=64"),
}


@dataclass(frozen=True)
class Seen:
    """What a first round sent and made: client -> its tensors, and the change of the model."""

    messages: dict
    change: np.ndarray


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    # In less of a second, clients differ too little to see a mean that is divided otherwise.
    return world.make_world(tmp_path_factory.mktemp("world"), 16000)


@pytest.fixture(scope="module")
def packed(root) -> dict[str, Path]:
    """Return client -> the clips of all others."""
    return {one: world.without(root / "train", root / f"no-{one}", one) for one in CHOSEN}


def first_round(
    root: Path, path: Path, *settings: str, train: Path | None = None, jobs: int = 1
) -> Seen:
    world.begin(root, path, *QUIET, *settings, train=train)
    inside("rounds", path, "--to", "1", "--nj", str(jobs)).ok()
    return Seen(rows_of(path), released(path))


def breaches(client: str, there: Seen, absent: Seen) -> set[str]:
    """Return the ways in which two neighbours break the bound."""
    found = set()
    if client in absent.messages:
        found.add("who has no data sends something")
    others = there.messages.keys() - {client}
    if others != absent.messages.keys():
        found.add("others come or stay away")
    for one in others & absent.messages.keys():
        if not np.array_equal(vector(there.messages[one]), vector(absent.messages[one])):
            found.add("another client's message changes")
    # Python's numbers have no bound.
    squares = [sum(x * x for x in vector(one).tolist()) for one in there.messages.values()]
    if max(squares) > STEPS**2:
        found.add("a change is longer than C")
    # The model is in single precision.
    moved = np.linalg.norm(there.change - absent.change)
    if moved > CLIP / len(CLIENTS) * (1 + 1e-4):
        found.add("the mean moves by more than C / n")
    return found


@pytest.fixture(scope="module")
def whole(root):
    """Return a function of a setting's name: a first round of all clients, run once for each."""
    return cache(lambda name: first_round(root, root / f"there {name}", *SETTINGS[name]))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("client", CHOSEN)
def test_neighbours_differ_by_one_clipped_change(root, packed, whole, tmp_path, client, name):
    there = whole(name)
    absent = first_round(root, tmp_path / "absent", *SETTINGS[name], train=packed[client])
    assert set(there.messages) == set(CLIENTS)
    assert breaches(client, there, absent) == set()
    # The mean is over all in the list, and so is the difference.
    mean = sum(vector(one) for one in there.messages.values()) * (CLIP / STEPS / len(CLIENTS))
    assert np.allclose(there.change, mean, atol=1e-7)
    own = vector(there.messages[client]) * (CLIP / STEPS / len(CLIENTS))
    assert np.allclose(there.change - absent.change, own, atol=2e-7)


@pytest.fixture(scope="module")
def head(root) -> tuple[str, ...]:
    """Return settings of a head on the cached outputs of a frozen encoder."""
    pytest.importorskip("transformers")
    from pretrained_models import save_whisper

    folder = save_whisper(root / "whisper")
    model = f"{{network: hf, path: {folder}, cache_frozen: true, adapt: {{kind: head}}"
    quiet = "{time_shift_ms: 0, noise_volume: 0.0, noise_probability: 0.0}"
    return (
        f"model={model}, normalise: layer}}",
        "training={batch_size: 8, stack: 3, optim: sgd, optim_conf: {lr: 1.0}, "
        f"augment: {quiet}}}",
        "method_conf.local_steps=1",
    )


def test_a_head_of_a_random_client_with_jobs_and_a_kill_between(root, head, tmp_path):
    client = CLIENTS[commit_seed() % len(CLIENTS)]
    train = world.without(root / "train", tmp_path / "others", client)
    there = first_round(root, tmp_path / "there", *head)
    path = tmp_path / "absent"
    world.begin(root, path, *QUIET, *head, train=train)
    inside("sample", path, "--nj", "2").ok()
    inside("train-local", path, "--job", "1").ok()
    # As if it had been killed before its table was in place.
    (path / "round_0001" / "update.1.tsv").unlink()
    for job in ("2", "1"):
        inside("train-local", path, "--job", job).ok()
    inside("aggregate", path).ok()
    absent = Seen(rows_of(path), released(path))
    assert breaches(client, there, absent) == set()


def test_jobs_change_no_message(root, whole, tmp_path):
    one, two = whole("sgd"), first_round(root, tmp_path / "two", jobs=2)
    assert one.messages.keys() == two.messages.keys()
    for client, tensors in one.messages.items():
        assert np.array_equal(vector(tensors), vector(two.messages[client]))
    assert np.array_equal(one.change, two.change)


def unchecked(patch):
    """Let the server take changes of any norm, so that a test sees what it prevents."""
    patch.setattr(aggregate, "_longer", lambda *_: {})


def a_layer_unclipped(patch):
    """Leave a tensor out of clipping."""
    rounded = Grid.rounded

    def without_one(self, changes):
        *others, last = sorted(changes)
        found = rounded(self, {name: changes[name] for name in others})
        return found | {last: np.rint(changes[last] / self.step).astype(np.int32)}

    patch.setattr(Grid, "rounded", without_one)
    unchecked(patch)


def nearest_on_a_coarse_grid(patch):
    """Round to the nearest of few steps."""
    rounded = Grid.rounded

    def nearest(self, changes):
        coarse = STEPS // 32
        found = rounded(self, changes)
        return {
            name: (np.rint(one / coarse) * coarse).astype(np.int32) for name, one in found.items()
        }

    patch.setattr(Grid, "rounded", nearest)
    unchecked(patch)


def weighed(patch, weigh):
    """Let the server add up messages with weights: of the messages' vectors and clips."""

    def add_up(self):
        sums = {name: np.zeros(shape) for name, (shape, _) in self._spec.items()}
        each = [_read(self, message) for message in self.messages]
        norms = [np.sqrt(sum(np.square(x, dtype="f8").sum() for x in one.values())) for one in each]
        weights = weigh(np.array([one.utterances for one in self.messages]), np.array(norms))
        for one, weight in zip(each, weights, strict=True):
            for name, value in one.items():
                sums[name] += np.trunc(weight * value)
        return sums

    patch.setattr(Server, "_sum_of_changes", add_up)


def _read(server, message):
    rows = load_state(message.path)
    return {name: rows[name][message.row].astype("f8") for name in server._spec}


def weights_by_clips(patch):
    weighed(patch, lambda clips, norms: clips / clips.mean())


def division_by_who_came(patch):
    weighed(patch, lambda clips, norms: np.full(len(clips), len(CLIENTS) / len(clips)))


def median_norms(patch):
    """Shorten changes to the median norm; clients' norms differ only below C."""
    weighed(patch, lambda clips, norms: np.minimum(1, np.median(norms) / norms) * 7 / len(clips))


def batches_by_data(patch):
    """Pad the batches of a stack to the largest there."""
    batch = ClipFeatures.batch
    patch.setattr(
        ClipFeatures, "batch", lambda self, rows, plans, step, width: batch(self, rows, plans, step)
    )


FAULTS = {
    a_layer_unclipped: ("7e7", "a change is longer than C"),
    nearest_on_a_coarse_grid: ("7e7", "a change is longer than C"),
    weights_by_clips: ("1e1", "the mean moves by more than C / n"),
    division_by_who_came: ("1e1", "the mean moves by more than C / n"),
    median_norms: ("1e1", "the mean moves by more than C / n"),
    batches_by_data: ("1e1", "another client's message changes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds_a_broken_bound(root, packed, tmp_path, monkeypatch, fault):
    client, breach = FAULTS[fault]
    fault(monkeypatch)
    settings = ("training.stack=7", "training.batch_size=64", *ADAMW)
    there = first_round(root, tmp_path / "there", *settings)
    absent = first_round(root, tmp_path / "absent", *settings, train=packed[client])
    assert breach in breaches(client, there, absent)


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> Path:
    """Return data of speech recognition, also without client `in`, and the list of all clients."""
    root = asr_world.make_world(tmp_path_factory.mktemp("speech"))
    data = DataDir.read(root / "train")
    kept = [name for name in data.utterances if data.utt2client[name] != "in"]
    shutil.copytree(root / "train", root / "others")
    DataDir.read(root / "others").restrict(kept).write()
    (root / "clients").write_text("au\nen\nin\n")
    return root


def init_speech(speech: Path, path: Path, train: str, *more: str | Path) -> None:
    quiet = [word for setting in QUIET for word in ("--set", setting)]
    inside(
        *("init", path, "--config", speech / "plain.yaml", "--method", "dpfedavg"),
        *("--data", f"train={speech / train}", "--asset", f"tokens={speech / 'tokens'}"),
        *(
            "--clients",
            speech / "clients",
            "--set",
            f"method_conf.clip={CLIP}",
            *quiet,
            *more,
        ),
    ).ok()


def of_speech(speech: Path, path: Path, train: str, *more: str | Path) -> dict:
    init_speech(speech, path, train, *more)
    inside("rounds", path, "--to", "1").ok()
    return rows_of(path)


@pytest.mark.parametrize("adapted", [False, True])
def test_neighbours_of_speech_recognition(speech, tmp_path, adapted):
    more = ()
    if adapted:
        init_speech(speech, tmp_path / "base", "train")
        adapt = "{rank: 1, targets: ['*linear_q', '*linear_v'], combine: fixed_a}"
        start = tmp_path / "base" / "init.safetensors"
        more = ("--start", start, "--set", f"model.adapt={adapt}")
    there = of_speech(speech, tmp_path / "there", "train", *more)
    absent = of_speech(speech, tmp_path / "absent", "others", *more)
    assert set(there) == {"au", "en", "in"} and set(absent) == {"au", "en"}
    for client in absent:
        assert np.array_equal(vector(there[client]), vector(absent[client]))
    assert 0 < max(np.square(vector(one)).sum() for one in there.values()) <= STEPS**2
    assert all(name.endswith(("lora_b", "bias", "weight")) for name in there["in"])


def test_what_is_published_of_neighbours_differs_in_numbers_alone(speech, key, tmp_path):
    """A missing client must not show in a name, a sentence, or a failure."""
    texts, files = [], []
    noisy = ("--set", "method_conf.noise=null", "--set", "method_conf.epsilon=8")
    for train in ("train", "others"):
        data = speech / train
        speaker = (data / "utt2client").read_text()
        (data / "utt2spk").write_text(speaker)
        path = tmp_path / train
        of_speech(speech, path, train, *noisy)
        inside("publish", path, tmp_path / f"{train}-out").ok()
        inside("privacy", path).ok()
        files.append(sorted(one.name for one in (tmp_path / f"{train}-out").iterdir()))
        names = [one for one in files[-1] if not one.endswith(("safetensors", "sha256sums"))]
        texts.append([(tmp_path / f"{train}-out" / one).read_text() for one in names])
    assert files[0] == files[1] and texts[0] == texts[1]
    assert "README.md" in files[0]


def test_cached_outputs_of_a_client_are_its_own_alone(root, head, tmp_path):
    """One clip more than a batch of all clients' clips would hold, or one less, changes nothing."""
    sizes = {"1e1": 40, "2e2": 17, "3e3": 5, "4e4": 3}
    counts = {one: [size, 0, 0, 0] for one, size in sizes.items()}
    packed = keywords.pack(tmp_path / "all", counts, length=16000)
    others = world.without(packed, tmp_path / "some", "1e1")
    outputs = {}
    for train in (packed, others):
        path = tmp_path / f"exp-{train.name}"
        world.begin(root, path, *QUIET, *head, train=train, listed=False)
        inside("rounds", path, "--to", "1").ok()
        (kept,) = train.glob("frozen/*.npy")
        outputs[train.name] = np.load(kept)
    assert len(outputs["all"]) == 65
    assert np.array_equal(outputs["all"][40:], outputs["some"])


def test_a_secret_sample_moves_no_other_message(root, key, tmp_path, monkeypatch):
    """The stack of a client must not depend on who else is drawn."""
    from fedtools.privacy.model_releases import ModelReleases

    seen = []
    settings = ("sampling=poisson", "clients_per_round=4", *ADAMW)
    for sample in (["1e1", "2e2", "3e3", "7e7"], ["2e2", "3e3", "7e7"], ["7e7"]):
        monkeypatch.setattr(ModelReleases, "_sample", lambda *_, drawn=sample: drawn)
        path = tmp_path / "-".join(sample)
        seen.append(first_round(root, path, *settings).messages)
        assert sorted(seen[-1]) == sample
    for messages in seen[1:]:
        for client, tensors in messages.items():
            assert np.array_equal(vector(tensors), vector(seen[0][client]))


@pytest.fixture(scope="module")
def language(tmp_path_factory) -> Path:
    """Return streams of words for rescoring, also without one client, and a language model."""
    root = tmp_path_factory.mktemp("language")
    net_worlds.WORLDS["lm"][0](root / "lm")
    lm = root / "lm"
    options = ("--config", lm / "nnlm.yaml", "--valid", lm / "made/text")
    inside("train-nnlm", "--plain", lm / "plain", *options, lm / "nnlm").ok()
    inside("rescore", lm / "made", lm / "nnlm", lm / "scored").ok()
    inside("rescore-stream", lm / "made", lm / "scored", lm / "all").ok()
    shutil.copytree(lm / "all", lm / "some")
    owners = [line.split()[1] for line in (lm / "all/utt2client").open()]
    clients = sorted(set(owners))
    (root / "clients").write_text("".join(f"{name}\n" for name in clients))
    for name in ("nbest.tsv", "nnlm.scp", "segments", "text", "utt2client", "utt2spk"):
        lines = (lm / "all" / name).read_text().splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith(f"{clients[0]}-")]
        assert len(kept) < len(lines)
        (lm / "some" / name).write_text("".join(kept))
    return root


def test_neighbours_of_language_models(language, tmp_path):
    found, lm = {}, language / "lm"
    for name in ("all", "some"):
        path = tmp_path / name
        quiet = [word for setting in QUIET for word in ("--set", setting)]
        inside(
            *("init", path, "--config", lm / "config.yaml", "--method", "dpfedavg", *quiet),
            *("--data", f"train={lm / name}", "--asset", f"weights={lm / 'weights'}"),
            *("--start", lm / "nnlm/model.safetensors", "--clients", language / "clients"),
            *("--set", f"method_conf.clip={CLIP}"),
        ).ok()
        inside("rounds", path, "--to", "1").ok()
        found[name] = rows_of(path)
    assert len(found["all"]) == len(found["some"]) + 1 > 2
    for client, tensors in found["some"].items():
        assert np.array_equal(vector(tensors), vector(found["all"][client]))
    longest = max(np.square(vector(one)).sum() for one in found["all"].values())
    assert 0 < longest <= STEPS**2
