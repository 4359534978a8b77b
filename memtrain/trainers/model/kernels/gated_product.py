"""SwiGLU's product, bit for bit the same, with a gate that is activated again in the backward pass.

Two kernels forward and four backward, where transformers has two and three; the activated gate is not kept.

Source: Shazeer 2020, arXiv:2002.05202, eq. 6.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    """The MLP's output; in place of its own forward."""
    return self.down_proj(gated_product(self.gate_proj(x), self.up_proj(x)))


def gated_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _GatedProduct.apply(gate, up)
    return F.silu(gate).mul_(up)


class _GatedProduct(torch.autograd.Function):
    """The product in the graph, which keeps its two factors as they came."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of both factors."""
        gate, up = ctx.saved_tensors
        (grad,) = grads
        grad_up = F.silu(gate).mul_(grad) if ctx.needs_input_grad[1] else None
        grad_gate = None
        if ctx.needs_input_grad[0]:
            wide = grad * up
            grad_gate = torch.ops.aten.silu_backward.grad_input(wide, gate, grad_input=wide)
        return grad_gate, grad_up
