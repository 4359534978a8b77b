"""A completion with all facts that a reward may use. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memtrain.recipes.formats.fields import Messages, Tool


@dataclass(frozen=True, slots=True)
class RowPrompt:
    """A prompt as its row says it, before any tokenizer and template."""

    prompt: str | Messages
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion of a prompt."""

    prompt: str
    completion: str
    completion_ids: tuple[int, ...]
    columns: Mapping[str, Any]
    """Other columns of the row."""
    prompt_ids: tuple[int, ...] = ()
    asked: RowPrompt | None = None
    """Prompt in the words of the row, which a reward model renders by its own template."""
