"""Weights of a module that are packed in place: parameters of bytes under its own name and beside it.

They are frozen parameters, so that they move, are counted and travel to the host as any others do.
"""

# E experts, R rows and C columns of a stored matrix

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memtrain.memory.plan.sizes import NF4_BLOCK, SCALE_BLOCK, experts_at_once
from memtrain.trainers.model.quantized import int8, nf4
from memtrain.trainers.model.quantized.int8 import Int8
from memtrain.trainers.model.quantized.nf4 import NF4

Bits = Literal["4bit", "8bit"]

LAYOUTS = "_packed_layouts"
"""Attribute of a module: the layout of each of its packed weights, by name."""

SUFFIXES: dict[Bits, tuple[str, ...]] = {
    "4bit": ("", "_scale_codes", "_scales", "_offset"),
    "8bit": ("", "_scales"),
}
"""Endings of the parameters that hold a packed weight, in the order of `NF4` and `Int8`."""

SHARDED = torch.float8_e4m3fn
"""Type under which bytes lie in shards. FSDP2 until torch 2.12 makes parameters of what it cuts that could
have gradients, so of floating-point numbers alone; nothing computes with this one, and no bit moves."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Facts of a weight that its packed form has lost."""

    bits: Bits
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """The matrices of a stack, packed or not: one after the other, or all at once."""

    parts: tuple[Tensor, ...]
    shape: torch.Size
    dtype: torch.dtype
    bits: Bits | None
    """None: not packed."""

    @property
    def num_at_once(self) -> int:
        """Matrices that are unpacked together: see `experts_at_once`."""
        if self.bits is None:
            return self.shape[0]
        num_experts, num_rows, num_columns = self.shape
        return experts_at_once(num_experts, num_rows * num_columns, self.dtype.itemsize)

    def between(self, first: int, last: int) -> Tensor:
        """[last - first, R, C]: those matrices in the precision of the computation."""
        size = self.shape[1:].numel()
        if self.bits is None:
            return self.parts[0][first:last]
        if self.bits == "8bit":
            return int8.unpack(Int8(*(part[first:last] for part in self.parts)), self.dtype)
        flat = nf4.unpack(NF4(*self.parts), first * size, last * size, self.dtype)
        return flat.view(last - first, *self.shape[1:])

    def whole(self) -> Tensor:
        """[E, R, C], or [R, C] of a single matrix."""
        return self.between(0, self.shape[0])


def pack(
    module: nn.Module,
    name: str,
    bits: Bits,
    weight: Tensor | None = None,
    *,
    device: torch.device | None = None,
) -> None:
    """Pack `weight`, or the module's own, in place of the module's parameter `name`; on `device`, or where
    it is.

    Without data (a weight on torch's meta device, a fake one) the packed form has none either.
    """
    weight = module._parameters[name] if weight is None else weight
    assert weight is not None, "A module has the weight that is to be packed."
    made = parts_of(weight.detach(), bits)
    layouts: dict[str, Layout] = vars(module).setdefault(LAYOUTS, {})
    layouts[name] = Layout(bits, weight.shape, weight.dtype)
    for suffix, part in zip(SUFFIXES[bits], made, strict=True):
        frozen = nn.Parameter(part.to(device or part.device), requires_grad=False)
        vars(frozen)["_is_hf_initialized"] = True  # transformers draws what is not marked
        module._parameters[name + suffix] = frozen


def parts_of(weight: Tensor, bits: Bits) -> tuple[Tensor, ...]:
    """The tensors of a packed weight."""
    if weight.is_meta:
        return _without_data(weight, bits)
    return nf4.pack(weight) if bits == "4bit" else int8.pack(weight)


def matrices_of(module: nn.Module, name: str) -> Matrices:
    """The stack, or the one matrix, that a module holds under `name`."""
    layout = layout_of(module, name)
    if layout is None:
        weight = module._parameters[name]
        assert weight is not None, "A module has the weight that is asked for."
        return Matrices((weight,), weight.shape, weight.dtype, None)
    held: Any = [module._parameters[name + suffix] for suffix in SUFFIXES[layout.bits]]
    codes = torch.int8 if layout.bits == "8bit" else torch.uint8
    parts = tuple(part.detach().view(codes) if part.dtype == SHARDED else part for part in held)
    return Matrices(parts, layout.shape, layout.dtype, layout.bits)


def parts_in(module: nn.Module) -> set[str]:
    """Names of the parameters that hold the packed weights of a module."""
    layouts: dict[str, Layout] = vars(module).get(LAYOUTS, {})
    return {name + suffix for name, layout in layouts.items() for suffix in SUFFIXES[layout.bits]}


def shardable(model: nn.Module) -> None:
    """Let the bytes of packed weights lie as a type that can be cut into shards; their storages stay."""
    for module in model.modules():
        for name in parts_in(module):
            part = module._parameters[name]
            if part is not None and not part.is_floating_point():
                module._parameters[name] = nn.Parameter(part.detach().view(SHARDED), requires_grad=False)


def layout_of(module: nn.Module, name: str) -> Layout | None:
    """The layout of a packed weight; None of one that is not packed."""
    return vars(module).get(LAYOUTS, {}).get(name)


def _without_data(weight: Tensor, bits: Bits) -> tuple[Tensor, ...]:
    def of(count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=weight.device)

    if bits == "8bit":
        codes = torch.empty_like(weight, dtype=torch.int8)
        return Int8(codes, torch.empty(weight.shape[:-1], dtype=torch.float32, device=weight.device))
    blocks = -(-weight.numel() // NF4_BLOCK)
    scales = of(-(-blocks // SCALE_BLOCK), torch.float32)
    return NF4(of(weight.numel() // 2, torch.uint8), of(blocks, torch.uint8), scales, of(1, torch.float32))
