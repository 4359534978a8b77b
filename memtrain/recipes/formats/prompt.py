"""A prompt alone, for the methods that write the answers themselves: `prompt`; other columns are kept.

Rows of a question and its answer are prompts there too: the question is the user's turn, as in fine-tuning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, cast
from uuid import UUID

from memtrain.recipes.formats.fields import (
    TEMPLATE_KWARGS,
    BadRow,
    Example,
    Messages,
    Names,
    Row,
    TableRow,
    Tool,
    text_or_messages_at,
)
from memtrain.recipes.formats.json_text import template_kwargs_at, tools_at
from memtrain.recipes.formats.prompt_completion import PromptCompletion

NEEDS = ("prompt",)
READS = ("prompt", "tools")
PARTS = ("prompt",)
ASKED = "memtrain:asked"
"""Key beside the columns of a stored row, under which its prompt stands as it was read."""


@dataclass(frozen=True, slots=True)
class Prompt(Example):
    """A prompt, with the columns for the rewards."""

    prompt: str | Messages
    tools: tuple[Tool, ...]
    columns: dict[str, Any]

    @property
    def kept(self) -> dict[str, Any]:
        """Values stored beside the row's tokens: the columns, and under `ASKED` the prompt and its tools."""
        return {**self.columns, ASKED: {"prompt": self.prompt, "tools": self.tools}}


def parse(row: Row, names: Names) -> Prompt:
    """The prompt of a row, with every other column that has a JSON form; dates and decimals become text.

    A column without one (bytes) is left out: `unused_columns` names it. Columns of a table keep the nulls of
    its structs here: a reward finds the keys that it finds with `datasets`.
    Raises: BadRow when the prompt is missing or empty, or a column holds half a character.
    """
    prompt = text_or_messages_at(row, names.prompt)
    if not prompt:
        raise BadRow(f"column '{names.prompt}' is empty", "remove the row")
    columns = columns_but(row, (names.prompt, names.tools, TEMPLATE_KWARGS))
    return Prompt(prompt, tools_at(row, names.tools), columns, template_kwargs=template_kwargs_at(row))


def of_answered(example: PromptCompletion, row: Row, names: Names) -> Prompt:
    """The prompt of a row of a question and its answer; all its columns go to the rewards, the answer too.

    Raises: BadRow when a column holds half a character.
    """
    columns = columns_but(row, (names.tools, TEMPLATE_KWARGS))
    return Prompt(example.prompt, example.tools, columns, template_kwargs=example.template_kwargs)


def columns_but(row: Row, taken: Sequence[str]) -> dict[str, Any]:
    """Columns of a row that have a JSON form, without those `taken`."""
    columns: dict[str, Any] = {}
    whole = row.held if isinstance(row, TableRow) else {}
    for column, value in {**row, **whole}.items():
        if column not in taken:
            with suppress(TypeError):
                columns[text_of(column)] = json_form(value)
    return columns


def json_form(value: Any) -> Any:
    """A value as rewards get it: JSON's own types unchanged, dates in ISO 8601, durations in seconds,
    decimals in their digits.

    Raises: TypeError for what has no such form; BadRow for half a character.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, Mapping):
        given = cast(Mapping[Any, Any], value)
        return {text_of(str(key)): json_form(one) for key, one in given.items()}
    if isinstance(value, (list, tuple)):
        return [json_form(one) for one in cast(Sequence[Any], value)]
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    raise TypeError(f"cannot be written as JSON: {type(value).__name__}")


def text_of(text: str) -> str:
    """The text, if it has a UTF-8 form.

    Raises: BadRow when it has none.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            raise BadRow(
                f"the text holds {half}, half of a surrogate pair", "fix the escapes in the file"
            ) from None
    return text
