"""Pairs of answers: `chosen`, `rejected`, with their `prompt` or with a common beginning; optional `margin`.

Without a `prompt` column, the prompt is the common beginning of the two answers: for messages, the leading
messages that are equal; for strings, the common text cut back to the end of a word, so that it never ends
inside one ("The sky is blue" and "The sky is black" share "The sky is", not "The sky is bl").
"""

from __future__ import annotations

from dataclasses import dataclass
from os.path import commonprefix
from unicodedata import east_asian_width

from memtrain.recipes.formats.fields import (
    BadRow,
    Example,
    Messages,
    Names,
    Row,
    Tool,
    margin_at,
    refuse_switched_off,
    same_kind,
    text_or_messages_at,
)
from memtrain.recipes.formats.json_text import template_kwargs_at, tools_at

NEEDS = ("chosen", "rejected")
READS = ("prompt", "chosen", "rejected", "margin", "tools")
PARTS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True, slots=True)
class Preference(Example):
    """A prompt with a preferred and another answer. All are strings, or all are messages."""

    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages
    margin: float | None
    tools: tuple[Tool, ...]


def parse(row: Row, names: Names) -> Preference:
    """The pair of a row.

    Raises: BadRow when an answer is missing, both are the same, or strings and messages are mixed.
    """
    chosen = text_or_messages_at(row, names.chosen)
    rejected = text_or_messages_at(row, names.rejected)
    same_kind({names.chosen: chosen, names.rejected: rejected})
    if chosen == rejected:
        raise BadRow(
            f"'{names.chosen}' and '{names.rejected}' are the same",
            "a pair needs two different answers: remove the row",
        )
    for answer, column in ((chosen, names.chosen), (rejected, names.rejected)):
        refuse_switched_off(answer, column)
    margin, tools = margin_at(row, names.margin), tools_at(row, names.tools)
    given = template_kwargs_at(row)
    if row.get(names.prompt) is None:
        return Preference(*common_beginning(chosen, rejected), margin, tools, template_kwargs=given)
    prompt = text_or_messages_at(row, names.prompt)
    if isinstance(prompt, str) and not isinstance(chosen, str):
        return Preference(
            *prompt_twice(prompt, chosen, rejected, names), margin, tools, template_kwargs=given
        )
    same_kind({names.prompt: prompt, names.chosen: chosen})
    return Preference(prompt, chosen, rejected, margin, tools, template_kwargs=given)


def prompt_twice(
    prompt: str, chosen: Messages, rejected: str | Messages, names: Names
) -> tuple[str | Messages, str | Messages, str | Messages]:
    """Prompt and answers of a row whose answers are whole conversations that repeat the string prompt.

    Raises: BadRow when the string is not a message at the common beginning of both.
    """
    parts = common_beginning(chosen, rejected)
    if not any(isinstance(message, dict) and message["content"] == prompt for message in parts[0]):
        raise BadRow(
            f"'{names.prompt}' is a string, and '{names.chosen}' is messages that do not begin with it",
            "make the prompt a list of messages, or begin both answers with the prompt's messages",
        )
    return parts


def common_beginning(
    chosen: str | Messages, rejected: str | Messages
) -> tuple[str | Messages, str | Messages, str | Messages]:
    """Prompt, chosen and rejected of answers that begin alike; the prompt may be empty for strings.

    Raises: BadRow when conversations have no common first message, or one is the beginning of the other.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        length = words_in_common(chosen, rejected)
        return chosen[:length], chosen[length:], rejected[length:]
    length = 0
    while length < min(len(chosen), len(rejected)) and chosen[length] == rejected[length]:
        length += 1
    if length == 0:
        raise BadRow(
            "the two conversations have no common first message, and there is no prompt column",
            "begin both with the prompt's messages, or add a prompt column",
        )
    if length in (len(chosen), len(rejected)):
        raise BadRow(
            "one conversation is the beginning of the other, without its own answer",
            "end each conversation with its own answer, or remove the row",
        )
    return chosen[:length], chosen[length:], rejected[length:]


def words_in_common(one: str, other: str) -> int:
    """Characters of the longest common beginning that ends at the end of a word in both texts.

    A word ends before a space, or beside a wide character (scripts without spaces); the spaces after it
    belong to what follows, as they do in the tokens.
    """
    common = commonprefix([one, other])
    length = len(common)
    while length and not (ends_word(one, length) and ends_word(other, length)):
        length -= 1
    return length


def ends_word(text: str, length: int) -> bool:
    """Whether `text[:length]` ends a word of the text."""
    before = text[length - 1]
    if before.isspace():
        return False
    after = text[length] if length < len(text) else " "
    return after.isspace() or east_asian_width(before) in "WF" or east_asian_width(after) in "WF"
