"""Quantiles of any number of values: torch's own refuse more than 16.8 million."""

# N values.

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor


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
