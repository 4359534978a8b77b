"""Preference losses on sorted batches: the chosen answers' distribution should dominate the rejected ones'.

Sorting is a statistic of the batch: a loss over micro-batches is not the loss over one batch of all of them.
"""

# B pairs. Each function gives one loss a rank of the sorted batch, which stands for no particular pair.

from __future__ import annotations

from torch import Tensor

from memtrain.trainers.losses.preference.pairs import PairKnobs, PairLogps, smoothed_logistic


def aot(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """-log sigmoid(beta * (sorted policy log-ratios - sorted reference log-ratios)), log-ratio w - l.

    Source: Melnyk et al. 2024 (AOT), arXiv:2406.05882, the paired form of section 3. Reads beta,
    label_smoothing.
    """
    assert logps.chosen_reference_B is not None, "aot needs reference log-probs"
    assert logps.rejected_reference_B is not None, "aot needs reference log-probs"
    policy_B = (logps.chosen_B - logps.rejected_B).sort().values
    reference_B = (logps.chosen_reference_B - logps.rejected_reference_B).sort().values
    return smoothed_logistic(knobs.beta * (policy_B - reference_B), knobs.label_smoothing)


def aot_unpaired(logps: PairLogps, knobs: PairKnobs) -> Tensor:
    """-log sigmoid(beta * (sorted r_w - sorted r_l)), r = log policy - log reference.

    Source: Melnyk et al. 2024 (AOT), arXiv:2406.05882, the unpaired form of section 3. Reads beta,
    label_smoothing.
    """
    chosen_B, rejected_B = logps.chosen_ratio_B.sort().values, logps.rejected_ratio_B.sort().values
    return smoothed_logistic(knobs.beta * (chosen_B - rejected_B), knobs.label_smoothing)
