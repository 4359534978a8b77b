"""A model whose layers are read from their files for each call: memory holds one layer beside the ends.

For passes without gradients over a model that the machine cannot hold. A layer's weights are there while it
is called, and nowhere after; files that are read often stay in the system's cache as long as it has room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from memtrain.trainers.model.loading.sharded_init import Kept, kept_in_parts, kept_of
from memtrain.trainers.model.streamed.apply import layers_of

Model = TypeVar("Model", bound=nn.Module)


def without_data(make: Callable[[], Model]) -> tuple[Model, dict[str, Kept]]:
    """A model without data, and where the numbers of its weights are.

    Raises: NeedsWhole where its files cannot be read a weight at a time.
    """
    with kept_in_parts(lambda shape: range(shape.numel())):
        made = make()
    return made, kept_of(made)


@torch.no_grad()
def read_layers_when_called(model: nn.Module, kept: Mapping[str, Kept], device: torch.device) -> None:
    """Read all weights outside of the decoder layers now, and those of a layer whenever it is called.

    `kept`: of the model as `without_data` made it; what an adapter has added since has data of its own.
    """
    names = {id(weight): name for name, weight in kept_weights(model, kept).items()}
    inside: set[int] = set()
    for layer in layers_of(model):
        own = _places(layer, names)
        inside |= {id(weight) for _, _, weight in own}
        layer.register_forward_pre_hook(_bring(own, names, kept, device))
        layer.register_forward_hook(_forget(own), always_call=True)
    read: dict[int, nn.Parameter] = {}
    for module, last, weight in _places(model, names):
        if id(weight) not in inside:
            found = read.setdefault(id(weight), _parameter(kept[names[id(weight)]], device))
            module._parameters[last] = found
    for module in model.modules():
        for last, buffer in module._buffers.items():
            module._buffers[last] = None if buffer is None else buffer.to(device)


def kept_weights(model: nn.Module, kept: Mapping[str, Kept]) -> dict[str, nn.Parameter]:
    """The weights without data by their names in `kept`: an adapter has put modules between since."""
    found: dict[int, str] = {one.storage._cdata: name for name, one in kept.items()}
    return {
        found[weight.untyped_storage()._cdata]: weight
        for weight in model.parameters()
        if weight.is_meta and weight.untyped_storage()._cdata in found
    }


Places = list[tuple[nn.Module, str, nn.Parameter]]


def _places(within: nn.Module, names: Mapping[int, str]) -> Places:
    return [
        (module, last, weight)
        for module in within.modules()
        for last, weight in module._parameters.items()
        if weight is not None and id(weight) in names
    ]


def _parameter(one: Kept, device: torch.device) -> nn.Parameter:
    numbers = one.numbers(range(one.shape.numel())).view(one.shape)
    return nn.Parameter(numbers.to(device), requires_grad=False)


def _bring(places: Places, names: Mapping[int, str], kept: Mapping[str, Kept], device: torch.device) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        for owner, last, weight in places:
            owner._parameters[last] = _parameter(kept[names[id(weight)]], device)

    return hook


def _forget(places: Places) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for owner, last, weight in places:
            owner._parameters[last] = weight

    return hook
