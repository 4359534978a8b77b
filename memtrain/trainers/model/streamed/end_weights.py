"""Weights of the embedding and the head that live on the host: on the device while their module is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from memtrain.trainers.model.streamed.layer_weights import LayerWeights


class EndWeights:
    """The trained weights of some modules outside the layers, each fetched for a call of its module.

    A weight that two modules share gets the sum of both gradients, as in a backward pass without this.
    """

    def __init__(self, modules: Sequence[nn.Module], owner: LayerWeights) -> None:
        self._owner = owner
        own = [module for module in modules if isinstance(module._parameters.get("weight"), nn.Parameter)]
        weights = [cast(nn.Parameter, module._parameters["weight"]) for module in own]
        uses = Counter(map(id, weights))
        for weight in dict.fromkeys(weights):
            owner.adopt(weight, is_shared=uses[id(weight)] > 1)
        for module, weight in zip(own, weights, strict=True):
            module.register_forward_pre_hook(self._bring(weight), prepend=True)
            module.register_forward_hook(self._restore(weight), always_call=True)

    def _bring(self, weight: nn.Parameter) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled() and weight.requires_grad:
                fetched: Tensor = Fetched.apply(self._owner, (weight,), torch.empty(0, requires_grad=True))
            else:
                fetched = self._owner.fetch(weight)
            module._parameters["weight"] = fetched  # pyright: ignore[reportArgumentType]

        return hook

    def _restore(self, weight: nn.Parameter) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            module._parameters["weight"] = weight

        return hook


class Fetched(torch.autograd.Function):
    """A weight on the device, in the graph: its gradient goes to the host, and to the weight there.

    The weight, in a tuple, is no input for autograd: see `_inputs` of layer_pass.
    """

    @staticmethod
    def forward(ctx: Any, owner: LayerWeights, one: tuple[nn.Parameter], anchor: Tensor) -> Tensor:
        """The weight's copy on the device."""
        ctx.owner, ctx.weight = owner, one[0]
        return owner.fetch(one[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        """No gradient for autograd."""
        ctx.owner.take([(ctx.weight, grads[0])], waits=True)
        return None, None, None
