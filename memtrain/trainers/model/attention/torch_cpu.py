"""The CPU back end: a loop over segments on torch's CPU flash kernel; nothing of size T x T is ever built."""

from __future__ import annotations

import torch
from torch import Tensor

from memtrain.trainers.model.attention.segment_loop import SegmentLoop
from memtrain.trainers.model.attention.two_part import attend_by

aten = torch.ops.aten


class TorchCpu(SegmentLoop):
    """Segments on the CPU's flash kernel."""

    @classmethod
    def shares_keys(cls, dtype: torch.dtype) -> bool:
        """See `SegmentLoop`. Not in half precision, where the kernel rounds after each head of a group."""
        return dtype in (torch.float32, torch.float64)

    @classmethod
    def attended(cls, *segment: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `SegmentLoop`."""
        return aten._scaled_dot_product_flash_attention_for_cpu(
            *segment, 0.0, is_causal, attn_mask=None, scale=scale
        )

    @classmethod
    def gradients(cls, *segment: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `SegmentLoop`."""
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *segment, 0.0, is_causal, attn_mask=None, scale=scale
        )


attend = attend_by(TorchCpu)
