"""RMS norm in two kernels forward and one to three backward; it keeps its input and a number a token.

transformers starts eight kernels forward and more backward, and keeps a float32 copy. The forward pass rounds
where transformers does: after the division by the root mean square, and after the scale. The backward pass
rounds once, at its end.

Source: Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4; rounding of LlamaRMSNorm in transformers 5.23.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memtrain.trainers.model.streamed.wide_products import HALF, add_norm_gradient_, sum_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """The norm of `hidden_states` [..., W] over W; in place of an RMSNorm's own forward."""
    x, weight = hidden_states, self.weight
    if x.dtype != weight.dtype or x.dtype not in DTYPES:
        return type(self).forward(self, x)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RmsNorm.apply(x, weight, self.variance_epsilon)
    return normalized(x, self.variance_epsilon)[0].mul_(weight)


class _RmsNorm(torch.autograd.Function):
    """The norm in the graph. Over slices of a row the weight's gradient goes into their float32 sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, eps: float) -> Tensor:
        """Normalized, rounded, scaled."""
        y, scale = normalized(x, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.held = sum_of(weight) if x.dtype in HALF else None
        return y.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of the input and of the weight, as they are asked for."""
        x, weight, scale = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad = grads[0].contiguous()
        if needs_weight and ctx.held is not None:
            add_norm_gradient_(ctx.held.total(), grad, x, scale)
            needs_weight = False
        return *norm_gradients(grad, x, scale, weight, (needs_x, needs_weight)), None


def normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(`x` over its root mean square in x's precision, [..., 1] one over that root in float32)."""
    if x.is_cuda:
        return torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], None, eps)
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype), scale


def norm_gradients(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of input and weight where `needs` says so, summed in float32; `grad` is contiguous."""
    if x.is_cuda:
        made = torch.ops.aten._fused_rms_norm_backward(grad, x, [x.shape[-1]], scale, weight, list(needs))
        return made[0] if needs[0] else None, made[1] if needs[1] else None
    unit, wide = x.to(torch.float32) * scale, grad.to(torch.float32)
    grad_x = grad_weight = None
    if needs[1]:
        grad_weight = (wide * unit).flatten(0, -2).sum(0).to(weight.dtype)
    if needs[0]:
        wide = wide * weight.to(torch.float32)
        grad_x = (wide - unit * (wide * unit).mean(-1, keepdim=True)).mul_(scale).to(x.dtype)
    return grad_x, grad_weight
