"""Divergence of a student from its teacher over one tile of log-probs, and its gradient, in place.

    forward KL (beta 0):  sum_v t_v (log t_v - log s_v)
    reverse KL (beta 1):  sum_v s_v (log s_v - log t_v)
    between:              beta KL(t || m) + (1 - beta) KL(s || m),  m = beta t + (1 - beta) s

t: the teacher's distribution, s: the student's.
Source: Agarwal et al. 2024 (GKD), arXiv:2306.13649, section 2 (the generalized Jensen-Shannon divergence).
Its ends are the KL divergences themselves, which the mixture, divided by beta or 1 - beta, approaches there.
"""

# T tokens of one tile, V vocabulary, or the events that a truncated teacher tells apart

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG_FLOOR = -200.0
"""Log-probability that stands for a probability of 0: float32 holds none below, and differences stay finite.
"""


class NllTerm(NamedTuple):
    """Probabilities at temperature 1 from log-probs at another: p_v = exp(scale * log s_v + shift)."""

    scale: float
    shift_T: Tensor


class Divergence(NamedTuple):
    """Result of a tile."""

    value_T: Tensor
    gradient_TV: Tensor
    """By the student's logits (divided by the temperature)."""
    probs_TV: Tensor | None
    """The student's probabilities at temperature 1, where they were asked for."""


def divergence_(
    student_TV: Tensor,
    teacher_TV: Tensor,
    beta: float,
    scratch: tuple[Tensor, Tensor],
    nll: NllTerm | None = None,
) -> Divergence:
    """The divergence of each token and its gradient, from log-probs; all four tiles are overwritten.

    `scratch`: two more tiles of the same shape. With `nll` the student's probabilities at temperature 1 are
    left in one of the four.
    """
    if beta == 0:
        return _forward_kl_(student_TV, teacher_TV, scratch, nll)
    if beta == 1:
        return _reverse_kl_(student_TV, teacher_TV, scratch, nll)
    return _mixture_(student_TV, teacher_TV, beta, scratch, nll)


def _forward_kl_(
    student_TV: Tensor, teacher_TV: Tensor, scratch: tuple[Tensor, Tensor], nll: NllTerm | None
) -> Divergence:
    """d / d logit_v = s_v - t_v."""
    probs_TV, other_TV = scratch
    torch.exp(teacher_TV, out=probs_TV)
    value_T = teacher_TV.sub_(student_TV).mul_(probs_TV).sum(-1)
    at_one = _probs(student_TV, nll, out=other_TV)
    return Divergence(value_T, student_TV.exp_().sub_(probs_TV), at_one)


def _reverse_kl_(
    student_TV: Tensor, teacher_TV: Tensor, scratch: tuple[Tensor, Tensor], nll: NllTerm | None
) -> Divergence:
    """d / d logit_v = s_v (log s_v - log t_v - KL)."""
    probs_TV, other_TV = scratch
    torch.sub(student_TV, teacher_TV, out=teacher_TV)
    torch.exp(student_TV, out=probs_TV)
    value_T = torch.mul(teacher_TV, probs_TV, out=other_TV).sum(-1)
    at_one = _probs(student_TV, nll, out=other_TV)
    return Divergence(value_T, teacher_TV.sub_(value_T[:, None]).mul_(probs_TV), at_one)


def _mixture_(
    student_TV: Tensor, teacher_TV: Tensor, beta: float, scratch: tuple[Tensor, Tensor], nll: NllTerm | None
) -> Divergence:
    """d / d logit_v = (1 - beta) s_v (h_v - sum_u s_u h_u) with h = log s - log m: the terms of m cancel."""
    mixed_TV, probs_TV = scratch
    log_beta, log_rest = math.log(beta), math.log1p(-beta)
    teacher_TV.add_(log_beta)
    student_TV.add_(log_rest)
    torch.logaddexp(teacher_TV, student_TV, out=mixed_TV)
    torch.exp(teacher_TV, out=probs_TV)
    of_teacher_T = teacher_TV.sub_(mixed_TV).sub_(log_beta).mul_(probs_TV).sum(-1)
    own = None if nll is None else nll._replace(shift_T=nll.shift_T - nll.scale * log_rest)
    at_one = _probs(student_TV, own, out=teacher_TV)
    torch.exp(student_TV, out=probs_TV)
    student_TV.sub_(mixed_TV).sub_(log_rest)
    of_student_T = torch.mul(student_TV, probs_TV, out=mixed_TV).sum(-1)
    mean_T = of_student_T / (1 - beta)
    gradient_TV = student_TV.sub_(mean_T[:, None]).mul_(probs_TV)
    return Divergence(of_teacher_T + of_student_T, gradient_TV, at_one)


def _probs(student_TV: Tensor, nll: NllTerm | None, out: Tensor) -> Tensor | None:
    if nll is None:
        return None
    return torch.mul(student_TV, nll.scale, out=out).add_(nll.shift_T[:, None]).exp_()
