"""Policy losses of whole answers: RLOO's clipped objective, whose ratio is that of the sequence."""

# N scored tokens, answer after answer; A answers of one micro-batch.

from __future__ import annotations

from torch import Tensor

from memtrain.trainers.losses.answers import sum_per_answer
from memtrain.trainers.losses.head.linear import Count, over
from memtrain.trainers.losses.policy.registry import Clip, clipped_loss


def answer_log_ratio(logp_N: Tensor, old_logp_N: Tensor, lengths_A: Tensor) -> Tensor:
    """log(policy / old policy) of each whole answer [A]: the sum over its tokens."""
    return sum_per_answer(logp_N - old_logp_N, lengths_A)


def sequence_clipped_loss(
    log_ratio_A: Tensor,
    advantage_A: Tensor,
    clip: Clip,
    *,
    num_answers: Count,
    mismatch_A: Tensor | None = None,
) -> Tensor:
    """Sum over answers of -min(r A, clip(r) A), divided by `num_answers` of the whole optimizer step.

    At r = 1 its gradient is REINFORCE's, -A grad log p(answer). `mismatch_A` weights each answer.
    Source: Ahmadian et al. 2024 (RLOO), arXiv:2402.14740, section 2.3 (its gradient); the clipped ratio of
    whole answers: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    loss_A = clipped_loss(log_ratio_A.exp(), advantage_A, clip)
    if mismatch_A is not None:
        loss_A = loss_A * mismatch_A
    return over(loss_A.sum(), num_answers)


def penalised_rewards(reward_A: Tensor, kl_A: Tensor, *, beta: float) -> Tensor:
    """reward - beta * kl [A], kl the sum over the answer's tokens of log p_old - log p_reference.

    Source: Ahmadian et al. 2024 (RLOO), arXiv:2402.14740, section 2.1 (the KL penalty in the reward).
    """
    return reward_A - beta * kl_A
