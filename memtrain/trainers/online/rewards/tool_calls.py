"""Tool calls in a turn of the model, in the formats of chat templates, and functions as tools. No torch."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

MARKED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.S)
"""A call as the templates of Qwen, Hermes and GLM write it."""
WITH_BARE_JSON = re.compile(r"\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)?\s*([\[{].*)", re.S)
"""A turn that is nothing but calls, as Mistral's and Llama 3's templates write it."""
AFTER_A_NAME = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([A-Za-z_]\w*)\s*(?:\[ARGS\])?\s*(?=\{)")
"""Begin of a call of Mistral since its eleventh tokenizer; its marks are special tokens, and may be gone."""
IN_TAGS = re.compile(r"<function=([^>\s]+)>\s*(.*?)\s*(?:</function>|$)", re.S)
"""A call as Qwen3-Coder and Qwen3.5 write it, inside the marks."""
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.S)
WITH_KEYS = re.compile(r"(\w+)\s*((?:<arg_key>.*</arg_value>)?)", re.S)
"""A call as GLM 4.5 writes it, inside the marks."""
KEY_AND_VALUE = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.S)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that a turn asks for."""

    name: str
    arguments: Mapping[str, Any]
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Arguments as they were written, of formats that put no quotes around strings."""


def tool_calls(text: str) -> list[ToolCall]:
    """The tool calls in a turn of the model, in their order; none where it asks for none.

    Known are, inside `<tool_call>` marks, a JSON object (Qwen, Hermes), `<function=...>` tags (Qwen3-Coder,
    Qwen3.5) and keys with values (GLM); a JSON list behind `[TOOL_CALLS]`, or names with JSON objects
    (Mistral); one JSON object (Llama 3, `parameters` for `arguments`).
    Raises: ValueError with the reason where a call is broken: its JSON, its name or its arguments.
    """
    marked = MARKED.findall(text)
    if marked:
        return [_marked(one) for one in marked]
    if IN_TAGS.search(text):
        return [_tagged(one[1], one[2], PARAMETER) for one in IN_TAGS.finditer(text)]
    if AFTER_A_NAME.match(text):
        return _after_names(text)
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


def _marked(text: str) -> ToolCall:
    """The call between two marks, in one of the three formats."""
    if (tagged := IN_TAGS.fullmatch(text)) is not None:
        return _tagged(tagged[1], tagged[2], PARAMETER)
    if (keyed := WITH_KEYS.fullmatch(text)) is not None:
        return _tagged(keyed[1], keyed[2], KEY_AND_VALUE)
    return _call(json.loads(text))


def _tagged(name: str, body: str, argument: re.Pattern[str]) -> ToolCall:
    """A call whose values have no quotes: what is JSON is read as such, all other values are strings."""
    texts: dict[str, str] = dict(argument.findall(body))
    return ToolCall(name, {key: _value(text) for key, text in texts.items()}, texts)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _after_names(text: str) -> list[ToolCall]:
    """Calls of a turn that is nothing but names with JSON objects; none of any other turn."""
    calls: list[ToolCall] = []
    at = 0
    while at < len(text.rstrip()):
        found = AFTER_A_NAME.match(text, at)
        if found is None:
            return []
        try:
            arguments, at = json.JSONDecoder().raw_decode(text, found.end())
        except ValueError:
            if "[TOOL_CALLS]" in text or "[ARGS]" in text:
                raise
            return []
        calls.append(_call({"name": found[1], "arguments": arguments}))
    return calls


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
            found = known[call.name](**_typed(known[call.name], call))
        except Exception as error:
            self.num_failed += 1
            return f"error: {type(error).__name__}: {error}"
        return found if isinstance(found, str) else json.dumps(found, default=str)


def _typed(function: Callable[..., Any], call: ToolCall) -> dict[str, Any]:
    """The arguments of a call; what the function takes as text is the text that was written: `007`."""
    kinds = {name: one.annotation for name, one in inspect.signature(function).parameters.items()}
    own = {name: text for name, text in call.texts.items() if kinds.get(name) in (str, "str")}
    return {**call.arguments, **own}
