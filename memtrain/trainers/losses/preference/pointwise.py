"""Preference losses that judge each answer of a pair against the reference, not only against each other."""

# B pairs. Each function gives one loss a pair; r is log policy - log reference of an answer.

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from memtrain.trainers.losses.preference.pairs import PairKnobs, PairLogps


def nca_pair(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """-log sigmoid(beta r_w) - 1/2 log sigmoid(-beta r_w) - 1/2 log sigmoid(-beta r_l).

    Source: Chen et al. 2024 (NCA), arXiv:2402.05369, section 4.1, the NCA loss for K = 2. Reads beta.
    """
    chosen_B, rejected_B = _rewards(logps, knobs)
    return -F.logsigmoid(chosen_B) - 0.5 * F.logsigmoid(-chosen_B) - 0.5 * F.logsigmoid(-rejected_B)


def bco_pair(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """-log sigmoid(beta r_w - delta) - log sigmoid(-(beta r_l - delta)), delta = `bco_shift`.

    The paper's delta is a mean of rewards over batches: a statistic the caller keeps (`updated_mean`)
    and hands over, so that this stays a sum over pairs. TRL 1.16 leaves it out (delta = 0).
    Source: Jung et al. 2024 (BCO), arXiv:2404.04656, section 4. Reads beta, bco_shift.
    """
    chosen_B, rejected_B = _rewards(logps, knobs)
    return -F.logsigmoid(chosen_B - knobs.bco_shift) - F.logsigmoid(knobs.bco_shift - rejected_B)


def sppo_hard(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """(r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2: the winner's probability is 1, the loser's 0.

    Source: Wu et al. 2024 (SPPO), arXiv:2405.00675, eq. 4.7, with 1 / beta for eta. Reads beta.
    """
    half = 0.5 / knobs.beta
    return (logps.chosen_ratio_B - half).square() + (logps.rejected_ratio_B + half).square()


def apo_zero(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """1 - sigmoid(beta r_w) + sigmoid(beta r_l): for chosen answers better than the model's own.

    Source: D'Oosterlinck et al. 2024 (APO), arXiv:2408.06266, eq. 7. Reads beta.
    """
    chosen_B, rejected_B = _rewards(logps, knobs)
    return (-chosen_B).sigmoid() + rejected_B.sigmoid()


def apo_down(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """sigmoid(beta r_w) + 1 - sigmoid(beta (r_w - r_l)): for chosen answers worse than the model's own.

    Source: D'Oosterlinck et al. 2024 (APO), arXiv:2408.06266, eq. 8. Reads beta.
    """
    chosen_B, rejected_B = _rewards(logps, knobs)
    return chosen_B.sigmoid() + (rejected_B - chosen_B).sigmoid()


def updated_mean(mean: Tensor, num_seen: int, value_B: Tensor) -> tuple[Tensor, int]:
    """(mean, count) of all values seen so far, with the new ones: what `bco_shift` is made of."""
    total = num_seen + value_B.numel()
    return (mean * num_seen + value_B.detach().sum()) / total, total


def _rewards(logps: PairLogps, knobs: PairKnobs) -> tuple[Tensor, Tensor]:
    return knobs.beta * logps.chosen_ratio_B, knobs.beta * logps.rejected_ratio_B
