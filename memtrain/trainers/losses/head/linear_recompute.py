"""Log-probs of targets straight from hidden states; the backward pass forms each tile of logits again."""

# N scored tokens, V vocabulary, D width of one pair

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from memtrain.trainers.losses.head.fused_tiles import fused_scores, is_fused
from memtrain.trainers.losses.head.gradients import (
    Needs,
    ScoredTokens,
    gradients_by_columns,
    gradients_by_tokens,
)
from memtrain.trainers.losses.head.spans import spans
from memtrain.trainers.losses.head.tiles import (
    Coefficients,
    Operands,
    ScoreOptions,
    TileScores,
    bend_,
    empty_scores,
    gather_operands,
    head_outputs_,
    num_tile_tokens,
    products_for,
    put_scores,
    score_,
    without_autocast,
)


def scores_by_tokens(operands: Operands, targets_N: Tensor, options: ScoreOptions) -> TileScores:
    """Per-token scores of the whole call, one [T, V] tile of logits at a time; nothing is differentiated."""
    products, rule = products_for(operands, options.rule), options.rule
    num_tokens, num_columns = operands.hidden[0].shape[0], operands.weight[0].shape[0]
    fuses = is_fused(rule, products.wide, targets_N.device)
    step = num_tile_tokens(num_columns, 1 if fuses else 1 + options.want_entropy, rule, products.wide)
    scratch = torch.empty(min(step, num_tokens), num_columns, dtype=products.wide, device=targets_N.device)
    all_scores = empty_scores(num_tokens, options, products.wide, targets_N.device)
    for low, high in spans(num_tokens, step):
        tile_TV = scratch[: high - low]
        head_outputs_(
            tile_TV, operands._replace(hidden=tuple(x[low:high] for x in operands.hidden)), products
        )
        if fuses:
            scores = fused_scores(tile_TV, targets_N[low:high], options)
        else:
            bend_(tile_TV, rule, want_slope=False)
            scores = score_(tile_TV, targets_N[low:high], options)[0]
        put_scores(all_scores, scores, low, high)
    return all_scores


class TokenScores(torch.autograd.Function):
    """`TileScores` of all tokens: log p, log Z, mean logit and entropy are differentiable, the rest is not.

    Saves the hidden states, the weights, and two numbers a token.
    """

    @staticmethod
    def forward(
        ctx: Any, options: ScoreOptions, targets_N: Tensor, bias_V: Tensor | None, *flat: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Scores of all tokens; see `scores_by_tokens`."""
        with without_autocast(targets_N.device):
            operands = gather_operands(options.dtypes, bias_V, flat)
            scores = scores_by_tokens(operands, targets_N, options)
        ctx.options = options
        ctx.hidden_dtypes = [x.dtype for x in flat[0::2]]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            targets_N, scores.log_z_T, scores.entropy_T, bias_V, *operands.hidden, *flat[1::2]
        )
        constants = (scores.correct_T, scores.log_sum_squares_T)
        ctx.mark_non_differentiable(*(c for c in constants if c is not None))
        return tuple(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of the pairs and the bias."""
        targets_N, log_z_N, entropy_N, bias_V, *saved = ctx.saved_tensors
        options: ScoreOptions = ctx.options
        num_pairs = len(saved) // 2
        hidden, weight = saved[:num_pairs], saved[num_pairs:]
        flat = [t for pair in zip(hidden, weight, strict=True) for t in pair]
        asked = ctx.needs_input_grad
        needs = Needs(tuple(asked[3::2]), tuple(asked[4::2]), asked[2])
        with without_autocast(targets_N.device):
            operands = gather_operands(options.dtypes, bias_V, flat)
            coefficients = _coefficients(grads, log_z_N, num_columns=weight[0].shape[0])
            tokens = ScoredTokens(targets_N, log_z_N, entropy_N, coefficients)
            form = gradients_by_columns if options.by_columns else gradients_by_tokens
            pairs, bias = form(operands, tokens, options.rule, needs, products_for(operands, options.rule))
        dtypes = [d for pair in zip(ctx.hidden_dtypes, (w.dtype for w in weight), strict=True) for d in pair]
        return (
            None,
            None,
            None if bias is None else bias.to(bias_V.dtype),
            *(None if g is None else g.to(dtype) for g, dtype in zip(pairs, dtypes, strict=True)),
        )


def _coefficients(grads: tuple[Tensor | None, ...], like_N: Tensor, num_columns: int) -> Coefficients:
    """d log p = 1[v = y] - p, d log Z = p, d mean logit = 1 / V, and the entropy's own term."""
    logp_N, log_z_N, mean_N, entropy_N, *_ = grads
    nothing_N = torch.zeros_like(like_N)
    target_N = nothing_N if logp_N is None else logp_N
    prob_N = (nothing_N if log_z_N is None else log_z_N) - target_N
    return Coefficients(prob_N, target_N, None if mean_N is None else mean_N / num_columns, entropy_N)
