"""Matrix products of half-precision operands summed in fp32, with no fp32 copy of a whole matrix."""

# T tokens of one tile, V vocabulary rows, D width of one pair (hidden size, or the rank of an adapter)

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memtrain.trainers.losses.head.spans import spans

HALF = (torch.bfloat16, torch.float16)


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype sums are kept in: fp32, or fp64 when an operand is fp64."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


@functools.cache
def sums_half_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device's own kernel adds a product of `dtype` matrices to an fp32 one: found by a trial.

    The kernel exists on CUDA only, some torch releases refuse an fp32 addend, and GPUs before Ampere may have
    it for float16 alone. Where torch sees no such device (a CPU build tracing a CUDA run with fake tensors)
    the answer is no.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    with _disable_current_modes(), torch.no_grad():
        ones = torch.ones(16, 16, dtype=dtype, device=device)
        total = torch.ones(16, 16, dtype=torch.float32, device=device)
        try:
            torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
        except (RuntimeError, NotImplementedError, TypeError):
            return False
        return bool((total == 17).all())


@dataclass(frozen=True, slots=True)
class Products:
    """Products on one device: sums in `wide`, weights widened `block_bytes` at a time."""

    wide: torch.dtype
    half_kernel: bool
    block_bytes: int
    half: torch.dtype | None = None
    """Of every operand, where products of halves are summed wide: gradients are rounded to it for them."""

    def add_logits_(self, logits_TV: Tensor, hidden_TD: Tensor, weight_VD: Tensor, *, first: bool) -> None:
        """Write (`first`) or add `hidden @ weight.T` to the wide `logits_TV`."""
        hidden_TD = self._ready(hidden_TD)
        for low, high, block_VD in self._blocks(weight_VD):
            _multiply_(logits_TV[:, low:high], hidden_TD, block_VD.t(), add=not first)

    def add_hidden_gradient_(self, total_TD: Tensor, grad_TV: Tensor, weight_VD: Tensor) -> None:
        """Add `grad @ weight` to the wide `total_TD`."""
        for low, high, block_VD in self._blocks(weight_VD):
            _multiply_(total_TD, grad_TV[:, low:high].to(block_VD.dtype), block_VD, add=True)

    def write_hidden_gradient_(self, out_TD: Tensor, grad_TV: Tensor, weight_VD: Tensor) -> None:
        """Write `grad @ weight` to `out_TD`, summed wide and rounded once to the dtype of `out_TD`."""
        if weight_VD.dtype == self.wide == out_TD.dtype:
            torch.mm(grad_TV, weight_VD, out=out_TD)
            return
        total_TD = torch.zeros(out_TD.shape, dtype=self.wide, device=out_TD.device)
        self.add_hidden_gradient_(total_TD, grad_TV, weight_VD)
        out_TD.copy_(total_TD)

    def add_weight_gradient_(self, total_VD: Tensor, grad_TV: Tensor, hidden_TD: Tensor) -> None:
        """Add `grad.T @ hidden` to the wide `total_VD`."""
        hidden_TD = self._ready(hidden_TD)
        _multiply_(total_VD, grad_TV.to(hidden_TD.dtype).t(), hidden_TD, add=True)

    def _ready(self, tensor: Tensor) -> Tensor:
        return tensor if self._as_is(tensor) else tensor.to(self.wide)

    def _as_is(self, tensor: Tensor) -> bool:
        return tensor.dtype == self.wide or (self.half_kernel and tensor.dtype in HALF)

    def _blocks(self, weight_VD: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, row after the last, rows) of the weight, each block ready to be multiplied."""
        num_rows, width = weight_VD.shape
        if self._as_is(weight_VD):
            yield 0, num_rows, weight_VD
            return
        step = max(1, self.block_bytes // (width * self.wide.itemsize))
        for low, high in spans(num_rows, step):
            yield low, high, weight_VD[low:high].to(self.wide)


def _multiply_(out: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
    if left.dtype == out.dtype:
        if add:
            out.addmm_(left, right)
        else:
            torch.mm(left, right, out=out)
    elif add:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
