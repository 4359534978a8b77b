"""A question in a column and its answer in another, as the turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from memtrain.recipes.formats.fields import BadRow, Message, Row, kind_of, shown, text_at
from memtrain.recipes.formats.json_text import template_kwargs_at
from memtrain.recipes.formats.prompt_completion import PromptCompletion


def answered(
    row: Row, question: str, answer: str, *, system: str, history: str | None = None
) -> PromptCompletion:
    """A question with the system's turn and earlier turns before it; the text of `answer` is trained on.

    `answer`, `system` and `history` are names of columns. Raises: BadRow when one is of another kind.
    """
    rules = optional_text(row, system)
    prompt: list[Message] = [{"role": "system", "content": rules}] if rules else []
    prompt += turns_at(row, history) if history is not None else []
    prompt.append({"role": "user", "content": question})
    reply: Message = {"role": "assistant", "content": text_at(row, answer)}
    return PromptCompletion(tuple(prompt), (reply,), (), template_kwargs=template_kwargs_at(row))


def optional_text(row: Row, column: str) -> str:
    """The text of a column; empty where the row has none.

    Raises: BadRow when it is not a string.
    """
    return "" if row.get(column) is None else text_at(row, column)


def turns_at(row: Row, column: str) -> list[Message]:
    """Messages of the earlier turns of a column of [question, answer] pairs; none where it is empty.

    Raises: BadRow when it is no list of pairs of strings.
    """
    value = row.get(column)
    if value is None or value == "":
        return []
    if not isinstance(value, (list, tuple)):
        raise BadRow(
            f"column '{column}' is {kind_of(value)} ({shown(value)}), not a list of turns",
            "write [[question, answer], ...]",
        )
    made: list[Message] = []
    for index, turn in enumerate(cast(Sequence[object], value)):
        pair = cast(Sequence[object], turn if isinstance(turn, (list, tuple)) else ())
        if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise BadRow(
                f"{column}[{index}] is {shown(cast(object, turn))}, not a question and its answer",
                "write [[question, answer], ...]",
            )
        made += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return made
