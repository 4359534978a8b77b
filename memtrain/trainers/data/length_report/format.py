"""Numbers in words, the same on the screen, on the page and in the recommendation."""

from __future__ import annotations

SHOWN = {"loss_tokens": "loss tokens"}
"""Names of distributions on screens and pages, where they differ from those in JSON."""


def share(part: float, whole: float) -> str:
    """A share in percent: `0%`, `<0.01%`, `0.42%`, `12%`."""
    if not part or not whole:
        return "0%"
    percent = 100 * part / whole
    if percent < 0.01:
        return "<0.01%"
    if percent >= 99.5 and percent < 100:
        return f"{min(percent, 99.99):.2f}%"
    return f"{percent:.2f}%" if percent < 1 else f"{percent:.1f}%" if percent < 10 else f"{percent:.0f}%"


def short(count: float) -> str:
    """A count in at most five letters: `950`, `12.3k`, `4.56M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size * 0.9995 and count >= 9999.5:
            value = count / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{letter}"
    return f"{count:,.0f}"
