"""Prompts of instructions and questions that a text writes (`data.prompt_format`), not a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping

from memtrain.recipes.formats.fields import BadRow, Names, Row, text_at
from memtrain.recipes.formats.json_text import template_kwargs_at
from memtrain.recipes.formats.prompt_completion import PromptCompletion
from memtrain.recipes.formats.turns import optional_text, turns_at

ANSWERS = {"alpaca": "output", "question_answer": "answer"}
"""Formats whose rows are written so, and the field of the text that follows."""

_ASKS = {"alpaca": "instruction", "question_answer": "question"}


def formatted(row: Row, names: Names, form: str, given: Mapping[str, str]) -> PromptCompletion:
    """A row as text: the prompt by the formats `given` (`text`, `with_input`, `system`), and what follows.

    Raises: BadRow when a column is of another kind, or nothing is asked.
    """
    asked = optional_text(row, getattr(names, _ASKS[form]))
    more = optional_text(row, names.input) if form == "alpaca" else ""
    system = optional_text(row, names.system)
    if not asked and not more:
        raise BadRow(f"column '{getattr(names, _ASKS[form])}' is empty: nothing is asked", "remove the row")
    if form == "alpaca" and turns_at(row, names.history):
        raise BadRow(
            f"column '{names.history}' has earlier turns, which data.prompt_format does not write",
            "remove the column, or remove data.prompt_format and let the chat template write all turns",
        )
    texts = {"instruction": asked, "question": asked, "input": more, "system": system}
    parts = [given["system"]] if system and "system" in given else []
    parts.append(given.get("with_input", given["text"]) if more else given["text"])
    prompt = "".join(
        re.sub(r"\{(\w+)\}", lambda found: texts.get(found[1], found[0]), part) for part in parts
    )
    answer = text_at(row, getattr(names, ANSWERS[form]))
    return PromptCompletion(prompt, answer, (), template_kwargs=template_kwargs_at(row))
