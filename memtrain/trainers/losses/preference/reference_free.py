"""Preference losses without a reference model: SimPO, ORPO, CPO, and the likelihood of chosen answers."""

# B pairs. Each function gives one loss a pair.

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from memtrain.trainers.losses.preference.pairs import PairKnobs, PairLogps, smoothed_logistic


def sft(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """-log p(chosen), summed over its tokens; `preference_loss` divides by the step's chosen tokens.

    Source: Pang et al. 2024 (iterative reasoning preference optimization), arXiv:2404.19733, the NLL term.
    """
    return -(logps.chosen_B if logps.plain_chosen_B is None else logps.plain_chosen_B)


def simpo(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """-log sigmoid(beta * (log p_w per token - log p_l per token) - gamma).

    Source: Meng et al. 2024 (SimPO), arXiv:2405.14734, eq. 6. Reads beta (the paper: 2.0 to 2.5),
    simpo_gamma, label_smoothing.
    """
    chosen_B, rejected_B = _per_token(logps)
    margin_B = knobs.beta * (chosen_B - rejected_B) - knobs.simpo_gamma
    return smoothed_logistic(margin_B, knobs.label_smoothing)


def orpo(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """-log sigmoid(log odds_w - log odds_l), odds = p / (1 - p) with p the mean-token probability.

    ORPO is {"sft": 1, "orpo": lambda}. Source: Hong et al. 2024, arXiv:2403.07691, eqs. 4 and 7.
    """
    chosen_B, rejected_B = _per_token(logps)
    return -F.logsigmoid(_log_odds(chosen_B) - _log_odds(rejected_B))


def cpo(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """-log sigmoid(beta * (log p_w - log p_l)).

    CPO is {"cpo": 1, "sft": 1}. Source: Xu et al. 2024, arXiv:2401.08417, eq. 3. Reads beta, label_smoothing.
    """
    return smoothed_logistic(knobs.beta * (logps.chosen_B - logps.rejected_B), knobs.label_smoothing)


def _per_token(logps: PairLogps) -> tuple[Tensor, Tensor]:
    return logps.chosen_B / logps.chosen_length_B, logps.rejected_B / logps.rejected_length_B


def _log_odds(logp_B: Tensor) -> Tensor:
    """log p - log(1 - p) from log p < 0, exact on both sides of p = 1/2."""
    logp_B = logp_B.clamp_max(-1e-6)
    is_likely_B = logp_B > -math.log(2.0)
    # Each branch sees a harmless value where the other is meant: where() alone would pass on a NaN gradient.
    near_B = (-torch.expm1(torch.where(is_likely_B, logp_B, -1.0))).log()
    far_B = torch.log1p(-torch.where(is_likely_B, -1.0, logp_B).exp())
    return logp_B - torch.where(is_likely_B, near_B, far_B)
