"""The losses of GRPO and its relatives by name: surrogate, normaliser, KL, entropy, masks and corrections."""

# N scored tokens of one micro-batch, answer after answer; A answers.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from memtrain.trainers.losses.policy.ratios import (
    KlEstimator,
    Level,
    keep_near_policy,
    kl_estimate,
    log_ratio,
    per_token,
)
from memtrain.trainers.losses.policy.surrogates import (
    Clip,
    GammaShape,
    cispo_loss,
    clipped_loss,
    gamma_weight,
    is_clipped,
    sapo_loss,
    vespo_loss,
)

Per = Literal["answer", "step_tokens", "rollout_tokens", "longest", "sum"]

NORMALISERS: Mapping[str, Per] = {
    "dapo": "rollout_tokens",
    "cispo": "rollout_tokens",
    "vespo": "rollout_tokens",
    "grpo": "answer",
    "sapo": "answer",
    "bnpo": "step_tokens",
    "dr_grpo": "longest",
    "luspo": "sum",
}
"""Divisor of each loss. `answer`: the mean of each answer's tokens, then over answers. `step_tokens`,
`rollout_tokens`: tokens of the optimizer step, or of an equal share of the rollout. `longest`: answers times
the completion limit, a constant. `sum`: each answer's tokens are summed, so that long answers weigh more."""

CLIPPED = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")


@dataclass(frozen=True, slots=True)
class PolicyKnobs:
    """The settings of a policy loss; defaults are DAPO's, without its clip-higher."""

    loss: str = "dapo"
    level: Level = "token"
    clip: Clip = Clip()
    cispo_max_weight: float = 5.0
    sapo_pos: float = 1.0
    sapo_neg: float = 1.05
    gamma: GammaShape = GammaShape()
    beta: float = 0.0
    """Weight of the KL term."""
    kl: KlEstimator = "k3"
    unbiased_kl: bool = False
    entropy_coef: float = 0.0
    off_policy_limit: float | None = None


@dataclass(frozen=True, slots=True)
class Norms:
    """Divisors of a whole optimizer step, over all micro-batches and ranks: then they add up."""

    num_answers: float
    """Answers of the step, those without signal and truncated ones included."""
    num_tokens: float
    """Tokens of the step that may be trained on."""
    rollout_tokens: float
    """Tokens of the rollout that may be trained on, divided by its optimizer steps."""
    max_tokens: int
    """Most tokens of a completion."""
    kept_tokens: float | None = None
    """Tokens of the step that a top-entropy mask keeps; None: all."""


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """The answers of one micro-batch."""

    logp_N: Tensor
    """Differentiable."""
    lengths_A: Tensor
    advantage_A: Tensor
    old_logp_N: Tensor | None = None
    """Of the policy that the update started from; None for the policy itself (the first update)."""
    sampler_logp_N: Tensor | None = None
    """Log-probs as recorded while sampling; for `off_policy_limit`, which looks back to it where it is
    known."""
    reference_N: Tensor | None = None
    entropy_N: Tensor | None = None
    """Differentiable where `entropy_coef` is not 0."""
    mismatch_N: Tensor | None = None
    """Weight of each token: the corrected ratio of trainer to sampler."""
    is_kept_N: Tensor | None = None
    """bool: tokens whose surrogate counts (top-entropy masks); None: all."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A scalar to be minimised, and sums over tokens for the metrics (detached)."""

    value: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)


def token_weights(lengths_A: Tensor, num_tokens: int, loss: str, norms: Norms) -> Tensor:
    """Factor of each token's loss [N], so that summing over all micro-batches gives the loss.

    Source: grpo: Shao et al. 2024, arXiv:2402.03300, eq. 3; dapo: Yu et al. 2025, arXiv:2503.14476, eq. 8;
    dr_grpo: Liu et al. 2025, arXiv:2503.20783, section 3.2; luspo: arXiv:2602.05261; bnpo: TRL's name for the
    mean over the tokens of a batch.
    """
    per = NORMALISERS[loss]
    if per == "answer":
        return per_token(1.0 / (lengths_A.clamp_min(1) * norms.num_answers), lengths_A, num_tokens)
    divisor = {
        "step_tokens": norms.num_tokens,
        "rollout_tokens": norms.rollout_tokens,
        "longest": norms.num_answers * norms.max_tokens,
        "sum": norms.num_answers,
    }[per]
    return torch.full((num_tokens,), 1.0 / max(divisor, 1.0), device=lengths_A.device)


def policy_loss(batch: PolicyBatch, knobs: PolicyKnobs, norms: Norms) -> PolicyLoss:
    """The loss of one micro-batch: surrogate + beta * KL - entropy_coef * mean entropy.

    Masks and corrections touch the surrogate alone; the KL term and the entropy see every token (the entropy
    those that a top-entropy mask keeps).
    Source: as in `policy_surrogate`, `policy_ratio` and `token_weights`; the entropy term: Schulman et al.
    2017 (PPO), arXiv:1707.06347, eq. 9.
    """
    N = len(batch.logp_N)
    old_logp_N = batch.old_logp_N if batch.old_logp_N is not None else batch.logp_N.detach()
    log_ratio_N = log_ratio(batch.logp_N, old_logp_N, batch.lengths_A, knobs.level)
    ratio_N = log_ratio_N.exp()
    advantage_N = per_token(batch.advantage_A, batch.lengths_A, N)
    loss_N = _surrogate(batch, knobs, log_ratio_N, ratio_N, advantage_N, old_logp_N)
    if knobs.off_policy_limit is not None:
        since_N = batch.sampler_logp_N if batch.sampler_logp_N is not None else old_logp_N
        near_A = keep_near_policy(
            batch.logp_N, since_N, batch.lengths_A, batch.advantage_A, limit=knobs.off_policy_limit
        )
        loss_N = loss_N * per_token(near_A, batch.lengths_A, N)
    if batch.is_kept_N is not None:
        loss_N = loss_N * batch.is_kept_N
    if batch.mismatch_N is not None and knobs.loss != "vespo":
        loss_N = loss_N * batch.mismatch_N
    sums = _sums(batch, knobs, ratio_N, advantage_N)
    if knobs.beta:
        assert batch.reference_N is not None, "A KL term needs the reference's log-probs."
        kl_N = kl_estimate(
            batch.logp_N, batch.reference_N, knobs.kl, ratio_N=ratio_N if knobs.unbiased_kl else None
        )
        loss_N = loss_N + knobs.beta * kl_N
        sums["kl"] = kl_N.detach().sum()
    value = (loss_N * token_weights(batch.lengths_A, N, knobs.loss, norms)).sum()
    if knobs.entropy_coef:
        assert batch.entropy_N is not None, "An entropy term needs the entropy."
        entropy_N = batch.entropy_N if batch.is_kept_N is None else batch.entropy_N * batch.is_kept_N
        kept_tokens = norms.kept_tokens if norms.kept_tokens is not None else norms.num_tokens
        value = value - knobs.entropy_coef * entropy_N.sum() / max(kept_tokens, 1.0)
    return PolicyLoss(value, sums)


def _surrogate(
    batch: PolicyBatch,
    knobs: PolicyKnobs,
    log_ratio_N: Tensor,
    ratio_N: Tensor,
    advantage_N: Tensor,
    old_logp_N: Tensor,
) -> Tensor:
    if knobs.loss in CLIPPED:
        return clipped_loss(ratio_N, advantage_N, knobs.clip)
    if knobs.loss == "cispo":
        return cispo_loss(ratio_N, batch.logp_N, advantage_N, highest=knobs.cispo_max_weight)
    if knobs.loss == "sapo":
        return sapo_loss(ratio_N, advantage_N, temperature_pos=knobs.sapo_pos, temperature_neg=knobs.sapo_neg)
    assert knobs.loss == "vespo", f"There is no policy loss {knobs.loss}."
    weight_N = gamma_weight(
        batch.logp_N.detach() - old_logp_N,
        batch.lengths_A,
        batch.advantage_A,
        knobs.gamma,
        mismatch_N=batch.mismatch_N,
    )
    return vespo_loss(weight_N, batch.logp_N, advantage_N)


def _sums(batch: PolicyBatch, knobs: PolicyKnobs, ratio_N: Tensor, advantage_N: Tensor) -> dict[str, Tensor]:
    sums = {"ratio": ratio_N.detach().sum()}
    if knobs.loss in CLIPPED:
        low_N, high_N = is_clipped(ratio_N.detach(), advantage_N, knobs.clip)
        sums |= {"clip_low": low_N.float().sum(), "clip_high": high_N.float().sum()}
    elif knobs.loss == "cispo":
        above_N = (ratio_N.detach() > knobs.cispo_max_weight) & (advantage_N > 0)
        sums["clip_high"] = above_N.float().sum()
    if batch.entropy_N is not None:
        sums["entropy"] = batch.entropy_N.detach().sum()
    return sums
