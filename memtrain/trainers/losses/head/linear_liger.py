"""The weighted NLL by Liger's fused kernel (CUDA, liger-kernel), interchangeable with ours."""

# N scored tokens, V vocabulary, D hidden size

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from memtrain.errors import LaunchError
from memtrain.trainers.losses.head.linear import (
    SUM_ALONE,
    LogprobOptions,
    NllOptions,
    NllResult,
    Pairs,
    linear_logprob,
)
from memtrain.trainers.losses.head.tiles import PLAIN_LOGITS, LogitRule

MODULE = "liger_kernel.ops.fused_linear_cross_entropy"


def liger_nll(
    pairs: Pairs,
    targets_N: Tensor,
    weights_N: Tensor,
    rule: LogitRule = PLAIN_LOGITS,
    options: NllOptions = SUM_ALONE,
    *,
    bias: Tensor | None = None,
) -> NllResult:
    """The weighted NLL of `linear_nll`, computed by Liger; gradients accumulate in float32.

    Where every token has the same weight (`weight_of_all`) gradients are made in the forward pass; else Liger
    recomputes its chunks in the backward pass. The rule's tiles are those of our own pass without gradients,
    which makes the figures of `want_stats`; the size of its chunks is Liger's own business.
    Source: Hsu et al. 2024, arXiv:2410.10989, section 3.2 (FusedLinearCrossEntropy).

    Raises: LaunchError for an adapter on the LM head: its logits are a sum of products.
    """
    assert rule.temperature == 1.0, "Liger's kernel knows no temperature."
    hidden_ND, weight_VD = _only(pairs)
    kernel: Any = import_module(MODULE).LigerFusedLinearCrossEntropyFunction
    weight_of_all = options.weight_of_all
    reduction = "none" if weight_of_all is None else "sum"
    scaled_ND = hidden_ND * rule.scale if rule.scale != 1.0 else hidden_ND
    first, *_ = kernel.apply(
        scaled_ND,
        weight_VD,
        targets_N,
        bias,
        None,
        -100,
        options.z_loss,
        options.label_smoothing,
        reduction,
        rule.softcap,
        False,
        torch.float32,
    )
    loss = (first * weights_N).sum() if weight_of_all is None else first * weight_of_all
    if not options.want_stats:
        return NllResult(loss, None, None, None)
    asked = LogprobOptions(want_entropy=True)
    with torch.no_grad():
        scores = linear_logprob([(hidden_ND, weight_VD)], targets_N, rule, asked, bias=bias)
    return NllResult(loss, scores.logp_N, scores.entropy_N, None)


def _only(pairs: Pairs) -> tuple[Tensor, Tensor]:
    if len(pairs) != 1:
        raise LaunchError(
            "Liger's loss computes a plain LM head, and this one has an adapter",
            "memory.loss",
            "set memory.loss: chunked, or leave lm_head out of the adapter",
        )
    return pairs[0]
