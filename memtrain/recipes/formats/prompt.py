"""A prompt alone, for the methods that write the answers themselves: `prompt`; other columns are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memtrain.recipes.formats.fields import (
    TEMPLATE_KWARGS,
    BadRow,
    Example,
    Messages,
    Names,
    Row,
    Tool,
    text_or_messages_at,
)
from memtrain.recipes.formats.json_text import template_kwargs_at, tools_at

NEEDS = ("prompt",)
READS = ("prompt", "tools")
PARTS = ("prompt",)


@dataclass(frozen=True, slots=True)
class Prompt(Example):
    """A prompt, and what the rewards may want to know of it."""

    prompt: str | Messages
    tools: tuple[Tool, ...]
    columns: dict[str, Any]


def parse(row: Row, names: Names) -> Prompt:
    """The prompt of a row, with every other column as it stands.

    Raises: BadRow when the prompt is missing or empty.
    """
    prompt = text_or_messages_at(row, names.prompt)
    if not prompt:
        raise BadRow(f"column '{names.prompt}' is empty", "remove the row, or set data.on_bad_row: skip")
    given = template_kwargs_at(row)
    taken = (names.prompt, names.tools, TEMPLATE_KWARGS)
    columns = {column: value for column, value in row.items() if column not in taken}
    return Prompt(prompt, tools_at(row, names.tools), columns, template_kwargs=given)
