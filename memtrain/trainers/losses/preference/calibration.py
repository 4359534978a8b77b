"""Calibration of a reward model's probabilities: expected calibration error, in ten bins."""

# B pairs

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

NUM_BINS = 10
PREFIX = "calibration/"


def calibration_sums(chosen_B: Tensor, rejected_B: Tensor) -> dict[str, Tensor]:
    """Detached scalars on the device: over each bin of confidence, the sum of (confidence - win).

    Confidence is sigmoid(|R_w - R_l|), between 1/2 and 1: the probability that the model gives to the answer
    it prefers. A win is the chosen answer being that one; a tie is half a win.
    """
    with torch.no_grad():
        gap_B = (chosen_B - rejected_B).double()
        confidence_B = gap_B.abs().sigmoid()
        win_B = (gap_B > 0).double() + 0.5 * (gap_B == 0).double()
        bin_B = ((confidence_B - 0.5) * 2 * NUM_BINS).long().clamp(0, NUM_BINS - 1)
        sums = torch.zeros(NUM_BINS, dtype=torch.float64, device=gap_B.device)
        sums.index_add_(0, bin_B, confidence_B - win_B)
        return {f"{PREFIX}{index}": value for index, value in enumerate(sums.unbind())}


def calibration_error(sums: Mapping[str, float], count: float) -> tuple[dict[str, float], float | None]:
    """(the other sums, the error): sum over bins of |sum of (confidence - win)| over `count` pairs.

    None where the bins were not asked for. Source: Naeini et al. 2015, "Obtaining well calibrated
    probabilities using Bayesian binning" (ECE); equal bins of the confidence.
    """
    bins = [value for name, value in sums.items() if name.startswith(PREFIX)]
    rest = {name: value for name, value in sums.items() if not name.startswith(PREFIX)}
    return rest, sum(map(abs, bins)) / count if bins else None
