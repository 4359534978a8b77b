"""The smallest change of a run's own configuration that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

from memtrain.cli.rescue.as_it_was import AsItWas, as_it_was, changed
from memtrain.errors import MemtrainError
from memtrain.memory.estimate.pricing import Priced, fits_host
from memtrain.memory.hardware.devices import Hardware
from memtrain.recipes.importers.importing import Foreign
from memtrain.recipes.importers.own_changes import changes_of
from memtrain.recipes.peers.savings import SEGMENTS, OwnChange

MOST_TRIED = 150
"""Combinations that are priced. Taste: a few seconds."""


@dataclass(frozen=True, slots=True)
class Way:
    """Changes that go together, and the need of the run with them."""

    keys: dict[str, object]
    environment: tuple[str, ...]
    learns: tuple[str, ...]
    priced: Priced
    need_bytes: int
    """Most that the changed run needs of a card, vLLM's share included."""
    fits_host: bool = True


@dataclass(slots=True)
class _Search:
    foreign: Foreign
    hardware: Hardware
    budget: int
    max_length: int | None
    pins: Mapping[str, object]
    tried: dict[tuple[int, ...], Way | None] = field(default_factory=dict["tuple[int, ...]", "Way | None"])

    def way(self, chosen: Sequence[OwnChange]) -> Way | None:
        """The run with some changes; None where they say nothing new, or cannot be."""
        at = tuple(id(one) for one in chosen)
        if at not in self.tried:
            self.tried[at] = self._priced(chosen) if len(self.tried) < MOST_TRIED else None
        return self.tried[at]

    def _priced(self, chosen: Sequence[OwnChange]) -> Way | None:
        keys: dict[str, object] = {}
        pins: dict[str, object] = {**self.pins}
        for one in chosen:
            edited = one.edit({**self.foreign.config, **keys})
            if not edited and not one.pins:
                return None
            keys |= edited
            pins |= one.pins
        length = None if any(one.kind == "length" for one in chosen) else self.max_length
        try:
            was = as_it_was(changed(self.foreign, keys), self.hardware, self.budget, length, pins)
        except MemtrainError:
            return None
        environment = tuple(one.environment for one in chosen if one.environment)
        learns = tuple(one.learns for one in chosen if one.learns)
        fits = fits_host(was.priced, was.facts)
        return Way(keys, environment, learns, was.priced, was.need_bytes, fits)

    def fits(self, way: Way | None) -> bool:
        """Whether card and host hold the run."""
        return way is not None and way.need_bytes <= self.budget and way.fits_host


def own_way(
    foreign: Foreign,
    was: AsItWas,
    hardware: Hardware,
    budget: int,
    max_length: int | None,
    pins: Mapping[str, object],
) -> Way | None:
    """The fewest exact changes that fit, the fastest first; else the fewest with an inexact change.

    `pins`: what of the run is otherwise than its configuration says.

    None where the tool's own keys do not make it fit.
    """
    search = _Search(foreign, hardware, budget, max_length, pins)
    changes = changes_of(
        foreign.tool.name, was.imported.method, foreign.processes, is_script=foreign.is_plain_script
    )
    if foreign.grows_segments:
        changes = [one for one in changes if one is not SEGMENTS]
    exact = [one for one in changes if not one.learns and search.way((one,)) is not None]
    others = [one for one in changes if one.learns and search.way((one,)) is not None]
    for chosen in _combinations(exact):
        fitting = [way for one in chosen if search.fits(way := search.way(one)) and way is not None]
        if fitting:
            # Where no logits hold the memory, a loss without them is not it: of what is as fast the first.
            digits = None if _has_logits(was) else 2
            return min(fitting, key=lambda way: _rounded(way.priced.step_s / was.priced.step_s, digits))
    strongest = tuple({one.kind: one for one in exact}.values())
    for count in (1, 2):
        for lossy in combinations(others, count):
            if len({one.kind for one in lossy}) == count and search.fits(search.way((*strongest, *lossy))):
                return search.way(_pruned(search, (*strongest, *lossy)))
    return None


def _has_logits(was: AsItWas) -> bool:
    return any(one.owner == "logits" for one in was.priced.prediction.peak.owners)


def _rounded(share: float, digits: int | None) -> float:
    return share if digits is None else round(share, digits)


def _combinations(exact: Sequence[OwnChange]) -> Iterator[list[tuple[OwnChange, ...]]]:
    """Sets of changes of different kinds: single ones, then pairs, ..., all that there are."""
    kinds: dict[str, list[OwnChange]] = {}
    for one in exact:
        kinds.setdefault(one.kind, []).append(one)
    for count in range(1, len(kinds) + 1):
        yield [
            chosen
            for names in combinations(kinds, count)
            for chosen in product(*(kinds[name] for name in names))
        ]


def _pruned(search: _Search, chosen: tuple[OwnChange, ...]) -> tuple[OwnChange, ...]:
    """The same without changes that are not needed, exact ones tried first."""
    kept = list(chosen)
    for one in chosen:
        fewer = [other for other in kept if other is not one]
        if fewer and search.fits(search.way(tuple(fewer))):
            kept = fewer
    return tuple(kept)
