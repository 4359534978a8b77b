"""Gradients of a layer's weights, summed over the slices of a row and handed out once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from memtrain.trainers.model.streamed.wide_products import SUM


class _Place(NamedTuple):
    module: nn.Module
    name: str


def trained_weights(layer: nn.Module) -> list[nn.Parameter]:
    """The layer's weights that get a gradient, in a fixed order, each once."""
    return [weight for weight in layer.parameters() if weight.requires_grad]


class WeightSums:
    """While the block lasts, the layer's trained weights are stand-ins that share their memory.

    A stand-in's gradient is added to its sum as soon as it is made, and freed: beside the sums one gradient
    at a time is alive, and no hook of the weight itself sees a part of its gradient. Sums are in float32 at
    least, and linear maps in half precision add their products to them unrounded (`wide_products`); not
    `is_wide`: there is one gradient, which stays as it is.
    """

    def __init__(self, layer: nn.Module, *, is_wide: bool = True) -> None:
        self._layer = layer
        self._is_wide = is_wide
        self._weights = trained_weights(layer)
        self._sums: list[Tensor | None] = [None] * len(self._weights)
        self._places: list[tuple[_Place, nn.Parameter]] = []

    def __enter__(self) -> WeightSums:
        stand_ins = {id(weight): self._stand_in(number) for number, weight in enumerate(self._weights)}
        for module in self._layer.modules():
            for name, weight in module._parameters.items():
                if weight is not None and id(weight) in stand_ins:
                    self._places.append((_Place(module, name), weight))
                    module._parameters[name] = stand_ins[id(weight)]
        return self

    def __exit__(self, *_: object) -> None:
        for (module, name), weight in self._places:
            module._parameters[name] = weight
        self._places.clear()

    def taken(self) -> list[Tensor | None]:
        """The sums in the weights' own precision; None for a weight that no slice used."""
        taken: list[Tensor | None] = []
        for number, weight in enumerate(self._weights):
            total, self._sums[number] = self._sums[number], None
            taken.append(total if total is None else total.to(weight.dtype))
        return taken

    def _stand_in(self, number: int) -> nn.Parameter:
        stand_in = nn.Parameter(self._weights[number].detach())

        def add(made: Tensor) -> None:
            grad, made.grad = made.grad, None
            if grad is None:
                # Added to its sum where it was made: see WideLinear.
                return
            total = self._sums[number]
            if total is None:
                dtype = torch.promote_types(grad.dtype, torch.float32) if self._is_wide else grad.dtype
                self._sums[number] = grad.to(dtype)
            else:
                total.add_(grad)

        stand_in.register_post_accumulate_grad_hook(add)
        if self._is_wide:
            setattr(stand_in, SUM, _Sum(self._sums, number, stand_in))
        return stand_in


class _Sum(NamedTuple):
    """The place of a weight's sum, for products that are added to it."""

    sums: list[Tensor | None]
    number: int
    like: Tensor

    def total(self) -> Tensor:
        """The sum, of zeros where nothing was added yet."""
        found = self.sums[self.number]
        if found is None:
            wide = torch.promote_types(self.like.dtype, torch.float32)
            found = self.sums[self.number] = torch.zeros_like(self.like, dtype=wide, requires_grad=False)
        return found
