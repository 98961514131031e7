"""Adapters of keyword networks, whose layers have a client dimension."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bare_networks import BARE, as_bare
from pretrained_models import save_whisper
from safetensors.torch import save_file
from torch import Tensor, nn

from fedtools.client.options import ClipTraining
from fedtools.core.errors import UserError
from fedtools.models.adapt.adapters import count, merged
from fedtools.models.keywords import build_network
from fedtools.models.keywords.base import Network
from fedtools.tasks.kws.model import KwsModels

CLASSES, RANK, ALPHA = 5, 2, 3.0
NETWORKS = {
    "dscnn": {"channels": 8, "blocks": 2},
    "mhattrnn": {"heads": 4, "units": 8, "filters": 2},
    "resnet": {"channels": 8, "layers": 5, "pool_frames": 4, "pool_bins": 3},
    "transformer": {"layers": 2, "width": 16, "feedforward": 16},
}
LORA = {"rank": RANK, "alpha": ALPHA}
WAYS = {
    "lora": LORA,
    "lora, also": LORA | {"also": ["first*"], "combine": "residual"},
    "lora, all": LORA | {"also": ["*"], "combine": "fixed_a"},
    "bias": {"kind": "bias"},
    "head": {"kind": "head"},
    "full": {"kind": "full"},
}
HEAD = {"head.weight", "head.bias"}


pytestmark = pytest.mark.usefixtures("in_float64")


def config_of(network: str) -> dict:
    return {"network": network, "network_conf": NETWORKS[network]}


def base_of(network: str, folder: Path) -> tuple[Path, Network]:
    """Return a trained network of one client, and its file."""
    plain = build_network(config_of(network), CLASSES, "x").eval()
    with torch.no_grad():
        for name, value in plain.state_dict().items():
            value.add_(0.3 * (torch.rand_like(value) if "var" in name else torch.randn_like(value)))
    path = folder / "base.safetensors"
    save_file({name: value[0].clone() for name, value in plain.state_dict().items()}, path)
    return path, plain


def adapted(network: str, how: dict, base: Path, clients: int) -> Network:
    if network == "transformer" and "also" in how:
        how = how | {"also": ["*norm*", "places"]}
    config = config_of(network) | {"adapt": how}
    return build_network(config, CLASSES, "x", clients=clients, base=base).train()


def stir(model: nn.Module) -> None:
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(0.1 * torch.randn_like(value))


def dense(base: Network, state: dict[str, Tensor], client: int) -> dict[str, Tensor]:
    """Return a client's tensors by the base's names, with the adapters' products, computed here."""
    found = {name: value[0] for name, value in base.state_dict().items()}
    found |= {name: value[client] for name, value in state.items() if "lora" not in name}
    for stem in (name.removesuffix(".lora_b") for name in state if name.endswith("lora_b")):
        product = state[f"{stem}.lora_b"][client] @ state[f"{stem}.lora_a"][client]
        if f"{stem}.lora_delta" in state:
            product = product + state[f"{stem}.lora_delta"][client]
        weight = found[f"{stem}.weight"]
        found[f"{stem}.weight"] = weight + ALPHA / RANK * product.view(weight.shape)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_stack_is_as_its_clients_merged_networks(tmp_path, network, way):
    """A stack equals its clients' merged networks, by an oracle of torch's own layers."""
    path, base = base_of(network, tmp_path)
    stack = adapted(network, WAYS[way], path, 3)
    clips = torch.randn(3, 2, 98, 40)
    with torch.no_grad():
        alone = torch.cat([base(one[None]) for one in clips])
        torch.testing.assert_close(stack(clips), alone, rtol=0, atol=1e-12)
    stir(stack)
    found = stack(clips)
    assert (found - alone).abs().max() > 1e-3
    torch.testing.assert_close(stack(clips[:2]), found[:2], rtol=0, atol=1e-12)
    one = adapted(network, WAYS[way], path, 1)
    found.square().sum().backward()
    state = stack.state_dict()
    for client in range(3):
        bare = BARE[network](CLASSES, **NETWORKS[network]).eval()
        own = dense(base, state, client)
        bare.load_state_dict(as_bare(network, own), strict=False)
        torch.testing.assert_close(bare(clips[client]), found[client], rtol=0, atol=1e-10)
        one.load_state_dict({name: value[client : client + 1] for name, value in state.items()})
        one.zero_grad()
        one(clips[client : client + 1]).square().sum().backward()
        for name, value in stack.named_parameters():
            grad = one.get_parameter(name).grad[0]
            torch.testing.assert_close(grad, value.grad[client], rtol=1e-9, atol=1e-10)
        together = merged(one)
        assert together.keys() == own.keys()
        for name in own:
            torch.testing.assert_close(together[name][0], own[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_are_those_of_the_products(tmp_path, network):
    path, base = base_of(network, tmp_path)
    ours = adapted(network, LORA, path, 1)
    stir(ours)
    clips = torch.randn(1, 2, 98, 40)
    ours(clips).square().sum().backward()
    state = {name: value.detach().requires_grad_() for name, value in ours.state_dict().items()}
    own = {name: value[None] for name, value in dense(base, state, 0).items()}
    torch.func.functional_call(base, own, (clips,)).square().sum().backward()
    for name, value in ours.named_parameters():
        assert value.grad.abs().max() > 0
        torch.testing.assert_close(value.grad, state[name].grad, rtol=1e-9, atol=1e-10)


def test_what_is_trained(tmp_path):
    names = {}
    for network in NETWORKS:
        path, base = base_of(network, tmp_path)
        whole = {name for name, _ in base.named_parameters()}
        for way in WAYS:
            one = adapted(network, WAYS[way], path, 1)
            names[network, way] = {name for name, _ in one.named_parameters()}
            trained, everything = count(one)
            assert trained == sum(value.numel() for value in one.parameters())
            assert everything == sum(value.numel() for value in base.parameters()) + sum(
                value.numel() for name, value in one.named_parameters() if "lora" in name
            )
        assert names[network, "head"] == HEAD
        assert names[network, "full"] == whole
        biases = {name for name in whole if name.rpartition(".")[2].startswith("bias")}
        assert names[network, "bias"] == HEAD | biases
    low = {network: names[network, "lora"] - HEAD for network in NETWORKS}
    assert {name.rpartition(".")[0] for name in low["resnet"]} == {
        "first",
        *(f"convolutions.{number}" for number in range(3)),
    }
    # Patterns for linear layers exclude convolutions; recurrent layers are never adapted.
    assert {name.rpartition(".")[0] for name in low["mhattrnn"]} == {"query", "key"}
    assert "recurrent.0.bias_ih" in names["mhattrnn", "bias"]
    assert {"token", "places"} <= names["transformer", "full"]


def test_targets_of_both_kinds(tmp_path):
    path, _ = base_of("mhattrnn", tmp_path)
    one = adapted("mhattrnn", LORA | {"targets": ["*", "first"]}, path, 1)
    low = {name.rpartition(".")[0] for name, _ in one.named_parameters()} - {"head"}
    assert low == {"first", "query", "key"}
    with pytest.raises(UserError, match=r"matches 'recurrent\*'; there are query, ... second"):
        adapted("mhattrnn", LORA | {"targets": ["recurrent*"]}, path, 1)


def test_a_frozen_norm_keeps_its_statistics(tmp_path):
    path, base = base_of("dscnn", tmp_path)
    stack = adapted("dscnn", {"kind": "full"}, path, 2)
    clips, valid = torch.randn(2, 4, 98, 40), torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]])
    before = {name: value.clone() for name, value in stack.named_buffers()}
    assert any("running_var" in name for name in before)
    found = stack(clips, valid)
    torch.testing.assert_close(found[0], base(clips[:1])[0], rtol=0, atol=1e-12)
    for name, value in stack.named_buffers():
        assert torch.equal(value, before[name]), name


def test_a_head_of_kind_none_is_not_trained(tmp_path):
    folder = save_whisper(tmp_path / "whisper")
    base_of("dscnn", tmp_path)
    pretrained = {"network": "hf", "path": str(folder)}
    for config in (pretrained, config_of("dscnn")):
        how = {"kind": "none"} | ({"also": ["conv1.*"]} if config is pretrained else {})
        make = KwsModels(config | {"adapt": how}, CLASSES, 98, ClipTraining(), "x",
                         torch.device("cpu"), tmp_path)  # fmt: skip
        trained = {n for n, value in make.build(2).named_parameters() if value.requires_grad}
        assert trained == {f"encoder.conv1.{n}" for n in ("weight", "bias") if "also" in how}
        assert set(make.build(2).state_dict()) == HEAD | trained


def bytes_of(*models: nn.Module) -> int:
    """Return the memory of all their tensors, each storage counted once."""
    tensors = [value for model in models for value in [*model.parameters(), *model.buffers()]]
    pieces = {value.untyped_storage().data_ptr(): value.untyped_storage() for value in tensors}
    return sum(piece.nbytes() for piece in pieces.values())


@pytest.mark.parametrize("network", NETWORKS)
def test_stacks_hold_one_base(tmp_path, network):
    path, base = base_of(network, tmp_path)
    config = config_of(network) | {"adapt": LORA}
    device = torch.device("cpu")
    make = KwsModels(config, CLASSES, 98, ClipTraining(), "x", device, tmp_path)
    first = make.build(8)
    path.unlink()
    one = sum(8 * value.numel() for value in first.parameters()) // 8
    frozen = sum(8 * v.numel() for name, v in base.state_dict().items() if name not in HEAD)
    assert bytes_of(first) == frozen + 8 * one
    others = [make.build(), make.build(3), make.build(8, "copy")]
    assert bytes_of(first, *others) == frozen + (8 + 1 + 3 + 8) * one
    assert make.build(3) is others[1]
