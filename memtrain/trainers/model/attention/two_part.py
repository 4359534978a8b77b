"""Attention over a flattened row in one autograd node: segments to themselves, completions to their prompt.

Source: the log-sum-exp merge is that of blockwise softmax (Dao et al. 2022, arXiv:2205.14135, section 3.1);
the backward is flash attention's (its Algorithm 4) run once per part with the *merged* output and
log-sum-exp, so that P = exp(s - lse) and D = rowsum(dO * O) are those of the whole row.
"""

# T: tokens, H: query heads, K: key heads, D: head width. lse: log-sum-exp of the scores.

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Layout, Part


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
    """Exact attention of a `Layout`; saves query, key, value, output and lse once.

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
        layout: Layout,
        scale: float,
        kernel: type[Kernel],
    ) -> Tensor:
        """`out_THD`, in the query's dtype."""
        out_THD, lse_HT = kernel.forward(query_THD, key_TKD, value_TKD, layout.within, scale)
        if layout.to_prompt is not None:
            P = layout.num_prompt_tokens
            prompt_out_THD, prompt_lse_HT = kernel.forward(
                query_THD[P:], key_TKD[:P], value_TKD[:P], layout.to_prompt, scale
            )
            merge_rows(out_THD, lse_HT, prompt_out_THD, prompt_lse_HT, slice(P, None))
        ctx.save_for_backward(query_THD, key_TKD, value_TKD, out_THD, lse_HT)
        ctx.layout, ctx.scale, ctx.kernel = layout, scale, kernel
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value; none for the rest."""
        query_THD, key_TKD, value_TKD, out_THD, lse_HT = ctx.saved_tensors
        layout: Layout = ctx.layout
        kernel: type[Kernel] = ctx.kernel
        grad_THD = grads[0].contiguous()
        dq_THD, dk_TKD, dv_TKD = kernel.backward(
            grad_THD, query_THD, key_TKD, value_TKD, out_THD, lse_HT, layout.within, ctx.scale
        )
        if layout.to_prompt is not None:
            P = layout.num_prompt_tokens
            dq_tail, dk_head, dv_head = kernel.backward(
                grad_THD[P:],
                query_THD[P:],
                key_TKD[:P],
                value_TKD[:P],
                out_THD[P:],
                lse_HT[:, P:].contiguous(),
                layout.to_prompt,
                ctx.scale,
            )
            dq_THD[P:] += dq_tail
            dk_TKD[:P] += dk_head
            dv_TKD[:P] += dv_head
        return dq_THD, dk_TKD, dv_TKD, None, None, None


def merge_rows(
    out_THD: Tensor, lse_HT: Tensor, other_out_THD: Tensor, other_lse_HT: Tensor, rows: slice
) -> None:
    """`rows` of out and lse become the softmax over their own and the others' keys, summed in lse's dtype."""
    own_lse_HT = lse_HT[:, rows]
    merged_lse_HT = torch.logaddexp(own_lse_HT, other_lse_HT)
    own_weight_TH1 = (own_lse_HT - merged_lse_HT).exp().t()[..., None]
    other_weight_TH1 = (other_lse_HT - merged_lse_HT).exp().t()[..., None]
    merged_THD = other_out_THD.to(lse_HT.dtype).mul_(other_weight_TH1)
    merged_THD = torch.addcmul(merged_THD, out_THD[rows].to(lse_HT.dtype), own_weight_TH1)
    out_THD[rows] = merged_THD
    lse_HT[:, rows] = merged_lse_HT
