#!/usr/bin/env python3
"""Work of a GPU in a client's step: operations started, and multiplications.

    python tests/bench/bench_launches.py

Needs no GPU: networks and clips are on torch's "meta" device, where every operation is dispatched
and none is computed. A GPU takes a few microseconds to start an operation however small; stacks of
K clients start about as many as one client, so where starts are most of the time, K clients take
the time of one. Where multiplications take most of the time, stacks gain nothing: divide those of a
step by what the GPU does in the time of its starts. Of a step it counts loss, gradient and
optimiser (one start: it is fused), not the features.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bare_networks import BARE  # noqa: E402

from fedtools.core.config import read_yaml  # noqa: E402
from fedtools.core.tables import format_table  # noqa: E402
from fedtools.models.keywords import NETWORKS, build_network  # noqa: E402

BATCH, FRAMES, BINS, CLASSES = 32, 98, 40, 35


class Counts(TorchDispatchMode):
    """Operations that compute (views and empty tensors do not), and multiplications and additions.

    Attributes:
        starts: the operations; the gradient of a part of a tensor is two, zeros and a copy.
        flops: 2 for each multiplication of convolutions and matrix products.
    """

    def __init__(self):
        super().__init__()
        self.starts = self.flops = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        name = operation.name()
        if not operation.is_view and "empty" not in name and name != "aten::_unsafe_view":
            self.starts += 2 if name in ("aten::slice_backward", "aten::select_backward") else 1
            self.flops += self._flops(operation, args, found)
        return found

    @staticmethod
    def _flops(operation, args: tuple, found: object) -> int:
        # torch's own formula for gradients of convolutions in groups counts all pairs of groups.
        if operation is torch.ops.aten.convolution.default:
            return 2 * found.numel() * args[1][0].numel()
        if operation is torch.ops.aten.convolution_backward.default:
            gradient, _, weight, *_, wanted = args
            return 2 * gradient.numel() * weight[0].numel() * sum(wanted[:2])
        formula = flop_registry.get(operation.overloadpacket)
        return formula(*args, out_val=found) if formula else 0


def count(network: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Counts:
    """Count one step's work; the fused optimiser is one start."""
    with Counts() as counts:
        loss(network).backward()
    counts.starts += 1
    return counts


def bare_loss() -> Callable[[nn.Module], Tensor]:
    """Return the bare loop's loss for one client's batch."""
    clips = torch.zeros(BATCH, FRAMES, BINS, device="meta")
    labels = torch.zeros(BATCH, dtype=torch.long, device="meta")
    return lambda network: F.cross_entropy(network(clips), labels)


def stack_loss(clients: int) -> Callable[[nn.Module], Tensor]:
    """Return the sum of the losses of the stack's clients."""
    clips = torch.zeros(clients, BATCH, FRAMES, BINS, device="meta")
    labels = torch.zeros(clients, BATCH, 1, dtype=torch.long, device="meta")

    def loss(network: nn.Module) -> Tensor:
        return -F.log_softmax(network(clips), -1).gather(2, labels).mean(1).sum()

    return loss


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stacks", type=int, nargs="+", default=[16, 64])
    options = parser.parse_args()
    rows = []
    for name in ("mini.yaml", "paper.yaml"):
        networks = read_yaml(ROOT / "conf/speechcommands" / name)["networks"]
        for network in NETWORKS.names():
            model = networks[network]["model"]
            bare = count(BARE[network](CLASSES, **model["network_conf"]).to("meta"), bare_loss())
            # torch's GRU is one cuDNN call on a GPU, but a few operations per frame on this device.
            known = network != "mhattrnn"
            row = [name, network, str(bare.starts) if known else "-"]
            for stack in options.stacks:
                ours = build_network(model, CLASSES, name, clients=stack).to("meta")
                found = count(ours, stack_loss(stack))
                ratio = f", {stack * bare.starts / found.starts:.1f} x" if known else ""
                row.append(f"{found.starts / stack:.1f}{ratio}")
            rows.append((*row, f"{found.flops / stack / 1e9:.1f}"))
    stacks = [f"stacks of {stack}" for stack in options.stacks]
    print(format_table(("starts a step", "network", "bare loop", *stacks, "GFLOP"), rows))


if __name__ == "__main__":
    main()
