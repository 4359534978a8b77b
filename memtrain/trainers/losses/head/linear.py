"""Head losses from hidden states and head weights: log-probs or weighted NLL, logits never held whole."""

# N scored tokens, V vocabulary, D width of one pair (hidden size, or the rank of an adapter)

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.trainers.losses.head.linear_nll import SUM_ALONE, NllInForward, NllOptions, weighted_nll
from memtrain.trainers.losses.head.linear_recompute import TokenScores
from memtrain.trainers.losses.head.products import wide_dtype
from memtrain.trainers.losses.head.tiles import PLAIN_LOGITS, LogitRule, ScoreOptions, TileScores

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(hidden [N, D_i], weight [V, D_i]): head outputs are the sum of hidden_i @ weight_i.T. An adapter on the
head is one more pair, so the merged weight never exists."""


class LogprobResult(NamedTuple):
    """Per scored token, fp32: log p of the target and, when asked, entropy and log sum_v p_v^2.

    The first two are differentiable, the last is a constant.
    """

    logp_N: Tensor
    entropy_N: Tensor | None = None
    log_sum_squares_N: Tensor | None = None


class NllResult(NamedTuple):
    """The weighted sum (fp32 scalar), and per token when asked, detached: log p, entropy, top-1 hit."""

    loss: Tensor
    logp_N: Tensor | None
    entropy_N: Tensor | None
    correct_N: Tensor | None


class LogprobOptions(NamedTuple):
    """Results that are asked of each token beside its log p."""

    want_entropy: bool = False
    want_log_sum_squares: bool = False
    learns_entropy: bool = True
    """Gradients of the entropies are asked for. Without, the full logits are not copied for them."""


LOGPROBS_ALONE = LogprobOptions()


def linear_logprob(
    pairs: Pairs,
    targets_N: Tensor,
    rule: LogitRule = PLAIN_LOGITS,
    options: LogprobOptions = LOGPROBS_ALONE,
    *,
    bias: Tensor | None = None,
) -> LogprobResult:
    """log p(target) of each token under softmax(softcap * tanh(scale * x / softcap) / temperature).

    Any loss may follow, on log p and on the entropy: the backward pass forms each tile of logits
    again (four matrix products in all). Saved: hidden states, weights and two numbers a token. Under
    autocast the products take autocast's dtype, the weight is cast once a pass, sums stay fp32.
    """
    asked = _score_options(pairs, rule)._replace(
        want_entropy=options.want_entropy, want_log_sum_squares=options.want_log_sum_squares
    )
    scores = TileScores(*TokenScores.apply(asked, targets_N, bias, *_flat(pairs)))
    return LogprobResult(scores.logp_T, scores.entropy_T, scores.log_sum_squares_T)


def linear_nll(
    pairs: Pairs,
    targets_N: Tensor,
    weights_N: Tensor,
    rule: LogitRule = PLAIN_LOGITS,
    options: NllOptions = SUM_ALONE,
    *,
    bias: Tensor | None = None,
) -> NllResult:
    """Sum over tokens of weight * (NLL, smoothed, plus z-loss): see `weighted_nll` for the formula.

    Weights are constants known before the pass, so gradients are formed in it (three products, and the
    result can be backpropagated once). Where that would cost more than it saves - a trainable weight
    narrower than fp32, fp16 whose gradients must be scaled before rounding - the backward pass recomputes.
    """
    assert not weights_N.requires_grad, "the weights of linear_nll are constants"
    asked = _score_options(pairs, rule)._replace(
        want_mean=options.label_smoothing > 0,
        want_entropy=options.want_stats,
        want_correct=options.want_stats,
    )
    flat = _flat(pairs)
    if asked.by_columns or torch.float16 in asked.dtypes:
        scores = TileScores(*TokenScores.apply(asked, targets_N, bias, *flat))
        loss = weighted_nll(scores, weights_N, options)
        stats = scores.logp_T.detach(), _detached(scores.entropy_T), scores.correct_T
    else:
        loss, *stats = NllInForward.apply(
            asked, options, torch.is_grad_enabled(), targets_N, weights_N, bias, *flat
        )
    return NllResult(loss, *stats) if options.want_stats else NllResult(loss, None, None, None)


def _score_options(pairs: Pairs, rule: LogitRule) -> ScoreOptions:
    """Dtypes of the products, and the order of the backward pass."""
    device = pairs[0][0].device
    if torch.is_autocast_enabled(device.type):
        dtypes = (torch.get_autocast_dtype(device.type),) * len(pairs)
    else:
        dtypes = tuple(torch.promote_types(hidden.dtype, weight.dtype) for hidden, weight in pairs)
    wide = wide_dtype(*(t for pair in pairs for t in pair))
    narrow = [weight for _, weight in pairs if weight.requires_grad and weight.dtype != wide]
    # Summing a narrow weight's gradient wide costs a wide copy of it; below one tile that copy is free.
    by_columns = sum(weight.numel() * wide.itemsize for weight in narrow) > rule.tile_bytes
    return ScoreOptions(rule, dtypes, by_columns=by_columns and torch.is_grad_enabled())


def _flat(pairs: Pairs) -> list[Tensor]:
    return [tensor for pair in pairs for tensor in pair]


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
