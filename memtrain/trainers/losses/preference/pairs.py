"""Inputs of a preference loss for a batch of pairs: log-probs of answers, their scores, and the knobs."""

# B pairs

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional as F

_MAX_EXPONENT = 40.0
"""Chosen: the square of exp(40), which IPO takes, is 5.5e34; the largest fp32 is 3.4e38."""


class Divergence(StrEnum):
    """Distance of the policy from the reference: f(u), u = policy / reference probability of an answer."""

    REVERSE_KL = "reverse_kl"
    FORWARD_KL = "forward_kl"
    JS = "js_divergence"
    ALPHA = "alpha_divergence"


@dataclass(frozen=True, slots=True)
class PairKnobs:
    """The knobs of all preference losses; each loss says which it reads."""

    beta: float = 0.1
    """Strength of the reference (DPO's temperature). Higher: closer to the reference."""
    label_smoothing: float = 0.0
    """Probability that a label is flipped."""
    divergence: Divergence = Divergence.REVERSE_KL
    divergence_alpha: float = 0.5
    """Of the alpha-divergence: towards 0 reverse KL, 1 is forward KL."""
    discopop_tau: float = 0.05
    simpo_gamma: float = 0.5
    """Margin by which a chosen answer must win in SimPO."""
    bco_shift: float = 0.0
    """BCO's delta: mean reward of all answers seen so far, kept by the caller; 0 leaves it out."""


@dataclass(frozen=True, slots=True)
class PairLogps:
    """Log-probs of the answers of a batch of pairs, summed over answer tokens, fp32 [B].

    The references are None for reference-free losses. `plain_chosen_B` is the chosen answers' log-prob
    where `chosen_B` was desensitised to length; None where they are the same.
    """

    chosen_B: Tensor
    rejected_B: Tensor
    chosen_reference_B: Tensor | None
    rejected_reference_B: Tensor | None
    chosen_tokens_B: Tensor
    rejected_tokens_B: Tensor
    plain_chosen_B: Tensor | None = None

    @property
    def chosen_ratio_B(self) -> Tensor:
        """log policy - log reference of the chosen answers."""
        assert self.chosen_reference_B is not None, "this loss needs reference log-probs"
        return self.chosen_B - self.chosen_reference_B

    @property
    def rejected_ratio_B(self) -> Tensor:
        """log policy - log reference of the rejected answers."""
        assert self.rejected_reference_B is not None, "this loss needs reference log-probs"
        return self.rejected_B - self.rejected_reference_B

    @property
    def chosen_length_B(self) -> Tensor:
        """Tokens of the chosen answers, at least 1."""
        return self.chosen_tokens_B.clamp_min(1)

    @property
    def rejected_length_B(self) -> Tensor:
        """Tokens of the rejected answers, at least 1."""
        return self.rejected_tokens_B.clamp_min(1)


def divergence_scores(logps: PairLogps, knobs: PairKnobs) -> tuple[Tensor, Tensor]:
    """(chosen, rejected) scores f'(u) without their constants: beta times them are the implicit rewards.

    reverse KL: log u. Forward KL: 1 - 1/u. JS: log(2u / (1 + u)). alpha: (1 - u^-alpha) / alpha.
    Source: Wang et al. 2023 (f-DPO), arXiv:2309.16240, table 1. TRL 1.16 spells alpha as 1 - alpha.
    """
    score = _SCORES[knobs.divergence]
    return score(logps.chosen_ratio_B, knobs), score(logps.rejected_ratio_B, knobs)


def smoothed_logistic(margin_B: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - eps) log sigmoid(margin) - eps log sigmoid(-margin): labels are wrong with probability eps."""
    loss_B = -F.logsigmoid(margin_B)
    if label_smoothing == 0:
        return loss_B
    return (1.0 - label_smoothing) * loss_B - label_smoothing * F.logsigmoid(-margin_B)


def _inverse_power(log_ratio_B: Tensor, alpha: float) -> Tensor:
    """(1 - u^-alpha) / alpha, flat where u^-alpha would leave fp32's range."""
    return -torch.expm1((-alpha * log_ratio_B).clamp_max(_MAX_EXPONENT)) / alpha


_SCORES = {
    Divergence.REVERSE_KL: lambda log_ratio_B, knobs: log_ratio_B,
    Divergence.FORWARD_KL: lambda log_ratio_B, knobs: _inverse_power(log_ratio_B, 1.0),
    Divergence.JS: lambda log_ratio_B, knobs: math.log(2.0) + F.logsigmoid(log_ratio_B),
    Divergence.ALPHA: lambda log_ratio_B, knobs: _inverse_power(log_ratio_B, knobs.divergence_alpha),
}
