"""A conversation: `messages` (`role`, `content`) or `conversations` (`from`, `value`); `tools`, `system`."""

from __future__ import annotations

from dataclasses import dataclass

from memtrain.recipes.formats.fields import (
    BadRow,
    Example,
    Messages,
    Names,
    Row,
    Tool,
    messages_in,
    text_at,
    value_at,
)
from memtrain.recipes.formats.json_text import template_kwargs_at, tools_at

NEEDS = ("messages",)
READS = ("messages", "tools", "system")
PARTS = ("messages",)


@dataclass(frozen=True, slots=True)
class Conversation(Example):
    """A conversation, rendered by the chat template."""

    messages: Messages
    tools: tuple[Tool, ...]


def parse(row: Row, names: Names) -> Conversation:
    """The messages of a row, roles in the chat template's words.

    Raises: BadRow when they are missing, a message has no known role or no content, or the row has two system
    messages.
    """
    messages = messages_in(value_at(row, names.messages), names.messages)
    messages = with_system_column(messages, row, names)
    return Conversation(messages, tools_at(row, names.tools), template_kwargs=template_kwargs_at(row))


def with_system_column(messages: Messages, row: Row, names: Names) -> Messages:
    """The messages after the text of the column `system`, where the row has one (ShareGPT).

    Raises: BadRow when the messages begin with another system message.
    """
    system = "" if row.get(names.system) is None else text_at(row, names.system)
    if not system:
        return messages
    if messages[0]["role"] != "system":
        return ({"role": "system", "content": system}, *messages)
    if messages[0]["content"] != system:
        raise BadRow(
            f"column '{names.system}' and {names.messages}[0] are two different system messages",
            "remove one of them",
        )
    return messages
