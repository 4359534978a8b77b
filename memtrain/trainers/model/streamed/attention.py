"""Attention from one slice of a row to itself and to the keys and values that earlier slices left.

The parts are merged by their log-sum-exp. In the backward pass, which meets the slices from the last to the
first, gradients of earlier keys go straight into the layer's sums, and a slice's own keys get what later
slices left there; so autograd never sees the keys of the whole row.

Source: StreamBP, arXiv:2506.03077 (a part of the sequence attends to the keys before it); the merge as in
two_part.
"""

# S: tokens of the slice, H: query heads, K: key heads, D: head width. lse: log-sum-exp of the scores.

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.attention.masked import MaskedScores
from memtrain.trainers.model.attention.row_layout import Part
from memtrain.trainers.model.attention.sliced import HOLDS_SCORES, KERNELS
from memtrain.trainers.model.attention.torch_cpu import TorchCpu
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
from memtrain.trainers.model.streamed.layer_keys import KeysKnown, LayerKeys, SliceLayout
from memtrain.trainers.model.streamed.wide_products import HALF


def attend_streamed(
    query_SHD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    layout: SliceLayout,
    scale: float,
    backend: AttentionBackend,
    rule: ScoreRule = PLAIN,
) -> Tensor:
    """`out_SHD` of the slice under a layer's rule of its scores, differentiable.

    Raises: KeysKnown when the pass over the slice was for its keys and values alone.
    """
    module = import_module(f"memtrain.trainers.model.attention.{backend}")
    kernel = capped(getattr(module, KERNELS[backend]), rule.softcap)
    layout = layout.under(rule.window)
    part, keys = layout.part, layout.keys
    keys.window = rule.window
    reaches = part.key_blocks if backend in HOLDS_SCORES else part.reaches
    if keys.stops and torch.is_grad_enabled():
        keys.met = key_SKD, value_SKD
        raise KeysKnown
    if not torch.is_grad_enabled():
        keys.put(slice(part.begin, part.end), key_SKD, value_SKD)
        if keys.stops:
            raise KeysKnown
        return _attended(query_SHD, key_SKD, value_SKD, rule.sinks_H, layout, reaches, scale, kernel)[0]
    out_SHD: Tensor = SliceAttention.apply(
        query_SHD, key_SKD, value_SKD, rule.sinks_H, layout, reaches, scale, kernel
    )
    return out_SHD


WIDENED = (TorchCpu, MaskedScores)
"""Kernels that take float32 as they take half precision."""


class _Widened:
    """A kernel on float32 copies of half-precision numbers: partial results that nothing has rounded.

    What a query gets from the keys before its slice and from those in it nearly cancels (gradients of its
    scores sum to zero over all its keys), so that rounding each part is far more than rounding the sum.
    """

    def __init__(self, kernel: type[Kernel]) -> None:
        self.kernel = kernel

    def forward(
        self, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `two_part.Kernel`; the output in float32."""
        return self.kernel.forward(query_SHD.float(), key_SKD.float(), value_SKD.float(), part, scale)

    def backward(
        self,
        grad_SHD: Tensor,
        query_SHD: Tensor,
        key_SKD: Tensor,
        value_SKD: Tensor,
        out_SHD: Tensor,
        lse_HS: Tensor,
        part: Part,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `two_part.Kernel`; gradients in float32."""
        grad, query, key = grad_SHD.float(), query_SHD.float(), key_SKD.float()
        value, out = value_SKD.float(), out_SHD.float()
        return self.kernel.backward(grad, query, key, value, out, lse_HS, part, scale)


def _for_parts(kernel: type[Kernel], query_SHD: Tensor, layout: SliceLayout) -> type[Kernel]:
    """The kernel for a slice: a CPU's kernels widen where results of several parts are summed.

    Flash kernels give half precision alone, whatever they sum in.
    """
    is_cut = layout.part.key_blocks or layout.part.gathered
    if is_cut and query_SHD.dtype in HALF and query_SHD.device.type == "cpu" and issubclass(kernel, WIDENED):
        return cast(type[Kernel], _Widened(kernel))
    return kernel


def _attended(
    query_SHD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    sinks_H: Tensor | None,
    layout: SliceLayout,
    reaches: tuple[Reach, ...],
    scale: float,
    kernel: type[Kernel],
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the slice's queries; `reaches`: the tokens before the slice that they attend
    to."""
    kernel = _for_parts(kernel, query_SHD, layout)
    out_SHD, lse_HS = kernel.forward(query_SHD, key_SKD, value_SKD, layout.part.within, scale)
    for keys, (queries, rows, reach) in _met(layout, reaches):
        there = kernel.forward(query_SHD[queries], *keys.held(rows), reach, scale)
        merge_rows(out_SHD, lse_HS, *there, queries)
    if sinks_H is not None:
        merge_sinks(out_SHD, lse_HS, sinks_H)
    return out_SHD.to(query_SHD.dtype), lse_HS


def _met(layout: SliceLayout, reaches: tuple[Reach, ...]) -> Iterator[tuple[LayerKeys, Reach]]:
    """Keys outside the slice: of the row or a rank's part of it, and those that ranks gather."""
    yield from ((layout.keys, reach) for reach in reaches)
    if layout.keys.there is not None:
        yield from ((layout.keys.there, reach) for reach in layout.part.gathered)


class SliceAttention(torch.autograd.Function):
    """Exact attention of one slice; saves its query, output and lse. Its keys are those of the layer."""

    @staticmethod
    def forward(
        ctx: Any,
        query_SHD: Tensor,
        key_SKD: Tensor,
        value_SKD: Tensor,
        sinks_H: Tensor | None,
        layout: SliceLayout,
        reaches: tuple[Reach, ...],
        scale: float,
        kernel: type[Kernel],
    ) -> Tensor:
        """`out_SHD`, in the query's dtype."""
        part, keys = layout.part, layout.keys
        own = slice(part.begin, part.end)
        # The last slice of a row is met here first: nobody made its keys before.
        keys.put(own, key_SKD, value_SKD)
        own_key_SKD, own_value_SKD = keys.held(own)
        out_SHD, lse_HS = _attended(
            query_SHD, own_key_SKD, own_value_SKD, sinks_H, layout, reaches, scale, kernel
        )
        ctx.save_for_backward(query_SHD, sinks_H, out_SHD, lse_HS)
        ctx.layout, ctx.scale, ctx.kernel = layout, scale, kernel
        return out_SHD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value, with later slices' parts, and sinks; none for the rest."""
        query_SHD, sinks_H, out_SHD, lse_HS = ctx.saved_tensors
        layout: SliceLayout = ctx.layout
        kernel = _for_parts(ctx.kernel, query_SHD, layout)
        part, keys = layout.part, layout.keys
        own = slice(part.begin, part.end)
        needs_keys = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        grad_SHD = grads[0].contiguous()
        dq_SHD, dk_SKD, dv_SKD = kernel.backward(
            grad_SHD, query_SHD, *keys.held(own), out_SHD, lse_HS, part.within, ctx.scale
        )
        dtype = query_SHD.dtype
        if needs_keys:
            keys.add_gradients(own, dk_SKD, dv_SKD)
        # A name that outlives its use holds what the next kernel call could take.
        del dk_SKD, dv_SKD
        wide = torch.promote_types(dtype, torch.float32)
        sum_SHD = dq_SHD.to(wide) if part.key_blocks or part.gathered else dq_SHD
        del dq_SHD
        for there, (queries, rows, block) in _met(layout, part.key_blocks):
            dq_there, dk_there, dv_there = kernel.backward(
                grad_SHD[queries],
                query_SHD[queries],
                *there.held(rows),
                out_SHD[queries],
                lse_HS[:, queries].contiguous(),
                block,
                ctx.scale,
            )
            sum_SHD[queries] += dq_there
            if needs_keys:
                there.add_gradients(rows, dk_there, dv_there)
            del dq_there, dk_there, dv_there
        # Gradients from other ranks come after all slices: own ones wait for them.
        is_whole = needs_keys and keys.there is None
        own_grads = keys.gradients(own, dtype) if is_whole else (None, None)
        d_sinks_H = None if sinks_H is None else sinks_gradient(grad_SHD, out_SHD, lse_HS, sinks_H)
        return sum_SHD.to(dtype), *own_grads, d_sinks_H, None, None, None, None
