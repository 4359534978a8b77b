"""One completion with all that a reward may want to know. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion of one prompt."""

    prompt: str
    completion: str
    completion_ids: tuple[int, ...]
    columns: Mapping[str, Any]
    """Other columns of the row."""
    prompt_ids: tuple[int, ...] = ()
