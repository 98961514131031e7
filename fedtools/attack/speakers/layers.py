"""Hidden layers of a model, whose activations attacks compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from torch import Tensor, nn

from fedtools.core.errors import UserError
from fedtools.models.acoustic.tdnn import TdnnEncoder
from fedtools.models.adapt.adapters import Trained
from fedtools.models.keywords.pretrained import PretrainedNetwork
from fedtools.models.pretrained.encoders import Encoder
from fedtools.models.stacked import Conv2d


class Layer(NamedTuple):
    """A hidden layer.

    Attributes:
        name: for files and tables.
        module: module whose output is taken.
        axis: axis of the output's values; all other axes are frames, or clips.
    """

    name: str
    module: nn.Module
    axis: int = -1


class _Reached(Exception):
    """Raised when the last requested layer has been computed."""


def lowest_layers(
    model: nn.Module, run: Callable[[nn.Module], Any], part: str, highest: int
) -> list[Layer]:
    """Return the hidden layers of a model up to number `highest`, from 1; see `hidden_layers`.

    Raises:
        UserError: if there are fewer layers.
    """
    layers = hidden_layers(model, run, part)
    if highest > len(layers):
        problem = f"layer {highest}: there are {len(layers)}, {layers[0].name} to {layers[-1].name}"
        raise UserError(problem, remedy=f"take 1 to {len(layers)}")
    return layers[:highest]


def hidden_layers(model: nn.Module, run: Callable[[nn.Module], Any], part: str) -> list[Layer]:
    """Return the hidden layers of a model, from the bottom.

    Args:
        model: a TDNN, an encoder of blocks, pretrained or not, or a keyword network.
        run: computes the model's hidden layers for some input.
        part: one of `fedtools.attack.options.Part`.
    """
    # The model may be the encoder itself.
    encoder = model if isinstance(model, TdnnEncoder) else getattr(model, "encoder", None)
    if isinstance(encoder, TdnnEncoder):
        return [
            Layer(f"tdnn{number}", getattr(layer, part), 1)
            for number, layer in enumerate(encoder.layers, 1)
        ]
    if isinstance(encoder, Encoder):
        found = [Layer(f"block{number}", one) for number, one in enumerate(encoder.layers, 1)]
        if isinstance(model, PretrainedNetwork):
            # Blocks below `depth` are not run if their output is kept; maybe only the head trains.
            found = [*found[model.depth or 0 :], Layer("head", model.head)]
        return found
    if encoder is not None:
        blocks = enumerate(encoder.encoders, 1)
        return [Layer("embed", encoder.embed), *(Layer(f"block{n}", one) for n, one in blocks)]
    # For a keyword network, all modules with parameters, in the order in which they are run.
    reached: dict[str, nn.Module] = {}
    names = {module: name for name, module in model.named_modules() if name}
    with ExitStack() as hooks:
        for module in names:
            if next(module.parameters(recurse=False), None) is not None:

                def seen(module: nn.Module, _: Any, out: Any) -> None:
                    if isinstance(out, Tensor):
                        reached.setdefault(names[module], module)

                hooks.callback(module.register_forward_hook(seen).remove)
        run(model)
    return [Layer(name, module, _axis(module)) for name, module in reached.items()]


def _axis(module: nn.Module) -> int:
    """Return the axis of the values of a keyword network's layer, adapted or not."""
    layer = module.layer if isinstance(module, Trained) else module
    return 1 if isinstance(layer, Conv2d) else -1


@contextmanager
def watched(layers: Sequence[Layer], see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `see` with each layer's number and output, (frames, values), within the context.

    Layers above the last one are not computed: the body may end early.
    """
    with ExitStack() as hooks:
        for number, layer in enumerate(layers):

            def seen(_: nn.Module, __: Any, out: Any, number: int = number) -> None:
                # Blocks also return their masks and positional embeddings.
                while isinstance(out, tuple):
                    out = out[0]
                see(number, out.movedim(layers[number].axis, -1).flatten(0, -2))
                if number == len(layers) - 1:
                    raise _Reached

            hooks.callback(layer.module.register_forward_hook(seen).remove)
        with suppress(_Reached):
            yield
