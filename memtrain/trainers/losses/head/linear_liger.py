"""The weighted NLL by Liger's fused kernel (CUDA, liger-kernel), interchangeable with ours."""

# N scored tokens, V vocabulary, D hidden size

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from memtrain.errors import LaunchError
from memtrain.trainers.losses.head.linear import NllResult, Pairs, linear_logprob
from memtrain.trainers.losses.head.tiles import TILE_BYTES

MODULE = "liger_kernel.ops.fused_linear_cross_entropy"


def liger_nll(
    pairs: Pairs,
    targets_N: Tensor,
    weights_N: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    want_stats: bool = False,
    tile_bytes: int = TILE_BYTES,
    weight_of_all: float | None = None,
) -> NllResult:
    """Loss as `linear_nll` gives it, computed by Liger; gradients accumulate in float32.

    weight_of_all: the weight, where every token has the same: gradients are then made in the forward pass.
        Otherwise Liger recomputes its chunks in the backward pass.
    tile_bytes: of our own pass without gradients, which the figures of `want_stats` come from; how large its
        chunks are is Liger's own business.
    Source: Hsu et al. 2024, arXiv:2410.10989, section 3.2 (FusedLinearCrossEntropy).

    Raises: LaunchError for an adapter on the LM head: its logits are a sum of products.
    """
    hidden_ND, weight_VD = _only(pairs)
    kernel: Any = import_module(MODULE).LigerFusedLinearCrossEntropyFunction
    reduction = "none" if weight_of_all is None else "sum"
    scaled_ND = hidden_ND * scale if scale != 1.0 else hidden_ND
    first, *_ = kernel.apply(
        scaled_ND,
        weight_VD,
        targets_N,
        bias,
        None,
        -100,
        z_loss,
        label_smoothing,
        reduction,
        softcap,
        False,
        torch.float32,
    )
    loss = (first * weights_N).sum() if weight_of_all is None else first * weight_of_all
    if not want_stats:
        return NllResult(loss, None, None, None)
    with torch.no_grad():
        scores = linear_logprob(
            [(hidden_ND, weight_VD)],
            targets_N,
            bias=bias,
            softcap=softcap,
            scale=scale,
            want_entropy=True,
            tile_bytes=tile_bytes,
        )
    return NllResult(loss, scores.logp_N, scores.entropy_N, None)


def _only(pairs: Pairs) -> tuple[Tensor, Tensor]:
    if len(pairs) != 1:
        raise LaunchError(
            "Liger's loss takes one LM head, and an adapter adds a second product to it",
            "memory.loss",
            "set memory.loss: chunked, or leave lm_head out of the adapter",
        )
    return pairs[0]
