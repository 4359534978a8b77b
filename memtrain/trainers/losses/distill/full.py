"""The plain form of distillation, all logits at once. The `full` strategy, and what tests compare with."""

# N scored tokens, V vocabulary, K tokens of a truncated teacher, E events of one

from __future__ import annotations

import math

import torch
from torch import Tensor

from memtrain.trainers.losses.distill.divergence import LOG_FLOOR
from memtrain.trainers.losses.distill.linear import DistillResult, DistillTerms
from memtrain.trainers.losses.distill.teachers import Teacher, TopKTeacher, WholeTeacher
from memtrain.trainers.losses.head.linear import Pairs
from memtrain.trainers.losses.head.linear_full import full_logits
from memtrain.trainers.losses.head.tiles import LogitRule


def full_distill(
    pairs: Pairs,
    targets_N: Tensor,
    weights_N: Tensor,
    teacher: Teacher,
    rule: LogitRule,
    terms: DistillTerms,
    *,
    bias: Tensor | None = None,
) -> DistillResult:
    """The loss as `linear_distill` gives it, with all logits held in place of tiles."""
    logits_NV = full_logits(pairs, rule, bias=bias)
    if isinstance(teacher, WholeTeacher) and teacher.num_columns < logits_NV.shape[1]:
        logits_NV = logits_NV[:, : teacher.num_columns]
    share = terms.cross_entropy_weight
    with torch.set_grad_enabled(torch.is_grad_enabled() and share > 0):
        logp_N = logits_NV.log_softmax(-1).gather(1, targets_N[:, None])[:, 0]
    is_warm = terms.temperature != 1.0
    student_NV = (logits_NV / terms.temperature if is_warm else logits_NV).log_softmax(-1)
    if isinstance(teacher, WholeTeacher):
        other_NV = _teacher_logps(teacher, student_NV.shape[1], terms.temperature)
        best_N = other_NV.argmax(-1)
        divergence_N = divergence(student_NV, other_NV, terms.beta)
    else:
        best_N = teacher.ids_NK.gather(1, teacher.logp_NK.argmax(-1)[:, None])[:, 0]
        divergence_N = divergence(*_events(student_NV, teacher), terms.beta)
    loss_N = divergence_N if not share else (1 - share) * divergence_N - share * logp_N
    agrees_N = (logits_NV.argmax(-1) == best_N).to(loss_N.dtype)
    return DistillResult((loss_N * weights_N).sum(), logp_N.detach(), divergence_N.detach(), agrees_N)


def divergence(student_NV: Tensor, teacher_NV: Tensor, beta: float) -> Tensor:
    """[N], the divergence of log-probs, by its definition (see divergence.py)."""
    if beta == 0:
        return (teacher_NV.exp() * (teacher_NV - student_NV)).sum(-1)
    if beta == 1:
        return (student_NV.exp() * (student_NV - teacher_NV)).sum(-1)
    mixed_NV = torch.logaddexp(teacher_NV + math.log(beta), student_NV + math.log1p(-beta))
    of_teacher_N = (teacher_NV.exp() * (teacher_NV - mixed_NV)).sum(-1)
    of_student_N = (student_NV.exp() * (student_NV - mixed_NV)).sum(-1)
    return beta * of_teacher_N + (1 - beta) * of_student_N


def _teacher_logps(teacher: WholeTeacher, columns: int, temperature: float) -> Tensor:
    with torch.no_grad():
        pairs = [(h, w[:columns]) for h, w in zip(teacher.hidden, teacher.weight, strict=True)]
        bias = None if teacher.bias_V is None else teacher.bias_V[:columns]
        return (full_logits(pairs, teacher.rule, bias=bias) / temperature).log_softmax(-1)


def _events(student_NV: Tensor, teacher: TopKTeacher) -> tuple[Tensor, Tensor]:
    """Log-probs [N, E] of student and teacher over the K tokens and the event of any other."""
    ids_NK = teacher.ids_NK.long()
    is_kept_NV = torch.zeros_like(student_NV, dtype=torch.bool).scatter_(1, ids_NK, True)
    tail_N = student_NV.masked_fill(is_kept_NV, LOG_FLOOR).logsumexp(-1)
    own_NE = torch.cat([student_NV.gather(1, ids_NK), tail_N[:, None]], 1)
    other_NE = torch.cat([teacher.logp_NK, teacher.tail_N[:, None]], 1)
    return own_NE.clamp_min(LOG_FLOOR), other_NE.clamp_min(LOG_FLOOR)
