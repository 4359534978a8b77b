"""Contents of rows that their text lacks: columns, fields of messages, parts that a template leaves out.

A field of a message is found by rendering the row with and without it. No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from memtrain.recipes.formats.detect import FORMS
from memtrain.recipes.formats.fields import (
    TEMPLATE_KWARGS,
    BadRow,
    Example,
    Messages,
    Names,
    Row,
    TableRow,
    shown,
)
from memtrain.recipes.formats.prompt import Prompt
from memtrain.recipes.registry import METHODS
from memtrain.trainers.data.store.token_store import TokenStore

Render = Callable[[Example], Sequence[str]]
"""The texts of an example."""

OWN = "memtrain:"
"""Begin of the keys that memtrain itself puts into a message."""
EMPTY_KEYS = "the keys without a value of column "
"""Begin of what a table's row has lost: it is told apart from what the row's text lacks."""
SPEAKS_OF_THE_PROMPT = (
    "system",
    "system_prompt",
    "instruction",
    "instructions",
    "context",
    "history",
    "documents",
)
"""Columns that people expect in a prompt; of prompts alone, every other column is for the rewards."""
HAS_MESSAGES = ("messages", "prompt", "completion", "chosen", "rejected")
GONE = object()
"""What is taken away."""
NUM_NAMED = 20
"""Fields that a note names."""


def unused_columns(row: Row, example: Example, form: str, names: Names, kind: str) -> Iterator[str]:
    """Columns of a row that are not empty and in none of its texts, and fields beside the text of a part."""
    reads = FORMS[form].reads
    if FORMS[kind].num_answers == 1:  # The two rows of a pair have no margin.
        reads = tuple(name for name in reads if name != "margin")
    used = {getattr(names, name) for name in reads}
    if any(isinstance(getattr(example, name, None), tuple) for name in HAS_MESSAGES):
        used.add(TEMPLATE_KWARGS)
    for column, value in row.items():
        if column in used or is_empty(value):
            continue
        if not isinstance(example, Prompt):
            yield f"column {shown(column)}"
        elif column not in example.columns:
            yield f"column {shown(column)} (nor given to rewards: it is not a text, number or list)"
        elif column.lower() in SPEAKS_OF_THE_PROMPT:
            yield f"column {shown(column)} (given to rewards only)"
    if isinstance(row, TableRow):
        for column in used & row.held.keys():
            is_tools = column == names.tools
            if is_tools or _as_messages(row.held[column]) != _as_messages(row[column]):
                yield f"{EMPTY_KEYS}{shown(column)}"
    for column in used:
        if isinstance(row.get(column), (list, tuple)):
            yield from unread_parts(row[column])


def is_empty(value: object) -> bool:
    """Whether a column holds nothing that could be missed."""
    return value is None or value == "" or value == [] or value == {}


def _as_messages(value: Any) -> list[Any]:
    """Messages as they are read: without their null fields, and without their contents (text alone is)."""
    return [
        {key: field for key, field in one.items() if field is not None and key != "content"}
        if isinstance(one, Mapping)
        else one
        for one in (cast(list[Any], value) if isinstance(value, list) else [value])
    ]


def unread_parts(messages: Sequence[object]) -> Iterator[str]:
    """Fields beside the text in the parts of messages' contents."""
    for message in messages:
        content = cast(Mapping[str, Any], message).get("content") if isinstance(message, Mapping) else None
        for part in cast(Sequence[object], content) if isinstance(content, (list, tuple)) else ():
            if isinstance(part, Mapping):
                given = cast(Mapping[str, Any], part)
                yield from (
                    f"content part field {shown(key)}"
                    for key, value in given.items()
                    if value is not None and key not in ("type", "text")
                )


@dataclass(frozen=True, slots=True)
class Unit:
    """What may be missing in the texts of a row: a field of a message, one of several in it, or a tool."""

    part: str
    """Field of the example: `messages`, `prompt`, ..., `tools`."""
    index: int
    """Of the message, or of the tool."""
    key: str = ""
    """Of the message; empty for a tool."""
    at: int | None = None
    """Of the several that a field lists: a call of `tool_calls`."""


def unrendered_fields(example: Example, texts: Sequence[str], render: Render) -> Iterator[str]:
    """Fields of an example's messages, and tools, without which its `texts` are the same, message by message.

    Every text in them is written as a sign of its own, in one pass of the template: those whose sign is in a
    text are rendered. The others are taken away, all together, then one by one.
    Contents are told too: a content that is not in the texts as it stands, or not at all.
    """
    held = {
        name: cast(Messages, given)
        for name in HAS_MESSAGES
        if isinstance(given := getattr(example, name, None), tuple)
    }
    units = list(_units(example, held))
    if units:
        lost = _lost(example, texts, render, units)
        yield from dict.fromkeys(_lost_words(unit, units, lost) for unit in lost)
    yield from _contents(example, texts, render, held)


def _units(example: Example, held: Mapping[str, Messages]) -> Iterator[Unit]:
    tools: tuple[object, ...] = getattr(example, "tools", ())
    yield from (Unit("tools", index) for index in range(len(tools)))
    for part, given in held.items():
        for index, message in enumerate(given):
            for key, value in message.items():
                if key in ("role", "content") or OWN in key:
                    continue
                if isinstance(value, list) and len(cast(list[object], value)) > 1:
                    many = len(cast(list[object], value))
                    yield from (Unit(part, index, key, at) for at in range(many))
                else:
                    yield Unit(part, index, key)


def _lost(example: Example, texts: Sequence[str], render: Render, units: Sequence[Unit]) -> list[Unit]:
    """The units that no text holds."""
    signs = {unit: f"zq{number:07}" for number, unit in enumerate(units)}
    try:
        written = " ".join(render(_with(example, {unit: _signed for unit in units}, signs))).lower()
    except BadRow:
        written = ""
    suspects = [unit for unit in units if signs[unit] not in written]
    if not suspects or _is_same(texts, render, _without(example, suspects)):
        return suspects
    return [unit for unit in suspects if _is_same(texts, render, _without(example, [unit]))]


def _lost_words(unit: Unit, units: Sequence[Unit], lost: Sequence[Unit]) -> str:
    """The name of a field that is lost in all messages that have it, or in some."""
    alike = [one for one in units if (one.part == "tools", one.key) == (unit.part == "tools", unit.key)]
    kept = [one for one in alike if one not in lost]
    if unit.part == "tools":
        return "some of the tools" if kept else "tools"
    name = f"message field {shown(unit.key)}"
    if not kept:
        return name
    gone = [one.index for one in alike if one in lost]
    is_earlier = len({one.part for one in alike}) == 1 and max(gone) < min(one.index for one in kept)
    return f"{name} of earlier messages" if is_earlier else f"{name} of some messages"


def _signed(value: Any, sign: str) -> Any:
    """A value with the sign in place of every text in it; `type` is for the template to read."""
    if isinstance(value, str):
        return sign
    if isinstance(value, Mapping):
        given = cast(Mapping[str, Any], value)
        return {key: one if key == "type" else _signed(one, sign) for key, one in given.items()}
    if isinstance(value, (list, tuple)):
        return [_signed(one, sign) for one in cast(Sequence[Any], value)]
    return value


def _with(
    example: Example, changes: Mapping[Unit, Callable[[Any, str], Any]], signs: Mapping[Unit, str]
) -> Example:
    """The example with other values of some units; without those whose change gives GONE."""
    parts: dict[str, list[Any]] = {}
    for unit, change in changes.items():
        given = parts.setdefault(unit.part, [_copy(one) for one in getattr(example, unit.part)])
        sign = signs.get(unit, "")
        if not unit.key:
            given[unit.index] = change(given[unit.index], sign)
        elif unit.at is None:
            given[unit.index][unit.key] = change(given[unit.index][unit.key], sign)
        else:
            given[unit.index][unit.key][unit.at] = change(given[unit.index][unit.key][unit.at], sign)
    return replace(example, **{part: tuple(_kept(given)) for part, given in parts.items()})


def _without(example: Example, units: Sequence[Unit]) -> Example:
    return _with(example, {unit: lambda _value, _sign: GONE for unit in units}, {})


def _copy(message: Any) -> Any:
    """A message, or a tool, whose lists can be changed."""
    given = cast(Mapping[str, Any], message)
    return {
        key: list(cast(list[Any], value)) if isinstance(value, list) else value
        for key, value in given.items()
    }


def _kept(given: Sequence[Any]) -> Iterator[Any]:
    """Messages, or tools, without what is gone; a list that is empty then is gone too."""
    for one in given:
        if one is GONE:
            continue
        kept: dict[str, Any] = {}
        for key, value in cast(Mapping[str, Any], one).items():
            if isinstance(value, list) and GONE in value:
                value = [item for item in cast(list[Any], value) if item is not GONE] or GONE
            if value is not GONE:
                kept[key] = value
        yield kept


def _contents(
    example: Example, texts: Sequence[str], render: Render, held: Mapping[str, Messages]
) -> Iterator[str]:
    """Roles whose contents the texts do not hold as they stand."""
    stripped = {name: [str(message["content"]).strip() for message in given] for name, given in held.items()}
    times = Counter(content for contents in stripped.values() for content in contents)
    for name, given in held.items():
        for index, message in enumerate(given):
            content = stripped[name][index]
            if not content or any(text.count(content) >= times[content] for text in texts):
                continue
            is_there = any(content in text for text in texts)
            emptied = (*given[:index], {**message, "content": ""}, *given[index + 1 :])
            role = message["role"]
            if _is_same(texts, render, replace(example, **{name: emptied})):
                yield f"the content of {role} messages"
            elif not is_there:
                yield f"the content of {role} messages as it stands (the template changes it)"


def _is_same(texts: Sequence[str], render: Render, other: Example) -> bool:
    try:
        return list(render(other)) == list(texts)
    except BadRow:
        return False


def unrendered_words(counts: Mapping[str, int], num_rows: int) -> Iterator[str]:
    """A sentence that names the fields and how many of `num_rows` rows have them; none without any."""
    keys = {name: count for name, count in counts.items() if name.startswith(EMPTY_KEYS)}
    if keys:
        parts = [f"{name} ({share_words(keys[name], num_rows)})" for name in sorted(keys)]
        yield (
            f"not read, {', '.join(parts)}: a table gives every row the keys of all rows, and cannot say "
            "which of them were written; write the column as JSON text to keep those"
        )
    counts = {name: count for name, count in counts.items() if name not in keys}
    if not counts:
        return
    order = sorted(counts, key=lambda name: (name.startswith("column"), -counts[name], name))
    parts = [f"{name} ({share_words(counts[name], num_rows)})" for name in order[:NUM_NAMED]]
    if len(order) > NUM_NAMED:
        parts.append(f"{len(order) - NUM_NAMED:,} more")
    yield f"not in the rendered text of the rows: {', '.join(parts)}"


def empty_words(count: int, num_rows: int, first: str) -> str:
    """A sentence on rows with an answer that says nothing."""
    return (
        f"with empty answers: {share_words(count, num_rows)} (the first: {first}); only the end of such an "
        "answer is trained on, which teaches to say nothing: remove these rows, unless that is meant"
    )


def share_words(count: int, num_rows: int) -> str:
    """`all rows`, or `12 of 1,000 rows, 1.2%`."""
    if count >= num_rows:
        return "all rows"
    return f"{count:,} of {num_rows:,} rows, {count / num_rows:.1%}"


def notes_of(store: TokenStore, method: str) -> Iterator[str]:
    """Notes on the rows of a store: contents left out, and keys without effect."""
    meta = store.meta
    unused = dict(meta.unrendered)
    reads_margin = method in METHODS and METHODS[method].reads_margin
    if not reads_margin and FORMS[meta.format].num_answers == 2:
        margins = int(np.isfinite(store.labels).sum())
        unused |= {f"the margin, which {method} does not use": margins} if margins else {}
    num_good = meta.num_read - meta.num_skipped
    yield from unrendered_words(unused, num_good)
    if meta.first_empty is not None:
        stream, line = meta.first_empty
        yield empty_words(meta.num_empty, num_good, f"{meta.streams[stream]}:{line}")
    if meta.num_skipped:
        rows = f"{meta.num_skipped:,} bad row{'' if meta.num_skipped == 1 else 's'}"
        yield f"dropped (data.on_bad_row: skip): {rows}, the first: {meta.skipped[0]}"
