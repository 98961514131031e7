"""The keyword networks: the paper's sizes, torch's own layers as oracle, separate clients."""

from __future__ import annotations

import sys
from functools import partial

import keywords
import pytest
import torch
import torch.nn.functional as F
from bare_networks import BARE, as_bare
from conftest import fedtools, run
from keyword_world import OWN_NETWORK
from torch import nn

from fedtools.core.errors import UserError
from fedtools.models.keywords import NETWORKS, build_network
from fedtools.models.stacked import (
    BatchNorm2d,
    BiGru,
    Conv1d,
    Conv2d,
    FramesToOne,
    GroupNorm2d,
    LayerNorm,
    Linear,
    ManyToMany,
    OneToMany,
    Pointwise,
)

# Li et al. 2022, table 2: parameters in thousands for 12 and 35 classes.
TABLE_2 = {
    "dscnn": (169, 173),
    "mhattrnn": (228, 232),
    "resnet": (238, 239),
    "transformer": (232, 234),
}
SMALL = {
    "dscnn": {"channels": 8, "blocks": 2},
    "mhattrnn": {"heads": 4, "units": 8, "filters": 2},
    "resnet": {"channels": 8, "layers": 5, "pool_frames": 4, "pool_bins": 3},
    "transformer": {"layers": 1, "width": 16, "feedforward": 16},
}
# Deep enough for the order of layers to matter.
DEEPER = {"resnet": {"layers": 8}, "transformer": {"layers": 2}}
# The Transformer has only layer normalisation.
KINDS = [(name, norm) for name in SMALL for norm in ("batch", "group")][:-1]
CLIENTS = 3


pytestmark = pytest.mark.usefixtures("in_float64")


def small(network: str, clients: int, **more: object) -> nn.Module:
    config = {"network": network, "network_conf": {**SMALL[network], **more}}
    return build_network(config, 5, "config", clients=clients)


def scramble(layer: nn.Module) -> nn.Module:
    """Give every client different parameters."""
    for value in layer.parameters():
        nn.init.normal_(value, std=0.5)
    return layer


@pytest.mark.parametrize("network", NETWORKS.names())
def test_parameters_are_those_of_table_2(network):
    for classes, thousands in zip((12, 35), TABLE_2[network], strict=True):
        model = build_network({"network": network}, classes, "config")
        found = sum(value.numel() for value in model.parameters())
        assert abs(found / (1000 * thousands) - 1) < 0.02, found
        assert model(torch.zeros(1, 2, 98, 40)).shape == (1, 2, classes)


def test_gru_is_torchs():
    ours = scramble(BiGru(CLIENTS, 6, 4))
    values = torch.randn(CLIENTS, 2, 9, 6, requires_grad=True)
    found = ours(values)
    found.square().sum().backward()
    for client in range(CLIENTS):
        theirs = nn.GRU(6, 4, batch_first=True, bidirectional=True)
        for way, suffix in enumerate(("", "_reverse")):
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                getattr(theirs, f"{kind}_l0{suffix}").data = getattr(ours, kind).data[client, way]
        expected = theirs(values[client])[0]
        torch.testing.assert_close(found[client], expected)
        expected.square().sum().backward()
        torch.testing.assert_close(ours.weight_hh.grad[client, 1], theirs.weight_hh_l0_reverse.grad)


def test_convolution_linear_and_layer_norm_are_torchs():
    convolution = scramble(Conv2d(CLIENTS, 4, 6, (3, 2), stride=(2, 1), padding=(1, 0), groups=2))
    images = torch.randn(2, CLIENTS * 4, 8, 5)
    linear, norm = scramble(Linear(CLIENTS, 5, 3)), scramble(LayerNorm(CLIENTS, 5))
    values = torch.randn(CLIENTS, 2, 4, 5)
    found = convolution(images).view(2, CLIENTS, 6, 4, 4)
    for client in range(CLIENTS):
        expected = nn.functional.conv2d(
            images.view(2, CLIENTS, 4, 8, 5)[:, client],
            convolution.weight[client],
            convolution.bias[client],
            stride=(2, 1),
            padding=(1, 0),
            groups=2,
        )
        torch.testing.assert_close(found[:, client], expected)
        expected = nn.functional.linear(values[client], linear.weight[client], linear.bias[client])
        torch.testing.assert_close(linear(values)[client], expected)
        expected = nn.functional.layer_norm(
            values[client], (5,), norm.weight[client], norm.bias[client]
        )
        torch.testing.assert_close(norm(values)[client], expected)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: Pointwise(CLIENTS, 4, 6), 4),
        (lambda: FramesToOne(CLIENTS, 4, 5), 4),
        (lambda: OneToMany(CLIENTS, 4, 3), 1),
        (lambda: ManyToMany(CLIENTS, 4, 3, dilation=2), 4),
    ],
    ids=["Pointwise", "FramesToOne", "OneToMany", "ManyToMany"],
)
@pytest.mark.parametrize("clients", [CLIENTS, 1])
def test_convolutions_of_another_form_and_their_gradients_are_torchs(make, inputs, clients):
    layer = scramble(make())
    images = torch.randn(2, clients, inputs, 8, 5)
    found = layer(images.flatten(1, 2)).unflatten(1, (clients, -1))
    found.square().sum().backward()
    for client in range(clients):
        weight = layer.weight[client].detach().requires_grad_()
        bias = None if layer.bias is None else layer.bias[client]
        expected = nn.functional.conv2d(images[:, client], weight, bias, **layer.options)
        torch.testing.assert_close(found[:, client], expected)
        expected.square().sum().backward()
        torch.testing.assert_close(layer.weight.grad[client], weight.grad)


@pytest.mark.parametrize("clients", [CLIENTS, CLIENTS - 1, 1])
@pytest.mark.parametrize(
    ("length", "options"),
    [(9, {"stride": 2, "padding": 4}), (3, {"padding": 2, "dilation": 2}), (1, {"stride": 2})],
)
def test_convolutions_over_time_and_their_gradients_are_torchs(clients, length, options):
    """This includes the first clients of a stack whose last ones get no gradient."""
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    layer = scramble(Conv1d(max(clients, CLIENTS * (clients > 1)), 4, 6, length, **options))
    values = torch.randn(2, clients, 4, 13, requires_grad=True)
    found = layer(values.flatten(1, 2)).unflatten(1, (clients, -1))
    found.square().sum().backward()
    for client in range(clients):
        weight = layer.weight[client, :, :, 0].detach().requires_grad_()
        bias = layer.bias[client].detach().requires_grad_()
        own = values[:, client].detach().requires_grad_()
        expected = F.conv1d(own, weight, bias, **options)
        close(found[:, client], expected)
        expected.square().sum().backward()
        close(layer.weight.grad[client, :, :, 0], weight.grad)
        close(layer.bias.grad[client], bias.grad)
        close(values.grad[:, client], own.grad)
    assert not layer.weight.grad[clients:].any()


@pytest.mark.parametrize("network", NETWORKS.names())
def test_bfloat16_is_near_and_its_logits_are_not_rounded(network):
    model = scramble(small(network, CLIENTS)).float()
    mfcc, labels = torch.randn(CLIENTS, 4, 98, 40), torch.randint(5, (CLIENTS * 4,))
    mfcc, gradients = mfcc.float(), []
    for low in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            logits = model(mfcc)
        assert logits.dtype == torch.float32
        F.cross_entropy(logits.flatten(0, 1), labels).backward()
        assert all(value.grad.dtype == torch.float32 for value in model.parameters())
        gradients.append(torch.cat([value.grad.flatten() for value in model.parameters()]))
    exact, rounded = gradients
    assert 0 < (rounded - exact).norm() < 0.2 * exact.norm()


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_torchs_over_the_valid_clips(affine):
    ours = scramble(BatchNorm2d(CLIENTS, 4, affine=affine))
    images = torch.randn(5, CLIENTS * 4, 3, 2)
    valid = torch.tensor([[1.0] * 5, [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    found = ours(images, valid).view(5, CLIENTS, 4, 3, 2)
    for client, count in enumerate((5, 3, 1)):
        theirs = nn.BatchNorm2d(4, affine=affine)
        if affine:
            theirs.weight.data, theirs.bias.data = ours.weight.data[client], ours.bias.data[client]
        expected = theirs(images.view(5, CLIENTS, 4, 3, 2)[:count, client])
        torch.testing.assert_close(found[:count, client], expected)
        torch.testing.assert_close(ours.running_mean[client], theirs.running_mean)
        torch.testing.assert_close(ours.running_var[client], theirs.running_var)
    ours.eval()
    before = ours.running_mean.clone()
    torch.testing.assert_close(ours(images, valid), ours(images))
    assert torch.equal(ours.running_mean, before)


def test_group_norm_is_torchs():
    ours = scramble(GroupNorm2d(CLIENTS, 6))
    images = torch.randn(2, CLIENTS * 6, 3, 2)
    found = ours(images).view(2, CLIENTS, 6, 3, 2)
    for client in range(CLIENTS):
        theirs = nn.GroupNorm(3, 6)
        theirs.weight.data, theirs.bias.data = ours.weight.data[client], ours.bias.data[client]
        expected = theirs(images.view(2, CLIENTS, 6, 3, 2)[:, client])
        torch.testing.assert_close(found[:, client], expected)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("network", NETWORKS.names())
def test_clients_do_not_see_each_other(network, norm):
    """A client's output and gradient are those it gets alone, also after other clients finish."""
    together = scramble(small(network, CLIENTS, norm=norm))
    state = {name: value.clone() for name, value in together.state_dict().items()}
    mfcc = torch.randn(CLIENTS, 4, 98, 40)
    for active in (CLIENTS, 2):
        together.load_state_dict(state)
        together.zero_grad()
        found = together.train()(mfcc[:active])
        found.square().sum().backward()
        for client in range(active):
            alone = small(network, 1, norm=norm)
            alone.load_state_dict(
                {name: value[client : client + 1] for name, value in state.items()}
            )
            expected = alone.train()(mfcc[client : client + 1])
            torch.testing.assert_close(found[client], expected[0])
            expected.square().sum().backward()
            gradients = dict(together.named_parameters())
            for name, value in alone.named_parameters():
                torch.testing.assert_close(gradients[name].grad[client], value.grad[0])


@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 3, 2)], ids=["even", "ragged"])
@pytest.mark.parametrize(("network", "norm"), KINDS)
def test_networks_are_those_of_torchs_layers(network, norm, sizes):
    """Each client's logits and gradients in training, and logits after the step, are the same."""
    conf, frames = {**SMALL[network], **DEEPER.get(network, {})}, 98
    if network != "transformer":
        conf["norm"], frames = norm, 30
    close = partial(torch.testing.assert_close, rtol=1e-8, atol=1e-10)
    ours = scramble(small(network, CLIENTS, **conf)).train()
    alone = [BARE[network](5, **conf) for _ in sizes]
    for client, bare in enumerate(alone):
        state = as_bare(network, {name: value[client] for name, value in ours.state_dict().items()})
        missing, unexpected = bare.load_state_dict(state, strict=False)
        assert not unexpected and all(name.endswith("num_batches_tracked") for name in missing)

    mfcc, labels = torch.randn(CLIENTS, 4, frames, 40), torch.randint(5, (CLIENTS, 4))
    valid = (torch.arange(4) < torch.tensor(sizes)[:, None]).to(mfcc)
    logits = ours(mfcc, None if valid.all() else valid)
    pairs = list(zip(logits, labels, sizes, strict=True))
    sum(F.cross_entropy(one[:size], its[:size]) for one, its, size in pairs).backward()
    for client, (bare, (found, its, size)) in enumerate(zip(alone, pairs, strict=True)):
        expected = bare(mfcc[client, :size])
        close(found[:size], expected)
        F.cross_entropy(expected, its[:size]).backward()
        gradients = {name: value.grad[client] for name, value in ours.named_parameters()}
        by_torch = {name: value.grad for name, value in bare.named_parameters()}
        close(as_bare(network, gradients), by_torch)
        # Excludes biases: those before a normalisation have no gradient.
        assert all(value.abs().max() > 1e-4 for value in by_torch.values() if value.dim() > 1)

    for model in (ours, *alone):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.eval()
    with torch.no_grad():
        close(ours(mfcc), torch.stack([bare(own) for bare, own in zip(alone, mfcc, strict=True)]))


@pytest.mark.parametrize("network", NETWORKS.names())
def test_padding_clips_change_nothing(network):
    model = scramble(small(network, 2))
    mfcc = torch.randn(2, 4, 98, 40)
    valid = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]])
    found = model.train()(mfcc, valid)
    mfcc[1, 2:] = 7.0
    torch.testing.assert_close(model(mfcc, valid)[1, :2], found[1, :2])


def test_options_that_cannot_be():
    for config, said in (
        ({"network": "dscn"}, "dscnn"),
        ({"network": "dscnn", "network_conf": {"chanels": 3}}, "channels"),
        ({"network": "mhattrnn", "network_conf": {"heads": 3}}, "3 heads"),
        ({"network": "resnet", "network_conf": {"norm": "layer"}}, "norm"),
        ({"network": "transformer", "network_conf": {"width": 33}}, "33"),
    ):
        with pytest.raises(UserError, match=said):
            build_network(config, 5, "config")


def test_a_network_of_the_users_own_file_is_trained_and_has_its_title(tmp_path):
    (tmp_path / "keywords").mkdir()
    (tmp_path / "keywords/mynet.py").write_text(OWN_NETWORK)
    env = {"FEDTOOLS_PATH": str(tmp_path)}
    counts = {"a": [3, 3, 3, 3], "b": [2, 2, 2, 2]}
    clips = keywords.pack(tmp_path / "clips", counts)
    config = keywords.config_file(tmp_path / "c.yaml", model={"network": "mynet"})
    begin = (
        "init",
        tmp_path / "exp",
        "--config",
        config,
        "--method",
        "fedavg",
        "--data",
        f"train={clips}",
    )
    fedtools(*begin, "--data", f"test={clips}", "--set", "model.network=mynett", env=env).fails(
        1, "mynet"
    )
    fedtools(*begin, "--data", f"test={clips}", env=env).ok()
    fedtools("rounds", tmp_path / "exp", "--nj", "2", "--evaluate", "test", env=env).ok()
    line = "from fedtools.models.keywords import NETWORKS; print(NETWORKS.get('mynet', '').title)"
    assert run(sys.executable, "-c", line, env=env).ok().out == "My own\n"
