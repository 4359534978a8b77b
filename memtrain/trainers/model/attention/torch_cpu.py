"""The CPU back end: a loop over segments on torch's CPU flash kernel; nothing of size T x T is ever built."""

# T: tokens, L: tokens of one segment, H: query heads, K: key heads, G = H / K, D: head width.

from __future__ import annotations

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Layout
from memtrain.trainers.model.attention.score_rule import PLAIN, ScoreRule
from memtrain.trainers.model.attention.segment_loop import SegmentLoop
from memtrain.trainers.model.attention.two_part import attend_in_parts

aten = torch.ops.aten


def attend(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    layout: Layout,
    scale: float,
    rule: ScoreRule = PLAIN,
) -> Tensor:
    """`out_THD` of the row, differentiable; fp64, fp32, bf16 or fp16."""
    return attend_in_parts(query_THD, key_TKD, value_TKD, layout, scale, rule, TorchCpu)


class TorchCpu(SegmentLoop):
    """Segments on the CPU's flash kernel."""

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
