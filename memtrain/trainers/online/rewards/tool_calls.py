"""Tool calls in a turn of the model, in the formats of chat templates, and functions as tools. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

MARKED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.S)
"""A call as Qwen's and Hermes' templates write it."""
WITH_BARE_JSON = re.compile(r"\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)?\s*([\[{].*)", re.S)
"""A turn that is nothing but calls, as Mistral's and Llama 3's templates write it."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that a turn asks for."""

    name: str
    arguments: Mapping[str, Any]


def tool_calls(text: str) -> list[ToolCall]:
    """The tool calls in a turn of the model, in their order; none where it asks for none.

    Known are `<tool_call>{...}</tool_call>` (Qwen, Hermes), a JSON list behind `[TOOL_CALLS]` (Mistral) and
    one JSON object (Llama 3, `parameters` for `arguments`).
    Raises: ValueError with the reason where a call is broken: its JSON, its name or its arguments.
    """
    marked = MARKED.findall(text)
    if marked:
        return [_call(json.loads(one)) for one in marked]
    bare = WITH_BARE_JSON.fullmatch(text.rstrip())
    if bare is None:
        return []
    try:
        asked = json.loads(bare[1])
    except ValueError:
        return []
    items: list[Any] = asked if isinstance(asked, list) else [asked]
    is_calls = bool(items) and all(isinstance(one, dict) and "name" in one for one in items)
    return [_call(one) for one in items] if is_calls else []


def _call(asked: Any) -> ToolCall:
    given = cast(dict[str, Any], asked.get("function", asked) if isinstance(asked, dict) else {})
    name, arguments = given.get("name"), given.get("arguments", given.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call is an object with a name, and arguments that are an object")
    return ToolCall(name, cast(dict[str, Any], arguments))


class Tools:
    """An environment of plain functions: a turn that calls tools gets their results, any other is the last.

    A subclass names them: `functions = (search, calculate)`. Their definitions, for the rows' column `tools`,
    are `definitions()`: of the functions' annotations and Google-style docstrings. A call that is broken, of
    an unknown tool, or that raises is answered by the reason: the model may try again. `num_calls` and
    `num_failed` count.
    """

    role = "tool"
    functions: ClassVar[Sequence[Callable[..., Any]]] = ()
    num_calls = 0
    num_failed = 0

    @classmethod
    def definitions(cls) -> list[dict[str, Any]]:
        """The tools as JSON schemas, as chat templates render them."""
        from transformers.utils import get_json_schema

        return [get_json_schema(one) for one in cls.functions]

    def step(self, text: str) -> list[str] | None:
        """A message for each call; None where there is none."""
        try:
            calls = tool_calls(text)
        except ValueError as error:
            self.num_failed += 1
            return [f"error: this is not a tool call: {error}"]
        return [self.result_of(one) for one in calls] or None

    def result_of(self, call: ToolCall) -> str:
        """The result of a call as text, or the reason why there is none."""
        self.num_calls += 1
        known = {one.__name__: one for one in self.functions}
        if call.name not in known:
            self.num_failed += 1
            return f"error: there is no tool {call.name}; there are {', '.join(known)}"
        try:
            found = known[call.name](**call.arguments)
        except Exception as error:
            self.num_failed += 1
            return f"error: {type(error).__name__}: {error}"
        return found if isinstance(found, str) else json.dumps(found, default=str)
