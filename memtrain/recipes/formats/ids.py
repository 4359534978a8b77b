"""Rows that are tokenized already: `input_ids`, optional `labels` (-100 where a token is not trained on)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from memtrain.recipes.formats.fields import BadRow, Example, Names, Row, kind_of, shown, value_at

NEEDS = ("ids",)
READS = ("ids", "labels")
PARTS = ("ids",)
NO_LOSS = -100
MOST_ID = 2**31 - 1
"""Largest token id that a store holds."""


@dataclass(frozen=True, slots=True)
class Ids(Example):
    """Token ids, and where the file has them, labels: the same ids, or -100."""

    ids: tuple[int, ...]
    labels: tuple[int, ...] | None


def parse(row: Row, names: Names) -> Ids:
    """The ids of a row.

    Raises: BadRow when they are no ids, or the labels are neither the same ids nor -100.
    """
    ids = whole_numbers(value_at(row, names.ids), names.ids)
    if not ids:
        raise BadRow(f"column '{names.ids}' is empty", "remove the row")
    for token in (min(ids), max(ids)):
        if not 0 <= token <= MOST_ID:
            raise BadRow(
                f"column '{names.ids}' holds the id {shown(token)}", f"a token id is 0 to {MOST_ID:,}"
            )
    if row.get(names.labels) is None:
        return Ids(ids, None)
    labels = whole_numbers(row[names.labels], names.labels)
    if len(labels) != len(ids):
        raise BadRow(
            f"'{names.ids}' has {len(ids)} numbers and '{names.labels}' has {len(labels)}",
            "give a label for each token id",
        )
    for position, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, NO_LOSS):
            raise BadRow(
                f"'{names.labels}'[{position}] is {shown(label)}, but the token there is {token}",
                f"a label is the token's own id (not shifted), or {NO_LOSS} for a token outside the loss",
            )
    return Ids(ids, labels)


def whole_numbers(value: object, column: str) -> tuple[int, ...]:
    """A list of whole numbers.

    Raises: BadRow when it is anything else.
    """
    if not isinstance(value, (list, tuple)):
        raise BadRow(
            f"column '{column}' is {kind_of(value)} ({shown(value)}), not a list of whole numbers",
            "give a list of whole numbers",
        )
    items = cast(Sequence[object], value)
    for item in items:
        if not isinstance(item, int) or isinstance(item, bool):
            raise BadRow(
                f"column '{column}' holds {shown(item)}, which is not a whole number", "give whole numbers"
            )
    return tuple(cast(Sequence[int], items))
