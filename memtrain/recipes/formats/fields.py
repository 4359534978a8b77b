"""Reading a row of the user's file: text, messages, tools, and the sentence for a wrong value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, cast

from memtrain.errors import Fault
from memtrain.recipes.sections.data import Columns

Row = Mapping[str, Any]
Message = dict[str, Any]
Messages = tuple[Message, ...]
Tool = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
"""Role words that files use, and the chat template's word for each."""
CALLS = "function_call"
"""Role of LLaMA-Factory's messages whose text is calls of tools: the JSON of one call, or of a list."""

FAMILIAR = {
    "question": "prompt",
    "instruction": "prompt",
    "query": "prompt",
    "problem": "prompt",
    "input": "prompt",
    "answer": "completion",
    "response": "completion",
    "output": "completion",
    "solution": "completion",
    "target": "completion",
    "content": "text",
    "document": "text",
    "conversation": "messages",
    "dialog": "messages",
    "dialogue": "messages",
    "ids": "ids",
    "tokens": "ids",
    "preferred": "chosen",
    "dispreferred": "rejected",
    "kto_tag": "label",
}
"""Column names that people use for ours: only ever proposed in an error, never taken silently."""

TEXT_PARTS = ("text", "input_text", "output_text", None)
"""Types of the parts of a content that are text; an image with a text beside it is none."""

MEDIA_PARTS = {
    **dict.fromkeys(("image", "images", "image_url", "input_image"), "an image"),
    **dict.fromkeys(("audio", "audios", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "videos", "video_url", "input_video"), "video"),
}
"""Types of the parts of a content that are media, and their kind: also fields of parts without a type, and
of messages."""
NO_MEDIA = "memtrain trains on text; vision-language models are planned. Remove it to train on the text alone"

MOST_MARGIN = 10_000
"""Largest margin between the rewards of two answers. Taste: published ones are below 10; a larger loss
no longer shows a thousandth of a reward in float32."""

LONGEST_SHOWN = 60
NO_LOSS = "memtrain:not_learnt"
"""Key of a message that its row switches off; templates never see it."""
TEMPLATE_KWARGS = "chat_template_kwargs"
"""Column of a row's own arguments for the chat template."""


OTHER_COLUMN = "correct the value, or map the field to another column with data.columns"
AS_TEXT = "give the content as a string, or as parts of type text; remove other parts"


class TableRow(dict[str, Any]):
    """A row of a table as a JSON file would hold it: without the null keys that Arrow gives to structs."""

    def __init__(self, row: Row, held: Row) -> None:
        super().__init__(row)
        self.held = dict(held)
        """The columns in which keys were left out, with these: null each."""


class BadRow(ValueError):
    """A row that cannot be used: the fault, and the mend."""

    def __init__(self, what: str, fix: str = "") -> None:
        self.what = what
        self.fix = fix
        super().__init__(what)

    def fault(self, where: str) -> Fault:
        """The same, at its place in the user's file; rows like it can be left out, too."""
        return Fault(self.what, where, or_skipped(self.fix))


def or_skipped(fix: str) -> str:
    """The mend of a bad row, or the key that leaves such rows out."""
    return f"{fix or 'correct the row'}, or set data.on_bad_row: skip to leave out such rows"


@dataclass(frozen=True, slots=True)
class Names:
    """The column of each field, as one source names it."""

    text: str = "text"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"
    tools: str = "tools"
    ids: str = "input_ids"
    labels: str = "labels"
    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str = "margin"
    label: str = "label"
    instruction: str = "instruction"
    input: str = "input"
    output: str = "output"
    question: str = "question"
    answer: str = "answer"
    system: str = "system"
    history: str = "history"


@dataclass(frozen=True, slots=True)
class Example:
    """A row, read and checked. Each format adds its own fields."""

    template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    """The row's own arguments for the chat template."""


def names_of(columns: Columns, present: Sequence[str]) -> Names:
    """Column names after the user's own; `conversations` stands for `messages` where only it is present.

    A column that the user gave to a field is no other field's.
    """
    declared = {field.name: getattr(columns, field.name, None) for field in fields(Names)}
    own = {name: column for name, column in declared.items() if column is not None}
    taken = {
        name: "" for name, column in asdict(Names()).items() if column in own.values() and name not in own
    }
    names = replace(Names(), **taken, **own)
    if columns.messages is None and "messages" not in present and "conversations" in present:
        return replace(names, messages="conversations")
    return names


def shown(value: object) -> str:
    """A value as an error shows it: short, on one line."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def kind_of(value: object) -> str:
    """Kind of a value, in the words of a JSON file."""
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (bool, "true or false"),
        (str, "a string"),
        ((int, float), "a number"),
        (Mapping, "an object"),
        ((list, tuple), "a list"),
        (bytes, "bytes"),
        ((date, time, timedelta), "a date or a time"),
        (Decimal, "a number"),
    )
    if value is None:
        return "null"
    return next((word for types, word in kinds if isinstance(value, types)), "something else")


def mapping_hint(columns: Sequence[str], needed: Sequence[str]) -> str:
    """The `data.columns` line that would give the needed fields, from column names people often use."""
    found: dict[str, str] = {}
    for column in columns:
        field = FAMILIAR.get(column.lower(), "")
        if field in needed and field not in found and field not in columns:
            found[field] = column
    return columns_line(found) if found else ""


OR_TURNS = "; and data.strings_are: turns where its strings are turns of a chat"


def columns_line(found: Mapping[str, str]) -> str:
    """The `data.columns` line of fields with their columns; of prompts and completions the key beside it."""
    line = "data.columns: {" + ", ".join(f"{field}: {column}" for field, column in found.items()) + "}"
    return f"{line}{OR_TURNS}" if {"prompt", "completion"} & found.keys() else line


def familiar(columns: Sequence[str], field: str) -> str:
    """The column that people often use for a field, or that is named like it; empty where there is none."""
    named = (column for column in columns if column == field or FAMILIAR.get(column.lower()) == field)
    return next(named, "")


def value_at(row: Row, column: str) -> Any:
    """The value of a column that the format needs.

    Raises: BadRow when the row has no such column or it is null.
    """
    value = row.get(column)
    if value is None:
        if column in row:
            raise BadRow(f"column '{column}' is null", f"give '{column}' a value, or remove the row")
        has = ", ".join(str(name) for name in row) or "nothing"
        hint = mapping_hint([str(name) for name in row], [column])
        fix = hint or f"every row needs '{column}', as the first row of this source has"
        raise BadRow(f"the row has no column '{column}'; it has {has}", fix)
    return value


def text_at(row: Row, column: str) -> str:
    """The text of a column.

    Raises: BadRow when it is missing or not a string.
    """
    value = value_at(row, column)
    if not isinstance(value, str):
        raise BadRow(f"column '{column}' is {kind_of(value)} ({shown(value)}), not a string", OTHER_COLUMN)
    return value


def text_or_messages_at(row: Row, column: str) -> str | Messages:
    """The text, or the messages, of a column.

    Raises: BadRow when it is missing or neither.
    """
    value = value_at(row, column)
    if isinstance(value, str):
        return value
    if is_message(value):
        return messages_in([value], column)
    if not isinstance(value, (list, tuple)):
        raise BadRow(
            f"column '{column}' is {kind_of(value)} ({shown(value)}), not a string or a list of messages",
            OTHER_COLUMN,
        )
    return messages_in(cast(Sequence[object], value), column)


def is_message(value: object) -> bool:
    """Whether a value is one message, outside of a list: `{"from": "gpt", "value": ...}`."""
    if not isinstance(value, Mapping):
        return False
    keys = cast(Mapping[str, Any], value).keys()
    return {"role", "content"} <= keys or {"from", "value"} <= keys


def messages_in(value: object, column: str) -> Messages:
    """Messages with the roles of chat templates, from `role`/`content` or `from`/`value` objects.

    Raises: BadRow when it is not a list of messages, or a message has no known role or no content.
    """
    if not isinstance(value, (list, tuple)):
        raise BadRow(
            f"column '{column}' is {kind_of(value)}, not a list of messages",
            "write [{role: user, content: ...}, ...]",
        )
    items = cast(Sequence[object], value)
    if not items:
        raise BadRow(
            f"column '{column}' holds no messages", "give it at least one message, or remove the row"
        )
    return tuple(message_of(item, f"{column}[{index}]") for index, item in enumerate(items))


def message_of(item: object, place: str) -> Message:
    """A message with `role` and `content`; null fields are left out, others (tool_calls) are kept.

    Raises: BadRow when it has no known role, or neither content nor tool calls.
    """
    if not isinstance(item, Mapping):
        raise BadRow(f"{place} is {kind_of(item)}, not a message", "a message is {role: ..., content: ...}")
    given = cast(Mapping[str, Any], item)
    role, content = given.get("role"), given.get("content")
    taken: tuple[str, ...] = ("role", "content")
    if role is None:
        if content is not None and given.get("value") is not None:
            raise BadRow(f"{place} has both a content and a value", "keep one of the two")
        role, content, taken = given.get("from"), given.get("value"), ("role", "content", "from", "value")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(dict.fromkeys(ROLES))
        raise BadRow(f"{place} has the role {shown(role)}", f"use one of the roles {known}")
    taken += ("weight", "train")
    rest = {key: value for key, value in given.items() if value is not None and key not in taken}
    if kind := next((MEDIA_PARTS[key] for key, value in rest.items() if key in MEDIA_PARTS and value), ""):
        raise BadRow(f"{place} has {kind}", NO_MEDIA)
    if content is None and not rest.get("tool_calls"):
        raise BadRow(f"{place} has no content", "give it a content (a string), or tool_calls")
    if not loss_mask(given, place):
        rest[NO_LOSS] = True
    text = content_of(content, place)
    if role == CALLS and "tool_calls" not in rest:
        text, rest["tool_calls"] = calls_in(text, place)
    return {"role": ROLES[role], "content": text, **rest}


def calls_in(text: str, place: str) -> tuple[str, list[dict[str, Any]]]:
    """(the thought before them, the calls) of a message that is the JSON of calls, one or a list of them.

    Source: LLaMA-Factory 0.9.5, data/formatter.py. Raises: BadRow when it is no such JSON.
    """
    thought, end, rest = text.rpartition("</think>")
    fix = 'write {"name": ..., "arguments": {...}}, or a list of such calls'
    try:
        read = json.loads(rest, object_pairs_hook=_each_key_once)
    except (ValueError, RecursionError) as error:
        raise BadRow(
            f"{place} has the role {CALLS}, and its text is no JSON of calls: {error}", fix
        ) from None
    calls = cast(list[object], read if isinstance(read, list) else [read])
    made: list[dict[str, Any]] = []
    for one in calls:
        call = cast(Mapping[str, Any], one if isinstance(one, Mapping) else {})
        if not isinstance(call.get("name"), str) or "arguments" not in call:
            raise BadRow(f"{place} has the role {CALLS}, and {shown(cast(object, one))} is not a call", fix)
        made.append({"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}})
    if not made:
        raise BadRow(f"{place} has the role {CALLS}, and no call", fix)
    return thought + end, made


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key is there twice in one object")
    return made


def loss_mask(given: Mapping[str, Any], place: str) -> bool:
    """Whether a message may be trained on: not with `weight: 0` or `train: false`.

    Raises: BadRow when they are anything but 0, 1, true and false, or contradict each other.
    """
    marks = {name: given[name] for name in ("weight", "train") if given.get(name) is not None}
    for name, value in marks.items():
        if value not in (0, 1):
            raise BadRow(f"the {name} of {place} is {shown(value)}", "a weight is 1 (in the loss) or 0 (not)")
    if len(set(map(bool, marks.values()))) > 1:
        raise BadRow(f"weight and train of {place} contradict each other", "leave one of them out")
    return all(marks.values())


def refuse_switched_off(messages: str | Messages, column: str) -> None:
    """Raise BadRow when a message is switched off where whole answers are compared."""
    if isinstance(messages, str):
        return
    for index, message in enumerate(messages):
        if NO_LOSS in message:
            raise BadRow(
                f"{column}[{index}] has weight 0, and preference methods use whole answers",
                "remove the weight, or the message",
            )


def content_of(content: object, place: str) -> str:
    """The text of a message: a string, or the text parts of a list, joined.

    Raises: BadRow when a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, (list, tuple)):
        if kind := _media_of(content):
            raise BadRow(f"the content of {place} has {kind}", NO_MEDIA)
        raise BadRow(
            f"the content of {place} is {kind_of(content)} ({shown(content)}), not a string", AS_TEXT
        )
    texts: list[str] = []
    for part in cast(Sequence[object], content):
        given: Mapping[str, Any] = cast(Mapping[str, Any], part) if isinstance(part, Mapping) else {}
        if kind := _media_of(given):
            raise BadRow(f"the content of {place} has {kind}", NO_MEDIA)
        if given.get("type", "text") not in TEXT_PARTS or not isinstance(given.get("text"), str):
            raise BadRow(
                f"the content of {place} has a part that is not text: {shown(cast(object, part))}", AS_TEXT
            )
        texts.append(given["text"])
    return "".join(texts)


def _media_of(part: object) -> str:
    """The kind of media that a part of a content is, by its type or, without one, by its fields."""
    given: Mapping[str, Any] = cast(Mapping[str, Any], part) if isinstance(part, Mapping) else {}
    kind = given.get("type")
    names = list(given) if kind is None else [str(kind)]
    return next((MEDIA_PARTS[name] for name in names if name in MEDIA_PARTS), "")


def margin_at(row: Row, column: str) -> float | None:
    """The margin of an optional column; None when the row has none.

    Raises: BadRow when it is no number, not finite, or beyond any difference of rewards.
    """
    value = number = row.get(column)
    if value is None:
        return None
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
    if isinstance(number, bool) or not isinstance(number, (int, float, Decimal)):
        raise BadRow(f"column '{column}' is {kind_of(value)} ({shown(value)}), not a number", "give a number")
    if not abs(number) <= MOST_MARGIN:
        raise BadRow(
            f"column '{column}' is {shown(number)}, not a number from -{MOST_MARGIN:,} to {MOST_MARGIN:,}",
            "give the margin in units of the reward, or null where there is none",
        )
    return float(number)


def same_kind(parts: Mapping[str, str | Messages]) -> None:
    """Raise BadRow when some columns are strings and others messages: no rule could tell the meaning."""
    are_strings = [isinstance(part, str) for part in parts.values()]
    if len(set(are_strings)) > 1:
        kinds = {
            column: "a string" if isinstance(part, str) else "messages" for column, part in parts.items()
        }
        kinds_text = ", ".join(f"'{column}' is {kind}" for column, kind in kinds.items())
        raise BadRow(
            f"strings and messages are mixed in one row: {kinds_text}",
            "write all of them as strings, or all as messages",
        )
