"""One completion with all that a reward may want to know. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memtrain.recipes.formats.fields import Messages, Tool


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as its row says it, before any tokenizer and template."""

    prompt: str | Messages
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion of one prompt."""

    prompt: str
    completion: str
    completion_ids: tuple[int, ...]
    columns: Mapping[str, Any]
    """Other columns of the row."""
    prompt_ids: tuple[int, ...] = ()
    asked: Asked | None = None
    """Its prompt as the row says it: what a reward model renders by its own template."""
