"""Helpers for environments of several turns: tool calls, functions as tools, verifiers'.

    from memtrain.environments import Tools, Verifiers, tool_calls

An environment needs none of them: it is any class with `step(text)` (docs/environments.md). No torch here.
"""

from memtrain.trainers.online.rewards.tool_calls import ToolCall, Tools, tool_calls
from memtrain.trainers.online.rewards.verifiers_adapter import Verifiers

__all__ = ["ToolCall", "Tools", "Verifiers", "tool_calls"]
