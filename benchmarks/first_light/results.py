"""The results: one file of JSON lines, a line a stage, on disk before the next stage begins."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
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


def merge(folders: Sequence[Path], out: Path) -> None:
    """Write the results in some folders, and in those within them, as the one file of `out`.

    Of a stage that was made several times the last folder's result stays; before that one without a fault,
    and within a folder's own one that had the card alone. What was traced stays beside the plan it is of.
    """
    kept: dict[str, tuple[tuple[bool, int, bool], list[Record]]] = {}
    for number, folder in enumerate(folders):
        for file in sorted(folder.rglob(FILE)):
            records = read(file.parent)
            made = {one["stage"]: one for one in records if "stage" in one}
            for name, one in made.items():
                rank = ("fault" not in one, number, not one.get("shared", False))
                beside = [more for more in records if more.get("job_of", more.get("trace_of")) == name]
                if name not in kept or rank >= kept[name][0]:
                    kept[name] = rank, [one, *beside]
    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(one) + "\n" for _, records in kept.values() for one in records]
    (out / FILE).write_text("".join(lines), encoding="utf-8")


def where_of(records: Sequence[Record]) -> dict[str, Any]:
    """Where the newest of some results was made, with all commits where they are of several."""
    found = [one["where"] for one in records if "where" in one]
    newest = max(found, key=lambda one: one["date"])
    commits = list(dict.fromkeys(one["commit"] for one in found))
    return dict(newest) | ({"commits": commits} if len(commits) > 1 else {})
