"""The plain form of the head losses: all logits at once. The `full` strategy, and what tests compare with."""

# N scored tokens, V vocabulary, D width of one pair

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from memtrain.trainers.losses.head.linear import (
    LOGPROBS_ALONE,
    SUM_ALONE,
    LogprobOptions,
    LogprobResult,
    NllOptions,
    NllResult,
    Pairs,
)
from memtrain.trainers.losses.head.tiles import PLAIN_LOGITS, LogitRule, wide_dtype

TILE_COPIES = 3
"""Log-probs, probabilities and their product, held at once by a tile of statistics."""


def full_logits(pairs: Pairs, rule: LogitRule = PLAIN_LOGITS, *, bias: Tensor | None = None) -> Tensor:
    """Logits [N, V], fp32 (fp64 when an operand is), each product in the dtype of its operands.

    At most two copies of them are there at once; of a scale or a temperature of 1 none is made.
    """
    wide = wide_dtype(*(t for pair in pairs for t in pair))
    first, *others = pairs
    total_NV = _product(first, wide)
    for pair in others:
        # No backward pass of a product reads what came out of it.
        total_NV = total_NV.add_(_product(pair, wide))
    if bias is not None:
        total_NV = total_NV + bias
    if rule.scale != 1.0:
        total_NV = total_NV * rule.scale
    if rule.softcap is not None:
        total_NV = rule.softcap * torch.tanh(total_NV / rule.softcap)
    return total_NV if rule.temperature == 1.0 else total_NV / rule.temperature


def _product(pair: tuple[Tensor, Tensor], wide: torch.dtype) -> Tensor:
    hidden, weight = pair
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    return F.linear(hidden.to(dtype), weight.to(dtype)).to(wide)


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
    entropy_N = _entropies(logp_NV, rule.tile_bytes, options) if options.want_entropy else None
    squares_N = (2.0 * logp_NV.detach()).logsumexp(-1) if options.want_log_sum_squares else None
    return LogprobResult(logp_NV.gather(1, targets_N[:, None])[:, 0], entropy_N, squares_N)


def _entropies(logp_NV: Tensor, tile_bytes: int, options: LogprobOptions) -> Tensor:
    """Entropies [N]; a tile at a time where nobody asks for their gradient."""
    if options.learns_entropy:
        return _entropy(logp_NV)
    rows = _rows_of_tile(logp_NV, tile_bytes)
    return torch.cat([_entropy(logp) for logp in logp_NV.detach().split(rows)])


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
    return NllResult(loss, *_statistics(logits_NV.detach(), targets_N, rule.tile_bytes))


def _statistics(logits_NV: Tensor, targets_N: Tensor, tile_bytes: int) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs of the targets, entropies, whether a target has the highest logit), a tile at a time."""
    rows = _rows_of_tile(logits_NV, tile_bytes)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for logits, targets in zip(logits_NV.split(rows), targets_N.split(rows), strict=True):
        logp, target = logits.log_softmax(-1), targets[:, None]
        chosen, found = logp.gather(1, target)[:, 0], logits.gather(1, target)[:, 0]
        parts.append((chosen, _entropy(logp), found >= logits.amax(-1)))
    logp_N, entropy_N, is_best_N = (torch.cat(one) for one in zip(*parts, strict=True))
    return logp_N, entropy_N, is_best_N


def _entropy(logp_NV: Tensor) -> Tensor:
    return -(logp_NV.exp() * logp_NV).sum(-1)


def _rows_of_tile(logits_NV: Tensor, tile_bytes: int) -> int:
    return max(1, tile_bytes // (TILE_COPIES * logits_NV.element_size() * logits_NV.shape[1]))
