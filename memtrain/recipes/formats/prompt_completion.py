"""A prompt and its completion: `prompt`, `completion`; strings, or messages with optional `tools`."""

from __future__ import annotations

from dataclasses import dataclass

from memtrain.recipes.formats.fields import (
    BadRow,
    Example,
    Messages,
    Names,
    Row,
    Tool,
    same_kind,
    text_or_messages_at,
)
from memtrain.recipes.formats.json_text import template_kwargs_at, tools_at

NEEDS = ("prompt", "completion")
READS = ("prompt", "completion", "tools")
PARTS = ("prompt", "completion")


@dataclass(frozen=True, slots=True)
class PromptCompletion(Example):
    """A prompt and what follows it. Both are strings, or both are messages."""

    prompt: str | Messages
    completion: str | Messages
    tools: tuple[Tool, ...]


def parse(row: Row, names: Names) -> PromptCompletion:
    """The prompt and the completion of a row.

    Raises: BadRow when one is missing, of the wrong kind, or both are empty.
    """
    prompt = text_or_messages_at(row, names.prompt)
    completion = text_or_messages_at(row, names.completion)
    same_kind({names.prompt: prompt, names.completion: completion})
    if not prompt and not completion:
        raise BadRow(f"'{names.prompt}' and '{names.completion}' are both empty", "remove the row")
    given = template_kwargs_at(row)
    return PromptCompletion(prompt, completion, tools_at(row, names.tools), template_kwargs=given)
