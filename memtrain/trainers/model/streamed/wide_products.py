"""Linear maps and norms whose weight gradient goes straight into a float32 sum, as over all slices at once.

Autograd rounds a slice's gradient of a half-precision weight before anybody can add it. Where gradients of
slices nearly cancel (chosen against rejected answers), these roundings are more than the one of a row in one
piece. Here the product of a slice is added to the sum without being rounded, and the sum is rounded once.
"""

# N tokens of a slice, I inputs and O outputs of a linear map, W width of a norm.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memtrain.memory.plan.sizes import WIDENED_TOKENS
from memtrain.trainers.losses.head.tiles import sums_half_in_fp32

HALF = (torch.bfloat16, torch.float16)


class WideSum(Protocol):
    """The float32 sum of a weight's gradients."""

    def total(self) -> Tensor:
        """The sum so far, to be added to in place."""
        ...


WIDENED_NUMBERS = 1 << 20
"""Numbers of a norm's input that are widened at a time: 12 MiB in all, and kernels long enough. Taste."""

SUM = "wide_sum"
"""Attribute of a stand-in with the sum that its gradients belong to."""


def sum_of(weight: Tensor) -> WideSum | None:
    """The sum of a stand-in's gradients; None for any other tensor."""
    return getattr(weight, SUM, None)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear` in the dtype of `x`, whatever the weight's own is."""
    if is_wide(x, weight_OI):
        out: Tensor = WideLinear.apply(x, weight_OI, bias_O, None, 1.0)
        return out
    return F.linear(x, weight_OI.to(x.dtype), None if bias_O is None else bias_O.to(x.dtype))


def is_wide(x: Tensor, weight: Tensor) -> bool:
    """Whether the gradient of `weight` in a product with `x` goes into a float32 sum."""
    return sum_of(weight) is not None and x.dtype in HALF and torch.is_grad_enabled()


class WideLinear(torch.autograd.Function):
    """`x @ (scale * weight).T`, with a bias, or added to other numbers in the product's own kernel.

    Gradients of weight and bias go into their sums; autograd gets none of them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, addend: Tensor | None, scale: float
    ) -> Tensor:
        """The product, in the dtype of `x`."""
        ctx.save_for_backward(x)
        # Leaves with a sum of their own: what autograd saves of them may come back as another tensor.
        ctx.weight, ctx.bias, ctx.scale = weight_OI, bias_O, scale
        rounded_OI = _rounded(weight_OI, x.dtype, scale)
        if addend is not None:
            return torch.addmm(addend.flatten(0, -2), x.flatten(0, -2), rounded_OI.t()).view(addend.shape)
        return F.linear(x, rounded_OI, None if bias_O is None else bias_O.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of `x` and of what was added."""
        (x,), (grad,) = ctx.saved_tensors, grads
        weight_OI: Tensor = ctx.weight
        grad_NO, x_NI = grad.flatten(0, -2), x.flatten(0, -2)
        held = sum_of(weight_OI)
        assert held is not None, "A wide product's weight has a sum."
        add_product_(held.total(), grad_NO, x_NI, ctx.scale)
        own = None if ctx.bias is None else sum_of(ctx.bias)
        if own is not None:
            own.total().add_(grad_NO.sum(0, dtype=torch.float32))
        dx = grad @ _rounded(weight_OI, x.dtype, ctx.scale) if ctx.needs_input_grad[0] else None
        return dx, None, None, grad if ctx.needs_input_grad[3] else None, None


def add_product_(total_OI: Tensor, grad_NO: Tensor, x_NI: Tensor, scale: float = 1.0) -> None:
    """Add `scale * grad.T @ x` of half-precision operands to a float32 sum, rounding neither product nor sum.

    By the device's own kernel where it has one; else of `WIDENED_TOKENS` tokens at a time in float32.
    """
    if sums_half_in_fp32(total_OI.device, x_NI.dtype):
        torch.addmm(total_OI, grad_NO.t(), x_NI, out_dtype=total_OI.dtype, alpha=scale, out=total_OI)
        return
    for grad, x in zip(grad_NO.split(WIDENED_TOKENS), x_NI.split(WIDENED_TOKENS), strict=True):
        total_OI.addmm_(grad.to(total_OI.dtype).t(), x.to(total_OI.dtype), alpha=scale)


class WideScale(torch.autograd.Function):
    """`weight * x`, as norms end; the weight's gradient goes into its sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_W: Tensor) -> Tensor:
        """The product, in the dtype of `x`."""
        ctx.save_for_backward(x)
        ctx.weight = weight_W
        return weight_W * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        """Gradient of `x`."""
        (x,), (grad,) = ctx.saved_tensors, grads
        weight_W: Tensor = ctx.weight
        held = sum_of(weight_W)
        assert held is not None, "A wide product's weight has a sum."
        total_W, width = held.total(), weight_W.shape[0]
        rows = max(1, WIDENED_NUMBERS // width)
        pairs = zip(grad.reshape(-1, width).split(rows), x.reshape(-1, width).split(rows), strict=True)
        for grad_NW, x_NW in pairs:
            total_W.add_((grad_NW.to(total_W.dtype) * x_NW).sum(0))
        return grad * weight_W if ctx.needs_input_grad[0] else None, None


def add_norm_gradient_(total_W: Tensor, grad: Tensor, x: Tensor, scale: Tensor) -> None:
    """Add the gradient of an RMS norm's weight to a float32 sum, a few rows at a time.

    grad, x: [..., W], of the norm's output and its input; scale: float32 [..., 1], one over the root mean
    square of each row of `x`.
    """
    width = total_W.shape[0]
    rows = max(1, WIDENED_NUMBERS // width)
    held = (grad.reshape(-1, width), x.reshape(-1, width), scale.reshape(-1, 1))
    for grad_NW, x_NW, scale_N1 in zip(*(one.split(rows) for one in held), strict=True):
        total_W.add_(x_NW.to(total_W.dtype).mul_(scale_N1).mul_(grad_NW).sum(0))


@contextmanager
def wide_products(is_on: bool) -> Iterator[None]:
    """Context in which every `F.linear` of a stand-in is a `WideLinear`, and what it scales a `WideScale`."""
    if not is_on:
        yield
        return
    with _WideProducts():
        yield


SCALINGS = (torch.Tensor.mul, torch.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__)


class _WideProducts(TorchFunctionMode):
    """Takes the linear maps and the scaling of stand-ins; all other calls go on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.linear:
            x, weight, bias = _linear_arguments(*args, **given)
            # Weights in x's own dtype only: other casts are the caller's, who knows them.
            if is_wide(x, weight) and weight.dtype == x.dtype:
                return WideLinear.apply(x, weight, bias, None, 1.0)
        elif func in SCALINGS and not given:
            found = _scaled(*args)
            if found is not None:
                return WideScale.apply(*found)
        return func(*args, **given)


def _scaled(one: Any, other: Any) -> tuple[Tensor, Tensor] | None:
    """(numbers, the stand-in that scales their last dimension); None for any other product."""
    for x, weight in ((other, one), (one, other)):
        if isinstance(x, Tensor) and isinstance(weight, Tensor) and weight.dim() == 1:
            is_ours = is_wide(x, weight) and weight.dtype == x.dtype
            if is_ours and x.dim() > 1 and x.shape[-1] == weight.shape[0]:
                return x, weight
    return None


def _linear_arguments(
    input: Tensor,  # noqa: A002 (torch's name)
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _rounded(weight_OI: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    rounded = weight_OI.to(dtype)
    return rounded if scale == 1.0 else rounded * scale
