"""Sentences of fields, from the source of their sections."""

from __future__ import annotations

from memtrain.recipes.reading.field_docs import sentences_of
from memtrain.recipes.sections.base import Section


class _Above(Section):
    first: int = 1
    """Of the class above."""
    second: int = 2
    """Also of the class above."""


class _Below(_Above):
    second: int = 3
    """Of the class
    itself."""
    silent: int = 4
    last: int = 5
    """Of the last field."""


def test_own_sentences_go_before_inherited_ones() -> None:
    names = ("first", "second", "silent", "last")
    assert [sentences_of(_Below, name) for name in names] == [
        "Of the class above.",
        "Of the class itself.",
        "",
        "Of the last field.",
    ]
