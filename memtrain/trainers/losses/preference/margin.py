"""Preference losses of one margin: how far the chosen answer's score is above the rejected one's."""

# B pairs. Each function gives one loss a pair; scores are those of the knobs' divergence.

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from memtrain.trainers.losses.preference.pairs import (
    PairKnobs,
    PairLogps,
    divergence_scores,
    smoothed_logistic,
)


def sigmoid(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """DPO: -log sigmoid(beta * (score of chosen - score of rejected)); smoothed labels make it cDPO.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; cDPO: Mitchell 2023, "A note on DPO with noisy
    preferences". Reads beta, label_smoothing, divergence. (TRL 1.16 ignores label_smoothing here.)
    """
    return smoothed_logistic(knobs.beta * _margin(logps, knobs), knobs.label_smoothing)


def sigmoid_norm(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """DPO on scores per token: -log sigmoid(beta * (chosen / its tokens - rejected / its tokens)).

    Source: Lambert et al. 2024 (Tulu 3), arXiv:2411.15124, length-normalized DPO. Reads beta,
    label_smoothing, divergence.
    """
    return smoothed_logistic(knobs.beta * _margin_per_token(logps, knobs), knobs.label_smoothing)


def hinge(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """max(0, 1 - beta * margin).

    Source: Zhao et al. 2023 (SLiC-HF), arXiv:2305.10425, section 2, the calibration loss; on DPO's margin
    Liu et al. 2023 (RSO), arXiv:2309.06657, the hinge-norm loss. Reads beta, divergence.
    """
    return F.relu(1.0 - knobs.beta * _margin(logps, knobs))


def ipo(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """(margin per token - 1 / (2 beta))^2.

    Source: Azar et al. 2023, arXiv:2310.12036, eq. 17, with beta for tau. The paper says nothing of
    length; scores per token are what TRL does too, after its authors' word. Reads beta, divergence.
    """
    return (_margin_per_token(logps, knobs) - 1.0 / (2.0 * knobs.beta)).square()


def exo_pair(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """KL of (sigmoid(beta * margin), its rest) from (1 - eps, eps).

    Source: Ji et al. 2024 (EXO), arXiv:2402.00856, eq. 16. Reads beta, label_smoothing (> 0), divergence.
    """
    eps = knobs.label_smoothing
    assert 0.0 < eps < 1.0, "exo_pair needs label_smoothing above 0: it is the losers' share of the target"
    margin_B = knobs.beta * _margin(logps, knobs)
    win_B = margin_B.sigmoid() * (F.logsigmoid(margin_B) - math.log1p(-eps))
    lose_B = (-margin_B).sigmoid() * (F.logsigmoid(-margin_B) - math.log(eps))
    return win_B + lose_B


def robust(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """DPO made unbiased under flipped labels: ((1 - eps) l(margin) - eps l(-margin)) / (1 - 2 eps).

    Source: Chowdhury et al. 2024 (rDPO), arXiv:2403.00409, section 3.1. Reads beta, label_smoothing
    (below 1/2), divergence.
    """
    eps = knobs.label_smoothing
    assert 0.0 <= eps < 0.5, "robust needs label_smoothing below 1/2"
    margin_B = knobs.beta * _margin(logps, knobs)
    return ((1.0 - eps) * -F.logsigmoid(margin_B) + eps * F.logsigmoid(-margin_B)) / (1.0 - 2.0 * eps)


def discopop(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """Logistic and exponential loss of rho = beta * margin, mixed by s = sigmoid(rho / tau).

    (1 - s) * -log sigmoid(rho) + s * exp(-rho), the last as exp(log s - rho): far below 0, where s is 0 and
    exp(-rho) infinite, their product is still a number.
    Source: Lu et al. 2024 (DiscoPOP), arXiv:2406.08414, eq. 5. Reads beta, discopop_tau, divergence.
    """
    rho_B = knobs.beta * _margin(logps, knobs)
    share_B = torch.sigmoid(rho_B / knobs.discopop_tau)
    exponential_B = torch.exp(F.logsigmoid(rho_B / knobs.discopop_tau) - rho_B)
    return (1.0 - share_B) * -F.logsigmoid(rho_B) + exponential_B


def _margin(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    chosen_B, rejected_B = divergence_scores(logps, knobs)
    return chosen_B - rejected_B


def _margin_per_token(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    chosen_B, rejected_B = divergence_scores(logps, knobs)
    return chosen_B / logps.chosen_length_B - rejected_B / logps.rejected_length_B
