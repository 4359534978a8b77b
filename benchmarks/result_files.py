"""Results of benchmarks as files: JSON, compact, one row a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WIDTH = 110
"""What fits is on one line."""
ROW = 600
"""Letters of the longest row of a table whose rows have names."""
DEPTH = 4
"""Levels that are opened where they do not fit; below, a value is one line however long it is."""


def write_result(path: Path, made: Any) -> None:
    """Write `made` as `text_of` says it."""
    path.write_text(text_of(made))


def text_of(made: Any) -> str:
    """The JSON of `made`, a key or a row a line; the rows of a table are never divided."""
    return _text(made, 0) + "\n"


def _text(value: Any, depth: int) -> str:
    line = json.dumps(value)
    if len(line) + depth <= WIDTH or depth == DEPTH:
        return line
    indent, end = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict):
        below = DEPTH if _is_table(value) else depth + 1
        items = [f"{json.dumps(key)}: {_text(one, below)}" for key, one in value.items()]
        return f"{{{indent}{f',{indent}'.join(items)}{end}}}"
    if isinstance(value, list | tuple) and any(isinstance(one, dict | list | tuple | str) for one in value):
        return f"[{indent}{f',{indent}'.join(map(json.dumps, value))}{end}]"
    return line


def _is_table(made: dict[str, Any]) -> bool:
    """Whether the values are rows, none of which is too long."""
    rows = list(made.values())
    return len(rows) > 1 and all(isinstance(one, dict) and len(json.dumps(one)) <= ROW for one in rows)


def main() -> None:
    """Write the files that are named once more: the same content, one row a line."""
    import sys

    for name in sys.argv[1:]:
        path = Path(name)
        made = json.loads(path.read_text())
        write_result(path, made)
        assert json.loads(path.read_text()) == made, name


if __name__ == "__main__":
    main()
