"""Looking into the sources of a recipe: the format of their rows, and the rendering of these as texts.

No torch here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memtrain.errors import DataError
from memtrain.recipes.formats.detect import FORMS, SUPERVISED, detect
from memtrain.recipes.formats.fields import BadRow, Row
from memtrain.recipes.formats.prompt_format import ANSWERS as FORMATTED
from memtrain.recipes.sections.data import Columns, Data, Format, Source
from memtrain.trainers.data.sources.sources import Stream, at_key, is_on_hub, locate, located
from memtrain.trainers.data.tokenize.chat import (
    check_template_kwargs,
    specials_of,
    template_kwargs,
    template_of,
)
from memtrain.trainers.data.tokenize.chat_templates import MARKS, training_template
from memtrain.trainers.data.tokenize.render import Rendering
from memtrain.trainers.data.tokenize.workers import Reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


NUM_NAMED = 10
"""Sources that a sentence names."""


@dataclass(frozen=True, slots=True)
class Found:
    """A source of the recipe, found and looked into."""

    source: Source
    streams: tuple[Stream, ...]
    reading: Reading
    notes: tuple[str, ...]
    """Files that lie among the data and are not read."""

    def rows(self) -> Iterator[tuple[str, Row | BadRow]]:
        """Rows with their places."""
        for stream in self.streams:
            for line, row in stream.read():
                yield f"{stream.name}:{line}", row


def look_into(source: Source, data: Data, allowed: Sequence[Format], key: str) -> Found:
    """A source with its streams, and its format from its first row; `key` is its place in the recipe.

    Raises: DataError when there are no rows, or they fit no format the method can use.
    """
    declared = source.format if source.format != "auto" else data.format
    source = source.model_copy(update={"text_unit": source.text_unit or data.text_unit})
    try:
        located = locate(source, declared if declared != "auto" else allowed[0], streaming=data.streaming)
    except DataError as error:
        raise at_key(error, key) from None
    columns = source.columns if source.columns is not None else data.columns
    if source.source.startswith("builtin:"):
        columns = Columns()
    for stream in located.streams:
        for line, row in stream.read():
            where = f"{stream.name}:{line}"
            if isinstance(row, BadRow):
                if data.on_bad_row == "skip":
                    continue
                raise DataError([row.fault(where)])
            form, names = detect(row, columns, declared, allowed, where)
            system = source.system_prompt if source.system_prompt is not None else data.system_prompt
            strings = source.strings_are if source.strings_are is not None else data.strings_are
            if source.source.startswith("builtin:"):
                strings = strings or "text"
            asked = source.prompt_format if source.prompt_format is not None else data.prompt_format
            # Other formats have no text of their own to write; where none has one, the recipe is refused.
            texts = asked.texts if asked is not None and form.name in FORMATTED else None
            reading = Reading(
                form.name, names, template_kwargs(data, source), False, system or None, strings, texts
            )
            reading = replace(reading, is_chat=is_chat(replace(reading, system_prompt=None), row))
            return Found(source, located.streams, reading, located.notes)
    raise DataError(*no_rows(source, located.streams, key))


def also_trained(data: Data, held_out: Found, allowed: Sequence[Format]) -> list[str]:
    """Files of held-out rows that are files of training rows, by their names; no hub dataset is asked for."""
    trained: set[str] = set()
    for source in data.train:
        if not is_on_hub(source):
            with suppress(DataError):
                trained.update(one.name for one in located(source, allowed[0], streaming=False).streams)
    files = {os.path.realpath(name) for name in trained if not name.startswith("builtin:")}
    return [one.name for one in held_out.streams if os.path.realpath(one.name) in files]


def trained_too(names: Sequence[str]) -> str:
    """The sentence on sources of held-out rows that are trained on."""
    shown = ", ".join(names[:NUM_NAMED])
    shown += f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return (
        f"the rows of {shown} are trained on too, and their evaluation says nothing of new ones: give "
        "data.eval rows of its own, or set data.eval_fraction: 0.1 in its place"
    )


def is_chat(reading: Reading, row: Row) -> bool:
    """Whether a row is a conversation, which the chat template renders; where it cannot be read, whether
    every row that can be is one."""
    try:
        example: Any = reading.example(row)
    except BadRow:
        return needs_template(reading)
    return reading.form == "messages" or not isinstance(getattr(example, "prompt", ""), str)


def needs_template(reading: Reading) -> bool:
    """Whether every row of a source is a conversation, whatever its first row is."""
    form = FORMS[reading.form]
    if reading.prompt_format is not None:
        return False
    takes_turns = form.takes_strings and reading.strings_are == "turns"
    return form.name == "messages" or form.stored_as is not None or takes_turns


def leaves_out_template(reading: Reading) -> bool:
    """Whether the strings of a source are given to the model as they stand, and nothing says that this is
    meant."""
    return FORMS[reading.form].takes_strings and not reading.is_chat and reading.strings_are is None


def is_cut_in_text(reading: Reading) -> bool:
    """Whether rows of a source are strings with a boundary of prompt and answer in them."""
    form = FORMS[reading.form]
    is_text = form.takes_strings or reading.prompt_format is not None
    return is_text and not form.is_prompt and not reading.is_chat


def check_system_prompt(found: Found) -> None:
    """Raise DataError for a system prompt that no row of the source can take."""
    if found.reading.system_prompt is not None and not found.reading.is_chat:
        raise DataError(
            f"data.system_prompt has no effect: the rows of '{found.source.source}' are strings",
            "data.system_prompt",
            "set data.strings_are: turns if they are turns of a chat, or give system_prompt only to sources "
            "of conversations",
        )


def check_strings_are(data: Data, found: Sequence[Found]) -> None:
    """Raise DataError for a word on strings that says nothing of any row: each source's own, and `data`'s."""
    takes = [FORMS[one.reading.form].takes_strings for one in found]
    of_source = [
        (one, f"of source '{one.source.source}' ")
        for one, taken in zip(found, takes, strict=True)
        if one.source.strings_are is not None and not taken
    ]
    if data.strings_are is not None and not any(takes):
        of_source = [(found[0], "")]
    for one, place in of_source[:1]:
        form = one.reading.form
        are = "turns already" if needs_template(one.reading) else "texts without turns"
        raise DataError(
            f"data.strings_are {place}has no effect: rows of format {form} are {are}",
            "data.strings_are",
            "remove it; it is for strings in the columns prompt, completion, chosen and rejected",
        )


def check_prompt_format(data: Data, found: Sequence[Found]) -> None:
    """Raise DataError for a format of prompts that no row is written by: each source's own, and `data`'s."""
    unused = [one for one in found if one.reading.prompt_format is None]
    of_source = [one for one in unused if one.source.prompt_format is not None]
    if of_source or (data.prompt_format is not None and len(unused) == len(found)):
        one, place = (
            (of_source[0], "source's prompt_format") if of_source else (found[0], "data.prompt_format")
        )
        raise DataError(
            f"the {place} has no effect: rows of '{one.source.source}' are of format {one.reading.form}",
            "data.prompt_format",
            "remove it; it is for the columns instruction and output, or question and answer "
            "(data.columns names yours)",
        )


def no_rows(source: Source, streams: Sequence[Stream], key: str) -> tuple[str, str, str]:
    """(what, where, fix) for a source without a row."""
    if len(streams) == 1:
        return f"there are no rows in '{streams[0].name}'", streams[0].name, "the file is empty: give another"
    return (
        f"there are no rows in the {len(streams)} files of '{source.source}'",
        key,
        "give files with rows",
    )


def kind_of(found: Sequence[Found], allowed: Sequence[Format]) -> str:
    """The format that the rows of all sources are stored in.

    Raises: DataError when the sources cannot be trained on together.
    """
    kinds = list(dict.fromkeys(stored_as(one, allowed) for one in found))
    num_answers = [FORMS[kind].num_answers for kind in kinds]
    becomes_single = num_answers[0] > 1 and FORMS[allowed[0]].num_answers == 1
    if len(kinds) == 1 and not becomes_single:
        return kinds[0]
    if all(num_answers):
        return "unpaired"
    if set(kinds) <= set(SUPERVISED):
        return "text"
    raise DataError(
        f"the sources have formats that cannot be mixed: {', '.join(kinds)}",
        "data.train",
        "train on one of them, or convert the others to its format",
    )


def stored_as(found: Found, allowed: Sequence[Format] = ()) -> Format:
    """Format whose examples the rows of a source become: of the methods that write the answers, a prompt."""
    form = FORMS[found.reading.form]
    return "prompt" if "prompt" in allowed[:1] else form.stored_as or form.name


def rendering_of(
    data: Data, tokenizer: PreTrainedTokenizerFast, kind: str, found: Sequence[Found]
) -> Rendering:
    """Rendering of the rows as texts.

    Raises: DataError when a setting has no effect on rows of this format, or the chat template marks nothing.
    """
    forms = {kind} if kind == "prompt" else {stored_as(one) for one in found}
    if data.completion_only_loss and not (
        "prompt_completion" in forms or any(FORMS[form].num_answers for form in forms)
    ):
        raise DataError(
            f"data.completion_only_loss has no effect on rows of format {kind}",
            "data.completion_only_loss",
            "remove it; of messages, the assistant's turns are trained on by default",
        )
    for name in ("assistant_only_loss", "last_turn_only_loss"):
        if getattr(data, name) and not forms & {"messages", "prompt_completion"}:
            raise DataError(
                f"data.{name} has no effect on rows of format {kind}",
                f"data.{name}",
                "remove it; it is for rows of messages",
            )
    template = template_of(tokenizer)
    if template is None and any(needs_template(one.reading) for one in found):
        as_text = any(FORMS[one.reading.form].stored_as for one in found)
        raise DataError(
            "the rows are conversations, but the tokenizer has no chat template",
            "model.chat_template",
            "set model.chat_template: chatml, or the path of a Jinja file"
            + (
                "; or train on them as plain text: data.columns with the fields prompt and completion"
                if as_text
                else ""
            ),
        )
    check_strings_are(data, found)
    check_prompt_format(data, found)
    for one in found:
        check_template_kwargs(one.reading.template_kwargs, template, one.reading.is_chat)
        check_system_prompt(one)
    specials = specials_of(tokenizer)
    asked = data.assistant_only_loss or data.last_turn_only_loss
    by_default = not asked and data.assistant_only_loss is None
    assistant_only = asked or (by_default and bool(forms & {"messages", "prompt_completion"}))
    own = template
    if assistant_only and template is not None:
        try:
            template = training_template(template, specials)
        except DataError:
            # Completions that the assistant alone speaks need no marks.
            if asked or "messages" in forms:
                raise
    end = tokenizer.eos_token if data.end_token and kind != "prompt" else None
    only = data.completion_only_loss is not False
    return Rendering(
        chat_template=template,
        special_tokens=specials,
        end_token=str(end) if end else None,
        completion_only=only,
        assistant_only=assistant_only,
        own_template=own if own != template else None,
        by_default=by_default and assistant_only,
        last_turn_only=data.last_turn_only_loss,
        has_marks=template is not None and bool(MARKS.search(template)),
    )
