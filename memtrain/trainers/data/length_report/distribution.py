"""A distribution of lengths as numbers: mean, percentiles, bars, and how sure they are when sampled."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memtrain.trainers.data.length_report.result import Bin, Distribution, Interval, Percentile

Ints = NDArray[np.int64]

PERCENTS = (1.0, 5.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 100.0)
BARS_PER_DOUBLING = 8
Z_95 = 1.96


def distribution(
    name: str, values: Ints, *, unit: Literal["tokens", "messages"] = "tokens", scale: float = 1.0
) -> Distribution:
    """The distribution of `values`; `scale`: how many rows each stands for, above 1 in a sample."""
    ordered = np.sort(values)
    count = len(ordered)
    total, mean = int(ordered.sum()), float(ordered.mean()) if count else 0.0
    spread = float(ordered.std()) if count else 0.0
    half = Z_95 * spread / max(count, 1) ** 0.5 * finite(scale)
    return Distribution(
        name=name,
        unit=unit,
        count=round(count * scale),
        total=round(total * scale),
        mean=mean,
        mean_interval=(mean - half, mean + half) if scale > 1 else None,
        smallest=int(ordered[0]) if count else 0,
        largest=int(ordered[-1]) if count else 0,
        percentiles=tuple(percentile(ordered, percent, scale) for percent in PERCENTS) if count else (),
        bins=bars(ordered, scale),
    )


def finite(scale: float) -> float:
    """Factor of a sample without replacement on a standard error: sqrt(1 - rows read / rows there are).

    Source: Cochran 1977, Sampling Techniques, eq. 2.20.
    """
    return (1 - 1 / scale) ** 0.5 if scale > 1 else 0.0


def percentile(ordered: Ints, percent: float, scale: float = 1.0) -> Percentile:
    """The smallest value that `percent` of the sorted values do not exceed, and its interval in a sample.

    Source: order statistics around n*p within 1.96 binomial standard deviations.
    """
    count, share = len(ordered), percent / 100
    middle = count * share
    half = Z_95 * (count * share * (1 - share)) ** 0.5 * finite(scale)

    def at(rank: float) -> int:
        return int(ordered[min(max(int(np.ceil(rank - 1e-9)) - 1, 0), count - 1)])

    return Percentile(
        percent=percent,
        tokens=at(middle),
        interval=(at(middle - half), at(middle + half)) if scale > 1 else None,
    )


def bar_ends(largest: int) -> Ints:
    """Ends of the bars, each the last length in its bar: eight a doubling, so that powers of two are ends."""
    ends = {0}
    power = 1
    while max(ends) < largest:
        ends |= {power + power * part // BARS_PER_DOUBLING for part in range(BARS_PER_DOUBLING)}
        ends.add(2 * power)
        power *= 2
    return np.array(sorted(ends), np.int64)


def bars(ordered: Ints, scale: float = 1.0) -> tuple[Bin, ...]:
    """Bars from the smallest value to the largest, empty bars included."""
    if not len(ordered):
        return ()
    ends = bar_ends(int(ordered[-1]))
    below = np.searchsorted(ordered, ends, side="right")
    counts = np.diff(below, prepend=0)
    first, last = np.flatnonzero(counts)[[0, -1]].tolist()
    starts = np.concatenate([[0], ends[:-1] + 1])
    return tuple(
        Bin(first=int(starts[at]), last=int(ends[at]), rows=round(int(counts[at]) * scale))
        for at in range(first, last + 1)
    )


def share_interval(part: int, whole: int, scale: float) -> Interval | None:
    """95 % interval of a share of the rows (Wilson), where the rows are a sample.

    Source: Wilson 1927, doi:10.2307/2276774; narrowed by `finite`.
    """
    if scale <= 1 or not whole:
        return None
    z = Z_95 * finite(scale)
    share = part / whole
    middle = share + z * z / (2 * whole)
    half = z * (share * (1 - share) / whole + z * z / (4 * whole * whole)) ** 0.5
    below = 1 + z * z / whole
    return max(0.0, (middle - half) / below), min(1.0, (middle + half) / below)


def ratio_interval(parts: Ints, wholes: Ints, scale: float) -> Interval | None:
    """95 % interval of sum(parts) / sum(wholes) over rows, where the rows are a sample.

    Source: Cochran 1977, Sampling Techniques, section 6.4 (the ratio estimator's standard error).
    """
    count, total = len(wholes), int(wholes.sum())
    if scale <= 1 or count < 2 or not total:
        return None
    ratio = int(parts.sum()) / total
    spread = float(np.square(parts - ratio * wholes).sum() / (count - 1)) ** 0.5
    half = Z_95 * finite(scale) * spread * count**0.5 / total
    return max(0.0, ratio - half), min(1.0, ratio + half)
