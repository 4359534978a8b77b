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
