"""Plain text: `text`."""

from __future__ import annotations

from dataclasses import dataclass

from memtrain.recipes.formats.fields import BadRow, Example, Names, Row, text_at

NEEDS = ("text",)
READS = ("text",)
PARTS = ("text",)


@dataclass(frozen=True, slots=True)
class Text(Example):
    """A text, all of it trained on."""

    text: str


def parse(row: Row, names: Names) -> Text:
    """The text of a row.

    Raises: BadRow when it is missing, empty, or not a string.
    """
    text = text_at(row, names.text)
    if not text:
        raise BadRow(f"column '{names.text}' is empty", "remove the row")
    return Text(text)
