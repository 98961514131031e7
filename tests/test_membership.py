"""Membership attacks on clients that memorise their data, and on updates that are noise."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import keyword_world
import numpy as np
import pytest
import simulated
import torch
from conftest import inside
from keyword_world import begin as begin_keywords
from keyword_world import make_world
from safetensors.numpy import load_file, save_file
from scipy.stats import beta
from test_adapters import CONFORMER

from fedtools.attack.membership.attack import COLUMNS, World
from fedtools.attack.membership.candidates import ANYBODY, SAME
from fedtools.attack.membership.evidence import Evidence
from fedtools.attack.membership.shadows import train
from fedtools.attack.options import Updates
from fedtools.attack.victims import sound_victims
from fedtools.core.tables import read_tsv
from fedtools.data.datadir import DataDir
from fedtools.federation.federation import Federation
from fedtools.models.acoustic.asr import build_model

PEOPLE = ("ann", "bob", "cat")
PARTS = 3
# A single block learns the letters by heart as well.
ENCODER = simulated.CONFIG["model"]["encoder_conf"] | {"num_blocks": 1}
MODEL = simulated.CONFIG["model"] | {"encoder_conf": ENCODER}
CLIENTS = [f"{speaker}-m{number}" for speaker in PEOPLE for number in range(PARTS)]
# The rows of a round with references, kin and shadow models.
ATTACKS = {
    *(("threshold", score, "-") for score in ("loss", "gradient")),
    *(("RMIA", "loss", references) for references in ("round", "speaker")),
    *(("blind", "audio", references) for references in ("round", "speaker")),
    *(
        ("LiRA offline", score, references)
        for score in ("loss", "gradient")
        for references in ("round", "speaker")
    ),
}
ONLINE = {("LiRA online", score, "speaker") for score in ("loss", "gradient")}
# Four standard deviations of the area of nine times four members and four non-members.
NEAR = 100 * 4 * np.sqrt(9 / (12 * 16 * 9))
Rows = dict[tuple[str, str, str, str], dict[str, str]]


def people(path: Path, utterances: int, seed: int = 0) -> Path:
    """Make data of speakers who are alike at each of their clients, dealt in turn."""
    data = DataDir.read(simulated.data_dir(path, list(PEOPLE), utterances, seed))
    for number, name in enumerate(data.utt2spk):
        data.utt2spk[name] = name[:3]
        data.utt2client[name] = f"{name[:3]}-m{number % PARTS}"
    data.write()
    return path


def begin(root: Path, path: Path, epochs: int, *more: str | Path, rounds: int = 1) -> Path:
    settings = (f"rounds={rounds}", f"method_conf.local_epochs={epochs}")
    settings += ("training.optim_conf.lr=0.01", "keep_updates=true")
    inside(
        *("init", path, "--config", root / "c.yaml", "--method", "fedavg"),
        *("--data", f"train={root / 'train'}", "--asset", f"tokens={root / 'tokens'}"),
        *(word for one in settings for word in ("--set", one)),
        *more,
    ).ok()
    inside("rounds", path).ok()
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("world")
    people(root / "train", 4 * PARTS)
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    simulated.config_file(root / "c.yaml", model=MODEL)
    return root


@pytest.fixture(scope="module")
def voices(root) -> Path:
    """Train each client on its four utterances thirty times."""
    return begin(root, root / "voices", 30)


@pytest.fixture(scope="module")
def learnt(root, tmp_path_factory) -> Path:
    """Train on letters that were not said, which can only be memorised."""
    folder = tmp_path_factory.mktemp("learnt")
    for name in ("train", "tokens", "c.yaml"):
        (shutil.copy if name.endswith("yaml") else shutil.copytree)(root / name, folder / name)
    lie(folder / "train")
    return begin(folder, folder / "exp", 20)


def lie(path: Path) -> None:
    """Replace the letters that were said by others, equally many, so that they fit."""
    data, random = DataDir.read(path), np.random.default_rng(5)
    for name, text in data.text.items():
        letters = random.choice(list(simulated.LETTERS), len(text))
        data.text[name] = "".join(
            " " if said == " " else other for said, other in zip(text, letters, strict=True)
        )
    data.write()


def attacked(path: Path, out: Path, *more: str) -> Rows:
    """Return the rows without a defence."""
    inside("attack", "membership", path, out, "--round", "1", *more).ok()
    return known(read_tsv(out / "membership.tsv", COLUMNS), "none", "-")


def known(rows: list[dict[str, str]], defence: str, attacker: str) -> Rows:
    keys = "others_of", "attack", "score", "references"
    return {
        tuple(row[key] for key in keys): row
        for row in rows
        if (row["defence"], row["attacker"]) == (defence, attacker)
    }


def area(rows: Rows, kind: str, *key: str) -> float:
    return float(rows[(kind, *key)]["AUC%"])


# One without effect, one that keeps all models near the global one, one that drowns them.
DEFENCES = "clip=1000", "clip=0.02", "noise=1000"


@pytest.fixture(scope="module")
def behind(learnt, tmp_path_factory) -> list[dict[str, str]]:
    out = tmp_path_factory.mktemp("out")
    words = [word for one in ("none", *DEFENCES) for word in ("--defence", one)]
    attacked(learnt, out, "--shadows", "1", *words)
    return read_tsv(out / "membership.tsv", COLUMNS)


@pytest.fixture(scope="module")
def rows(behind) -> Rows:
    return known(behind, "none", "-")


def test_what_was_learnt_by_heart_is_found(rows):
    keys = {(kind, *key) for kind in (SAME, ANYBODY) for key in ATTACKS}
    assert rows.keys() == keys | {(SAME, *key) for key in ONLINE}
    for (kind, *_), row in rows.items():
        if kind == SAME:
            counts = row["clients"], row["speakers"], row["members"], row["others"]
            assert counts == ("9", "3", "36", "36")
        # Three speakers are three trials at best, and 36 non-members give no rate.
        won = 3 * float(row["AUC%"]) / 100
        low = beta.ppf(0.025, won, 4 - won) if won else 0.0
        high = beta.ppf(0.975, won + 1, 3 - won) if won < 3 else 1.0
        assert float(row["low"]) == pytest.approx(100 * low, abs=0.05)
        assert float(row["high"]) == pytest.approx(100 * high, abs=0.05)
        assert (row["TPR@0.1%"], row["TPR@1%"], row["TPR@10%"]) == ("-",) * 3
    for key in (*ATTACKS, *ONLINE):
        if key[0] == "blind":
            assert area(rows, SAME, *key) == pytest.approx(50, abs=NEAR)
        else:
            strong = {"LiRA online": 92, "LiRA offline": 88}
            least = strong.get(key[0], 75) if key[1] == "loss" else 60
            assert area(rows, SAME, *key) > least, key
    # References beat the plain loss.
    plain = area(rows, SAME, "threshold", "loss", "-")
    assert area(rows, SAME, "LiRA offline", "loss", "round") > plain
    assert area(rows, SAME, "LiRA online", "loss", "speaker") > plain


def test_attackers_who_know_a_defence_and_who_do_not(behind, rows):
    """Informed attackers gain from references where a defence keeps models near the global one."""
    informed = {key for key in rows if key[3] != "-" and key[1] != "blind"}
    thresholds = {key for key in rows if key[1] == "threshold"}
    found = {}
    for defence in DEFENCES:
        ignorant, semi = (known(behind, defence, one) for one in ("ignorant", "semi-informed"))
        # Audio is attacked once, and thresholds involve no training.
        assert ignorant.keys() == informed | thresholds and semi.keys() == informed
        found[defence] = ignorant, semi
    for some in found["clip=1000"]:
        for key, row in some.items():
            assert float(row["AUC%"]) == pytest.approx(float(rows[key]["AUC%"]), abs=1), key
    # Noise reveals nothing to any attacker.
    for some in found["noise=1000"]:
        for key, row in some.items():
            if key[0] == SAME:
                assert float(row["AUC%"]) == pytest.approx(50, abs=NEAR), key
    ignorant, semi = found["clip=0.02"]
    for key in informed:
        if key[0] != SAME:
            continue
        one, other = (float(some[key]["AUC%"]) for some in (ignorant, semi))
        if "gradient" in key:
            # A direction has no length.
            assert one == pytest.approx(other, abs=1), key
        else:
            assert other > one + 15, key


def test_what_is_no_defence_of_a_client_is_refused(learnt, tmp_path):
    command = ("attack", "membership", learnt, tmp_path, "--round", "1", "--defence")
    inside(*command, "mean=2").fails(1, "membership is attacked in updates of single clients")
    inside(*command, "x").fails(1, "invalid defence 'x' in 'x'")


def test_a_model_of_the_same_speakers_other_speech_has_no_members(voices, tmp_path):
    """A client's update comes from another client of the same speaker: old scores report a leak.

    The model under the client's name was trained on none of the members.
    """
    path = shutil.copytree(voices, tmp_path / "exp")
    folder = path / "round_0001"
    sent = load_file(folder / "update.1.safetensors")
    clients = [row["client"] for row in read_tsv(folder / "update.1.tsv", None)]
    moved = [clients.index(f"{one[:3]}-m{(int(one[-1]) + 1) % PARTS}") for one in clients]
    save_file({name: value[moved] for name, value in sent.items()}, folder / "update.1.safetensors")
    rows = attacked(path, tmp_path / "out", "--shadows", "1")
    assert area(rows, ANYBODY, "threshold", "loss", "-") > 70
    assert area(rows, ANYBODY, "LiRA offline", "loss", "round") > 70
    for attack in ("LiRA offline", "RMIA"):
        # Two standard deviations; models of the same speaker may separate members better than this
        # one.
        assert area(rows, ANYBODY, attack, "loss", "speaker") < 50 + NEAR / 2


@pytest.fixture(scope="module")
def twice(root) -> Path:
    """Run two short rounds, whose initial models differ."""
    return begin(root, root / "twice", 2, rounds=2)


def test_an_attack_has_the_same_bytes_again(twice, tmp_path):
    tables = []
    for number in range(2):
        short = ("--shadows", "1", "--each", "2", "--references", "2", "--seed", "3")
        inside("attack", "membership", twice, tmp_path / str(number), "--round", "2", *short).ok()
        tables.append((tmp_path / str(number) / "membership.tsv").read_bytes())
    assert tables[0] == tables[1]


def test_evidence_by_hand(root, twice):
    """Losses and the cosine of update and descent agree with those by ESPnet's own model."""
    number = 2
    federation = Federation(twice)
    evidence = Evidence(federation, number, federation.task.items())
    begun = load_file(twice / "init.safetensors")
    begun |= load_file(twice / f"round_{number:04d}" / "global.safetensors")
    sent = load_file(twice / f"round_{number:04d}" / "update.1.safetensors")
    rows = read_tsv(twice / f"round_{number:04d}" / "update.1.tsv", None)
    at = {row["client"]: index for index, row in enumerate(rows)}
    tokens = (root / "tokens" / "tokens.txt").read_text().split()

    def model_of(own: dict[str, np.ndarray]) -> tuple[torch.nn.Module, torch.Tensor]:
        model = build_model(MODEL, tokens).eval()
        model.load_state_dict({key: torch.tensor(value) for key, value in (begun | own).items()})
        return model, torch.cat([value.detach().flatten() for value in model.parameters()])

    start, vector = model_of({})
    batches = dict(utterances(root, tokens))
    names = list(batches)[:5]
    states = sound_victims(federation, [number]).states(CLIENTS)
    found = dict(evidence.under(states, lambda _: names))
    assert found.keys() == set(CLIENTS)
    for client, values in found.items():
        model, changed = model_of({key: value[at[client]] for key, value in sent.items()})
        for name, (loss, cosine) in zip(names, values, strict=True):
            before = start(**batches[name])[0].sum()
            gradients = torch.autograd.grad(before, list(start.parameters()))
            down = -torch.cat([one.flatten() for one in gradients])
            update = changed - vector
            with torch.no_grad():
                assert loss == pytest.approx(model(**batches[name])[0].item(), rel=1e-4)
            expected = (down @ update / (down.norm() * update.norm())).item()
            assert cosine == pytest.approx(expected, rel=2e-3, abs=1e-4)
    for name, loss in evidence.begun([names]).items():
        assert loss == pytest.approx(start(**batches[name])[0].item(), rel=1e-4)


def utterances(root: Path, tokens: list[str]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield single utterances as batches of ESPnet's models."""
    import kaldiio

    data = DataDir.read(root / "train")
    for name in data.utterances:
        speech = torch.tensor(kaldiio.load_mat(data.feats_scp[name]))[None]
        letters = ["<space>" if one == " " else one for one in data.text[name]]
        text = torch.tensor([[tokens.index(one) for one in letters]])
        lengths = {"speech_lengths": torch.tensor([speech.shape[1]])}
        yield name, {"speech": speech, "text": text, **lengths,
                     "text_lengths": torch.tensor([text.shape[1]])}  # fmt: skip


def same_training(federation: Federation, number: int, client: str, data: list[str]) -> None:
    """Check that training on a client's data as the client reproduces its update."""
    items = federation.task.items()
    seed = federation.experiment.seed
    victims = sound_victims(federation, [number])
    ((_, sent),) = victims.states([client])
    with federation.settings():
        found = train(federation, number, items, client, data, seed)
        other = train(federation, number, items, client, data, seed + 1)
        less = train(federation, number, items, client, data[1:], seed)
    assert found.keys() == sent.keys()
    for name, value in sent.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    for state in (other, less):
        assert any((state[name] != value).any() for name, value in sent.items())


def test_shadow_models_are_trained_as_clients_are(root, twice):
    data = DataDir.read(root / "train").client_utterances("bob-m1")
    same_training(Federation(twice), 2, "bob-m1", data)


def test_a_split_that_nobody_trains_on(root, tmp_path):
    """With one client per speaker, non-members of the same speaker come from a held-out split."""
    for name, seed in (("train", 0), ("valid", 1)):
        data = DataDir.read(people(tmp_path / name, 4, seed))
        renamed = {one: one[:4] + f"{name}-" + one[4:] for one in data.utterances}
        data.utt2client = {one: one[:3] for one in data.utt2client}
        for table in ("text", "utt2spk", "feats_scp", "utt2client"):
            old = getattr(data, table)
            setattr(data, table, {renamed[key]: value for key, value in old.items()})
        (tmp_path / name / "utt2num_frames").unlink()
        data.write()
        lie(tmp_path / name)
    shutil.copy(root / "c.yaml", tmp_path / "c.yaml")
    shutil.copytree(root / "tokens", tmp_path / "tokens")
    path = begin(tmp_path, tmp_path / "exp", 60, "--data", f"valid={tmp_path / 'valid'}")
    short = ("--shadows", "0")
    rows = attacked(path, tmp_path / "out", *short)
    assert {kind for kind, *_ in rows} == {ANYBODY}
    rows = attacked(path, tmp_path / "held", *short, "--held", "valid")
    assert {kind for kind, *_ in rows} == {SAME, ANYBODY}
    assert rows[SAME, "threshold", "loss", "-"]["members"] == "12"
    assert area(rows, SAME, "LiRA offline", "loss", "round") > 90
    command = ("attack", "membership", path, tmp_path / "x", "--round", "1")
    inside(*command, "--held", "train").fails(2, "clients train on train")
    inside(*command, *["--held", "valid"] * 2).fails(2, "the same split twice")
    inside(*command, "--held", "no").fails(1, "no no data; there are train, valid")


def test_clips_of_keyword_clients(tmp_path):
    """Non-members are of any speaker, or of the same in a split that has them."""
    world = make_world(tmp_path / "world")
    settings = ("method_conf.local_steps=20", "rounds=1", "keep_updates=true")
    path = begin_keywords(world, tmp_path / "exp", "fedavg", *settings, "clients_per_round=null")
    inside("rounds", path).ok()
    rows = attacked(path, tmp_path / "out", "--each", "5", "--shadows", "1")
    assert {kind for kind, *_ in rows} == {ANYBODY}
    assert {key[1:] for key in rows} >= ONLINE
    # Seven clients, of which two have fewer than five clips.
    assert rows[ANYBODY, "threshold", "loss", "-"]["members"] == "29"
    assert area(rows, ANYBODY, "threshold", "loss", "-") > 60
    rows = attacked(path, tmp_path / "held", "--each", "5", "--held", "test", "--shadows", "0")
    # The test clips are of two of them.
    row = rows[SAME, "LiRA offline", "loss", "round"]
    assert (row["clients"], row["members"], row["others"]) == ("2", "10", "10")


def test_shadow_networks_are_trained_as_clients_are(tmp_path):
    world = make_world(tmp_path / "world")
    path = begin_keywords(world, tmp_path / "exp", "fedavg", "rounds=1", "keep_updates=true",
                          "clients_per_round=null", "training.stack=1")  # fmt: skip
    inside("rounds", path).ok()
    federation = Federation(path)
    client = keyword_world.CLIENTS[2]
    owners = federation.task.items().owners
    same_training(federation, 1, client, [one for one in owners if owners[one] == client])


def test_adapters(root, tmp_path):
    """The updates are small; references and shadow models are adapters, too."""
    encoder = CONFORMER["encoder_conf"] | {"num_blocks": 1}
    model = CONFORMER | {"encoder_conf": encoder, "normalize": "utterance_mvn"}
    copy = tmp_path / "w"
    people(copy / "train", 4 * PARTS)
    shutil.copytree(root / "tokens", copy / "tokens")
    simulated.config_file(copy / "c.yaml", model=model)
    base = begin(copy, copy / "base", 1)
    how = {"rank": 2, "targets": ["*linear_q", "*linear_v"], "combine": "svd"}
    simulated.config_file(copy / "c.yaml", model=model | {"adapt": how})
    state = load_file(base / "init.safetensors")
    save_file(
        state | load_file(base / "round_0002" / "global.safetensors"), copy / "whole.safetensors"
    )
    start = ("--start", copy / "whole.safetensors")
    path = begin(copy, copy / "adapted", 2, *start, rounds=2)
    # Of any four clients, two are of different people.
    options = Updates(each=2, shadows=1, references=4)
    world = World(Federation(path), 2, options, 0)
    found = world.score()[SAME]
    assert {key for _, key in found.scores} == ATTACKS | ONLINE
    assert all(np.isfinite(values).all() for values in found.scores.values())
    data = DataDir.read(copy / "train").client_utterances("bob-m1")
    same_training(Federation(path), 2, "bob-m1", data)
