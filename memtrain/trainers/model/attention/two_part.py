"""Attention over a flattened row in one autograd node: segments to themselves, completions to their prompt.

With windows (`windows`), caps and sinks (`score_rule`).

Source: the log-sum-exp merge is that of blockwise softmax (Dao et al. 2022, arXiv:2205.14135, section 3.1);
the backward is flash attention's (its Algorithm 4) run once per part with the *merged* output and
log-sum-exp, so that P = exp(s - lse) and D = rowsum(dO * O) are those of the whole row.
"""

# T: tokens, H: query heads, K: key heads, D: head width. lse: log-sum-exp of the scores.

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Layout, Part, Rows
from memtrain.trainers.model.attention.score_rule import PLAIN, ScoreRule, merge_sinks, sinks_gradient
from memtrain.trainers.model.attention.windows import Windowed, pattern_of


class Kernel(Protocol):
    """Attention of a back end from query to key segments, without autograd. Heads may be grouped (H > K)."""

    @staticmethod
    def forward(
        query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor]:
        """`out_THD` in the query's dtype, and `lse_HT` in fp32 (fp64 for fp64)."""
        ...

    @staticmethod
    def backward(
        grad_THD: Tensor,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        part: Part,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key, value, given the final output and (contiguous) lse of the row."""
        ...


class TwoPartAttention(torch.autograd.Function):
    """Exact attention of a `Layout` under a `ScoreRule`; saves query, key, value, output and lse once.

    Differentiating through each part's own (out, lse) and merging those in autograd is the trap to avoid: the
    flash kernels drop the gradient of lse, which leaves the forward perfect and dq, dk about 20 % wrong
    (measured: CPU).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        sinks_H: Tensor | None,
        pattern: Windowed,
        scale: float,
        kernel: type[Kernel],
    ) -> Tensor:
        """`out_THD`, in the query's dtype."""
        out_THD, lse_HT = kernel.forward(query_THD, key_TKD, value_TKD, pattern.within, scale)
        for queries, keys, part in pattern.reaches:
            there = kernel.forward(query_THD[queries], key_TKD[keys], value_TKD[keys], part, scale)
            merge_rows(out_THD, lse_HT, *there, queries)
        if sinks_H is not None:
            merge_sinks(out_THD, lse_HT, sinks_H)
        ctx.save_for_backward(query_THD, key_TKD, value_TKD, sinks_H, out_THD, lse_HT)
        ctx.pattern, ctx.scale, ctx.kernel = pattern, scale, kernel
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value and sinks; none for the rest."""
        query_THD, key_TKD, value_TKD, sinks_H, out_THD, lse_HT = ctx.saved_tensors
        pattern: Windowed = ctx.pattern
        kernel: type[Kernel] = ctx.kernel
        grad_THD = grads[0].contiguous()
        dq_THD, dk_TKD, dv_TKD = kernel.backward(
            grad_THD, query_THD, key_TKD, value_TKD, out_THD, lse_HT, pattern.within, ctx.scale
        )
        for queries, keys, part in pattern.reaches:
            dq_there, dk_there, dv_there = kernel.backward(
                grad_THD[queries],
                query_THD[queries],
                key_TKD[keys],
                value_TKD[keys],
                out_THD[queries],
                lse_HT[:, queries].contiguous(),
                part,
                ctx.scale,
            )
            dq_THD[queries] += dq_there
            dk_TKD[keys] += dk_there
            dv_TKD[keys] += dv_there
        d_sinks_H = None if sinks_H is None else sinks_gradient(grad_THD, out_THD, lse_HT, sinks_H)
        return dq_THD, dk_TKD, dv_TKD, d_sinks_H, None, None, None


def attend_in_parts(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    layout: Layout,
    scale: float,
    rule: ScoreRule,
    kernel: type[Kernel],
) -> Tensor:
    """`out_THD` of the row by a kernel, differentiable."""
    pattern = pattern_of(layout, rule.window)
    out_THD: Tensor = TwoPartAttention.apply(
        query_THD, key_TKD, value_TKD, rule.sinks_H, pattern, scale, capped(kernel, rule.softcap)
    )
    return out_THD


class RowAttention(Protocol):
    """Attention of a row under a rule, differentiable."""

    def __call__(
        self,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        layout: Layout,
        scale: float,
        rule: ScoreRule = PLAIN,
    ) -> Tensor:
        """`out_THD` of the row."""
        ...


def attend_by(kernel: type[Kernel]) -> RowAttention:
    """The attention of a back end, by its kernel."""

    def attend(
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        layout: Layout,
        scale: float,
        rule: ScoreRule = PLAIN,
    ) -> Tensor:
        return attend_in_parts(query_THD, key_TKD, value_TKD, layout, scale, rule, kernel)

    return attend


def capped(kernel: type[Kernel], softcap: float | None) -> type[Kernel]:
    """The kernel with a cap of its scores, which it must have a form for."""
    if softcap is None:
        return kernel
    assert hasattr(kernel, "softcap"), f"{kernel.__name__} caps no scores."
    return cast(type[Kernel], type(kernel.__name__, (kernel,), {"softcap": softcap}))


def merge_rows(
    out_THD: Tensor, lse_HT: Tensor, other_out_THD: Tensor, other_lse_HT: Tensor, rows: Rows
) -> None:
    """`rows` of out and lse become the softmax over their own and the others' keys, summed in lse's dtype."""
    own_lse_HT = lse_HT[:, rows]
    merged_lse_HT = torch.logaddexp(own_lse_HT, other_lse_HT)
    own_weight_TH1 = (own_lse_HT - merged_lse_HT).exp().t()[..., None]
    other_weight_TH1 = (other_lse_HT - merged_lse_HT).exp().t()[..., None]
    merged_THD = other_out_THD.to(lse_HT.dtype).mul_(other_weight_TH1)
    merged_THD.addcmul_(out_THD[rows].to(lse_HT.dtype), own_weight_TH1)
    out_THD[rows] = merged_THD.to(out_THD.dtype)
    lse_HT[:, rows] = merged_lse_HT
