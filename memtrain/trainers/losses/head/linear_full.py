"""The plain form of the head losses: all logits at once. The `full` strategy, and what tests compare with."""

# N scored tokens, V vocabulary, D width of one pair

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from memtrain.trainers.losses.head.linear import LogprobResult, NllResult, Pairs
from memtrain.trainers.losses.head.products import wide_dtype


def full_logits(
    pairs: Pairs,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Logits [N, V], fp32 (fp64 when an operand is), each product in the dtype of its operands."""
    wide = wide_dtype(*(t for pair in pairs for t in pair))
    outputs = []
    for hidden, weight in pairs:
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        outputs.append(F.linear(hidden.to(dtype), weight.to(dtype)).to(wide))
    total_NV = torch.stack(outputs).sum(0) if len(outputs) > 1 else outputs[0]
    if bias is not None:
        total_NV = total_NV + bias
    total_NV = total_NV * scale
    if softcap is not None:
        total_NV = softcap * torch.tanh(total_NV / softcap)
    return total_NV / temperature


def full_logprob(
    pairs: Pairs,
    targets_N: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    want_entropy: bool = False,
    want_log_sum_squares: bool = False,
    tile_bytes: int = 0,
) -> LogprobResult:
    """Log-probs as `linear_logprob` gives them, with all logits held; `tile_bytes` is not used."""
    logits_NV = full_logits(pairs, bias=bias, temperature=temperature, softcap=softcap, scale=scale)
    logp_NV = logits_NV.log_softmax(-1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(-1) if want_entropy else None
    squares_N = (2.0 * logp_NV.detach()).logsumexp(-1) if want_log_sum_squares else None
    return LogprobResult(logp_NV.gather(1, targets_N[:, None])[:, 0], entropy_N, squares_N)


def full_nll(
    pairs: Pairs,
    targets_N: Tensor,
    weights_N: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    want_stats: bool = False,
    tile_bytes: int = 0,
) -> NllResult:
    """Loss as `linear_nll` gives it, by torch's cross_entropy, with all logits held; `tile_bytes` is not
    used."""
    logits_NV = full_logits(pairs, bias=bias, temperature=temperature, softcap=softcap, scale=scale)
    loss_N = F.cross_entropy(logits_NV, targets_N, reduction="none", label_smoothing=label_smoothing)
    if z_loss:
        loss_N = loss_N + z_loss * logits_NV.logsumexp(-1).square()
    loss = (loss_N * weights_N).sum()
    if not want_stats:
        return NllResult(loss, None, None, None)
    logp_NV = logits_NV.detach().log_softmax(-1)
    target_N1 = targets_N[:, None]
    return NllResult(
        loss,
        logp_NV.gather(1, target_N1)[:, 0],
        -(logp_NV.exp() * logp_NV).sum(-1),
        logits_NV.detach().gather(1, target_N1)[:, 0] >= logits_NV.detach().amax(-1),
    )
