"""Configurations: strict, with the line and the nearest name in every refusal."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import keywords
import pytest
import yaml
from conftest import ROOT
from damaged import SEEDS, damage, read_or_refused
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtools.attack.options import A1
from fedtools.client.options import ClipTraining, UtteranceTraining
from fedtools.core.config import (
    differences,
    fix,
    from_mapping,
    lookup,
    merge,
    override,
    read_section,
    read_yaml,
    write_yaml,
)
from fedtools.core.errors import UserError
from fedtools.models.training import Training, check_optimizer

WHOLE = """\
task: kws
rounds: 3
training:
  optim: sgd
  optim_conf: {lr: 1e-2, momentum: 0.9}
  scheduler: warmuplr
  scheduler_conf: {warmup_steps: 10}
  grad_clip: 5.0
  num_threads: 1
  batch_size: 8
"""


@dataclass(frozen=True)
class Options:
    rate: float
    steps: int = 3
    name: str | None = None
    more: dict = field(default_factory=dict)


def test_numbers_as_people_write_them(tmp_path):
    (tmp_path / "c.yaml").write_text("rate: 1e-4\nsteps: 7\n")
    options = from_mapping(Options, read_yaml(tmp_path / "c.yaml"), "c.yaml")
    assert options == Options(rate=1e-4, steps=7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate": 1.0, "stepps": 1}, "did you mean 'steps'"),
        ({"rate": "fast"}, "'rate' is 'fast': input should be a valid number"),
        ({"rate": 1.0, "steps": 1.5}, "'steps' is 1.5: input should be a valid integer"),
        ({"rate": True}, "'rate' is True"),
        ({"steps": 1}, "'rate' is missing"),
    ],
)
def test_refused_options(options, said):
    with pytest.raises(UserError, match=said):
        from_mapping(Options, options, "c.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\na: 2\n", "duplicated"),
        ("a: [1\nb: 2\n", "c.yaml:2: not YAML"),
        ("- 1\n", "a mapping of options"),
        ("a: !!python/object/apply:os.system [true]\n", "not YAML"),
        (f"b: 1\na: {'9' * 401}\n", "c.yaml:2: not YAML: an integer of 401 digits"),
        (f"a: 1{':59' * 3000}\n", "c.yaml:1: not YAML: an integer of 9001 digits"),
        ("a: !!bool x\n", "c.yaml: not YAML: a value that does not fit its tag: "),
        ("a: &a [*a]\n", "c.yaml: not YAML: aliases within aliases"),
        (f"a: {'[' * 3000}{']' * 3000}\n", "c.yaml: not YAML: nested too deeply"),
    ],
)
def test_refused_files(tmp_path, text, said):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=said):
        read_yaml(tmp_path / "c.yaml")


def test_the_longest_integers(tmp_path):
    (tmp_path / "c.yaml").write_text(f"a: {'9' * 400}\n")
    assert read_yaml(tmp_path / "c.yaml") == {"a": 10**400 - 1}


@settings(max_examples=200)
@given(seed=SEEDS)
def test_a_damaged_configuration_is_refused_or_has_valid_options(seed):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_text(WHOLE)
        damage(path, seed)
        found = read_or_refused(lambda: read_yaml(path), path)
        if found is None:
            return
        # What was read can be written, and means the same again.
        write_yaml(Path(folder) / "again.yaml", found)
        # As text, since nan is not nan.
        assert str(read_yaml(Path(folder) / "again.yaml")) == str(found)
        section = f"{path}: training"

        def training():
            options = from_mapping(ClipTraining, found.get("training"), section)
            check_optimizer(options, section)
            return options

        options = read_or_refused(training, path)
        if options is not None:
            assert options.optim in ("adam", "adamw", "sgd")
            assert type(options.num_threads) is int and options.num_threads >= 1
            assert type(options.batch_size) is int and options.batch_size >= 1
            assert 0 <= options.grad_clip < math.inf
            assert options.scheduler_conf.get("warmup_steps", 1) > 0


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        read_yaml(tmp_path / "c.yaml")


def test_override_merge_lookup(tmp_path):
    config = {"a": {"b": 1}, "c": 2}
    assert override(config, ["a.b=3e-2", "a.d=x"]) == {"a": {"b": 0.03, "d": "x"}, "c": 2}
    assert config == {"a": {"b": 1}, "c": 2}
    assert merge(config, {"a": {"e": 5}}) == {"a": {"b": 1, "e": 5}, "c": 2}
    for wrong, said in (
        ("a", "--set 'a' has no '='; write --set a.b=value"),
        ("c.d=1", "--set 'c.d=1': 'c' holds a value, not options"),
        ("a.b=[", r"--set 'a.b=\[': the value is not YAML"),
    ):
        with pytest.raises(UserError, match=said):
            override(config, [wrong])
    with pytest.raises(UserError, match="option 'c' is 2: input should be a mapping"):
        merge(config, {"c": {"d": 1}})
    with pytest.raises(UserError, match=r"c.yaml: \[1\] must be a mapping"):
        from_mapping(Options, [1], "c.yaml")
    write_yaml(tmp_path / "c.yaml", config)
    assert lookup(tmp_path / "c.yaml", "a.b") == 1
    with pytest.raises(UserError, match=r"no option 'a\.z'"):
        lookup(tmp_path / "c.yaml", "a.z")


trees = st.recursive(
    st.integers() | st.text() | st.booleans() | st.none(),
    lambda inner: st.dictionaries(st.text(min_size=1), inner, max_size=3),
)


@given(st.dictionaries(st.text(min_size=1), trees, max_size=4))
def test_freezing_is_reading_back(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("f") / "config.yaml"
    fix(path, config)
    fix(path, config)
    assert not list(differences(read_yaml(path), config))
    with pytest.raises(UserError, match="another configuration"):
        fix(path, {**config, "one more": "!"})


@pytest.mark.parametrize(
    "path", sorted((ROOT / "conf/commonvoice").glob("*.yaml")), ids=lambda p: p.name
)
def test_our_configurations_make_models(path):
    from fedtools.decode.beam import BeamOptions
    from fedtools.models.acoustic.asr import build_model
    from fedtools.models.pretrained.options import Generation, Pretrained, is_seq2seq

    config = yaml.safe_load(path.read_text())
    for section in (config, merge(config, config["baseline"])):
        from_mapping(UtteranceTraining, section["training"], path)
    if is_seq2seq(config["model"]):
        # Whisper itself, in a folder that the recipe adds.
        from_mapping(Generation, config["decode"], path)
        from_mapping(Pretrained, {"path": "x", **config["model"]}, path)
        return
    from_mapping(BeamOptions, config["decode"], path)
    model = build_model(config["model"], ["<blank>", "<unk>", "a", "<sos/eos>"])
    blocks = {name.split(".")[2] for name, _ in model.named_parameters() if ".encoders." in name}
    assert len(blocks) == config["model"]["encoder_conf"]["num_blocks"]


@pytest.mark.parametrize("path", sorted((ROOT / "conf/speechcommands").glob("*.yaml")), ids=str)
def test_every_experiment_of_the_keyword_configurations_can_begin(path):
    from fedtools.federation.init import read_config
    from fedtools.methods import make_method
    from fedtools.models.keywords import NETWORKS, build_network
    from fedtools.models.pretrained.options import Pretrained, is_pretrained
    from fedtools.tasks import facts_of

    whole = yaml.safe_load(path.read_text())
    own = {
        "first": ["head"],
        "full": ["transformer"],
        "private": ["head", "layer_norm", "lora", "transformer"],
        "whisper": ["lora", "head"],
    }
    networks = own.get(path.stem, NETWORKS.names())
    assert list(whole["networks"]) == networks
    for network, method, task in itertools.product(networks, whole["methods"], ("12", "35")):
        sections = [f"networks.{network}", f"methods.{method}", f"tasks.{task}.{method}?"]
        config = read_config(path, sections, [])
        from_mapping(ClipTraining, config["training"], path)
        parts = facts_of("kws", path).parts
        make_method(method, config["method_conf"], path).check("kws", parts, config["model"])
        if is_pretrained(config["model"]):
            from_mapping(Pretrained, {"path": "x", **config["model"]}, path)
        else:
            build_network(config["model"], int(task), path)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"optim": "adagrad"}, "'optim' is 'adagrad': input should be 'adam', 'adamw' or 'sgd'"),
        ({"optim_conf": [1]}, "'optim_conf' is"),
        ({"scheduler": "cosine"}, "'cosine': input should be 'warmuplr'"),
        ({"scheduler_conf": {"warmup_steps": -1}}, "warmup_steps is -1"),
        ({"scheduler_conf": {"warmup_steps": "many"}}, "warmup_steps is 'many'"),
        ({"scheduler_conf": {"warmup_steps": True}}, "warmup_steps is True"),
        ({"scheduler_conf": 3}, "'scheduler_conf' is 3"),
        ({"grad_clip": -1.0}, "grad_clip"),
        ({"grad_clip": math.inf}, "grad_clip"),
        ({"save_interval_steps": -1}, "save_interval_steps"),
        ({"train_dtype": "float16"}, "'train_dtype' is 'float16': input should be"),
        ({"num_threads": 0}, "'num_threads' is 0: input should be greater than or equal to 1"),
    ],
)
def test_refused_options_of_training(section, said):
    with pytest.raises(UserError) as error:
        from_mapping(Training, section, "c.yaml: training")
    assert said in str(error.value) and str(error.value).startswith("c.yaml")


@pytest.mark.parametrize(
    ("kind", "section", "said"),
    [
        (UtteranceTraining, {"accum_grad": 0}, "'accum_grad' is 0: input should be greater"),
        (UtteranceTraining, {"batch_bins": 0}, "'batch_bins' is 0: input should be greater"),
        (UtteranceTraining, {"stack": 4}, "stack"),
        (UtteranceTraining, {"grad_clip": -1.0}, "grad_clip"),
        (ClipTraining, {"grad_clip": -1.0}, "grad_clip"),
        (ClipTraining, {"batch_size": 0}, "'batch_size' is 0: input should be greater"),
        (ClipTraining, {"stack": 0}, "'stack' is 0: input should be greater"),
        (ClipTraining, {"stack_mb": 0}, "'stack_mb' is 0: input should be greater"),
        (ClipTraining, {"augment": {"shift": 1}}, "augment"),
        (ClipTraining, {"batch_bins": 9}, "batch_bins"),
    ],
)
def test_refused_options_of_a_task(kind, section, said):
    with pytest.raises(UserError, match=said):
        from_mapping(kind, section, "c.yaml: training")


@pytest.mark.parametrize(
    ("optim", "conf"),
    [
        ("sgd", {"betas": [0, 1]}),
        ("sgd", {"momentum": "x", "lr": 0.1}),
        ("sgd", {"nesterov": True, "lr": 0.1}),
        ("adam", {"lr": -1.0}),
        ("adam", {"lr": math.nan}),
        ("adam", {"amsgrad": "x"}),
        ("adam", {"betas": 3}),
        ("adam", {"betas": [0.9]}),
        ("adam", {"foreach": True}),
        ("adamw", {"weight_decay": "x"}),
        ("adamw", {"differentiable": True}),
    ],
)
def test_refused_options_of_an_optimiser(optim, conf):
    with pytest.raises(UserError, match=r"^c\.yaml: training: optim_conf: \S") as found:
        check_optimizer(Training(optim=optim, optim_conf=conf), "c.yaml: training")
    assert "\n" not in str(found.value)


def test_usual_options_of_an_optimiser_pass():
    import torch

    before = torch.get_rng_state()
    for optim, conf in (
        ("sgd", {"lr": 1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}),
        ("adam", {"lr": 0.002, "betas": [0.9, 0.98], "eps": 1e-9, "amsgrad": True}),
        ("adamw", {}),
    ):
        check_optimizer(Training(optim=optim, optim_conf=conf), "c.yaml")
    # Later code may draw a model.
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("optim: sgd\n  optim_conf: {lr: x}", 5),
        ("optim: adam\n  optim_conf: {amsgrad: x}", 5),
        ("scheduler: warmuplr\n  scheduler_conf: {warmup_steps: 0}", 5),
        ("scheduler: warmuplr\n  scheduler_conf: {warmup_steps: -1}", 5),
        ("scheduler: warmuplr\n  scheduler_conf: {warmup_steps: x}", 5),
        ("scheduler: warmuplr\n  scheduler_conf: {warmup: 9}", 5),
        ("scheduler: warmuplr", 4),
        ("save_interval_steps: -3", 4),
        ("grad_clip: -1", 4),
        ("grad_clip: .inf", 4),
        ("num_threads: 10000000000", 4),
        ("num_threads: 0", 4),
        ("stack: 1000000000", 4),
        ("augment: {shift: 1}", 4),
        ("batch_size: 8\nrounds: 0", 5),
        ("batch_size: 8\nkeep_updates: 1", 5),
        ("batch_size: 8\nsampling: dice", 5),
        ("batch_size: 8\nclients_per_round: 9", 5),
        ("batch_size: 8\nround: 9", 5),
    ],
)
def test_init_names_the_line_of_an_option(tmp_path, cli, section, line):
    keywords.pack(tmp_path / "train", {"ann": [1, 1, 1, 1]})
    config = tmp_path / "config.yaml"
    model = "{network: dscnn, network_conf: {channels: 2, blocks: 1}}"
    config.write_text(f"task: kws\nmodel: {model}\ntraining:\n  {section}\n")
    begin = ("init", tmp_path / "exp", "--config", config, "--method", "fedavg")
    cli(*begin, "--data", f"train={tmp_path / 'train'}").fails(1, f"{config}:{line}: ")
    assert not (tmp_path / "exp").exists()


def test_warmup_is_espnets():
    import torch
    from espnet2.schedulers.warmup_lr import WarmupLR

    training = Training(scheduler="warmuplr", scheduler_conf={"warmup_steps": 10})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = WarmupLR(optimizer, warmup_steps=10)
    for step in range(1, 30):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(training.learning_rate(0.3, step))
        optimizer.step()
        scheduler.step()


@given(st.dictionaries(st.text("0123456789e+-.xyes", min_size=1), st.text("0123456789e+-._no~")))
def test_what_is_written_is_read(tmp_path_factory, content):
    """Speaker names of Speech Commands such as 1e5 are strings, not numbers."""
    path = tmp_path_factory.mktemp("yaml") / "c.yaml"
    write_yaml(path, {"1e5": "1e5", **content})
    assert read_yaml(path) == {"1e5": "1e5", **content}


@pytest.mark.parametrize("setting", ["a2.width=64", "width=64", "a1"])
def test_a_setting_of_another_section_is_refused(setting):
    """It would have no effect."""
    remedy = "write --set a1.option=value"
    with pytest.raises(UserError, match=f"'{setting}' is not in the section 'a1'.*{remedy}"):
        read_section(A1, None, "a1", [setting])
    assert read_section(A1, None, "a1", ["a1.others=7"]).others == 7


def outcome(path: Path) -> str:
    try:
        return repr(read_yaml(path))
    except UserError as error:
        return str(error)


# Pieces of YAML, of which most combinations are none.
PIECES = st.sampled_from([
    *("a", "b: ", "- ", "\n", "\n  ", "[", "]", "{", "}", ", ", ": ", "? ", "&x ", "*x", "!!str "),
    *("!!int ", "1e-4", "0o17", "0x1F", "1_000", "~", "yes", "'", '"', "\\", "#", " #", "%", "@"),
    *("|\n  ", ">-\n  ", "---\n", "...\n", "\t", "<<: ", "2020-01-01", "12:30:45", "é", ".inf"),
    "a: 1\n",
])  # fmt: skip


@settings(max_examples=1000)
@given(text=st.lists(PIECES, max_size=12).map("".join))
def test_the_loader_in_c_reads_what_the_other_reads(text):
    """Errors are those of the loader in Python, which takes over where the other one fails."""
    with TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        path = Path(temporary) / "c.yaml"
        path.write_text(text)
        found = outcome(path)
        patch.setattr("fedtools.core.config._is_flat", lambda _: False)
        assert found == outcome(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "- " * 50_000 + "x"])
def test_a_text_of_many_levels_is_refused(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    assert "nested too deeply" in outcome(tmp_path / "c.yaml")
