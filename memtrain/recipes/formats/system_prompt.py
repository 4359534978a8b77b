"""System message of the conversations that have none of their own (`data.system_prompt`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memtrain.recipes.formats.fields import BadRow, Example
from memtrain.recipes.formats.messages import Conversation


def with_system(example: Example, system: str | None) -> Example:
    """The example with a system message before its first message, unless its first message is one.

    Raises: BadRow when the row is no conversation.
    """
    if system is None:
        return example
    field = "messages" if isinstance(example, Conversation) else "prompt"
    given: Any = getattr(example, field, None)
    if not isinstance(given, tuple):
        raise BadRow(
            "data.system_prompt is set, but the row is not a conversation",
            "write the row as messages, or remove data.system_prompt",
        )
    if given and given[0]["role"] == "system":
        return example
    return replace(example, **{field: ({"role": "system", "content": system}, *given)})
