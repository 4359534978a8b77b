"""Instruction rows: `instruction`, `output`, optional `input`, `system`, `history`; turns of a conversation.

`input` follows the instruction on a line of its own; `history` is the earlier turns, [[question, answer],
...]; only `output` is trained on. Source: the rows of Stanford Alpaca, with
the columns that LLaMA-Factory added.
"""

from __future__ import annotations

from memtrain.recipes.formats.fields import BadRow, Names, Row, text_at
from memtrain.recipes.formats.prompt_completion import PromptCompletion
from memtrain.recipes.formats.turns import answered, optional_text

NEEDS = ("instruction", "output")
READS = ("instruction", "input", "output", "system", "history")
PARTS = ("prompt", "completion")


def parse(row: Row, names: Names) -> PromptCompletion:
    """The instruction and all before it as a prompt of messages; the output as the assistant's answer.

    Raises: BadRow when a column is of another kind, or instruction and input are both empty.
    """
    asked = [text_at(row, names.instruction), optional_text(row, names.input)]
    question = "\n".join(part for part in asked if part)
    if not question:
        raise BadRow(f"'{names.instruction}' and '{names.input}' are both empty", "remove the row")
    return answered(row, question, names.output, system=names.system, history=names.history)
