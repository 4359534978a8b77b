"""The runs that a tiled loss walks through: all of them, or the four that a trace needs."""

from __future__ import annotations


def spans(total: int, step: int) -> list[tuple[int, int]]:
    """(first, after the last) of consecutive runs of `step`; the last one may be shorter.

    A loop over these holds the same memory at the start of every run but the first.
    """
    return [(low, min(low + step, total)) for low in range(0, total, step)]


def logit_spans(total: int, step: int) -> list[tuple[int, int]]:
    """The first two and the last two of `spans`: spans between them hold the same as the second, at each
    moment."""
    found = spans(total, step)
    return found if len(found) <= 4 else [*found[:2], *found[-2:]]
