"""An answer and a verdict on it: `prompt`, `completion`, `label` (true is desirable)."""

from __future__ import annotations

from dataclasses import dataclass

from memtrain.recipes.formats import prompt_completion
from memtrain.recipes.formats.fields import BadRow, Example, Messages, Names, Row, Tool, shown, value_at
from memtrain.recipes.formats.preference import Preference

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
    """The prompt, the answer and the verdict of a row.

    Raises: BadRow when one is missing or of the wrong kind.
    """
    both = prompt_completion.parse(row, names)
    given = value_at(row, names.label)
    verdict = given.lower() if isinstance(given, str) else given
    if not isinstance(verdict, (bool, int, str)) or verdict not in VERDICTS:
        raise BadRow(f"column '{names.label}' is {shown(given)}", "a label is true or false")
    given = both.template_kwargs
    return Unpaired(both.prompt, both.completion, VERDICTS[verdict], both.tools, template_kwargs=given)


def from_pair(pair: Preference) -> tuple[Unpaired, Unpaired]:
    """The two rows of a pair: its chosen answer is desirable, its rejected one is not."""
    return (
        Unpaired(pair.prompt, pair.chosen, True, pair.tools, template_kwargs=pair.template_kwargs),
        Unpaired(pair.prompt, pair.rejected, False, pair.tools, template_kwargs=pair.template_kwargs),
    )
