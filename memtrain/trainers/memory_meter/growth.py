"""Memory that rises over the steps of a run: told while there is time to act, with the objects that grew.

The memory of normal runs rises in their first steps, with every longest batch so far, and with evaluations
and saves; then it stays. A leak rises by about the same in every stretch of steps. So the lowest values of
the last stretches are held against one another: each above the one before, by about the same, none of the
rise dying away, and the last stretch wholly above the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import median
from typing import Protocol

from memtrain.memory.plan.units import gib

BLOCK_STEPS = 8
"""Steps of a stretch. Taste."""
NUM_BLOCKS = 6
"""Stretches that are held against one another: by chance six values come in order once in 720."""
LEAST_RISE = 0.25
"""Smallest rise between two stretches, as a share of the usual one. Taste."""
LEAST_LASTING = 0.7
"""The last two rises, as a share of the first two: a start that levels off has less. Taste."""
LEAST_BYTES = 16 * 2**20
"""Growth of all stretches that is not told: caches of interpreters and allocators. Taste."""
MUCH_BYTES = 64 * 2**20
"""Growth of all stretches that is told whatever is free. Taste."""
LEAST_SHARE = 0.05
"""Growth until the end of the run that is told, as a share of what is free. Taste."""

Bytes = Callable[[], int]


class Census(Protocol):
    """Objects that hold memory, counted at one moment."""

    def grown(self) -> list[str]:
        """The objects that grew since, the largest growth first, in words."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """A memory that is watched."""

    name: str
    used: Bytes
    """Bytes that this process holds in it now."""
    free: Bytes
    """Bytes that it could still take."""


@dataclass(slots=True)
class _Seen:
    """The last steps in one place."""

    samples: deque[int]
    census: Census | None = None
    since: int = 0
    """Step of the census."""
    is_told: bool = False


@dataclass(slots=True)
class GrowthWatch:
    """Looks at memory after every step, and tells of growth once for each place.

    A first suspicion counts the objects, a second one, half a window later, tells of those that grew between.
    """

    places: Sequence[Place]
    last_step: int
    count: Callable[[], Census]
    note: Callable[[int, str], object]
    """Takes the step and the words."""
    most_tokens: int = 0
    seen: dict[str, _Seen] = field(default_factory=dict)

    def stepped(self, step: int, num_tokens: int) -> None:
        """Look at the memory after a step of so many tokens."""
        if num_tokens > self.most_tokens:
            # A longer batch than ever before may take what it likes.
            self.most_tokens = num_tokens
            self.seen = {name: one for name, one in self.seen.items() if one.is_told}
        for place in self.places:
            seen = self.seen.setdefault(place.name, _Seen(deque(maxlen=BLOCK_STEPS * NUM_BLOCKS)))
            if seen.is_told:
                continue
            seen.samples.append(place.used())
            if len(seen.samples) == seen.samples.maxlen:
                self._judge(place, seen, step)

    def _judge(self, place: Place, seen: _Seen, step: int) -> None:
        rate = steady_growth(list(seen.samples))
        if rate is None or not self._matters(place, rate, step):
            seen.census = None
        elif seen.census is None:
            seen.census, seen.since = self.count(), step
        elif step - seen.since >= BLOCK_STEPS * NUM_BLOCKS // 2:
            seen.is_told = True
            self.note(step, self._words(place, seen, rate, step))
            seen.census = None

    def _matters(self, place: Place, rate: float, step: int) -> bool:
        grown = rate * BLOCK_STEPS * NUM_BLOCKS
        to_come = rate * (self.last_step - step)
        return grown >= MUCH_BYTES or (grown >= LEAST_BYTES and to_come >= LEAST_SHARE * place.free())

    def _words(self, place: Place, seen: _Seen, rate: float, step: int) -> str:
        free = place.free()
        steps = int(free / rate)
        end = (
            f"is used up after {steps:,} more steps"
            if steps < self.last_step - step
            else "lasts for this run"
        )
        found = seen.census.grown() if seen.census is not None else []
        who = "; ".join(found) or "no Python object: memory of a library, or of an allocator"
        return (
            f"{place.name} memory grows by {gib(rate)} a step (now {gib(seen.samples[-1])}); the free "
            f"{gib(free)} {end}. Grown in {step - seen.since} steps: {who}"
        )


def steady_growth(samples: Sequence[int]) -> float | None:
    """Bytes a step by which `samples`, one a step, rise all the time; None where they do not.

    Source: the median of slopes, of the lowest sample of each stretch (Theil 1950, Sen 1968).
    """
    blocks = [samples[start : start + BLOCK_STEPS] for start in range(0, len(samples), BLOCK_STEPS)]
    lowest = [min(block) for block in blocks]
    rises = [after - before for before, after in pairwise(lowest)]
    if min(rises) <= 0 or min(rises) < LEAST_RISE * median(rises) or lowest[-1] <= max(blocks[0]):
        return None
    if sum(rises[-2:]) < LEAST_LASTING * sum(rises[:2]):
        return None
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(lowest), 2)]
    return median(slopes) / BLOCK_STEPS


def words_of_growth(by_owner: Mapping[str, tuple[int, str]], at_most: int = 3) -> list[str]:
    """`owner (words, bytes)` for the owners that grew most."""
    largest = sorted(by_owner.items(), key=lambda one: -one[1][0])[:at_most]
    return [f"{owner} ({text}, {gib(num_bytes)})" for owner, (num_bytes, text) in largest]
