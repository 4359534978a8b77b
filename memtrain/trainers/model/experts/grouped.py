"""Products of tokens with the matrices of their experts: one kernel for all, or one expert after the other.

Tokens lie sorted by expert. Packed matrices are unpacked for the product and once more for its gradient, a
few experts at a time, so that neither they nor the tokens are kept.
"""

# S token copies sorted by expert, E experts, I inputs, O outputs, R rows and C columns of a stored matrix

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memtrain.trainers.model.quantized.packed import Matrices
from memtrain.trainers.runtime.device_waits import host_acts

LEAST_CAPABILITY = (8, 0)
"""Of a GPU, for torch's grouped product in bfloat16."""

ALIGN_BYTES = 16
"""Rows of what a GPU's grouped product reads begin at multiples of so many bytes."""


def grouped_product(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """[S, O]: each token times its expert's matrix. `ends_E`: int32, where each expert's tokens end.

    The same numbers as `looped_product`, to rounding.
    """
    if has_kernel(x_SI):
        return F.grouped_mm(x_SI, weight_EIO, offs=ends_E)
    return looped_product(x_SI, weight_EIO, ends_E)


def has_kernel(x: Tensor) -> bool:
    """Whether torch has one kernel for all experts: on a CPU, and in bfloat16 on GPUs since Ampere."""
    if x.device.type != "cuda":
        return True
    return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= LEAST_CAPABILITY


def looped_product(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """The reference: one expert after the other."""
    ends = ends_on_host(ends_E, len(x_SI))
    parts = [
        x_SI[begin:end] @ weight_EIO[expert]
        for expert, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    ]
    return torch.cat(parts)


def ends_on_host(ends_E: Tensor, num_rows: int) -> list[int]:
    """The numbers themselves: the host waits for them."""
    host_acts("it reads where the tokens of each expert end")
    return ends_E.tolist()


def frozen_product(x_SI: Tensor, weight: Matrices, ends_E: Tensor, *, inputs_first: bool) -> Tensor:
    """[S, O]: each token times its expert's frozen matrix, stored [I, O] where `inputs_first`, else [O,
    I]."""
    product: Tensor = _Frozen.apply(x_SI, weight, ends_E, not inputs_first)
    return product


class _Frozen(torch.autograd.Function):
    """A product whose gradient goes to the tokens alone; neither they nor the unpacked matrices are kept."""

    @staticmethod
    def forward(ctx: Any, x_SI: Tensor, weight: Matrices, ends_E: Tensor, transposes: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.weight, ctx.ends_E, ctx.transposes = weight, ends_E, transposes
        return _times(x_SI, weight, ends_E, transposes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _times(grads[0].contiguous(), ctx.weight, ctx.ends_E, not ctx.transposes), None, None, None


def _times(x: Tensor, weight: Matrices, ends_E: Tensor, transposes: bool) -> Tensor:
    count, at_once = weight.shape[0], weight.num_at_once
    if at_once >= count and has_kernel(x):
        matrices = weight.whole().to(x.dtype)
        return F.grouped_mm(x, matrices.mT if transposes else matrices, offs=ends_E)
    out = x.new_empty(len(x), weight.shape[1] if transposes else weight.shape[2])
    ends = [0, *ends_on_host(ends_E, len(x))]
    for first in range(0, count, at_once):
        last = min(first + at_once, count)
        if ends[first] == ends[last]:
            continue
        matrices = weight.between(first, last).to(x.dtype)
        for expert in range(first, last):
            rows = slice(ends[expert], ends[expert + 1])
            if rows.start < rows.stop:
                _times_one(x[rows], matrices[expert - first], transposes, out[rows])
        del matrices  # before the next ones are unpacked
    return out


def _times_one(x_SI: Tensor, matrix: Tensor, transposes: bool, out_SO: Tensor) -> None:
    """A product of one expert; no view of its matrix outlives it."""
    torch.mm(x_SI, matrix.mT if transposes else matrix, out=out_SO)
