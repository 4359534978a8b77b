"""Chat templates for training: the text of a model's own template, with the assistant's turns marked.

Most tokenizers come with templates that mark nothing. The shipped templates write the same text for their
family and mark the assistant's words up to its end-of-turn token (`{% generation %}`). A shipped template
stands in only for a template that writes exactly the same on a set of probe conversations. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from memtrain.errors import DataError
from memtrain.recipes.formats.fields import BadRow, Messages, Tool
from memtrain.trainers.data.tokenize.render import Rendering, conversation, marked

FOLDER = Path(__file__).parent / "chat_templates"
NAMES = (
    "qwen3",
    "qwen3-instruct",
    "qwen2.5",
    "llama3.2",
    "llama3.1",
    "llama3",
    "llama4",
    "llama2",
    "gemma4",
    "gemma3",
    "gemma",
    "mistral",
    "phi4",
    "phi3",
    "deepseek3",
    "falcon-h1",
    "zephyr",
    "chatml",
)
"""The shipped training templates, the more particular first."""
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

USER, ASSISTANT = (
    {"role": "user", "content": "Hi, who are you? "},
    {"role": "assistant", "content": "  I'm a model."},
)
PROBES: tuple[Messages, ...] = (
    (USER, ASSISTANT),
    ({"role": "system", "content": "Be brief."}, USER, ASSISTANT),
    (USER, ASSISTANT, {"role": "user", "content": "And\n\n1+1?"}, {"role": "assistant", "content": "2\n"}),
    (
        {"role": "system", "content": " A\nB "},
        USER,
        ASSISTANT,
        USER,
        {"role": "assistant", "content": "é日本"},
    ),
)
"""Conversations with and without a system message, of one and two turns, with spaces at the edges."""
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL_PROBES: tuple[Messages, ...] = (
    (
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        ASSISTANT,
    ),
)
TOOLS: tuple[Tool, ...] = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
"""A template that agrees on this too is preferred among templates that agree on all others."""


def shipped_text(name: str) -> str:
    """The Jinja text of a shipped training template."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def training_template(own: str, special_tokens: Mapping[str, str]) -> str:
    """A template with the text of `own` that marks the assistant's words: itself, or a shipped one.

    `own` as it is, without marks, where no shipped one writes the same, but every turn can be found by the
    beginnings of a conversation.
    Raises: DataError when the turns cannot be found so either.
    """
    if MARKS.search(own):
        return own
    shipped = [shipped_text(name) for name in NAMES]
    same = [text for text in shipped if agree(own, text, special_tokens, PROBES, ())]
    if same:
        return next((text for text in same if agree(own, text, special_tokens, TOOL_PROBES, TOOLS)), same[0])
    if _finds_turns(own, special_tokens):
        return own
    raise DataError(
        "conversations are trained on the assistant's turns, and the tokenizer's chat template does not show "
        "which these are: it has no {% generation %} marks, and changes contents, or earlier turns when "
        "later ones follow",
        "model.chat_template",
        "train on all turns (data.assistant_only_loss: false), put {% generation %} ... {% endgeneration %} "
        "around the assistant's words in a copy of the template and set model.chat_template to it, or use a "
        f"shipped one: {', '.join(NAMES)}",
    )


def _finds_turns(template: str, special_tokens: Mapping[str, str]) -> bool:
    """Whether some probe of two turns is written, and the assistant's words found in all that are."""
    rendering = Rendering(
        template, special_tokens, None, completion_only=False, assistant_only=True, has_marks=False
    )
    found: list[bool] = []
    for probe in PROBES:
        text = written(template, special_tokens, probe, (), False)
        if text is None:
            continue
        answers = [message["content"].strip() for message in probe if message["role"] == "assistant"]
        try:
            spans = marked(probe, (), rendering)[1]
        except BadRow:
            return False
        found.append(all(words in text[slice(*span)] for words, span in zip(answers, spans, strict=True)))
    return len(found) > 0 and all(found)


def agree(
    one: str,
    other: str,
    special_tokens: Mapping[str, str],
    probes: tuple[Messages, ...],
    tools: tuple[Tool, ...],
) -> bool:
    """Whether two templates write the same for every probe, with and without a generation prompt."""
    asked = [(probe, False) for probe in probes] + [(probe[:-1], True) for probe in probes]
    return all(
        written(one, special_tokens, messages, tools, prompted)
        == written(other, special_tokens, messages, tools, prompted)
        for messages, prompted in asked
    )


def written(
    template: str,
    special_tokens: Mapping[str, str],
    messages: Messages,
    tools: tuple[Tool, ...],
    prompted: bool,
) -> str | None:
    """The text of a template for a conversation; None where the template refuses."""
    rendering = Rendering(template, special_tokens, None, completion_only=False, assistant_only=False)
    try:
        return conversation(messages, tools, rendering, generation_prompt=prompted)[0]
    except BadRow:
        return None
