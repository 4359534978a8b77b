"""A question and its answer: `question`, `answer`, optional `system`; two turns of a conversation."""

from __future__ import annotations

from memtrain.recipes.formats.alpaca import optional_text
from memtrain.recipes.formats.fields import BadRow, Message, Names, Row, text_at
from memtrain.recipes.formats.json_text import template_kwargs_at
from memtrain.recipes.formats.prompt_completion import PromptCompletion

NEEDS = ("question", "answer")
READS = ("question", "answer", "system")
PARTS = ("prompt", "completion")


def parse(row: Row, names: Names) -> PromptCompletion:
    """The question as the user's turn, the answer as the assistant's.

    Raises: BadRow when one is no string, or the question is empty.
    """
    question = text_at(row, names.question)
    if not question:
        raise BadRow(f"column '{names.question}' is empty", "remove the row, or set data.on_bad_row: skip")
    system = optional_text(row, names.system)
    prompt: list[Message] = [{"role": "system", "content": system}] if system else []
    prompt.append({"role": "user", "content": question})
    answer: Message = {"role": "assistant", "content": text_at(row, names.answer)}
    return PromptCompletion(tuple(prompt), (answer,), (), template_kwargs=template_kwargs_at(row))
