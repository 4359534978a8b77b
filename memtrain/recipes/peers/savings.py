"""Changes that save memory in other trainers, by the keys to change there: made from the tables' rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from memtrain.recipes.peers.table import Row, Saving, Table

Config = Mapping[str, Any]
Edit = Callable[[Config], Mapping[str, object]]

_KINDS = ("segments", "evaluation", "checkpointing", "rows", "loss", "offloading", "attention", "reference")
KINDS = (*_KINDS, "sleep", "share", "away", "sharding", "precision", "optimizer", "adapter", "length")
"""Every kind of change, in the order in which they are tried: exact ones first, then the mildest."""


@dataclass(frozen=True, slots=True)
class OwnChange:
    """A change. Changes of the same kind exclude each other, the mildest stands first."""

    kind: str
    edit: Edit
    """The keys to write with their values; none where it is made already."""
    learns: str = ""
    """The difference in learning; empty: the same numbers up to rounding."""
    pins: Mapping[str, object] = field(default_factory=dict[str, object])
    """Changes of the run's computation, beyond the keys."""
    environment: str = ""
    """A variable to set in place of a key."""


SEGMENTS = OwnChange(
    "segments",
    lambda config: {},
    pins={"memory.expandable_segments": True},
    environment="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
"""Segments that grow in place of fragmenting: every tool on torch has them."""


def changes_in(of: Table, method: str, processes: int) -> list[OwnChange]:
    """The changes that the rows of a trainer have for a method, exact ones first."""
    found = [
        change
        for row in of.rows.values()
        for saving in row.saves
        if (not saving.methods or method in saving.methods) and processes >= saving.devices
        for change in _changes(row, saving)
    ]
    return [SEGMENTS, *sorted(found, key=lambda one: KINDS.index(one.kind))]


def _changes(row: Row, saving: Saving) -> Iterator[OwnChange]:
    edits = [_set(row.key, saving, value) for value in saving.value]
    edits += [_number(row.key, saving, partial(_lower, to)) for to in saving.below]
    edits += [_number(row.key, saving, partial(_divided, by, saving.least)) for by in saving.divide]
    yield from (OwnChange(saving.change, edit, saving.learns) for edit in edits)


def _set(key: str, saving: Saving, value: object) -> Edit:
    """The key and those beside it set; nothing where the key is so already."""

    def edit(config: Config) -> Mapping[str, object]:
        if config.get(key, saving.unset) == value or not _may(saving, config):
            return {}
        return {key: value, **{other: to for other, to in saving.also.items() if config.get(other) != to}}

    return edit


def _number(key: str, saving: Saving, number: Callable[[Any], Any]) -> Edit:
    """The key set to a lower number, and another multiplied by what it was divided by."""

    def edit(config: Config) -> Mapping[str, object]:
        held, other = config.get(key, saving.unset), config.get(saving.times, 1)
        if not isinstance(held, int | float) or isinstance(held, bool) or not _may(saving, config):
            return {}
        to = number(held)
        sums = [config.get(one, 512) for one in saving.holds]
        if to is None or not all(isinstance(one, int) for one in (other, *sums)) or to < sum(sums):
            return {}
        if not saving.times:
            return {key: to}
        return {key: to, saving.times: other * held // to} if held % to == 0 else {}

    return edit


def _lower(to: float, held: float) -> float | None:
    return to if to < held else None


def _divided(by: int, least: int, held: float) -> int | None:
    """The number divided; None where it would be too small, or is one already."""
    if by == 0:
        return 1 if held > 1 else None
    return int(held // by) if held > 1 and held // by >= least else None


def _may(saving: Saving, config: Config) -> bool:
    return all(_among(config.get(key), values) for key, values in saving.where.items())


def _among(held: object, values: tuple[object, ...]) -> bool:
    if held in (None, "", [], {}):
        return "unset" in values
    return "set" in values or any(type(one) is type(held) and one == held for one in values)
