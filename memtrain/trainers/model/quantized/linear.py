"""Linear maps with a packed weight, unpacked for each product: for a CPU, where bitsandbytes is not used."""

# N tokens, I inputs, O outputs

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memtrain.trainers.model.quantized.packed import Bits, Matrices, matrices_of, pack, parts_of


class PackedLinear(nn.Linear):
    """A frozen linear map in 4 or 8 bits; PEFT takes it for a plain one."""

    def __init__(self, plain: nn.Linear, bits: Bits) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bits: Bits = bits
        self.weight = plain.weight
        self.bias = plain.bias

    def pack(self, weight_OI: Tensor | None = None) -> None:
        """Pack a weight, or the own one."""
        pack(self, "weight", self.bits, weight_OI)

    def forward(self, input: Tensor) -> Tensor:
        """The product with the unpacked weight."""
        product: Tensor = _Product.apply(input, _one(matrices_of(self, "weight")))
        return product if self.bias is None else product + self.bias


def unpacked(layer: PackedLinear) -> Tensor:
    """[O, I]: the weight of a packed map."""
    return _one(matrices_of(layer, "weight")).whole()[0]


def rounded(weight_OI: Tensor, bits: Bits) -> Tensor:
    """[O, I]: the numbers that a packed weight gives back."""
    parts = parts_of(weight_OI, bits)
    return _one(Matrices(parts, weight_OI.shape, weight_OI.dtype, bits)).whole()[0]


def _one(weight: Matrices) -> Matrices:
    """A single matrix as a stack of one; scales of its rows alike."""
    if weight.bits != "8bit":
        return Matrices(weight.parts, torch.Size((1, *weight.shape)), weight.dtype, weight.bits)
    parts = tuple(part[None] for part in weight.parts)
    return Matrices(parts, torch.Size((1, *weight.shape)), weight.dtype, weight.bits)


class _Product(torch.autograd.Function):
    """The weight is unpacked forward and backward; nothing is kept."""

    @staticmethod
    def forward(ctx: Any, input_NI: Tensor, weight: Matrices) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.weight = weight
        return F.linear(input_NI, weight.whole()[0].to(input_NI.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.matmul(grads[0], ctx.weight.whole()[0].to(grads[0].dtype)), None


def pack_linear_maps(model: nn.Module, bits: Bits, kept: set[str]) -> None:
    """Put packed maps in place of the linear maps of `model`, but for those whose names are `kept`."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name not in kept:
            parent, _, last = name.rpartition(".")
            packed = PackedLinear(module, bits)
            setattr(model.get_submodule(parent), last, packed)
