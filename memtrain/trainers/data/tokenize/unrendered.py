"""Contents of rows that their text lacks: columns, fields of messages, parts that a template leaves out.

A field of a message is found by rendering the row with and without it. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from memtrain.recipes.formats.detect import FORMS
from memtrain.recipes.formats.fields import (
    TEMPLATE_KWARGS,
    BadRow,
    Example,
    Message,
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


def unrendered_fields(example: Example, texts: Sequence[str], render: Render) -> Iterator[str]:
    """Fields of an example's messages, and its tools, without which its `texts` are the same.

    Contents are told too: a content that is not in the texts as it stands, or not at all.
    """
    held = {
        name: cast(Messages, given)
        for name in HAS_MESSAGES
        if isinstance(given := getattr(example, name, None), tuple)
    }
    if getattr(example, "tools", ()) and _is_same(texts, render, example, {"tools": ()}):
        yield "tools"
    if not held:
        return
    messages = [message for given in held.values() for message in given]
    extra = dict.fromkeys(
        key for message in messages for key in message if key not in ("role", "content") and OWN not in key
    )
    without = {name: tuple(_only(message, ()) for message in given) for name, given in held.items()}
    if extra and _is_same(texts, render, example, without):
        yield from (f"message field {shown(key)}" for key in extra)
    elif len(extra) > 1:
        for key in extra:
            others = tuple(other for other in extra if other != key)
            without = {
                name: tuple(_only(message, others) for message in given) for name, given in held.items()
            }
            if _is_same(texts, render, example, without):
                yield f"message field {shown(key)}"
    yield from _contents(example, texts, render, held)


def _contents(
    example: Example, texts: Sequence[str], render: Render, held: Mapping[str, Messages]
) -> Iterator[str]:
    """Roles whose contents the texts do not hold as they stand."""
    for name, given in held.items():
        for index, message in enumerate(given):
            content = str(message["content"]).strip()
            if not content or any(content in text for text in texts):
                continue
            emptied = (*given[:index], {**message, "content": ""}, *given[index + 1 :])
            role = message["role"]
            if _is_same(texts, render, example, {name: emptied}):
                yield f"the content of {role} messages"
            else:
                yield f"the content of {role} messages as it stands (the template changes it)"


def _only(message: Message, keys: Sequence[str]) -> Message:
    """A message with its role, its content and the given keys."""
    return {
        key: value
        for key, value in message.items()
        if key in ("role", "content") or OWN in key or key in keys
    }


def _is_same(texts: Sequence[str], render: Render, example: Example, changes: Mapping[str, Any]) -> bool:
    try:
        return list(render(replace(example, **changes))) == list(texts)
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
    yield from unrendered_words(unused, meta.num_read - meta.num_skipped)
    if meta.num_skipped:
        rows = f"{meta.num_skipped:,} bad row{'' if meta.num_skipped == 1 else 's'}"
        yield f"dropped (data.on_bad_row: skip): {rows}, the first: {meta.skipped[0]}"
