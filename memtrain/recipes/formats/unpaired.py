"""An answer and a verdict: `prompt`, `completion`, `label` (true is desirable); or `messages`, `label`."""

from __future__ import annotations

from dataclasses import dataclass

from memtrain.recipes.formats import prompt_completion
from memtrain.recipes.formats.fields import (
    BadRow,
    Example,
    Messages,
    Names,
    Row,
    Tool,
    messages_in,
    shown,
    value_at,
)
from memtrain.recipes.formats.json_text import template_kwargs_at, tools_at
from memtrain.recipes.formats.preference import Preference
from memtrain.recipes.formats.prompt_completion import PromptCompletion

NEEDS = ("prompt", "completion", "label")
READS = ("prompt", "completion", "label", "tools")
PARTS = ("prompt", "completion")
VERDICTS: dict[object, bool] = {True: True, False: False, "true": True, "false": False}
"""1 and 0 are taken too: Python counts them equal to True and False."""


@dataclass(frozen=True, slots=True)
class Unpaired(Example):
    """A prompt, an answer, and whether the answer is desirable."""

    prompt: str | Messages
    completion: str | Messages
    label: bool
    tools: tuple[Tool, ...]


def parse(row: Row, names: Names) -> Unpaired:
    """The prompt, the answer and the verdict of a row; where prompt and answer are one column, the answer is
    the last message of the conversation there.

    Raises: BadRow when one is missing or of the wrong kind.
    """
    is_one = names.prompt == names.completion
    both = _last_answered(row, names) if is_one else prompt_completion.parse(row, names)
    given = value_at(row, names.label)
    verdict = given.lower() if isinstance(given, str) else given
    if not isinstance(verdict, (bool, int, str)) or verdict not in VERDICTS:
        raise BadRow(f"column '{names.label}' is {shown(given)}", "a label is true or false")
    given = both.template_kwargs
    return Unpaired(both.prompt, both.completion, VERDICTS[verdict], both.tools, template_kwargs=given)


def _last_answered(row: Row, names: Names) -> PromptCompletion:
    messages = messages_in(value_at(row, names.prompt), names.prompt)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise BadRow(
            f"column '{names.prompt}' does not end with an answer of the assistant to a turn before it",
            "the verdict is on the last message: let it be the assistant's",
        )
    given = template_kwargs_at(row)
    tools = tools_at(row, names.tools)
    return PromptCompletion(messages[:-1], messages[-1:], tools, template_kwargs=given)


def from_pair(pair: Preference) -> tuple[Unpaired, Unpaired]:
    """The two rows of a pair: its chosen answer is desirable, its rejected one is not."""
    return (
        Unpaired(pair.prompt, pair.chosen, True, pair.tools, template_kwargs=pair.template_kwargs),
        Unpaired(pair.prompt, pair.rejected, False, pair.tools, template_kwargs=pair.template_kwargs),
    )
