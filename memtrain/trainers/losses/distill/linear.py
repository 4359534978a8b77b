"""Distillation straight from hidden states: student's and teacher's logits are made in one tile, never whole.

Gradients are formed in the forward pass, as those of the weighted NLL are: the tile of logits becomes its own
gradient, and the teacher's head is read once.
"""

# N scored tokens, T tokens of one tile, V vocabulary, K tokens that a truncated teacher tells apart

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.trainers.losses.distill.divergence import LOG_FLOOR, Divergence, NllTerm, divergence_
from memtrain.trainers.losses.distill.teachers import Teacher, TopKTeacher, WholeTeacher
from memtrain.trainers.losses.head.linear import HeadGradients, Needs, NllInForward, Pairs
from memtrain.trainers.losses.head.tiles import (
    LogitRule,
    Operands,
    Products,
    bend_,
    gather_operands,
    head_outputs_,
    num_tile_tokens,
    products_for,
    spans,
    without_autocast,
)

WHOLE_BUFFERS, TOP_K_BUFFERS = 4, 2
"""Tiles of a whole teacher: student, teacher, two of scratch; of a truncated one: student and scratch."""


class DistillTerms(NamedTuple):
    """The loss of a token: (1 - cross_entropy_weight) * divergence + cross_entropy_weight * NLL."""

    beta: float
    temperature: float = 1.0
    cross_entropy_weight: float = 0.0


class DistillResult(NamedTuple):
    """The weighted sum (fp32 scalar), and per token, detached: log-prob of the target at temperature 1,
    divergence, whether both have the same likeliest token."""

    loss: Tensor
    logp_N: Tensor
    divergence_N: Tensor
    agrees_N: Tensor


def linear_distill(
    pairs: Pairs,
    targets_N: Tensor,
    weights_N: Tensor,
    teacher: Teacher,
    rule: LogitRule,
    terms: DistillTerms,
    *,
    bias: Tensor | None = None,
) -> DistillResult:
    """Sum over tokens of weight * loss (see `DistillTerms`); the divergence is `divergence_`'s, with both
    distributions at the temperature, the NLL of the targets is at temperature 1.

    `rule` is the student's, at temperature 1. Where the vocabularies have different sizes (the same
    tokenizer, padded otherwise) both distributions are over the columns that both have. A truncated teacher
    is one distribution over its K tokens and the event of any other. The result can be backpropagated once.
    """
    device = pairs[0][0].device
    if torch.is_autocast_enabled(device.type):
        dtypes = (torch.get_autocast_dtype(device.type),) * len(pairs)
    else:
        dtypes = tuple(torch.promote_types(hidden.dtype, weight.dtype) for hidden, weight in pairs)
    flat = [tensor for pair in pairs for tensor in pair]
    asked = (rule, dtypes, torch.is_grad_enabled())
    return DistillResult(*DistillInForward.apply(asked, terms, teacher, targets_N, weights_N, bias, *flat))


class DistillInForward(NllInForward):
    """(loss, log-probs, divergence, agreement); see `NllInForward` for how gradients wait."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        asked: tuple[LogitRule, tuple[torch.dtype, ...], bool],
        terms: DistillTerms,
        teacher: Teacher,
        targets_N: Tensor,
        weights_N: Tensor,
        bias_V: Tensor | None,
        *flat: Tensor,
    ) -> tuple[Tensor, ...]:
        """The loss, and the gradients where they are wanted."""
        rule, dtypes, is_training = asked
        wanted = ctx.needs_input_grad
        needs = Needs(tuple(wanted[6::2]), tuple(wanted[7::2]), wanted[5])
        with without_autocast(targets_N.device):
            operands = _common(gather_operands(dtypes, bias_V, flat), teacher)
            products = products_for(operands, rule)
            gradients = HeadGradients(operands, needs, products) if is_training and needs.any() else None
            scores = _over_tiles(operands, products, targets_N, weights_N, teacher, rule, terms, gradients)
            loss = (_mixed(scores, terms) * weights_N).sum()
        if gradients is not None:
            widths = [weight.shape[0] for weight in flat[1::2]]
            ctx.pairs = _padded(gradients, widths)
            ctx.bias_V = None if gradients.bias_V is None else _rows(gradients.bias_V, widths[0])
            ctx.dtypes = [tensor.dtype for tensor in flat]
            ctx.bias_dtype = None if bias_V is None else bias_V.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*scores)
        return loss, *scores


class _Scores(NamedTuple):
    """Of each token."""

    logp_N: Tensor
    divergence_N: Tensor
    agrees_N: Tensor


def _mixed(scores: _Scores, terms: DistillTerms) -> Tensor:
    share = terms.cross_entropy_weight
    return scores.divergence_N if not share else (1 - share) * scores.divergence_N - share * scores.logp_N


def _over_tiles(
    operands: Operands,
    products: Products,
    targets_N: Tensor,
    weights_N: Tensor,
    teacher: Teacher,
    rule: LogitRule,
    terms: DistillTerms,
    gradients: HeadGradients | None,
) -> _Scores:
    """Scores of all tokens, one tile at a time; each tile's gradient goes to `gradients`."""
    num_tokens, num_columns = operands.hidden[0].shape[0], operands.weight[0].shape[0]
    num_tiles = WHOLE_BUFFERS if isinstance(teacher, WholeTeacher) else TOP_K_BUFFERS
    step = num_tile_tokens(num_columns, num_tiles + (rule.softcap is not None), rule, products.wide)
    device = targets_N.device
    scratch = [
        torch.empty(min(step, num_tokens), num_columns, dtype=products.wide, device=device)
        for _ in range(num_tiles)
    ]
    found = _Scores(*(torch.empty(num_tokens, dtype=products.wide, device=device) for _ in range(3)))
    for low, high in spans(num_tokens, step):
        tiles = [one[: high - low] for one in scratch]
        head_outputs_(
            tiles[0], operands._replace(hidden=tuple(x[low:high] for x in operands.hidden)), products
        )
        slope_TV = bend_(tiles[0], rule, want_slope=gradients is not None)
        logp_T, log_z_T = _logps(tiles[0], tiles[1], targets_N[low:high])
        made = _of_tile(tiles, teacher, products, low, high, terms, log_z_T)
        for all_N, part_T in zip(found, (logp_T, made.value_T, made.agrees_T), strict=True):
            all_N[low:high] = part_T
        if gradients is not None:
            gradient_TV = _finished(made, targets_N[low:high], weights_N[low:high], terms, rule, slope_TV)
            gradients.take(gradient_TV, operands, low, high)
    return found


class _Tile(NamedTuple):
    """Result of one tile: see `Divergence`."""

    value_T: Tensor
    gradient_TV: Tensor
    probs_TV: Tensor | None
    agrees_T: Tensor


def _logps(logits_TV: Tensor, scratch_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets at temperature 1, log Z); `scratch_TV` is overwritten."""
    highest_T = logits_TV.amax(-1)
    target_T = logits_TV.gather(1, targets_T[:, None])[:, 0]
    log_sums_T = torch.sub(logits_TV, highest_T[:, None], out=scratch_TV).exp_().sum(-1).log_()
    return (target_T - highest_T) - log_sums_T, highest_T + log_sums_T


def _of_tile(
    tiles: list[Tensor],
    teacher: Teacher,
    products: Products,
    low: int,
    high: int,
    terms: DistillTerms,
    log_z_T: Tensor,
) -> _Tile:
    """The divergence of the tile whose first buffer holds the student's logits at temperature 1."""
    student_TV, best_T = tiles[0], tiles[0].argmax(-1)
    log_z_at_T = log_z_T
    if terms.temperature != 1.0:
        student_TV.div_(terms.temperature)
        highest_T = student_TV.amax(-1)
        shifted_TV = torch.sub(student_TV, highest_T[:, None], out=tiles[1])
        log_z_at_T = shifted_TV.exp_().sum(-1).log_() + highest_T
    student_TV.sub_(log_z_at_T[:, None])
    nll = None
    if terms.cross_entropy_weight:
        nll = NllTerm(terms.temperature, terms.temperature * log_z_at_T - log_z_T)
    if isinstance(teacher, WholeTeacher):
        teacher_best_T = _teacher_logps_(tiles[1], tiles[2], teacher, products, low, high, terms)
        found = divergence_(student_TV, tiles[1], terms.beta, (tiles[2], tiles[3]), nll)
    else:
        part = TopKTeacher(*(one[low:high] for one in teacher))
        teacher_best_T = part.ids_NK.gather(1, part.logp_NK.argmax(-1)[:, None])[:, 0]
        found = _truncated_(student_TV, tiles[1], part, terms.beta, nll)
    return _Tile(*found, (best_T == teacher_best_T).to(student_TV.dtype))


def _teacher_logps_(
    into_TV: Tensor,
    scratch_TV: Tensor,
    teacher: WholeTeacher,
    products: Products,
    low: int,
    high: int,
    terms: DistillTerms,
) -> Tensor:
    """Fill `into_TV` with the teacher's log-probs at the temperature; its likeliest tokens."""
    columns = into_TV.shape[1]
    operands = Operands(
        tuple(hidden[low:high] for hidden in teacher.hidden),
        tuple(weight[:columns] for weight in teacher.weight),
        None if teacher.bias_V is None else teacher.bias_V[:columns],
    )
    head_outputs_(into_TV, operands, products)
    bend_(into_TV, teacher.rule, want_slope=False)
    if terms.temperature != 1.0:
        into_TV.div_(terms.temperature)
    best_T = into_TV.argmax(-1)
    into_TV.sub_(into_TV.gather(1, best_T[:, None]))
    log_sums_T = torch.exp(into_TV, out=scratch_TV).sum(-1).log_()
    into_TV.sub_(log_sums_T[:, None])
    return best_T


def _truncated_(
    student_TV: Tensor, scratch_TV: Tensor, teacher: TopKTeacher, beta: float, nll: NllTerm | None
) -> Divergence:
    """The divergence over K tokens and the event of any other.

    A token v of the tail moves as its event does: its gradient is s_v / s_tail of the event's. The
    student's tail is summed without the K tokens: 1 less their sum would lose digits.
    """
    ids_TK = teacher.ids_NK.long()
    kept_TK = student_TV.gather(1, ids_TK)
    tail_TV = torch.exp(student_TV, out=scratch_TV).scatter_(1, ids_TK, 0.0)
    tail_T = tail_TV.sum(-1)
    own_TE = torch.cat([kept_TK, tail_T.log()[:, None]], 1).clamp_min_(LOG_FLOOR)
    other_TE = torch.cat([teacher.logp_NK, teacher.tail_N[:, None]], 1).to(own_TE.dtype).clamp_min_(LOG_FLOOR)
    events = divergence_(own_TE, other_TE, beta, (torch.empty_like(own_TE), torch.empty_like(own_TE)))
    of_kept_TK, of_tail_T = events.gradient_TV[:, :-1], events.gradient_TV[:, -1]
    share_T = torch.where(tail_T > 0, of_tail_T / tail_T, 0.0)
    gradient_TV = tail_TV.mul_(share_T[:, None]).scatter_(1, ids_TK, of_kept_TK)
    at_one = None
    if nll is not None:
        at_one = student_TV.mul_(nll.scale).add_(nll.shift_T[:, None]).exp_()
    return Divergence(events.value_T, gradient_TV, at_one)


def _finished(
    made: _Tile,
    targets_T: Tensor,
    weights_T: Tensor,
    terms: DistillTerms,
    rule: LogitRule,
    slope_TV: Tensor | None,
) -> Tensor:
    """The gradient of the weighted loss by the head's outputs."""
    share = terms.cross_entropy_weight
    grad_TV = made.gradient_TV.mul_(((1 - share) / terms.temperature) * weights_T[:, None])
    if made.probs_TV is not None:
        scaled_T1 = (share * weights_T)[:, None]
        grad_TV.addcmul_(made.probs_TV, scaled_T1)
        grad_TV.scatter_add_(1, targets_T[:, None], -scaled_T1.to(grad_TV.dtype))
    if rule.slope != 1.0:
        grad_TV.mul_(rule.slope)
    return grad_TV if slope_TV is None else grad_TV.mul_(slope_TV)


def _common(operands: Operands, teacher: Teacher) -> Operands:
    """The student's head over the columns that the teacher has too."""
    columns = operands.weight[0].shape[0]
    if not isinstance(teacher, WholeTeacher) or teacher.num_columns >= columns:
        return operands
    own = teacher.num_columns
    bias = None if operands.bias_V is None else operands.bias_V[:own]
    return Operands(operands.hidden, tuple(weight[:own] for weight in operands.weight), bias)


def _padded(gradients: HeadGradients, widths: list[int]) -> list[Tensor | None]:
    """hidden, weight, ... with a row of zeros for every column that only the student has."""
    weights = [
        None if one is None else _rows(one, rows) for one, rows in zip(gradients.weight, widths, strict=True)
    ]
    return [one for pair in zip(gradients.hidden, weights, strict=True) for one in pair]


def _rows(gradient: Tensor, rows: int) -> Tensor:
    if len(gradient) == rows:
        return gradient
    whole = gradient.new_zeros(rows, *gradient.shape[1:])
    whole[: len(gradient)] = gradient
    return whole
