"""Weighted NLL straight from hidden states, its gradients formed in the forward pass."""

# N scored tokens, T tokens of one tile, V vocabulary, D width of one pair

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from memtrain.trainers.losses.head.fused_tiles import fused_gradient_, fused_scores, is_fused
from memtrain.trainers.losses.head.gradients import HeadGradients, Needs
from memtrain.trainers.losses.head.linear_recompute import scores_by_tokens
from memtrain.trainers.losses.head.spans import spans
from memtrain.trainers.losses.head.tiles import (
    Coefficients,
    Operands,
    ScoreOptions,
    TileScores,
    bend_,
    empty_scores,
    finish_gradient_,
    gather_operands,
    head_outputs_,
    num_tile_tokens,
    products_for,
    put_scores,
    score_,
    without_autocast,
)


class NllOptions(NamedTuple):
    """Terms of the weighted NLL, and the results that are asked beside the sum."""

    label_smoothing: float = 0.0
    """Epsilon of `weighted_nll`."""
    z_loss: float = 0.0
    """Coefficient of its z-loss."""
    want_stats: bool = False
    """Log p, entropy and top-1 hit of each token."""
    weight_of_all: float | None = None
    """The weight, where every token has the same; Liger's kernel then makes gradients in the forward pass."""


SUM_ALONE = NllOptions()
"""The plain NLL, and nothing beside its sum."""


def weighted_nll(scores: TileScores, weights_N: Tensor, terms: NllOptions) -> Tensor:
    """Sum over tokens of w * [(1 - eps) * -log p_y + eps * mean_v(-log p_v) + z * (log Z)^2], a scalar.

    mean_v(-log p_v) = log Z - mean logit.
    Source: label smoothing Szegedy et al. 2015, arXiv:1512.00567, section 7 (as torch's cross_entropy);
    z-loss Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, section 5.
    """
    loss_N = -scores.logp_T
    if terms.label_smoothing:
        assert scores.mean_logit_T is not None, "label smoothing needs the mean logit"
        uniform_N = scores.log_z_T - scores.mean_logit_T
        loss_N = (1.0 - terms.label_smoothing) * loss_N + terms.label_smoothing * uniform_N
    if terms.z_loss:
        loss_N = loss_N + terms.z_loss * scores.log_z_T.square()
    return (loss_N * weights_N).sum()


def nll_coefficients(log_z_N: Tensor, weights_N: Tensor, terms: NllOptions, num_columns: int) -> Coefficients:
    """The gradient of `weighted_nll`: d/dz_v = w * [(1 + 2 z log Z) p_v - (1 - eps) 1[v = y] - eps / V]."""
    prob_N = weights_N * (1.0 + 2.0 * terms.z_loss * log_z_N)
    every_N = weights_N * (-terms.label_smoothing / num_columns) if terms.label_smoothing else None
    return Coefficients(prob_N, weights_N * (terms.label_smoothing - 1.0), every_N, None)


class NllInForward(torch.autograd.Function):
    """(loss, log p, entropy, correct); the last three are per token, detached, and only when asked.

    The gradients wait in plain attributes of the context: saved-tensor hooks (offloading) never ship them
    to the host, and nobody else owns them, so scaling them in place is safe. They can be spent once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        options: ScoreOptions,
        terms: NllOptions,
        is_training: bool,
        targets_N: Tensor,
        weights_N: Tensor,
        bias_V: Tensor | None,
        *flat: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """The loss, and the gradients when `is_training`."""
        asked = ctx.needs_input_grad
        needs = Needs(tuple(asked[6::2]), tuple(asked[7::2]), asked[5])
        with without_autocast(targets_N.device):
            operands = gather_operands(options.dtypes, bias_V, flat)
            if is_training and needs.any():
                scores, gradients = _forward_and_gradients(
                    operands, targets_N, weights_N, options, terms, needs
                )
                ctx.pairs, ctx.bias_V = gradients.flat(), gradients.bias_V
                ctx.dtypes = [t.dtype for t in flat]
                ctx.bias_dtype = None if bias_V is None else bias_V.dtype
            else:
                scores = scores_by_tokens(operands, targets_N, options)
            loss = weighted_nll(scores, weights_N, terms)
        ctx.set_materialize_grads(False)
        stats = (scores.logp_T, scores.entropy_T, scores.correct_T)
        ctx.mark_non_differentiable(*(s for s in stats if s is not None))
        return loss, *stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradients of the forward pass, scaled in place."""
        pairs, bias_V, grad_loss = ctx.pairs, ctx.bias_V, grads[0]
        assert pairs is not None, (
            "linear_nll forms its gradients in the forward pass and can be backpropagated once; "
            "use linear_logprob where a graph is kept"
        )
        ctx.pairs = ctx.bias_V = None
        if grad_loss is None:
            return (None,) * (6 + len(pairs))
        scaled = [
            None if g is None else g.mul_(grad_loss).to(d) for g, d in zip(pairs, ctx.dtypes, strict=True)
        ]
        bias = None if bias_V is None else bias_V.mul_(grad_loss).to(ctx.bias_dtype)
        return None, None, None, None, None, bias, *scaled


def _forward_and_gradients(
    operands: Operands,
    targets_N: Tensor,
    weights_N: Tensor,
    options: ScoreOptions,
    terms: NllOptions,
    needs: Needs,
) -> tuple[TileScores, HeadGradients]:
    """Scores and gradients from one pass: each tile of logits becomes its own gradient."""
    products, rule = products_for(operands, options.rule), options.rule
    gradients = HeadGradients(operands, needs, products)
    num_tokens, num_columns = operands.hidden[0].shape[0], operands.weight[0].shape[0]
    fuses = is_fused(rule, products.wide, targets_N.device)
    num_buffers = 1 if fuses else 1 + options.want_entropy + (rule.softcap is not None)
    narrow = None if needs.bias else products.half
    step = num_tile_tokens(num_columns, num_buffers, rule, products.wide)
    scratch = torch.empty(min(step, num_tokens), num_columns, dtype=products.wide, device=targets_N.device)
    all_scores = empty_scores(num_tokens, options, products.wide, targets_N.device)
    for low, high in spans(num_tokens, step):
        tile_TV, rows = scratch[: high - low], tuple(x[low:high] for x in operands.hidden)
        head_outputs_(tile_TV, operands._replace(hidden=rows), products)
        given = (tile_TV, targets_N[low:high], weights_N[low:high], options, terms)
        scores, grad_TV = _fused_gradient_of_tile_(*given, narrow) if fuses else _gradient_of_tile_(*given)
        gradients.take(grad_TV, operands, low, high)
        put_scores(all_scores, scores, low, high)
        # The next tile makes its own: with this one it would be a tile more than the scratch is meant to be.
        del grad_TV
    return all_scores, gradients


def _gradient_of_tile_(
    tile_TV: Tensor, targets_T: Tensor, weights_T: Tensor, options: ScoreOptions, terms: NllOptions
) -> tuple[TileScores, Tensor]:
    """The scores of a tile of head outputs (overwritten), and the loss's gradient with respect to it."""
    slope_TV = bend_(tile_TV, options.rule, want_slope=True)
    scores, exp_TV, sums_T = score_(tile_TV, targets_T, options)
    part = nll_coefficients(scores.log_z_T, weights_T, terms, tile_TV.shape[1])
    grad_TV = exp_TV.mul_((part.prob_N / sums_T)[:, None])
    return scores, finish_gradient_(grad_TV, part, targets_T, slope_TV, options.rule)


def _fused_gradient_of_tile_(
    tile_TV: Tensor,
    targets_T: Tensor,
    weights_T: Tensor,
    options: ScoreOptions,
    terms: NllOptions,
    narrow: torch.dtype | None,
) -> tuple[TileScores, Tensor]:
    """The same by Triton's kernels, without another tile; in the dtype `narrow` where one is given."""
    scores = fused_scores(tile_TV, targets_T, options)
    part = nll_coefficients(scores.log_z_T, weights_T, terms, tile_TV.shape[1])
    given = (targets_T, scores.log_z_T, None, part, options.rule)
    return scores, fused_gradient_(tile_TV, *given, narrow=narrow)
