"""PEFT's adapters of stacked experts, computed beside the stacks instead of added to them.

PEFT wraps a module once for each stack that is adapted (`target_parameters`), names and stores A as [E * r,
I] and B as [O, r * E], and adds their product to the stack for each pass. Names and files stay PEFT's; the
sums are the same to rounding.
"""

# E experts, r rank, I inputs, O outputs

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from memtrain.trainers.model.experts.forward import Pair, adapted, is_experts, stacks_of, take_own_forward
from memtrain.trainers.model.quantized.packed import layout_of, matrices_of, parts_in


def beside_experts(model: nn.Module) -> None:
    """Let adapted experts of `model` compute their adapters beside the stacks from now on."""
    inner = {id(module.base_layer) for module in model.modules() if isinstance(module, ParamWrapper)}
    for module in list(model.modules()):
        if isinstance(module, ParamWrapper) and id(module) not in inner and is_experts(_base(module)):
            take_own_forward(_base(module))
            module.forward = MethodType(_adapted_forward, module)


@contextmanager
def shapes_of_packed() -> Iterator[None]:
    """PEFT sees the shape that a packed stack had, inside."""
    plain: Any = ParamWrapper._get_in_out_features

    def of_stack(self: Any, module: nn.Module) -> tuple[int, int]:
        layout = layout_of(self.get_base_layer(), self.parameter_name)
        if layout is None:
            return plain(self, module)
        self.num_experts, num_rows, num_columns = layout.shape
        self._param_ndim = len(layout.shape)
        return num_rows, num_columns

    ParamWrapper._get_in_out_features = of_stack  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        ParamWrapper._get_in_out_features = plain


def _adapted_forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The experts with the adapters that are on."""
    experts = _base(self)
    pairs = _pairs_of(self)
    if pairs is None:
        del experts.forward  # several adapters at once: PEFT's own way
        try:
            return ParamWrapper.forward(self, hidden, *args, **kwargs)
        finally:
            take_own_forward(experts)
    with adapted(experts, pairs):
        return experts(hidden, *args, **kwargs)


def _pairs_of(wrapper: Any) -> dict[str, Pair] | None:
    """The adapters of all stacks of a module; None where several are on at once."""
    found: dict[str, Pair] = {}
    layer = wrapper
    while isinstance(layer, ParamWrapper):
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        if len(names) > 1:
            return None
        if names and not layer.disable_adapters and not layer.merged:
            found[layer.parameter_name] = _pair(layer, names[0])
        layer = layer.base_layer
    return found


def _pair(layer: Any, name: str) -> Pair:
    """A and B of each expert: of B the expert is the last part of a column's number."""
    count = layer.num_experts
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    a_ErI = a.view(count, -1, a.shape[-1])
    b_ErO = b.view(b.shape[0], -1, count).permute(2, 1, 0)
    return Pair(a_ErI, b_ErO, layer.scaling[name])


def merged_stacks(outer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of all that a module of experts holds, unpacked, with its adapters in the stacks.

    `outer`: the experts, or the outermost of their wrappers. Sums are in float32, rounded once.
    """
    experts = _base(outer) if isinstance(outer, ParamWrapper) else outer
    layer: Any = outer
    deltas: dict[str, Tensor] = {}
    while isinstance(layer, ParamWrapper):
        for name in (name for name in layer.active_adapters if name in layer.lora_A and not layer.merged):
            delta = layer.get_delta_weight(name).float()
            before = deltas.get(layer.parameter_name)
            deltas[layer.parameter_name] = delta if before is None else before + delta
        layer = layer.base_layer
    stacks = stacks_of(experts)
    for name in stacks:
        stack = matrices_of(experts, name)
        whole = stack.whole()
        yield name, (whole.float() + deltas[name]).to(stack.dtype) if name in deltas else whole
    own = parts_in(experts) | set(stacks)
    yield from ((name, one) for name, one in experts.named_parameters(recurse=False) if name not in own)


def _base(wrapper: Any) -> nn.Module:
    """The module inside all wrappers."""
    return wrapper.get_base_layer()
