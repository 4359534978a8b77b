"""Tool calls in the formats of chat templates, and functions that answer them."""

import pytest

from memtrain.trainers.online.rewards.tool_calls import ToolCall, Tools, tool_calls

ADD = ToolCall("add", {"a": 1, "b": 2})
BARE = ToolCall("add", {})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('so <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', [ADD]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}', [ADD]),
        (
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now"}]',
            [ADD, ToolCall("now", {})],
        ),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        ("it is 3", []),
        ('{"answer": 3}', []),
        ("[1, 2]", []),
        ("{so it is}", []),
    ],
)
def test_calls_are_read_as_templates_write_them(text: str, calls: list[ToolCall]):
    assert tool_calls(text) == calls


CODER = "<function=find>\n<parameter=code>\n007\n</parameter>\n<parameter=top>\n3\n</parameter>\n</function>"
GLM = (
    "find\n<arg_key>code</arg_key>\n<arg_value>007</arg_value>\n"
    "<arg_key>top</arg_key>\n<arg_value>3</arg_value>"
)


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{CODER}\n</tool_call>",
        CODER,
        f"I look.\n<tool_call>{GLM}\n</tool_call>",
        '[TOOL_CALLS]find[ARGS]{"code": "007", "top": 3}',
        'find{"code": "007", "top": 3}',
    ],
)
def test_formats_of_newer_templates_are_read_and_answered(text: str):
    """Text without quotes stays text where the function takes text. Mistral's marks are special tokens."""
    (call,) = tool_calls(text)
    assert (call.name, call.arguments["top"]) == ("find", 3)
    assert Finding().step(text) == ["007 3"]


def test_two_calls_after_one_another_and_text_that_only_looks_like_one():
    assert [one.name for one in tool_calls('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}')] == [
        "add",
        "now",
    ]
    assert tool_calls("<tool_call>now\n</tool_call>") == [ToolCall("now", {})]
    assert tool_calls('f{"a": 1} is a call in no language') == []
    assert tool_calls("f{x} = 2") == []
    with pytest.raises(ValueError):
        tool_calls('[TOOL_CALLS]add[ARGS]{"a": ')


@pytest.mark.parametrize("inner", ['{"name": "add"', '{"arguments": {}}', '{"name": "a", "arguments": 1}'])
def test_a_broken_call_is_reported(inner: str):
    with pytest.raises(ValueError):
        tool_calls(f"<tool_call>{inner}</tool_call>")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def find(code: str, top: int) -> str:
    """Find an entry.

    Args:
        code: of the entry
        top: how many
    """
    return f"{code} {top}"


class Finding(Tools):
    functions = (find,)


class Adding(Tools):
    functions = (add,)


def test_functions_answer_calls_and_every_failure_is_returned_to_the_model():
    """1 + 2 = 3; the last turn asks for nothing."""
    made = Adding()
    two = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    assert made.step(two + '<tool_call>{"name": "sub"}</tool_call>') == [
        "3",
        "error: there is no tool sub; there are add",
    ]
    (reported,) = made.step('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>') or [""]
    assert reported.startswith("error: TypeError: add() missing")
    (reported,) = made.step("<tool_call>{</tool_call>") or [""]
    assert reported.startswith("error: this is not a tool call: Expecting")
    assert made.step("it is 3") is None
    assert (made.num_calls, made.num_failed) == (3, 3)
    (definition,) = Adding.definitions()
    assert definition["function"]["parameters"]["required"] == ["a", "b"]


def test_the_usual_names_of_an_environment_are_free_for_its_own_values():
    """`self.answer = answer` in `reset`, as the manual's example has it, once hid a method of Tools."""
    made = Adding()
    made.answer = made.result = made.prompt = made.seed = made.call = 3  # type: ignore[attr-defined]
    assert made.step('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>') == ["3"]
