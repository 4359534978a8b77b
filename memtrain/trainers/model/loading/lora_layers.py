"""LoRA layers in few kernels: adapters are rounded together once a pass, and one product adds to the other.

PEFT's own layer rounds A and B wherever they are used, scales the product, and adds it: in half precision
six kernels beside the frozen product (seven where that is bitsandbytes' in 4 bits, which is copied first),
and two here; the gradient of the input is one sum, where PEFT's are two tensors and a third. In float32
nothing is rounded, and layers are PEFT's.
Passes with and without gradients give the same numbers.
"""

# N tokens, I inputs, O outputs of a linear map, r rank.

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memtrain.trainers.model.loading.lora_product import LoraProduct, is_bare
from memtrain.trainers.model.streamed.wide_products import WideLinear, is_wide, linear

HALF = (torch.bfloat16, torch.float16)


class Rounded(NamedTuple):
    """The pair of an adapter in half precision, B scaled."""

    a_rI: Tensor
    b_Or: Tensor
    sources: tuple[Tensor, Tensor]
    versions: tuple[int, int]

    def is_of(self, a: Tensor, b: Tensor) -> bool:
        """Whether the cast copy was made of the weights as they are now."""
        return self.sources[0] is a and self.sources[1] is b and self.versions == (a._version, b._version)

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a layer rounds for itself."""


class _RoundTogether(torch.autograd.Function):
    """Weights in another precision, some of them scaled by a power of two; and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, scales: Sequence[float], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """The rounded weights; a power of two changes no digit of them."""
        ctx.scales, ctx.dtypes = scales, [weight.dtype for weight in weights]
        ctx.set_materialize_grads(False)
        made = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(made, list(weights))
        _scale_(made, scales)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients in the weights' precision."""
        there = [number for number, grad in enumerate(grads) if grad is not None]
        given = [grad for grad in grads if grad is not None]
        made = [torch.empty_like(g, dtype=ctx.dtypes[n]) for n, g in zip(there, given, strict=True)]
        if made:
            torch._foreach_copy_(made, given)
            _scale_(made, [ctx.scales[number] for number in there])
        whole: list[Tensor | None] = [None] * len(grads)
        for number, grad in zip(there, made, strict=True):
            whole[number] = grad
        return None, None, *whole


def _scale_(tensors: list[Tensor], scales: Sequence[float]) -> None:
    scaled = [(tensor, scale) for tensor, scale in zip(tensors, scales, strict=True) if scale != 1.0]
    if scaled:
        torch._foreach_mul_([tensor for tensor, _ in scaled], [scale for _, scale in scaled])


def in_few_kernels(model: PeftModel) -> None:
    """Let the plain LoRA layers of `model` compute in few kernels from now on.

    Exact but for one thing: the two products are summed before they are rounded, where PEFT rounds the second
    alone first; so are the two of the input's gradient. Layers with dropout, DoRA, several adapters, shards
    or a scale that is no power of two stay PEFT's, and so does everything in float32. The head's adapter is
    rounded in plain calls alone: the loss multiplies it as it is, and its gradient would wait for those of
    the layers.
    """
    layers = [module for module in model.modules() if is_few_kernels_kind(module)]
    for layer in layers:
        layer.forward = MethodType(_lora_forward, layer)  # pyright: ignore[reportAttributeAccessIssue]
    base = model.get_base_model()
    embedding = base.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    head = base.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    inner = [layer for layer in layers if layer is not head]
    if inner and isinstance(embedding, nn.Module):
        # Every forward pass begins here, outside of whatever is computed again.
        embedding.register_forward_pre_hook(_RoundFirst(inner, base))


KINDS = {
    "peft.tuners.lora.layer": ("Linear",),
    "peft.tuners.lora.bnb": ("Linear4bit", "Linear8bitLt"),
}
"""PEFT's layers beside a linear map, by module: of plain weights, and of those that bitsandbytes has packed.
Named, because their modules bring bitsandbytes."""


def is_few_kernels_kind(module: nn.Module) -> bool:
    """Whether a module is PEFT's LoRA beside a linear map, one that adds its product to the map's output."""
    kind = type(module)
    return kind.__name__ in KINDS.get(kind.__module__, ())


class _RoundFirst:
    """The hook that rounds; in a copy of the model it is the copy's."""

    def __init__(self, layers: list[nn.Module], base: nn.Module) -> None:
        self.layers, self.base = layers, base

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            _round_all(self.layers, _dtype_of(self.base))


def round_together(model: nn.Module, is_on: bool) -> None:
    """Whether the adapters of `model` are rounded once a pass, or where they are used, to the same numbers.

    Not once in streamed layers: their weights have stand-ins in the backward pass, which are rounded apart.
    """
    for module in model.modules():
        if is_few_kernels_kind(module):
            vars(module)["_rounds_apart"] = not is_on


def _dtype_of(base: nn.Module) -> torch.dtype:
    return next((p.dtype for p in base.parameters() if p.dtype in HALF), torch.float32)


def _round_all(layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Round the adapters of the layers that are plain, all at once."""
    asked: list[Any] = [layer for layer in layers if not vars(layer).get("_rounds_apart", False)]
    found = [(layer, name) for layer in asked if (name := _plain_adapter(layer)) is not None]
    if dtype not in HALF or not found:
        return
    pairs = [_adapter_of(layer, name) for layer, name in found]
    scales = [scale for layer, name in found for scale in (1.0, layer.scaling[name])]
    made = _RoundTogether.apply(dtype, scales, *(weight for pair in pairs for weight in pair))
    for (layer, _), (a, b), a_rI, b_Or in zip(found, pairs, made[0::2], made[1::2], strict=True):
        vars(layer)["_rounded"] = Rounded(a_rI, b_Or, (a, b), (a._version, b._version))
        vars(layer)["_is_used"] = False


def _adapter_of(layer: Any, name: str) -> tuple[Tensor, Tensor]:
    """A and B of an adapter."""
    return layer.lora_A[name].weight, layer.lora_B[name].weight


def _plain_adapter(layer: Any) -> str | None:
    """The layer's only adapter, where it is whole, without dropout or variant, scaled by a power of two."""
    if layer.disable_adapters or layer.merged or layer.lora_variant:
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1:
        return None
    (name,) = names
    a, b = layer.lora_A[name], layer.lora_B[name]
    drops = layer.training and getattr(layer.lora_dropout[name], "p", 0.0) > 0
    is_whole = not any(isinstance(w, DTensor) or hasattr(w, "ds_id") for w in (a.weight, b.weight))
    is_power = math.frexp(layer.scaling[name])[0] == 0.5
    is_plain = a.bias is None and b.bias is None and a.weight.dtype == b.weight.dtype == torch.float32
    return name if is_whole and is_power and is_plain and not drops else None


def _lora_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The frozen map and the adapter's, summed."""
    name = _plain_adapter(self) if x.dtype in HALF and not (args or kwargs) else None
    if name is None:
        return type(self).forward(self, x, *args, **kwargs)
    a, b = _adapter_of(self, name)
    if is_wide(x, a):
        out: Tensor = WideLinear.apply(linear(x, a), b, None, self.base_layer(x), self.scaling[name])
        return out
    a_rI, b_Or = _rounded_pair(self, name, x.dtype)
    base = self.base_layer
    if is_bare(base) and not torch.compiler.is_compiling():
        summed_NO: Tensor = LoraProduct.apply(x.flatten(0, -2), base.weight, base.bias, a_rI, b_Or)
        return summed_NO.view(*x.shape[:-1], -1)
    result = base(x)
    low_Nr = F.linear(x, a_rI).flatten(0, -2)
    return torch.addmm(result.flatten(0, -2), low_Nr, b_Or.t()).view(result.shape)


def _rounded_pair(layer: Any, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A and the scaled B in half precision: this pass's copies, else rounded here, to the same numbers.

    A map that a pass uses twice sums its gradients in float32, so only its first use takes what is rounded;
    a layer that is computed again in the backward pass wants the same numbers and no gradient. Passes without
    gradients round in place: a captured pass reads the weights as they are when it is started.
    """
    a, b = _adapter_of(layer, name)
    held: Rounded | None = vars(layer).get("_rounded")
    if vars(layer).get("_rounds_apart", False):
        held = None
    if torch.is_grad_enabled() and held is not None and held.a_rI.dtype == dtype and held.is_of(a, b):
        is_again = torch._C._current_graph_task_id() != -1
        if is_again or not vars(layer)["_is_used"]:
            vars(layer)["_is_used"] = True
            return held.a_rI, held.b_Or
    return a.to(dtype), b.to(dtype) * layer.scaling[name]
