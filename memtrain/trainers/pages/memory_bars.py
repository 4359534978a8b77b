"""Bars of memory: a row for each moment, a colour for each owner, on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memtrain.memory.plan.plan import PhasePeak
from memtrain.memory.plan.units import GIB, MIB, gib
from memtrain.trainers.pages.charts import COLOURS, Bar, Figure, bar_chart, for_both_widths

MEASURED = "measured"
"""Owner, and CSS class, of bytes that were measured as a whole."""


@dataclass(frozen=True, slots=True)
class OwnerBar:
    """Row of a chart: bytes by owner."""

    label: str
    owners: Sequence[tuple[str, int]]
    text: str
    """Written behind the bar."""

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return sum(size for _, size in self.owners)


def memory_unit(most_bytes: float) -> tuple[str, float]:
    """Unit of an axis on which so many bytes are the most: GiB, or MiB where they would be parts of one."""
    return ("GiB", float(GIB)) if most_bytes >= 0.9995 * GIB else ("MiB", float(MIB))


def predicted_bar(label: str, peak: PhasePeak, words: str = "") -> OwnerBar:
    """The row of a predicted peak."""
    owners = [(owned.owner, owned.num_bytes) for owned in peak.owners]
    return OwnerBar(label, owners, f"{gib(peak.num_bytes)}{words}")


def memory_figure(rows: Sequence[OwnerBar], *, budget: int | None) -> Figure:
    """The rows as one chart with its legend; the largest row's owners have the first colours."""
    by_size = sorted(rows, key=lambda row: -row.num_bytes)
    names = dict.fromkeys(owner for row in by_size for owner, size in row.owners if size)
    owners = [name for name in names if name != MEASURED]
    colours = {name: COLOURS[min(at, len(COLOURS) - 1)] for at, name in enumerate(owners)}
    if MEASURED in names:
        colours[MEASURED] = MEASURED

    def parts(row: OwnerBar) -> list[tuple[str, float, str]]:
        return [(f"{owner}: {gib(size)}", size, colours[owner]) for owner, size in row.owners if size]

    bars = [Bar(row.label, parts(row), row.text) for row in rows]
    limit = (f"budget {gib(budget)}", float(budget)) if budget else None
    unit = memory_unit(max((row.num_bytes for row in rows), default=0))
    title = "Memory by phase and owner"
    return for_both_widths(
        title,
        lambda is_narrow: bar_chart(bars, title, unit=unit, limit=limit, is_narrow=is_narrow),
        tuple(colours.items()),
    )
