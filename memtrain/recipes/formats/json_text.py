"""JSON text to values, without loss: doubled keys and endless nesting are refused.

Columns that may be JSON text are read here too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from memtrain.recipes.formats.fields import TEMPLATE_KWARGS, BadRow, Row, Tool, kind_of, shown

MAX_DEPTH = 100
"""Levels of lists and objects in a row. Taste: tool definitions have some 20; Python's stack has 1,000."""
MAX_DIGITS = 4300
"""Digits of a whole number that Python reads."""


class JsonReader:
    """Reads JSON values; a fault that the decoder passes over is kept until `check` is called."""

    def __init__(self) -> None:
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)
        self._doubled: str | None = None

    def whole(self, text: str) -> Any:
        """The value that the whole text is.

        Raises: BadRow when it is not one JSON value, or a value that cannot be taken.
        """
        try:
            value = self._decoder.decode(text)
        except json.JSONDecodeError as error:
            raise BadRow(
                f"invalid JSON: {error.msg} (column {error.colno})",
                "name the file .json: it is one JSON value over several lines"
                if text.strip() in ("{", "[")
                else "fix the line; each line is one JSON object",
            ) from None
        except (RecursionError, ValueError) as error:
            raise BadRow(*too_much(error)) from None
        self.check(value, text)
        return value

    def next(self, text: str, at: int) -> tuple[Any, int]:
        """(the value that begins at `at`, where it ends); `check` has to follow.

        Raises: JSONDecodeError, or BadRow for what Python's decoder cannot hold.
        """
        self._doubled = None
        try:
            return self._decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            raise
        except (RecursionError, ValueError) as error:
            raise BadRow(*too_much(error)) from None

    def check(self, value: Any, text: str) -> None:
        """Raise BadRow for a value read from `text` in which a key is doubled, or that is nested too deep."""
        doubled, self._doubled = self._doubled, None
        if doubled is not None:
            raise BadRow(f"the key {shown(doubled)} is there twice in one object", "keep one of the two")
        if text.count("{") + text.count("[") > MAX_DEPTH:
            check_depth(value)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs) and self._doubled is None:
            self._doubled = first_doubled(key for key, _ in pairs)
        return made


def first_doubled(names: Iterable[str]) -> str | None:
    """The first name that came before; None where each is there once. Each name is looked at once."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def read_json(text: str) -> Any:
    """The value of a JSON text.

    Raises: BadRow when it is not one JSON value, or a value that cannot be taken.
    """
    return JsonReader().whole(text)


def too_much(error: RecursionError | ValueError) -> tuple[str, str]:
    """(what, fix) for a value that Python's decoder refuses."""
    if isinstance(error, RecursionError):
        return f"JSON nested deeper than {MAX_DEPTH} levels", "write the value flat, or remove the row"
    return (
        f"a whole number of more than {MAX_DIGITS:,} digits",
        "write it as a string, or remove the row",
    )


def check_depth(value: Any) -> None:
    """Raise BadRow for a value of more than `MAX_DEPTH` levels of lists and objects."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for one in level
            if isinstance(one, (dict, list, tuple))
            for item in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise BadRow(*too_much(RecursionError()))


def json_at(value: str, column: str) -> Any:
    """The value of a column that is JSON text.

    Raises: BadRow when it is not.
    """
    try:
        return read_json(value)
    except BadRow as wrong:
        raise BadRow(f"column '{column}' is not JSON: {wrong.what}", wrong.fix) from None


def tools_at(row: Row, column: str) -> tuple[Tool, ...]:
    """Tool definitions of a row (a list, or its JSON text); empty when the row has none.

    Raises: BadRow when they are not a list of objects.
    """
    value: Any = row.get(column)
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        value = json_at(value, column)
    tools = cast(Sequence[Mapping[str, Any]], value)
    if not isinstance(value, (list, tuple)) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(
            f"column '{column}' is not a list of tool definitions: {shown(tools)}",
            "give a list of JSON objects, or remove the column",
        )
    return tuple(dict(tool) for tool in tools)


def template_kwargs_at(row: Row) -> dict[str, Any]:
    """The row's own arguments for the chat template (an object, or its JSON text); empty without them.

    Raises: BadRow when they are no object.
    """
    value: Any = row.get(TEMPLATE_KWARGS)
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        value = json_at(value, TEMPLATE_KWARGS)
    if not isinstance(value, Mapping):
        raise BadRow(
            f"column '{TEMPLATE_KWARGS}' is {kind_of(value)}, not an object of arguments",
            'give an object, such as {"enable_thinking": false}',
        )
    # Arrow files hold every key in every row, null where it was not given.
    given = cast(Mapping[str, Any], value)
    return {str(name): one for name, one in given.items() if one is not None}
