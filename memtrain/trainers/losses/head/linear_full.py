"""The plain form of the head losses: all logits at once. The `full` strategy, and what tests compare with."""

# N scored tokens, T tokens of one tile, V vocabulary, D width of one pair

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
from memtrain.trainers.losses.head.spans import spans
from memtrain.trainers.losses.head.tiles import PLAIN_LOGITS, LogitRule, num_tile_tokens


def full_logits(pairs: Pairs, rule: LogitRule = PLAIN_LOGITS, *, bias: Tensor | None = None) -> Tensor:
    """Logits [N, V], fp32 (fp64 when an operand is), each product in the dtype of its operands."""
    wide = wide_dtype(*(t for pair in pairs for t in pair))
    outputs = []
    for hidden, weight in pairs:
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        outputs.append(F.linear(hidden.to(dtype), weight.to(dtype)).to(wide))
    total_NV = torch.stack(outputs).sum(0) if len(outputs) > 1 else outputs[0]
    del outputs
    if bias is not None:
        total_NV = total_NV + bias
    if rule.scale != 1.0:
        total_NV = total_NV * rule.scale
    if rule.softcap is not None:
        total_NV = rule.softcap * torch.tanh(total_NV / rule.softcap)
    return total_NV if rule.temperature == 1.0 else total_NV / rule.temperature


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
    return NllResult(loss, *_stats(logits_NV.detach(), targets_N, rule))


def _stats(logits_NV: Tensor, targets_N: Tensor, rule: LogitRule) -> tuple[Tensor, Tensor, Tensor]:
    """(log p, entropy, top-1 hit) of each token, from a tile of the logits at a time: three copies of it."""
    logp_N, entropy_N = (torch.empty_like(logits_NV[:, 0]) for _ in range(2))
    correct_N = torch.empty_like(targets_N, dtype=torch.bool)
    step = num_tile_tokens(logits_NV.shape[1], 3, rule, logits_NV.dtype)
    for low, high in spans(len(logits_NV), step):
        logits_TV, target_T1 = logits_NV[low:high], targets_N[low:high, None]
        logp_TV = logits_TV.log_softmax(-1)
        logp_N[low:high] = logp_TV.gather(1, target_T1)[:, 0]
        entropy_N[low:high] = -(logp_TV.exp() * logp_TV).sum(-1)
        correct_N[low:high] = logits_TV.gather(1, target_T1)[:, 0] >= logits_TV.amax(-1)
    return logp_N, entropy_N, correct_N
