"""Attention over the slice of a row that one rank holds, to keys of the whole row: context parallelism.

In every layer the ranks of a group gather the keys and values that a query of another slice looks back on,
attend, and let them go again; the backward pass gathers them once more, and sums their gradients back to the
ranks that hold them (in float32 at least). So no rank ever keeps more than its slice, and no document sees
another: a row is cut by its `Layout`, not by a causal mask.

Source: keys and values gathered as in Llama 3 (arXiv:2407.21783, section 3.3.2); the parts are merged by
their log-sum-exp as in two_part.
"""

# T: tokens of the slice, M: gathered tokens, C: most of them from one rank, H: query heads, K: key heads,
# D: head width. lse: log-sum-exp of the scores.

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.attention.two_part import (
    PLAIN,
    Kernel,
    Reach,
    ScoreRule,
    capped,
    merge_rows,
    merge_sinks,
    sinks_gradient,
)
from memtrain.trainers.model.context_parallel.row_slices import SlicedLayout
from memtrain.trainers.model.context_parallel.windowed_rows import under_window

KERNELS = {
    AttentionBackend.TORCH_CPU: "TorchCpu",
    AttentionBackend.TORCH_VARLEN: "TorchFlash",
    AttentionBackend.FLASH3: "HopperFlash",
    AttentionBackend.FLASH: "PackageFlash",
    AttentionBackend.TORCH_EFFICIENT: "MemoryEfficient",
    AttentionBackend.MASKED: "MaskedScores",
}
"""The kernel of each back end that gives the log-sum-exp of its scores."""
HOLDS_SCORES = (AttentionBackend.MASKED,)
"""Back ends that hold all scores of a call: they take few keys at a time."""


def attend_sliced(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    layout: SlicedLayout,
    scale: float,
    backend: AttentionBackend,
    rule: ScoreRule = PLAIN,
) -> Tensor:
    """`out_THD` of the slice under a layer's rule of its scores, differentiable; called by all ranks of the
    group together."""
    module = import_module(f"memtrain.trainers.model.attention.{backend}")
    kernel = capped(getattr(module, KERNELS[backend]), rule.softcap)
    layout = under_window(layout, rule.window)
    out_THD: Tensor = SlicedAttention.apply(
        query_THD, key_TKD, value_TKD, rule.sinks_H, layout, scale, kernel
    )
    return out_THD


class SlicedAttention(torch.autograd.Function):
    """Exact attention of a `SlicedLayout`; saves the slice's query, key, value, output and lse."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        sinks_H: Tensor | None,
        layout: SlicedLayout,
        scale: float,
        kernel: type[Kernel],
    ) -> Tensor:
        """`out_THD`, in the query's dtype."""
        out_THD, lse_HT = kernel.forward(query_THD, key_TKD, value_TKD, layout.within, scale)
        for queries, keys, part in layout.own_reaches:
            there = kernel.forward(query_THD[queries], key_TKD[keys], value_TKD[keys], part, scale)
            merge_rows(out_THD, lse_HT, *there, queries)
        if layout.num_gathered_kv:
            keys_MKD, values_MKD = gathered(key_TKD, value_TKD, layout)
            for queries, keys, part in layout.reaches:
                there = kernel.forward(query_THD[queries], keys_MKD[keys], values_MKD[keys], part, scale)
                merge_rows(out_THD, lse_HT, *there, queries)
        if sinks_H is not None:
            merge_sinks(out_THD, lse_HT, sinks_H)
        ctx.save_for_backward(query_THD, key_TKD, value_TKD, sinks_H, out_THD, lse_HT)
        ctx.layout, ctx.scale, ctx.kernel = layout, scale, kernel
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value and sinks; none for the rest."""
        query_THD, key_TKD, value_TKD, sinks_H, out_THD, lse_HT = ctx.saved_tensors
        layout: SlicedLayout = ctx.layout
        kernel: type[Kernel] = ctx.kernel
        grad_THD = grads[0].contiguous()
        dq_THD, dk_TKD, dv_TKD = kernel.backward(
            grad_THD, query_THD, key_TKD, value_TKD, out_THD, lse_HT, layout.within, ctx.scale
        )
        d_sinks_H = None if sinks_H is None else sinks_gradient(grad_THD, out_THD, lse_HT, sinks_H)
        of_queries = grad_THD, query_THD, out_THD, lse_HT, dq_THD
        own = key_TKD, value_TKD, dk_TKD, dv_TKD
        _add_reaches(kernel, layout.own_reaches, of_queries, own, ctx.scale)
        if layout.num_gathered_kv:
            keys_MKD, values_MKD = gathered(key_TKD, value_TKD, layout)
            wide = torch.promote_types(key_TKD.dtype, torch.float32)
            dk_MKD = torch.zeros_like(keys_MKD, dtype=wide)
            dv_MKD = torch.zeros_like(values_MKD, dtype=wide)
            there = keys_MKD, values_MKD, dk_MKD, dv_MKD
            _add_reaches(kernel, layout.reaches, of_queries, there, ctx.scale)
            del keys_MKD, values_MKD, there
            dk_TKD = returned(dk_TKD, dk_MKD, layout)
            dv_TKD = returned(dv_TKD, dv_MKD, layout)
        return dq_THD, dk_TKD, dv_TKD, d_sinks_H, None, None, None


def _add_reaches(
    kernel: type[Kernel],
    reaches: tuple[Reach, ...],
    of_queries: tuple[Tensor, ...],
    of_keys: tuple[Tensor, ...],
    scale: float,
) -> None:
    """Add what some reaches give to the gradients of queries, keys and values: the last of `of_queries`, and
    the last two of `of_keys`."""
    grad_THD, query_THD, out_THD, lse_HT, dq_THD = of_queries
    key_MKD, value_MKD, dk_MKD, dv_MKD = of_keys
    for queries, keys, part in reaches:
        dq_there, dk_there, dv_there = kernel.backward(
            grad_THD[queries],
            query_THD[queries],
            key_MKD[keys],
            value_MKD[keys],
            out_THD[queries],
            lse_HT[:, queries].contiguous(),
            part,
            scale,
        )
        dq_THD[queries] += dq_there
        dk_MKD[keys] += dk_there
        dv_MKD[keys] += dv_there


def gathered(key_TKD: Tensor, value_TKD: Tensor, layout: SlicedLayout) -> tuple[Tensor, Tensor]:
    """Keys and values of the M tokens that some slice looks back on, in the order of the row."""
    both_CK2D = torch.cat([key_TKD[layout.sent], value_TKD[layout.sent]], -1)
    both_MK2D = layout.ranks.gather(both_CK2D)[layout.order]
    D = key_TKD.shape[-1]
    return both_MK2D[..., :D], both_MK2D[..., D:]


def returned(own_TKD: Tensor, there_MKD: Tensor, layout: SlicedLayout) -> Tensor:
    """The slice's own gradient, and the sum over all ranks for its tokens, in the dtype of the first."""
    num_rows = layout.ranks.size * len(layout.sent)
    arriving = there_MKD.new_zeros(num_rows, *there_MKD.shape[1:])
    arriving[layout.order] = there_MKD
    summed_CKD = layout.ranks.scatter(arriving)[: layout.num_sent]
    return (
        own_TKD.to(summed_CKD.dtype)
        .index_add(0, layout.sent[: layout.num_sent], summed_CKD)
        .to(own_TKD.dtype)
    )
