"""Strings as turns of a chat (`data.strings_are: turns`): prompts are the user's, answers the assistant's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memtrain.recipes.formats.fields import BadRow, Example, Names, Row
from memtrain.recipes.formats.preference import Preference

ROLES = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}
"""Fields that may be strings, and who speaks there."""


def as_turns(example: Example, row: Row, names: Names) -> Example:
    """The example with a turn in place of each string; one of messages as it is.

    Raises: BadRow when the prompt is empty, or a pair has no column for it: no turn could be told.
    """
    texts: dict[str, Any] = {name: getattr(example, name, None) for name in ROLES}
    given = {name: text for name, text in texts.items() if isinstance(text, str)}
    if "prompt" not in given:
        return example
    if isinstance(example, Preference) and row.get(names.prompt) is None:
        raise BadRow(
            f"the row has no column '{names.prompt}': with data.strings_are: turns, that is the user's turn",
            "map the prompt's column (data.columns: {prompt: ...}), or write the answers as messages",
        )
    if not given["prompt"].strip():
        raise BadRow(f"column '{names.prompt}' is empty: the user's turn says nothing", "remove the row")
    turns = {name: ({"role": ROLES[name], "content": text},) for name, text in given.items()}
    return replace(example, **turns)
