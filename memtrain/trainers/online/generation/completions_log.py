"""Completions as a person reads them: `completions.jsonl` of the run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMPLETIONS_FILE = "completions.jsonl"
SHOWN_CHARS = 160
"""Letters of a prompt and of a completion on the terminal. Taste."""


def cut_after(path: Path, step: int) -> None:
    """Remove lines after `step`, which a run that goes on writes again."""
    if not path.is_file():
        return
    kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
    path.write_text("".join(f"{line}\n" for line in kept))


def show(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Append some completions."""
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def as_text(line: dict[str, Any]) -> str:
    """Line of a completion for a terminal: its prompt's end, itself, its rewards and its advantage."""
    rewards = ", ".join(
        f"{name} {'none' if value is None else format(value, '.3g')}"
        for name, value in line["rewards"].items()
    )
    prompt, completion = _shortened(line["prompt"], from_end=True), _shortened(line["completion"])
    return (
        f"completion before step {line['step']}: {prompt} -> {completion}"
        f"  ({rewards}; advantage {line['advantage']:+.2f})"
    )


def _shortened(text: str, *, from_end: bool = False) -> str:
    """A text in one line and at most SHOWN_CHARS letters."""
    line = json.dumps(text, ensure_ascii=False)[1:-1]
    if len(line) <= SHOWN_CHARS:
        return line
    return f"...{line[-SHOWN_CHARS:]}" if from_end else f"{line[:SHOWN_CHARS]}..."


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return 2**62  # A line that a kill cut in two.
