"""Instruction rows: `instruction`, `output`, optional `input`, `system`, `history`; turns of a conversation.

`input` follows the instruction on a line of its own; `history` is the earlier turns, [[question, answer],
...]; only `output` is learnt. Source: the rows of Stanford Alpaca, with the columns that LLaMA-Factory added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from memtrain.recipes.formats.fields import BadRow, Message, Names, Row, kind_of, shown, text_at
from memtrain.recipes.formats.json_text import template_kwargs_at
from memtrain.recipes.formats.prompt_completion import PromptCompletion

NEEDS = ("instruction", "output")
READS = ("instruction", "input", "output", "system", "history")
PARTS = ("prompt", "completion")


def parse(row: Row, names: Names) -> PromptCompletion:
    """The instruction and what is before it as a prompt of messages; the output as the assistant's answer.

    Raises: BadRow when a column is of another kind, or instruction and input are both empty.
    """
    asked = [text_at(row, names.instruction), optional_text(row, names.input)]
    question = "\n".join(part for part in asked if part)
    if not question:
        raise BadRow(f"'{names.instruction}' and '{names.input}' are both empty", "remove the row")
    system = optional_text(row, names.system)
    prompt: list[Message] = [{"role": "system", "content": system}] if system else []
    prompt += [*turns_at(row, names.history), {"role": "user", "content": question}]
    answer: Message = {"role": "assistant", "content": text_at(row, names.output)}
    return PromptCompletion(tuple(prompt), (answer,), (), template_kwargs=template_kwargs_at(row))


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
