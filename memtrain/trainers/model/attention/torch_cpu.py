"""The CPU back end: a loop over segments on torch's CPU flash kernel; nothing of size T x T is ever built."""

from __future__ import annotations

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Layout
from memtrain.trainers.model.attention.segment_loop import SegmentLoop, rows_of
from memtrain.trainers.model.attention.two_part import PLAIN, ScoreRule, attend_in_parts

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


def attend(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    layout: Layout,
    scale: float,
    rule: ScoreRule = PLAIN,
) -> Tensor:
    """`out_THD` of the row, differentiable; by torch's own derivative where one call of the kernel gives it.

    The same calls and bits as `two_part` makes of it, without a fifth of a millisecond of Python each way.
    """
    if rule is PLAIN and layout.to_prompt is None:
        calls = TorchCpu.calls_of(query_THD, key_TKD, layout.within)
        if calls.is_one:
            (query_SHLD,), (key_SKLD,) = calls.queries(query_THD), calls.keys(key_TKD)
            (value_SKLD,) = calls.keys(value_TKD)
            out_SHLD, _ = TorchCpu.attended(query_SHLD, key_SKLD, value_SKLD, is_causal=True, scale=scale)
            return rows_of(out_SHLD)
    return attend_in_parts(query_THD, key_TKD, value_TKD, layout, scale, rule, TorchCpu)
