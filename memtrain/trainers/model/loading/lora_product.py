"""A frozen linear map and its adapter as one product: sums are made where the products write."""

# N tokens, I inputs, O outputs of a linear map, r rank.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def is_bare(layer: nn.Module) -> bool:
    """Whether a module is a frozen `F.linear` with its weight and bias, and nothing else sees its call."""
    is_hooked = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
    is_plain = type(layer) is nn.Linear and not is_hooked and "forward" not in vars(layer)
    return is_plain and not any(one.requires_grad for one in layer.parameters())


class LoraProduct(torch.autograd.Function):
    """x W^T + bias + (x A^T) B^T of a frozen W, without a tensor beside the output or the gradient of x.

    By autograd's own sums there are two of each, and a kernel more to add them. Saves x, W, A, B and x A^T.
    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_rI: Tensor, b_Or: Tensor
    ) -> Tensor:
        """The sum [N, O], rounded once."""
        low_Nr = F.linear(x_NI, a_rI)
        asked = ctx.needs_input_grad
        ctx.save_for_backward(x_NI, weight_OI if asked[0] else None, a_rI, b_Or, low_Nr)
        return F.linear(x_NI, weight_OI, bias_O).addmm_(low_Nr, b_Or.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of x, A and B."""
        x_NI, weight_OI, a_rI, b_Or, low_Nr = ctx.saved_tensors
        (grad_NO,), asked = grads, ctx.needs_input_grad
        grad_low_Nr = grad_NO @ b_Or
        grad_x = None if weight_OI is None else (grad_NO @ weight_OI).addmm_(grad_low_Nr, a_rI)
        grad_a = grad_low_Nr.t() @ x_NI if asked[3] else None
        grad_b = grad_NO.t() @ low_Nr if asked[4] else None
        return grad_x, None, None, grad_a, grad_b
