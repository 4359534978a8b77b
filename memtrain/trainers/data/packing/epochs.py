"""Layouts of several epochs as one: arrays end to end, and where each epoch begins. No torch here."""

# E epochs.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from memtrain.memory.plan.length_profile import LengthProfile, LengthReport, joined_profile, summed_report

Ints = NDArray[np.int64]
Laid = TypeVar("Laid")

POINTERS = {"bin_ptr", "item_ptr"}
"""Fields that point into the arrays beside them."""


def joined(parts: Sequence[Laid], *, sums_reports: bool = False) -> Laid:
    """Layouts (dataclasses of arrays) of several epochs as one; reports and lengths as `joined_profile`, or
    with `sums_reports` the report of all parts together."""
    if len(parts) == 1:
        return parts[0]
    made: dict[str, Any] = {}
    for name in (one.name for one in fields(parts[0])):  # pyright: ignore[reportArgumentType]
        values = [getattr(part, name) for part in parts]
        if name in POINTERS:
            made[name] = _pointers(values)
        elif isinstance(values[0], np.ndarray):
            made[name] = np.concatenate(values)
        elif isinstance(values[0], LengthProfile):
            made[name] = joined_profile(values)
            if sums_reports:
                whole = summed_report([value.report for value in values])
                made[name] = made[name].model_copy(update={"report": whole})
        else:
            is_report = sums_reports and isinstance(values[0], LengthReport)
            made[name] = summed_report(values) if is_report else values[0]
    return type(parts[0])(**made)


def laid_epochs(
    lay: Callable[[Ints], Laid],
    rows: Ints,
    later: Sequence[Ints],
    count: Callable[[Laid], int],
    *,
    sums_reports: bool = False,
) -> tuple[Laid, Ints]:
    """(layout of all epochs, [E + 1] where the sequences of each begin); `count`: sequences of a layout."""
    parts = [lay(one) for one in (rows, *later)]
    bounds = np.cumsum([0, *(count(part) for part in parts)]).astype(np.int64)
    return joined(parts, sums_reports=sums_reports), bounds


def of_epoch(bounds: Ints, epoch: int) -> tuple[int, int]:
    """(first, end) of the sequences of an epoch; later epochs begin again."""
    number = epoch % (len(bounds) - 1)
    return int(bounds[number]), int(bounds[number + 1])


def _pointers(values: Sequence[Ints]) -> Ints:
    made, end = [values[0][:1]], 0
    for value in values:
        made.append(value[1:] + end)
        end += int(value[-1])
    return np.concatenate(made)
