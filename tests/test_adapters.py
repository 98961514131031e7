"""Adapters of frozen models, against peft's; stacks of them; tied parameters."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from pretrained_models import save_whisper
from torch import Tensor, nn

from fedtools.models.acoustic.asr import build_model
from fedtools.models.adapt.adaptation import Adapt
from fedtools.models.adapt.adapters import Rows, adapt, count, merged
from fedtools.models.keywords import build_network
from fedtools.models.pretrained.encoders import WhisperEncoder

RANK, ALPHA = 4, 12.0
CONFORMER = {
    "input_size": 20,
    "encoder": "conformer",
    "encoder_conf": {
        "output_size": 16,
        "attention_heads": 2,
        "linear_units": 32,
        "num_blocks": 2,
        "cnn_module_kernel": 7,
        "dropout_rate": 0.0,
    },
}
TARGETS = {
    "whisper": ("*.q_proj", "*.v_proj", "*.fc1"),
    "conformer": ("*linear_q", "*.w_?"),
    # peft's adapter of a convolution with groups or dilation is another product.
    "convolutions": ("images.*", "rows.?"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_whisper(tmp_path_factory.mktemp("whisper"))


class Convolutions(nn.Module):
    """Convolutions over two dimensions, and over one."""

    def __init__(self):
        super().__init__()
        self.images = nn.ModuleList(
            nn.Conv2d(size, 4, (3, 2), stride=stride, padding=(1, 0))
            for size, stride in ((1, 2), (4, (1, 2)), (4, 1))
        )
        self.rows = nn.ModuleList(nn.Conv1d(4, 4, 3, stride=2, padding=1) for _ in range(3))

    def forward(self, values: Tensor) -> tuple[Tensor]:
        hidden = values[:, None]
        for layer in self.images:
            hidden = layer(hidden).tanh()
        hidden = hidden.mean(3)
        for layer in self.rows:
            hidden = layer(hidden).tanh()
        return (hidden,)


def encoder_of(kind: str, folder: Path) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a frozen model's encoder, float64, and a batch for it with padding."""
    torch.manual_seed(3)
    if kind == "whisper":
        whole = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
        frames = torch.randn(2, 200, 80, dtype=torch.float64)
        return WhisperEncoder(whole.model.encoder).double().eval(), (
            frames,
            torch.tensor([200, 120]),
        )
    if kind == "convolutions":
        return Convolutions().double().eval(), (torch.randn(2, 60, 20, dtype=torch.float64),)
    encoder = build_model(CONFORMER, ["<blank>", "a", "<sos/eos>"]).encoder.double().eval()
    return encoder, (torch.randn(2, 60, 20, dtype=torch.float64), torch.tensor([60, 45]))


def stir(model: nn.Module) -> None:
    """Change the trained parameters, since B is 0 at first."""
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * torch.randn_like(value))


@pytest.mark.parametrize("kind", TARGETS)
def test_outputs_and_gradients_are_those_of_peft(folder, kind):
    ours, batch = encoder_of(kind, folder)
    base = copy.deepcopy(ours)
    targets = [
        path
        for path, layer in base.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d))
        and any(Path(path).match(pattern) for pattern in TARGETS[kind])
    ]
    assert len(targets) >= 6
    options = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, lora_dropout=0.0)
    theirs = peft.inject_adapter_in_model(options, copy.deepcopy(base)).eval()
    adapt(ours, Adapt(rank=RANK, alpha=ALPHA, targets=TARGETS[kind]), None)
    stir(ours)
    own = dict(ours.named_parameters())
    assert {name.rpartition(".")[0] for name in own} == set(targets)
    with torch.no_grad():
        for path in targets:
            layer = theirs.get_submodule(path)
            for name, side in (("lora_a", layer.lora_A), ("lora_b", layer.lora_B)):
                weight = side["default"].weight
                weight.copy_(own[f"{path}.{name}"].view_as(weight))
    before, found, expected = base(*batch)[0], ours(*batch)[0], theirs(*batch)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert (found - before).abs().max() > 1e-3
    direction = torch.randn_like(found)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    for path in targets:
        layer = theirs.get_submodule(path)
        for name, side in (("lora_a", layer.lora_A), ("lora_b", layer.lora_B)):
            grad = own[f"{path}.{name}"].grad
            assert grad.abs().max() > 1e-6
            wanted = side["default"].weight.grad.flatten(1)
            torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-10)
    # Merged: the same model with other weights.
    state = merged(ours)
    assert state.keys() == base.state_dict().keys() | {n for n, _ in base.named_buffers()}
    base.load_state_dict({name: state[name] for name in base.state_dict()})
    torch.testing.assert_close(base(*batch)[0], found.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("sides", [1, 2])
def test_a_convolution_is_a_linear_layer_of_what_its_kernels_see(sides, groups, dilation):
    torch.manual_seed(5)
    kind, side = (nn.Conv1d, nn.Conv2d)[sides - 1], (3, 2)[:sides]
    options = {"stride": 2, "padding": 1, "dilation": dilation, "groups": groups}
    base = kind(4, 6, side, **options).double()
    model = nn.Sequential(copy.deepcopy(base))
    adapt(model, Adapt(rank=RANK, alpha=ALPHA), None)
    values = torch.randn(5, 4, *(9, 8)[:sides], dtype=torch.float64)
    assert torch.equal(model(values), base(values))
    stir(model)
    down, up = (dict(model.named_parameters())[f"0.lora_{name}"] for name in "ab")
    assert down.shape == (RANK, 4 // groups * math.prod(side)) and up.shape == (6, RANK)
    # One dimension as images of a single row.
    images, kernel, around = values, side, (1, 1)
    if sides == 1:
        images, kernel, around = values[:, :, None], (1, *side), (0, 1)
    seen = F.unfold(images, kernel, dilation, around, 2).unflatten(1, (groups, -1))
    product = torch.einsum("gor,rn,bgnl->bgol", up.view(groups, -1, RANK), down, seen)
    before, found = base(values), model(values)
    expected = before + ALPHA / RANK * product.reshape(before.shape)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    base.weight.data = merged(model)["0.weight"]
    torch.testing.assert_close(base(values), found, rtol=0, atol=1e-10)


def test_all_of_a_model_is_trained_as_without_adapters():
    """Full training includes layers within a layer with parameters, like conformer attention."""
    ours, batch = encoder_of("conformer", Path())
    plain = copy.deepcopy(ours)
    adapt(ours, Adapt(kind="full"), None)
    names = {name for name, _ in plain.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == set(ours.state_dict()) == names
    for model in (ours, plain):
        model(*batch)[0].square().sum().backward()
    for name, value in plain.named_parameters():
        grad = dict(ours.named_parameters())[name].grad
        torch.testing.assert_close(grad, value.grad, rtol=1e-10, atol=1e-10)
    assert count(ours) == (sum(one.numel() for one in plain.parameters()),) * 2
    assert merged(ours).keys() == plain.state_dict().keys()
    # Such a layer's parameters cannot be client-specific.
    with pytest.raises(ValueError, match=r"pos_bias_u belongs to no layer that a stack can train"):
        adapt(plain, Adapt(kind="full"), 2)


@pytest.mark.parametrize("combine", ["fixed_a", "residual"])
def test_constants_of_adapters_are_in_states_and_are_merged(folder, combine):
    ours, batch = encoder_of("conformer", folder)
    base = copy.deepcopy(ours)
    adapt(ours, Adapt(rank=RANK, targets=("*.linear_q",), combine=combine), None)
    constant = {"fixed_a": "lora_a", "residual": "lora_delta"}[combine]
    names = {name for name in ours.state_dict() if name.endswith(constant)}
    assert len(names) == 2 and not names & {name for name, _ in ours.named_parameters()}
    stir(ours)
    before = base(*batch)[0].detach()
    with torch.no_grad():
        for name in names:
            # Not a constant, whose product with what a layer norm gives is zero.
            value = ours.state_dict()[name]
            value.add_(torch.randn_like(value) * 0.1)
    found, state = ours(*batch)[0].detach(), ours.state_dict()
    with torch.no_grad():
        for path in (name.removesuffix(f".{constant}") for name in names):
            product = state[f"{path}.lora_b"] @ state[f"{path}.lora_a"]
            product = product + state.get(f"{path}.lora_delta", 0)
            # Adapt's default alpha.
            base.get_submodule(path).weight += 16.0 / RANK * product
    torch.testing.assert_close(base(*batch)[0], found, rtol=0, atol=1e-10)
    assert (found - before).abs().max() > 1e-3
    for name, value in base.state_dict().items():
        torch.testing.assert_close(merged(ours)[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "how",
    [
        {"rank": 2},
        {"rank": 2, "targets": ["conv?", "*fc1"], "also": ["conv1.bias"], "combine": "residual"},
        {"rank": 2, "also": ["*layer_norm*", "*conv?.*"], "combine": "fixed_a"},
        {"rank": 2, "targets": ["*fc?"], "combine": "residual"},
        {"kind": "bias"},
        {"kind": "full"},
    ],
    ids=str,
)
def test_a_stack_is_its_clients_one_by_one(folder, how):
    config = {"network": "hf", "path": str(folder), "adapt": how}
    stack, one = (build_network(config, 5, "x", clients=n).double().eval() for n in (3, 1))
    # All begin with the same model.
    for value in stack.state_dict().values():
        assert torch.equal(value, value[:1].expand_as(value))
    stir(stack)
    clips = torch.randn(3, 2, 100, 80, dtype=torch.float64)
    found = stack(clips)
    found.square().sum().backward()
    whole = {name: value.grad for name, value in stack.named_parameters()}
    for client in range(3):
        own = {name: value[client : client + 1] for name, value in stack.state_dict().items()}
        one.load_state_dict(own)
        one.zero_grad()
        alone = one(clips[client : client + 1])
        torch.testing.assert_close(alone[0], found[client], rtol=0, atol=1e-10)
        alone.square().sum().backward()
        for name, value in one.named_parameters():
            torch.testing.assert_close(value.grad[0], whole[name][client], rtol=1e-9, atol=1e-10)
    # The first clients alone, as after the other clients' last steps.
    torch.testing.assert_close(stack(clips[:2]), found[:2], rtol=0, atol=1e-10)


class Tied(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, values: Tensor) -> Tensor:
        return self.second(self.first(values).tanh())


@pytest.mark.parametrize("clients", [None, 2])
def test_what_is_tied_is_trained_and_kept_once(clients):
    model = Tied().double()
    plain = copy.deepcopy(model)
    rows: Rows = adapt(model, Adapt(kind="full"), clients)
    names = ["first.bias", "first.weight", "second.bias"]
    assert sorted(model.state_dict()) == sorted(dict(model.named_parameters())) == names
    values = torch.randn(3, 6, dtype=torch.float64)
    plain(values).square().sum().backward()
    rows.clients = clients or 1
    model(torch.cat([values] * rows.clients)).square().sum().backward()
    for name, value in model.named_parameters():
        expected = plain.get_parameter(name).grad
        for grad in value.grad if clients else [value.grad]:
            torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)
    if clients is None:
        assert count(model) == (36 + 12, 36 + 12)
        assert merged(model).keys() == plain.state_dict().keys()


def test_whisper_has_its_tied_embedding_once(folder):
    config = {"network": "hf", "path": str(folder), "criterion": "seq2seq"}
    model = build_model(config | {"adapt": {"kind": "full"}}, [])
    whole = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    # The encoder's table of sines is not a trained parameter.
    sines = whole.model.encoder.embed_positions.weight.numel()
    assert count(model) == (whole.num_parameters() - sines, whole.num_parameters())
    embeddings = [one for one in model.state_dict() if "embed_tokens" in one or "proj_out" in one]
    assert embeddings == ["decoder.embed_tokens.weight"]


def test_what_is_trained_is_counted(folder):
    whole = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    encoder = WhisperEncoder(whole.model.encoder)
    size = sum(value.numel() for value in encoder.parameters())
    adapt(encoder, Adapt(rank=2, targets=("*.fc1",), also=("*.self_attn_layer_norm.*",)), None)
    # Three layers: from 32 to 64 values, and two vectors of 32.
    low, also = 3 * 2 * (32 + 64), 3 * 2 * 32
    assert count(encoder) == (low + also, size + low)


def test_a_pattern_that_matches_nothing_says_what_there_is():
    with pytest.raises(ValueError, match=r"or convolution matches '\*q'; there are 0"):
        adapt(nn.Sequential(nn.Linear(2, 2)), Adapt(targets=("*q",)), None)
    with pytest.raises(ValueError, match=r"targets: .* there is none"):
        adapt(nn.Sequential(nn.GRU(2, 2)), Adapt(), None)
    with pytest.raises(ValueError, match="combine: svd requires kind lora, not bias"):
        Adapt(kind="bias", combine="svd")
