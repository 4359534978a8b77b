"""The results: one file of JSON lines, a line a stage, on disk before the next stage begins."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "results.jsonl"
Record = dict[str, Any]


def append(folder: Path, record: Mapping[str, Any]) -> None:
    """Add a line, and wait until it is on the disk."""
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> list[Record]:
    """Every line; one that was cut off by the end of its process is left out."""
    path = folder / FILE
    if not path.is_file():
        return []
    found: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def mend(folder: Path) -> None:
    """Take a line that was cut off out of the file, so that the next one begins at its own start."""
    path = folder / FILE
    if path.is_file() and not path.read_bytes().endswith(b"\n"):
        whole = path.read_bytes().rpartition(b"\n")[0]
        path.write_bytes(whole + b"\n" if whole else b"")


def to_make_again(records: list[Record]) -> set[str]:
    """Stages that were made once and had a fault: it may be mended since."""
    made = [one for one in records if "stage" in one]
    names = [one["stage"] for one in made]
    return {one["stage"] for one in made if "fault" in one and names.count(one["stage"]) == 1}


def by_stage(records: list[Record]) -> dict[str, Record]:
    """The last result of each stage, with its trace beside it as `traced`."""
    found = {one["stage"]: dict(one) for one in records if "stage" in one}
    for one in records:
        if one.get("trace_of") in found:
            found[one["trace_of"]]["traced"] = one
    return found
