"""Answers that say nothing: only their end would be trained on."""

from __future__ import annotations

from typing import Any

from memtrain.recipes.formats.fields import Example, Message

ANSWERS = ("completion", "chosen", "rejected", "messages")
"""Parts of an example in which the assistant speaks."""


def has_empty_answer(example: Example) -> bool:
    """Whether an answer of the example is empty or blank: a string, or a turn of the assistant."""
    return any(_is_empty(part) for name in ANSWERS if (part := getattr(example, name, None)) is not None)


def _is_empty(part: Any) -> bool:
    if isinstance(part, str):
        return not part.strip()
    return any(says_nothing(message) for message in part if message["role"] == "assistant")


def says_nothing(message: Message) -> bool:
    """Whether a message has neither words nor another field that could be some: calls, reasoning."""
    fields = (value for name, value in message.items() if name not in ("role", "content", "name"))
    return not str(message["content"]).strip() and not any(fields)
