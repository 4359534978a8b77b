"""Rotary positions in five kernels a tensor, forward and backward, bit for bit as in transformers.

Halves are multiplied where they lie: transformers puts the turned halves side by side first, and its backward
pass takes them apart into tensors of zeros.

Source: Su et al. 2021, arXiv:2104.09864, eq. 34, with halves in place of pairs as in transformers.
"""

# H heads, T tokens, D head width.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Queries and keys [..., D], turned by their tokens' angles; transformers' `apply_rotary_pos_emb`."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if torch.promote_types(x.dtype, cos.dtype) != x.dtype:
        # The products have the angles' precision.
        x = x.to(cos.dtype)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotary.apply(x, cos, sin)
    return _forth(x, cos, sin)


class _Rotary(torch.autograd.Function):
    """The rotation in the graph, which keeps the angles alone, shared by all layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x * cos + (-x2, x1) * sin."""
        ctx.save_for_backward(cos, sin)
        return _forth(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The turn back."""
        cos, sin = ctx.saved_tensors
        (grad,) = grads
        first, second = _halves(grad)
        sin_first, sin_second = _halves(sin)
        made = grad * cos
        made_first, made_second = _halves(made)
        made_first.add_(second * sin_second)
        made_second.sub_(first * sin_first)
        return made, None, None


def _forth(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = _halves(x)
    sin_first, sin_second = _halves(sin)
    made = x * cos
    made_first, made_second = _halves(made)
    made_first.sub_(second * sin_first)
    made_second.add_(first * sin_second)
    return made


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the two halves of the last dimension."""
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
