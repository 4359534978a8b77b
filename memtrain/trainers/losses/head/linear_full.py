"""The plain form of the head losses: all logits at once. The `full` strategy, and what tests compare with."""

# N scored tokens, V vocabulary, D width of one pair

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from memtrain.trainers.losses.head.linear import (
    LOGPROBS_ALONE,
    LogprobOptions,
    LogprobResult,
    NllResult,
    Pairs,
)
from memtrain.trainers.losses.head.linear_nll import SUM_ALONE, NllOptions
from memtrain.trainers.losses.head.products import wide_dtype
from memtrain.trainers.losses.head.tiles import PLAIN_LOGITS, LogitRule


def full_logits(pairs: Pairs, rule: LogitRule = PLAIN_LOGITS, *, bias: Tensor | None = None) -> Tensor:
    """Logits [N, V], fp32 (fp64 when an operand is), each product in the dtype of its operands."""
    wide = wide_dtype(*(t for pair in pairs for t in pair))
    outputs = []
    for hidden, weight in pairs:
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        outputs.append(F.linear(hidden.to(dtype), weight.to(dtype)).to(wide))
    total_NV = torch.stack(outputs).sum(0) if len(outputs) > 1 else outputs[0]
    if bias is not None:
        total_NV = total_NV + bias
    total_NV = total_NV * rule.scale
    if rule.softcap is not None:
        total_NV = rule.softcap * torch.tanh(total_NV / rule.softcap)
    return total_NV / rule.temperature


def full_logprob(
    pairs: Pairs,
    targets_N: Tensor,
    rule: LogitRule = PLAIN_LOGITS,
    options: LogprobOptions = LOGPROBS_ALONE,
    *,
    bias: Tensor | None = None,
) -> LogprobResult:
    """Log-probs as `linear_logprob` gives them, with all logits held in place of tiles."""
    logits_NV = full_logits(pairs, rule, bias=bias)
    logp_NV = logits_NV.log_softmax(-1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(-1) if options.want_entropy else None
    squares_N = (2.0 * logp_NV.detach()).logsumexp(-1) if options.want_log_sum_squares else None
    return LogprobResult(logp_NV.gather(1, targets_N[:, None])[:, 0], entropy_N, squares_N)


def full_nll(
    pairs: Pairs,
    targets_N: Tensor,
    weights_N: Tensor,
    rule: LogitRule = PLAIN_LOGITS,
    options: NllOptions = SUM_ALONE,
    *,
    bias: Tensor | None = None,
) -> NllResult:
    """Loss as `linear_nll` gives it, by torch's cross_entropy, with all logits held in place of tiles."""
    logits_NV = full_logits(pairs, rule, bias=bias)
    loss_N = F.cross_entropy(logits_NV, targets_N, reduction="none", label_smoothing=options.label_smoothing)
    if options.z_loss:
        loss_N = loss_N + options.z_loss * logits_NV.logsumexp(-1).square()
    loss = (loss_N * weights_N).sum()
    if not options.want_stats:
        return NllResult(loss, None, None, None)
    logp_NV = logits_NV.detach().log_softmax(-1)
    target_N1 = targets_N[:, None]
    return NllResult(
        loss,
        logp_NV.gather(1, target_N1)[:, 0],
        -(logp_NV.exp() * logp_NV).sum(-1),
        logits_NV.detach().gather(1, target_N1)[:, 0] >= logits_NV.detach().amax(-1),
    )
