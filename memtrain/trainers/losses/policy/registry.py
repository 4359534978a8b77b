"""The losses of GRPO and its relatives by name: surrogate, normaliser, KL, entropy, masks and corrections."""

# N values.
# N scored tokens, answer after answer; A answers.
# N scored tokens, answer after answer; A answers. logp: of the policy that learns; old: of the policy that
# the update started from; sampler: as recorded while sampling.
# N scored tokens; advantage_N is the advantage of each token (of its answer, or its own).
# N scored tokens of one micro-batch, answer after answer; A answers.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memtrain.recipes.sections.methods.online_base import MismatchMode
from memtrain.trainers.losses.answers import sum_per_answer
from memtrain.trainers.losses.head.linear import Count, at_least_one, on_device, one_over, over

# Quantiles of any number of values: torch's own refuse more than 16.8 million.


def quantiles(value_N: Tensor, shares: Sequence[float]) -> list[float]:
    """The values below which each of `shares` (0 to 1) of all lie, between two of them by straight line.

    For one value or more, none of them NaN. Ranks are float64, so that they are exact whatever N; sorts
    nothing, time grows as N.
    Source: Hyndman and Fan 1996, "Sample quantiles in statistical packages", definition 7 (torch's and
    numpy's default).
    """
    values = value_N.detach().cpu().double().numpy()
    ranks = [share * (len(values) - 1) for share in shares]
    places = sorted({place for rank in ranks for place in (math.floor(rank), math.ceil(rank))})
    parted = np.partition(values, places)
    return [
        float(np.interp(rank, (math.floor(rank), math.floor(rank) + 1), _pair(parted, rank)))
        for rank in ranks
    ]


def _pair(parted: np.ndarray, rank: float) -> tuple[float, float]:
    return parted[math.floor(rank)], parted[math.ceil(rank)]


# Correction of the mismatch between the sampler's log-probs and the trainer's, for the same weights.
#
# Another kernel, dtype or engine gives each token a slightly different probability; over a long answer the
# ratios multiply. Ratios are constants of the update. They are wrong together with top-k, top-p or min-p:
# then the sampler's probabilities are of another support, and kept mass ^ length multiplies every answer.


QUANTILES = (0.01, 0.5, 0.99)


class Mismatch(NamedTuple):
    """Factor of each token's loss, and facts of the raw ratios."""

    weight_N: Tensor
    """The corrected ratio at each token; that of its answer with the sequence modes."""
    is_outside_N: Tensor
    """bool: the raw ratio is outside the bounds, and truncated or masked."""


def mismatch(
    old_logp_N: Tensor,
    sampler_logp_N: Tensor,
    lengths_A: Tensor,
    mode: MismatchMode,
    *,
    lowest: float | None,
    highest: float | None,
) -> Mismatch:
    """exp(log p_trainer - log p_sampler), truncated to [lowest, highest], or 0 outside of it.

    By token, or of the whole answer (the product of its tokens). A token without a sampler log-prob (NaN)
    counts as ratio 1. `none` gives 1 everywhere.
    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"
    (https://fengyao.notion.site/off-policy-rl): truncated importance sampling; masked by token and by
    sequence: Liu et al. 2025, "When speed kills stability" (https://yingru.notion.site).
    """
    difference_N = torch.nan_to_num(old_logp_N - sampler_logp_N, nan=0.0).detach()
    if mode == "none":
        return Mismatch(torch.ones_like(difference_N), torch.zeros_like(difference_N, dtype=torch.bool))
    if mode.startswith("sequence"):
        sums_A = sum_per_answer(difference_N, lengths_A)
        difference_N = per_token(sums_A, lengths_A, len(difference_N))
    raw_N = difference_N.exp()
    low = lowest if lowest is not None else 0.0
    high = highest if highest is not None else torch.inf
    is_outside_N = (raw_N < low) | (raw_N > high)
    if mode.endswith("truncate"):
        return Mismatch(raw_N.clamp(low, high), is_outside_N)
    return Mismatch(raw_N.masked_fill(is_outside_N, 0.0), is_outside_N)


def mismatch_facts(old_logp_N: Tensor, sampler_logp_N: Tensor) -> dict[str, float]:
    """Metrics of the raw difference d = log p_trainer - log p_sampler of a step's tokens.

    Means and quantiles are taken before any bound is applied: a jump of mean |d| says that the sampler's
    weights are stale.
    """
    known = ~(old_logp_N.isnan() | sampler_logp_N.isnan())
    difference = (old_logp_N - sampler_logp_N)[known].double()
    if not len(difference):
        return {}
    named = {
        f"mismatch/ratio_p{round(share * 100)}": math.exp(value)
        for share, value in zip(QUANTILES, quantiles(difference, QUANTILES), strict=True)
    }
    return {
        "mismatch/mean": difference.abs().mean().item(),
        "mismatch/max": difference.abs().max().item(),
        **named,
    }


# Parts of policy losses: importance ratios, KL estimates, and the tokens that count.


KlEstimator = Literal["k1", "k2", "k3"]
Level = Literal["token", "sequence"]


def per_token(value_A: Tensor, lengths_A: Tensor, num_tokens: int) -> Tensor:
    """The value of each answer at each of its tokens [N]."""
    return torch.repeat_interleave(value_A, lengths_A, output_size=num_tokens)


def mean_per_answer(value_N: Tensor, lengths_A: Tensor) -> Tensor:
    """Means over the tokens of each answer [A]; 0 for an answer without tokens."""
    return sum_per_answer(value_N, lengths_A) / lengths_A.clamp_min(1)


def log_ratio(logp_N: Tensor, old_logp_N: Tensor, lengths_A: Tensor, level: Level) -> Tensor:
    """log(policy / old policy) at each token [N].

    `sequence`: the mean of the answer's tokens at each of them (the log of the geometric mean).
    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300, eq. 3 (token); Zheng et al. 2025 (GSPO),
    arXiv:2507.18071, eq. 7 (sequence).
    """
    difference_N = logp_N - old_logp_N
    if level == "token":
        return difference_N
    return per_token(mean_per_answer(difference_N, lengths_A), lengths_A, len(logp_N))


def kl_estimate(
    logp_N: Tensor, reference_N: Tensor, kind: KlEstimator, *, ratio_N: Tensor | None = None
) -> Tensor:
    """An estimate of KL(policy || reference) at each token [N], from the sampled token alone.

    With d = log p - log p_reference: k1 = d (unbiased, may be negative; alone its mean gradient is 0), k2 =
    d^2 / 2 (its gradient is unbiased), k3 = exp(-d) + d - 1 (unbiased, never negative; alone its gradient is
    that of KL(reference || policy)). `ratio_N`, the importance ratio to the policy that wrote the tokens,
    makes the gradients of k1 and k3 those of KL(policy || reference), and those of k2 wrong.

    Source: Schulman 2020, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html);
    the ratio: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, section 3.1 (unbiased KL estimate).
    """
    difference_N = logp_N - reference_N
    if kind == "k1":
        estimate_N = difference_N
    elif kind == "k2":
        estimate_N = 0.5 * difference_N.square()
    else:
        estimate_N = (-difference_N).exp() + difference_N - 1
    return estimate_N if ratio_N is None else estimate_N * ratio_N


def entropy_threshold(entropy_N: Tensor, share: float) -> Tensor:
    """The entropy (scalar) that the `share` of tokens with the highest one reach; +inf for no tokens.

    Taken over all tokens of an update, so that micro-batches and ranks do not move it.
    Source: Wang et al. 2025, arXiv:2506.01939, section 5 (the top 20 % carry the learning).
    """
    if not len(entropy_N):
        return torch.tensor(torch.inf)
    return torch.tensor(quantiles(entropy_N.float(), [1.0 - share])[0])


def keep_near_policy(
    logp_N: Tensor, old_logp_N: Tensor, lengths_A: Tensor, advantage_A: Tensor, *, limit: float
) -> Tensor:
    """bool [A]: answers to train on; disadvantageous answers only while they are near the policy.

    An answer of negative advantage is left out when the mean of log old - log policy over its tokens is above
    `limit`. A token without an old log-prob (NaN) is no evidence.
    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, section 3.1 (off-policy sequence
    masking).
    """
    distance_N = torch.nan_to_num(old_logp_N - logp_N.detach(), nan=0.0)
    return (advantage_A >= 0) | (mean_per_answer(distance_N, lengths_A) <= limit)


# Surrogate losses of one token, minimised instead of the expected reward.


LOWEST_LOG_WEIGHT = math.log(1e-8)
"""Of a sequence's weight in `vespo`, as in its authors' code."""


class Clip(NamedTuple):
    """Bounds of the ratio beyond which its gradient stops."""

    low: float = 0.2
    """The ratio is clipped below 1 - low."""
    high: float = 0.2
    """The ratio is clipped above 1 + high (DAPO's clip-higher: 0.28)."""
    delta: float | None = None
    """Upper bound of the unclipped ratio too, which bounds the loss of bad answers."""


class GammaShape(NamedTuple):
    """Exponents of `vespo`'s weight, for answers of positive and of negative advantage."""

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0


def clipped_loss(ratio_N: Tensor, advantage_N: Tensor, clip: Clip) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) of each token [N]; with `delta` the first r is at most delta.

    Source: Schulman et al. 2017 (PPO), arXiv:1707.06347, eq. 7; two bounds: Yu et al. 2025 (DAPO),
    arXiv:2503.14476, eq. 8; delta: Prime Intellect 2025 (INTELLECT-2), arXiv:2505.07291, two-sided clipping.
    """
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    if clip.delta is not None:
        ratio_N = ratio_N.clamp(max=clip.delta)
    return -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)


def is_clipped(ratio_N: Tensor, advantage_N: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """bool [N] each: tokens whose gradient the lower bound stops, and the upper one."""
    return (ratio_N < 1 - clip.low) & (advantage_N < 0), (ratio_N > 1 + clip.high) & (advantage_N > 0)


def cispo_loss(ratio_N: Tensor, logp_N: Tensor, advantage_N: Tensor, *, highest: float) -> Tensor:
    """-min(r, highest) A log p of each token [N], the weight a constant: no token's gradient is stopped.

    Source: MiniMax 2025 (CISPO), arXiv:2506.13585, section 3.1, with its upper bound only.
    """
    return -ratio_N.detach().clamp(max=highest) * advantage_N * logp_N


def sapo_loss(
    ratio_N: Tensor, advantage_N: Tensor, *, temperature_pos: float, temperature_neg: float
) -> Tensor:
    """-(4 / t) sigmoid(t (r - 1)) A of each token [N]: a gate that closes softly, t by the advantage's sign.

    Source: Gao et al. 2025 (SAPO), arXiv:2511.20347, its gate f(r).
    """
    temperature_N = torch.where(advantage_N > 0, temperature_pos, temperature_neg)
    return -(4 / temperature_N) * (temperature_N * (ratio_N - 1)).sigmoid() * advantage_N


def vespo_loss(weight_N: Tensor, logp_N: Tensor, advantage_N: Tensor) -> Tensor:
    """-phi A log p of each token [N], phi = `gamma_weight` of its answer, a constant.

    Source: VESPO, arXiv:2602.10693, with the weight of `gamma_weight`.
    """
    return -weight_N.detach() * advantage_N * logp_N


def gamma_weight(
    log_ratio_N: Tensor,
    lengths_A: Tensor,
    advantage_A: Tensor,
    shape: GammaShape,
    *,
    mismatch_N: Tensor | None = None,
) -> Tensor:
    """w^k exp(lambda (1 - w)) of each answer at its tokens [N]: 1 at w = 1, small where w is far from it.

    w is the ratio of the whole answer, the product over its tokens; `mismatch_N`, the (corrected) ratio of
    trainer to sampler, is multiplied in. Logs are clamped to +-20 a token and [log 1e-8, 20] an answer.
    Source: VESPO, arXiv:2602.10693: the gamma kernel, normalised to 1 at w = 1.
    """
    with torch.no_grad():
        log_w_A = sum_per_answer(log_ratio_N.clamp(-20.0, 20.0), lengths_A)
        if mismatch_N is not None:
            log_w_A = log_w_A + sum_per_answer(mismatch_N.log().clamp(LOWEST_LOG_WEIGHT, 20.0), lengths_A)
        log_w_A = log_w_A.clamp(LOWEST_LOG_WEIGHT, 20.0)
        is_good_A = advantage_A >= 0
        k_A = torch.where(is_good_A, shape.k_pos, shape.k_neg)
        lambda_A = torch.where(is_good_A, shape.lambda_pos, shape.lambda_neg).clamp_min(1e-4)
        log_phi_A = lambda_A + k_A * log_w_A - lambda_A * log_w_A.exp()
        phi_A = log_phi_A.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return per_token(phi_A, lengths_A, len(log_ratio_N))


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

    num_answers: Count
    """Answers of the step, those without signal and truncated ones included."""
    num_tokens: Count
    """Tokens of the step that may be trained on."""
    rollout_tokens: Count
    """Tokens of the rollout that may be trained on, divided by its optimizer steps."""
    max_tokens: int
    """Most tokens of a completion."""
    kept_tokens: Count | None = None
    """Tokens of the step that a top-entropy mask keeps; None: all."""

    def on_device(self, device: torch.device) -> Norms:
        """The same as scalars of the device."""
        return Norms(
            on_device(self.num_answers, device),
            on_device(self.num_tokens, device),
            on_device(self.rollout_tokens, device),
            self.max_tokens,
            None if self.kept_tokens is None else on_device(self.kept_tokens, device),
        )


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
        answers = norms.num_answers
        # In float32, as a number of Python's beside integers is.
        answers = answers.float() if isinstance(answers, Tensor) else answers
        return per_token(1.0 / (lengths_A.clamp_min(1) * answers), lengths_A, num_tokens)
    divisor = {
        "step_tokens": norms.num_tokens,
        "rollout_tokens": norms.rollout_tokens,
        "longest": norms.num_answers * norms.max_tokens,
        "sum": norms.num_answers,
    }[per]
    return one_over(at_least_one(divisor), (num_tokens,), lengths_A.device)


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
        value = value - over(knobs.entropy_coef * entropy_N.sum(), at_least_one(kept_tokens))
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
