"""Weights in 8 bits by row: int8, and a float32 scale for each row of the stored matrix.

Source: Dettmers et al. 2022, arXiv:2208.07339, section 2.1; the numbers are those that bitsandbytes stores
of a linear map (int8_vectorwise_quant without outliers). Products are not in int8: the weight is widened for
them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Int8(NamedTuple):
    """A packed weight."""

    codes: Tensor
    """int8, of the weight's shape."""
    scales: Tensor
    """float32: the largest magnitude of each row."""


@torch.no_grad()
def pack(weight: Tensor) -> Int8:
    """`weight` [..., rows, columns] in 8 bits."""
    scales = weight.detach().abs().amax(-1).float()
    scaled = weight.detach().float() * (127.0 / scales[..., None])
    return Int8(scaled.nan_to_num_(0.0).round_().to(torch.int8), scales)


@torch.no_grad()
def unpack(packed: Int8, dtype: torch.dtype) -> Tensor:
    """The weight, each number rounded once to `dtype`."""
    # Codes are exact in any of these precisions; the product is computed in float32.
    return packed.codes.to(dtype).mul_(packed.scales[..., None] * (1.0 / 127.0))
