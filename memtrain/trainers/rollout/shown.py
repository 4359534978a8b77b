"""Completions as a person reads them: `completions.jsonl` of the run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMPLETIONS_FILE = "completions.jsonl"


def cut_after(path: Path, step: int) -> None:
    """Remove what was written after `step`: a run that goes on writes it again."""
    if not path.is_file():
        return
    kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
    path.write_text("".join(f"{line}\n" for line in kept))


def show(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Append some completions."""
    with path.open("a") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return 2**62  # A line that a kill cut in two.
