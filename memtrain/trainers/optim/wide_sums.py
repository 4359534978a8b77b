"""Gradients of half-precision weights, summed in float32 over micro-batches and ranks.

A bfloat16 sum of k like terms loses every term that is below half a step of it: with 2,048 micro-batches half
of the gradient. torch casts each incoming gradient to a weight's `grad_dtype` and adds it there: in float32
the sum is exact to 1e-6, for 2 bytes a weight more than one gradient in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)


def sum_wide(model: nn.Module, num_micro_batches: int) -> None:
    """From now on gradients of `model` are summed in float32 where a step has several micro-batches.

    A gradient that is alone stays as the backward pass makes it. Called when there are no gradients.
    """
    set_wide(model.parameters(), is_wide=num_micro_batches > 1)


def summing_wide(parameters: Iterable[nn.Parameter]) -> Callable[[nn.Module, int], None]:
    """`sum_wide` of a model whose trained parameters are these: no module is gone through at each step."""
    halves = [one for one in parameters if one.dtype in HALF]
    return lambda model, num_micro_batches: set_wide(halves, is_wide=num_micro_batches > 1)


def set_wide(parameters: Iterable[Tensor], *, is_wide: bool) -> None:
    """Whether half-precision parameters that are trained get float32 gradients."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype in HALF:
            wanted = torch.float32 if is_wide else parameter.dtype
            if parameter.grad_dtype is not wanted:
                parameter.grad_dtype = wanted


@contextmanager
def narrowed(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Gradients are in their weights' own precision inside, rounded once; they are gone afterwards.

    For optimizers that step half-precision weights as they are.
    """
    wide = [one for one in parameters if one.grad is not None and one.grad.dtype != one.dtype]
    for parameter in wide:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "Only parameters with a gradient are taken."
        parameter.grad_dtype = parameter.dtype
        parameter.grad = gradient.to(parameter.dtype)
        del gradient
    try:
        yield
    finally:
        for parameter in wide:
            parameter.grad = None
            parameter.grad_dtype = torch.float32
