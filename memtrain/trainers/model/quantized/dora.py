"""DoRA beside packed weights: PEFT is given their numbers, where it would take their bytes for the weight."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from peft.tuners.lora import dora, variants
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from memtrain.trainers.model.quantized.linear import PackedLinear, unpacked


def show_numbers_to_dora() -> None:
    """Let PEFT's DoRA take norms of unpacked weights; for the rest of the process.

    PEFT 0.21 unpacks bitsandbytes' weights alone: the norm of int8 codes is another number, and packed NF4
    has another shape.
    """
    for module in (dora, variants):
        vars(module)["dequantize_module_weight"] = numbers_of


@singledispatch
def numbers_of(layer: nn.Module) -> Tensor:
    """[O, I]: the weight of a linear map, as it computes; kinds that PEFT does not know are registered."""
    plain: Any = dequantize_module_weight
    weight: Tensor = plain(layer)
    return weight


@numbers_of.register
def _(layer: PackedLinear) -> Tensor:
    return unpacked(layer)
