"""The forward pass of a mixture's experts where they are packed, adapted, or both.

Step by step that of transformers (grouped_mm_experts_forward): tokens sorted by expert, grouped products,
sums in the tokens' order. Packed matrices are unpacked inside the products; adapters are two thin grouped
products beside each, where PEFT would add their product to the whole stack first, and keep it.

Source: transformers 5.23, integrations/moe.py; LoRA arXiv:2106.09685, equation 3, by expert.
"""

# N tokens, K experts of a token, S = N * K copies sorted by expert, W width, E experts, r rank, I inputs, O
# outputs

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memtrain.trainers.model.experts.grouped import ALIGN_BYTES, frozen_product, grouped_product, has_kernel
from memtrain.trainers.model.quantized.packed import LAYOUTS, matrices_of

ADAPTERS = "_expert_adapters"
"""Attribute of experts inside a pass: their adapters."""
PIECES = 16
"""Pieces in which products of gradients and outputs are made in float32, so that they stay small."""


class Pair(NamedTuple):
    """The adapter of one stack."""

    a_ErI: Tensor
    b_ErO: Tensor
    scale: float


def is_experts(module: nn.Module) -> bool:
    """Whether a module is a mixture's experts in the form of transformers 5: stacks, and a common
    signature."""
    stacks = stacks_of(module)
    return bool(stacks) and hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def stacks_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the stacked matrices that a module of experts holds, packed or not."""
    known = ("gate_up_proj", "up_proj", "down_proj")
    packed = vars(module).get(LAYOUTS, {})
    found = [name for name in known if module._parameters.get(name) is not None]
    return tuple(name for name in found if name in packed or module._parameters[name].dim() == 3)  # pyright: ignore[reportOptionalMemberAccess]


def take_own_forward(module: nn.Module) -> None:
    """Let a module of experts compute by this file from now on."""
    module.forward = MethodType(experts_forward, module)


@contextmanager
def adapted(module: nn.Module, pairs: Mapping[str, Pair]) -> Iterator[None]:
    """The experts have these adapters inside, by the name of their stack."""
    vars(module)[ADAPTERS] = pairs
    try:
        yield
    finally:
        vars(module).pop(ADAPTERS, None)


def experts_forward(self: Any, hidden_NW: Tensor, chosen_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """[N, W]: the weighted sum of what each token's experts make of it."""
    num_tokens, num_k = chosen_NK.shape
    expert_S, order_S = torch.sort(chosen_NK.reshape(-1))
    ends_E = ends_of(expert_S, self.num_experts)
    x_SW = hidden_NW[order_S // num_k]
    name = "gate_up_proj" if getattr(self, "has_gate", True) else "up_proj"
    up_SM = _product(self, name, x_SW, expert_S, ends_E)
    # Where nothing is kept for a gradient, what entered a product makes room for what comes next.
    del x_SW
    up_SM = self._apply_gate(up_SM) if name == "gate_up_proj" else self.act_fn(up_SM)
    out_SW = _product(self, "down_proj", up_SM, expert_S, ends_E)
    del up_SM
    if getattr(self, "has_post_expert_norm", False):
        out_SW = self.post_expert_norm(out_SW)
    return combined(out_SW, weight_NK, order_S).to(hidden_NW.dtype)


def combined(out_SW: Tensor, weight_NK: Tensor, order_S: Tensor) -> Tensor:
    """[N, W]: the outputs of each token's experts, weighted and summed."""
    return _Combined.apply(out_SW, weight_NK, order_S)


class _Combined(torch.autograd.Function):
    """The weighted sum, and its gradients.

    Copies of all outputs in another order are there one at a time, where autograd would hold three. Weights
    that a router leaves in float32 (Mixtral, DeepSeek-V3, GLM-4 MoE) count in float32, as in transformers:
    one rounding of the sum, and of each gradient.
    """

    @staticmethod
    def forward(ctx: Any, out_SW: Tensor, weight_NK: Tensor, order_S: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        back_S = torch.empty_like(order_S)
        back_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        ctx.save_for_backward(out_SW, weight_NK, order_S)
        if weight_NK.dtype == out_SW.dtype:
            out_NKW = out_SW[back_S].view(*weight_NK.shape, -1)
            return torch.bmm(weight_NK[:, None], out_NKW)[:, 0]
        wide = torch.promote_types(weight_NK.dtype, out_SW.dtype)
        total_NW = weight_NK.new_zeros(len(weight_NK), out_SW.shape[1], dtype=wide)
        for weight_N, back_N in zip(weight_NK.unbind(1), back_S.view(weight_NK.shape).unbind(1), strict=True):
            total_NW.addcmul_(out_SW[back_N], weight_N[:, None])
        return total_NW.to(out_SW.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        out_SW, weight_NK, order_S = ctx.saved_tensors
        grad_SW = grads[0][order_S // weight_NK.shape[1]]
        if weight_NK.dtype == out_SW.dtype:
            grad_S = torch.bmm(grad_SW[:, None], out_SW[:, :, None]).view(-1)
        else:
            wide, rows = torch.promote_types(weight_NK.dtype, out_SW.dtype), max(len(order_S) // PIECES, 64)
            pieces = zip(grad_SW.split(rows), out_SW.split(rows), strict=True)
            grad_S = torch.cat([grad.to(wide, copy=True).mul_(out).sum(1) for grad, out in pieces])
        grad_NK = torch.empty_like(grad_S).index_copy_(0, order_S, grad_S).view(weight_NK.shape)
        return grad_SW.mul_(weight_NK.reshape(-1)[order_S][:, None]), grad_NK.to(weight_NK.dtype), None


def ends_of(expert_S: Tensor, num_experts: int) -> Tensor:
    """int32 [E]: where the tokens of each expert end, of sorted ones."""
    # A histogram, which a captured pass allows; deterministic kernels want floats on a CPU and integers on
    # CUDA.
    sorted_S = expert_S.int() if expert_S.device.type == "cuda" else expert_S.float()
    counts_E = torch.histc(sorted_S, bins=num_experts, min=0, max=num_experts - 1)
    return counts_E.cumsum(0, dtype=torch.int32)


def _product(self: Any, name: str, x_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
    """[S, O]: the frozen product with a stack, its adapter's, and its bias."""
    out_SO = frozen_product(x_SI, matrices_of(self, name), ends_E, inputs_first=self.is_transposed)
    pair: Pair | None = vars(self).get(ADAPTERS, {}).get(name)
    if pair is not None:
        # No backward pass of a product reads what came out of it.
        out_SO = out_SO.add_(low_rank_product(x_SI, pair, ends_E))
    bias_EO: Tensor | None = self._parameters.get(f"{name}_bias")
    return out_SO if bias_EO is None else out_SO + bias_EO[expert_S]


def low_rank_product(x_SI: Tensor, pair: Pair, ends_E: Tensor) -> Tensor:
    """[S, O]: what an adapter adds."""
    a_ErI, b_ErO = pair.a_ErI.to(x_SI.dtype), pair.b_ErO.to(x_SI.dtype)
    if has_kernel(x_SI):
        # Ranks that a grouped product does not take aligned get rows of zeros, which change no number.
        short = -a_ErI.shape[1] % (ALIGN_BYTES // x_SI.dtype.itemsize)
        a_ErI, b_ErO = F.pad(a_ErI, (0, 0, 0, short)), F.pad(b_ErO, (0, 0, 0, short))
    low_Sr = grouped_product(x_SI, a_ErI.mT, ends_E)
    return grouped_product(low_Sr * pair.scale, b_ErO.contiguous(), ends_E)
