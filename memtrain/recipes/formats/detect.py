"""Format of a row, by a declared rule on its column names, the same in every process.

The rule, on the columns of the first row that are not null, after `data.columns`:

    input_ids                    ids
    chosen, rejected             preference
    prompt, completion, label    unpaired
    prompt, completion           prompt_completion
    instruction, output          alpaca
    question, answer             question_answer
    messages (or conversations)  messages
    text                         text
    messages before chosen, rejected that are one message each
                                 preference
    messages that end with the assistant's, label
                                 unpaired, for methods that take a verdict
    prompt, and none of these    prompt

A format whose columns are part of a longer match is not counted. Where two are left, the method may use only
one of them; where it may use both, the fields that `data.columns` names say which, else `data.format` has to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from memtrain.errors import DataError
from memtrain.recipes.formats import (
    alpaca,
    ids,
    messages,
    preference,
    prompt,
    prompt_completion,
    question_answer,
    text,
    unpaired,
)
from memtrain.recipes.formats.fields import (
    BadRow,
    Example,
    Names,
    Row,
    columns_line,
    familiar,
    is_message,
    mapping_hint,
    names_of,
)
from memtrain.recipes.formats.media import refuse_media
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.data import Columns, Format

Parse = Callable[[Row, Names], Example]


@dataclass(frozen=True, slots=True)
class Form:
    """A format: its name, the fields it needs and reads, the parts its rows have, and its reader."""

    name: Format
    needs: tuple[str, ...]
    reads: tuple[str, ...]
    """Every field that is used, needed or not."""
    parts: tuple[str, ...]
    parse: Parse
    stored_as: Format | None = None
    """Format whose examples its rows become, where it is another."""
    num_answers: int = 0
    """Answers of a row that is a prompt with its answers; 0: the row is trained on whole, or is a prompt."""
    is_prompt: bool = False
    """Whether a row is a prompt alone."""
    strings: tuple[str, ...] = ()
    """Fields that are its whole text, one after another, where they are strings; the last is trained on."""

    @property
    def takes_strings(self) -> bool:
        """Whether its prompts may be strings: text, or turns of a chat (`data.strings_are`)."""
        return "prompt" in self.reads

    @property
    def has_prompts(self) -> bool:
        """Whether rows of one prompt belong together: they are held out together."""
        return self.is_prompt or self.num_answers > 0


def _prompted(name: Format, needs: tuple[str, ...], reads: tuple[str, ...], parse: Parse) -> Form:
    return Form(name, needs, reads, prompt_completion.PARTS, parse, "prompt_completion")


FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (
        Form("ids", ids.NEEDS, ids.READS, ids.PARTS, ids.parse),
        Form(
            "preference",
            preference.NEEDS,
            preference.READS,
            preference.PARTS,
            preference.parse,
            num_answers=2,
        ),
        Form("unpaired", unpaired.NEEDS, unpaired.READS, unpaired.PARTS, unpaired.parse, num_answers=1),
        Form(
            "prompt_completion",
            prompt_completion.NEEDS,
            prompt_completion.READS,
            prompt_completion.PARTS,
            prompt_completion.parse,
            strings=prompt_completion.NEEDS,
        ),
        _prompted("alpaca", alpaca.NEEDS, alpaca.READS, alpaca.parse),
        _prompted("question_answer", question_answer.NEEDS, question_answer.READS, question_answer.parse),
        Form("messages", messages.NEEDS, messages.READS, messages.PARTS, messages.parse),
        Form("text", text.NEEDS, text.READS, text.PARTS, text.parse, strings=text.NEEDS),
        Form("prompt", prompt.NEEDS, prompt.READS, prompt.PARTS, prompt.parse, is_prompt=True),
    )
}
"""Every format, in the order of the rule."""

SUPERVISED: tuple[Format, ...] = (
    "prompt_completion",
    "messages",
    "text",
    "ids",
    "alpaca",
    "question_answer",
)
ONLINE: tuple[Format, ...] = ("prompt", "question_answer", "alpaca")
BY_ANSWERS: Mapping[int, tuple[Format, ...]] = {1: ("unpaired", "preference"), 2: ("preference",)}
METHOD_FORMATS: Mapping[str, tuple[Format, ...]] = {
    **{
        name: ONLINE if method.is_online else BY_ANSWERS.get(method.num_answers, SUPERVISED)
        for name, method in METHODS.items()
    },
    "score": ("preference", "unpaired", "prompt_completion", "alpaca", "question_answer"),
}
"""Formats each method can use, the one it is usually given first."""


def detect(
    row: Row, columns: Columns, declared: Format, allowed: Sequence[Format], where: str
) -> tuple[Form, Names]:
    """The format of a source, and its column names, from its first row.

    Raises: DataError when the columns fit no allowed format, or several, or the declared one is not allowed.
    """
    present = tuple(str(column) for column, value in row.items() if value is not None)
    names = names_of(columns, present)
    if "preference" in allowed and declared in ("auto", "preference"):
        names = after_a_conversation(row, names)
    if "unpaired" in allowed and declared in ("auto", "unpaired"):
        names = ended_by_the_answer(row, names)
    check_mapping(columns, [str(column) for column in row], where)
    if declared != "auto":
        if declared not in allowed:
            raise DataError(
                f"the method cannot use rows of format {declared}",
                where,
                f"give rows of format {' or '.join(allowed)}, or use another method",
            )
        return FORMS[declared], names
    fitting = matches(present, names)
    usable = [form for form in fitting if form.name in allowed]
    if usable and allowed[0] == "prompt" and names.prompt in present:
        usable = [FORMS["prompt"], *(form for form in usable if form.name != "prompt")]
    mapped = [form for form in usable if any(getattr(columns, need, None) for need in form.needs)]
    if len(usable) == 1 or len(mapped) == 1:
        return (mapped or usable)[0], names
    if not usable:
        raise DataError(*no_format(row, names, fitting, allowed, where))
    found = " and ".join(form.name for form in usable)
    raise DataError(
        f"the columns {', '.join(present)} fit several formats: {found}",
        where,
        f"choose one: data.format: {usable[0].name}",
    )


def after_a_conversation(row: Row, names: Names) -> Names:
    """The names where the answers of a pair are one message each, and the conversation before them is their
    prompt: `conversations`, `chosen`, `rejected`, as LLaMA-Factory has them."""
    answers = (row.get(names.chosen), row.get(names.rejected))
    has_turns = row.get(names.messages) is not None and row.get(names.prompt) is None
    if has_turns and all(is_message(answer) for answer in answers):
        return replace(names, prompt=names.messages, messages="")
    return names


def ended_by_the_answer(row: Row, names: Names) -> Names:
    """The names where a verdict is on the last message of a conversation: `messages`, `label`."""
    has_turns = row.get(names.messages) is not None and row.get(names.label) is not None
    if has_turns and row.get(names.prompt) is None and row.get(names.completion) is None:
        return replace(names, prompt=names.messages, completion=names.messages, messages="")
    return names


@cache
def used_columns(form: str, names: Names) -> frozenset[str]:
    """Columns that rows of a format read."""
    return frozenset(getattr(names, name) for name in FORMS[form].reads)


def matches(present: Sequence[str], names: Names) -> list[Form]:
    """Formats whose columns are all present, without parts of a longer match."""
    fitting = [form for form in FORMS.values() if all(getattr(names, need) in present for need in form.needs)]
    longest = [form for form in fitting if not any(set(form.needs) < set(other.needs) for other in fitting)]
    return [form for form in longest if form.name != "prompt"] or longest


def no_format(
    row: Row, names: Names, fitting: Sequence[Form], allowed: Sequence[Format], where: str
) -> tuple[str, str, str]:
    """(what, where, fix) for a first row whose columns fit no format the method can use."""
    present = [str(column) for column, value in row.items() if value is not None]
    shown = ", ".join(present) or "nothing"
    needed = [need for name in allowed for need in FORMS[name].needs]
    if fitting:
        form = fitting[0]
        declared = [
            name for name in allowed if all(getattr(names, need) in present for need in FORMS[name].needs)
        ]
        what = f"the columns {shown} are rows of format {form.name}, which this method does not accept"
        if declared:
            return what, where, f"if that is intended, set data.format: {declared[0]}"
        return what, where, _hint(present, needed) or f"it takes {' or '.join(allowed)}"
    try:
        refuse_media(row, ())
    except BadRow as media:
        return media.what, where, media.fix
    ways = [" and ".join(getattr(names, need) for need in FORMS[name].needs) for name in allowed]
    hint = _hint(present, needed)
    return (
        f"no format fits the columns {shown}: rows need {', or '.join(ways)}",
        where,
        hint or _mapping_example(row, needed),
    )


def _hint(present: Sequence[str], needed: Sequence[str]) -> str:
    """The `data.columns` line from familiar names: as turns of a conversation where the method takes them."""
    asked, answered = familiar(present, "prompt"), familiar(present, "completion")
    if asked and answered and "question" in needed:
        if {"instruction", "input"} <= {column.lower() for column in present} and asked != "input":
            return f"data.columns: {{output: {answered}}}"
        pairs = {"question": asked, "answer": answered}
        return columns_line({field: column for field, column in pairs.items() if field != column})
    return mapping_hint(present, needed)


def _mapping_example(row: Row, needed: Sequence[str]) -> str:
    """The `data.columns` line for columns of unknown names: theirs where as many hold text as are needed."""
    if len(row) == 1 and (found := [mark for mark in ";|\t" if mark in str(next(iter(row)))]):
        return f"its columns are separated by {found[0]!r}: write commas, or tabs in a .tsv file"
    for column, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            return f"the rows seem to be in column '{column}': write that list as a file of its own"
    texts = [str(column) for column, value in row.items() if isinstance(value, str)]
    objects = [str(column) for column, value in row.items() if isinstance(value, Mapping)]
    if objects and not texts:
        return f"write the fields of column '{objects[0]}' as separate columns: a column is mapped whole"
    if len(texts) == 1 and "text" in needed:
        return f"map your column: data.columns: {{text: {texts[0]}}}"
    if not texts or len(needed) < 2:
        return "map your columns with data.columns"
    taken = texts if len(texts) == 2 else ["YOUR_COLUMN"] * 2
    asked = ["question", "answer"] if "question" in needed else needed
    return f"map your columns, such as {columns_line(dict(zip(asked, taken, strict=False)))}"


def check_mapping(columns: Columns, present: Sequence[str], where: str) -> None:
    """Raise DataError when `data.columns` names a column that the first row has not."""
    for field in fields(Names):
        column: Any = getattr(columns, field.name, None)
        if column is not None and column not in present:
            raise DataError(
                f"data.columns.{field.name} is '{column}', and the first row has no such column",
                where,
                f"name one of its columns: {', '.join(present) or 'it has none'}",
            )
