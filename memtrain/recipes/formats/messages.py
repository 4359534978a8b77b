"""A conversation: `messages` (`role`, `content`), or `conversations` (`from`, `value`), optional `tools`."""

from __future__ import annotations

from dataclasses import dataclass

from memtrain.recipes.formats.fields import (
    Example,
    Messages,
    Names,
    Row,
    Tool,
    messages_in,
    value_at,
)
from memtrain.recipes.formats.json_text import template_kwargs_at, tools_at

NEEDS = ("messages",)
READS = ("messages", "tools")
PARTS = ("messages",)


@dataclass(frozen=True, slots=True)
class Conversation(Example):
    """A conversation, rendered by the chat template."""

    messages: Messages
    tools: tuple[Tool, ...]


def parse(row: Row, names: Names) -> Conversation:
    """The messages of a row, roles in the chat template's words.

    Raises: BadRow when they are missing, or a message has no known role or no content.
    """
    messages = messages_in(value_at(row, names.messages), names.messages)
    return Conversation(messages, tools_at(row, names.tools), template_kwargs=template_kwargs_at(row))
