"""A question and its answer: `question`, `answer`, optional `system`; two turns of a conversation."""

from __future__ import annotations

from memtrain.recipes.formats.fields import BadRow, Names, Row, text_at
from memtrain.recipes.formats.prompt_completion import PromptCompletion
from memtrain.recipes.formats.turns import answered

NEEDS = ("question", "answer")
READS = ("question", "answer", "system")
PARTS = ("prompt", "completion")


def parse(row: Row, names: Names) -> PromptCompletion:
    """The question as the user's turn, the answer as the assistant's.

    Raises: BadRow when one is no string, or the question is empty.
    """
    question = text_at(row, names.question)
    if not question:
        raise BadRow(f"column '{names.question}' is empty", "remove the row")
    return answered(row, question, names.answer, system=names.system)
