"""Predicted and measured memory of a phase, and why less may have been needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memtrain.memory.plan.plan import PhasePeak, Plan
from memtrain.trainers.protocols.events import MemoryEvent

LIGHTER = 0.02
"""Share of the prediction by which a measured peak is below it before the batch is named. Taste."""


EXTRA_SIZES = (("reserved by the allocator", "reserved"), ("resident", "rss"))
"""Title and field of measurements beside the peak of live tensors."""


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Predicted and measured peak of a phase; either may be missing."""

    phase: str
    predicted: PhasePeak | None
    measured: MemoryEvent | None

    @property
    def difference(self) -> float | None:
        """Measured minus predicted, as a fraction of the predicted; above zero: more was needed."""
        if self.predicted is None or self.measured is None or not self.predicted.num_bytes:
            return None
        return self.measured.allocated / self.predicted.num_bytes - 1


def lighter_words(phases: Sequence[PhaseMemory], plan: Plan | None) -> list[str]:
    """A sentence where no step had a micro-batch as large as the plan allows, and needed less for it."""
    limit = None if plan is None else plan.settings.micro_tokens
    found = [
        f"{one.measured.tokens:,} in the {one.phase}"
        for one in phases
        if limit is not None
        and one.measured is not None
        and 0 < one.measured.tokens < limit
        and one.difference is not None
        and one.difference < -LIGHTER
    ]
    if not found:
        return []
    return [f"predicted for micro-batches of up to {limit:,} tokens; the largest had {', '.join(found)}"]


def extra_sizes(phases: Sequence[PhaseMemory]) -> list[tuple[str, str]]:
    """Title and field of what was measured beside the peaks: a CPU's allocator reserves nothing."""
    measured = [one.measured for one in phases if one.measured is not None]
    return [(title, field) for title, field in EXTRA_SIZES if any(getattr(one, field) for one in measured)]
