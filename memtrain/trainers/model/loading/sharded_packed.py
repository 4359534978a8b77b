"""Packed weights of which a rank keeps its part: each is read whole, packed, and cut, one at a time.

The scales of a packed weight depend on all of it, so that a part cannot be packed by itself; packed by every
rank alike, parts together are the packed weight of a single process, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert

from memtrain.trainers.model.experts.forward import is_experts, stacks_of
from memtrain.trainers.model.loading.sharded_init import keep
from memtrain.trainers.model.quantized.linear import PackedLinear, pack_linear_maps, rounded
from memtrain.trainers.model.quantized.packed import SUFFIXES, Bits, pack, parts_of
from memtrain.trainers.model.quantized.quantizer import begin_packed

Read = Callable[[range], Tensor]
"""Reads a stretch of a flattened weight."""

_PACKING: WeakKeyDictionary[nn.Module, _Packing] = WeakKeyDictionary()
"""Weights of linear maps that are still to be packed."""


class _Packing:
    """A weight in its files; packed when the first of its parts is wanted, and let go with the last."""

    def __init__(self, source: Read, plain: Tensor, bits: Bits, device: torch.device) -> None:
        self._source, self._shape, self._dtype, self._device = source, plain.shape, plain.dtype, device
        self._bits: Bits = bits
        self._parts: dict[int, Tensor] = {}
        self._taken = 0

    def part(self, number: int) -> Read:
        """Reads a stretch of one part, flattened. Each part is read once."""

        def read(stretch: range) -> Tensor:
            if not self._taken:
                self._parts = dict(enumerate(parts_of(self._whole(), self._bits)))
            self._taken += 1
            own = self._parts.pop(number).reshape(-1)[stretch.start : stretch.stop]
            return own.to("cpu", copy=True)

        return read

    def rounded(self) -> Tensor:
        """The numbers that the packed weight will give back, whole."""
        return rounded(self._whole(), self._bits)

    def _whole(self) -> Tensor:
        return self._source(range(self._shape.numel())).to(self._device, self._dtype).view(self._shape)


def keep_packed(
    model: PreTrainedModel, bits: Bits, sources: Mapping[str, Read], device: torch.device
) -> set[str]:
    """Put packed weights in place of those that a run packs as it loads them; they are read when cut.

    `device`: where they are packed. Returns the names of the weights that were there.
    """
    pack_linear_maps(model, bits, set(get_keys_to_not_convert(model)))
    names: set[str] = set()
    for prefix, module in model.named_modules():
        for name in _packs(module):
            plain = module._parameters[name]
            assert plain is not None, "A module has the weight that is packed."
            names.add(f"{prefix}.{name}")
            packing = _Packing(sources[f"{prefix}.{name}"], plain, bits, device)
            _PACKING[module] = packing
            pack(module, name, bits)
            for number, suffix in enumerate(SUFFIXES[bits]):
                part = module._parameters[name + suffix]
                assert part is not None, "It has just been packed."
                keep(part, packing.part(number))
    begin_packed(model)
    return names


def numbers_to_pack(layer: nn.Module) -> Tensor | None:
    """[O, I]: what the packed weight of a linear map without data will give back; None of another layer."""
    packing = _PACKING.get(layer) if isinstance(layer, PackedLinear) else None
    return None if packing is None else packing.rounded()


def _packs(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's weights that are packed."""
    if isinstance(module, PackedLinear):
        return ("weight",)
    return stacks_of(module) if is_experts(module) else ()
