"""Texts of an example for the tokenizer, with the spans of their characters that are trained on.

A prompt with a string completion is the two put together, tokenized once. Where a token reaches over the
boundary, it belongs to the completion: the boundary is the end of the last token that lies wholly in the
prompt. The ids are those of TRL, which tokenizes prompt and both together, and takes what they have in common
for the prompt.

Conversations are rendered by the chat template, with the generation prompt at the end of a prompt. Strings
end with the tokenizer's end token where `data.end_token` asks for it; conversations end as the template ends
them. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from memtrain.errors import DataError, MemtrainError, words_of
from memtrain.recipes.formats.fields import BadRow, Example, Messages, Tool
from memtrain.recipes.formats.messages import Conversation
from memtrain.recipes.formats.preference import Preference
from memtrain.recipes.formats.prompt import Prompt
from memtrain.recipes.formats.prompt_completion import PromptCompletion
from memtrain.recipes.formats.text import Text
from memtrain.recipes.formats.unpaired import Unpaired
from memtrain.trainers.data.tokenize.template_limits import check_length, within_limits
from memtrain.trainers.data.tokenize.turns import CharSpan, loss_spans, shown


@dataclass(frozen=True, slots=True)
class Piece:
    """A text to tokenize."""

    text: str
    cut: int
    """Characters of the prompt at its beginning."""
    loss_spans: tuple[CharSpan, ...]
    """Learnt spans, in characters."""
    adds_specials: bool
    """Whether the tokenizer adds special tokens of its own: not where a template wrote them."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Rules for the texts of examples: every property that decides them, so that a cache key can hold it."""

    chat_template: str | None
    special_tokens: Mapping[str, str]
    """Special tokens by name (`eos_token`, ...), as templates use them."""
    end_token: str | None
    """Appended to strings; None where nothing is."""
    completion_only: bool
    assistant_only: bool
    own_template: str | None = None
    """The model's own template, where `chat_template` stands in for it: both must write the same text."""
    by_default: bool = False
    """Whether `assistant_only` is nobody's word: completions that only the assistant speaks are then trained
    on whole, as the template writes them."""
    last_turn_only: bool = False
    """Only the last turn of the assistant."""
    has_marks: bool = True
    """Whether the template marks the assistant's text; else its turns are found by beginnings."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the template beside the messages."""


def render(example: Example, rendering: Rendering) -> tuple[Piece, ...]:
    """The texts of an example: one, or for a pair one with each answer.

    Raises: BadRow when the chat template refuses the conversation, or marks nothing to learn where it should.
    """
    return RENDERERS[type(example)](example, rendering)


def _text(example: Text, rendering: Rendering) -> tuple[Piece, ...]:
    text = ended(example.text, rendering)
    return (Piece(text, 0, ((0, len(text)),), adds_specials=True),)


def _answer(
    prompt: str | Messages, answer: str | Messages, tools: tuple[Tool, ...], rendering: Rendering
) -> Piece:
    """The prompt with an answer after it, the answer trained on."""
    if isinstance(prompt, str) or isinstance(answer, str):
        assert isinstance(prompt, str), "formats give strings with strings"
        assert isinstance(answer, str), "formats give strings with strings"
        text = prompt + ended(answer, rendering)
        return Piece(text, len(prompt), ((len(prompt), len(text)),), adds_specials=True)
    text, spans = marked(prompt + answer, tools, rendering)
    return Piece(text, len(prompt_of(text, prompt, tools, rendering)), spans, adds_specials=False)


def _prompt_completion(example: PromptCompletion | Unpaired, rendering: Rendering) -> tuple[Piece, ...]:
    if rendering.by_default and (not rendering.completion_only or is_assistants(example.completion)):
        own = rendering.own_template or rendering.chat_template
        rendering = replace(rendering, assistant_only=False, chat_template=own, own_template=None)
    piece = _answer(example.prompt, example.completion, example.tools, rendering)
    if rendering.completion_only:
        return (_after_cut(piece),)
    return (replace(piece, loss_spans=((0, len(piece.text)),)) if piece.adds_specials else piece,)


def is_assistants(completion: str | Messages) -> bool:
    """Whether nobody but the assistant speaks in a completion."""
    return isinstance(completion, str) or all(message["role"] == "assistant" for message in completion)


def _after_cut(piece: Piece) -> Piece:
    """The piece, of which nothing of the prompt is trained on."""
    inside = tuple((max(start, piece.cut), end) for start, end in piece.loss_spans if end > piece.cut)
    return piece if inside == piece.loss_spans else replace(piece, loss_spans=inside)


def _conversation(example: Conversation, rendering: Rendering) -> tuple[Piece, ...]:
    text, spans = marked(example.messages, example.tools, rendering)
    return (Piece(text, 0, spans, adds_specials=False),)


def _preference(example: Preference, rendering: Rendering) -> tuple[Piece, ...]:
    return (
        _after_cut(_answer(example.prompt, example.chosen, example.tools, rendering)),
        _after_cut(_answer(example.prompt, example.rejected, example.tools, rendering)),
    )


def _prompt(example: Prompt, rendering: Rendering) -> tuple[Piece, ...]:
    if isinstance(example.prompt, str):
        return (Piece(example.prompt, len(example.prompt), (), adds_specials=True),)
    text, _ = conversation(example.prompt, example.tools, rendering, generation_prompt=True)
    return (Piece(text, len(text), (), adds_specials=False),)


RENDERERS: dict[type[Example], Callable[[Any, Rendering], tuple[Piece, ...]]] = {
    Text: _text,
    PromptCompletion: _prompt_completion,
    Conversation: _conversation,
    Preference: _preference,
    Unpaired: _prompt_completion,
    Prompt: _prompt,
}


def texts_alone(example: Example, rendering: Rendering) -> list[str]:
    """The texts of an example as `render` has them, without what is trained on: fewer passes of a template.

    Raises: BadRow when the chat template refuses the conversation.
    """
    own = rendering.own_template or rendering.chat_template
    plain = replace(rendering, chat_template=own, own_template=None, assistant_only=False)
    prompt: Any = example.messages if isinstance(example, Conversation) else getattr(example, "prompt", None)
    if not isinstance(prompt, tuple):
        return [piece.text for piece in render(example, plain)]
    names = ("completion", "chosen", "rejected")
    answers: list[Messages] = [part for name in names if (part := getattr(example, name, None)) is not None]
    tools: tuple[Tool, ...] = getattr(example, "tools", ())
    is_asked = isinstance(example, Prompt)
    return [
        conversation(prompt + answer, tools, plain, generation_prompt=is_asked)[0]
        for answer in answers or [()]
    ]


def ended(text: str, rendering: Rendering) -> str:
    """The text with the end token after it, once."""
    if rendering.end_token is None or text.endswith(rendering.end_token):
        return text
    return text + rendering.end_token


def prompt_of(text: str, prompt: Messages, tools: tuple[Tool, ...], rendering: Rendering) -> str:
    """The part of a rendered conversation that is its prompt, generation prompt included.

    Raises: BadRow when the template writes the prompt differently once an answer follows.
    """
    own = replace(rendering, chat_template=rendering.own_template or rendering.chat_template)
    for generation_prompt in (True, False):
        head, _ = conversation(prompt, tools, own, generation_prompt=generation_prompt)
        if text.startswith(head):
            return head
    raise BadRow(
        "the chat template renders the prompt differently when an answer follows",
        "give the conversation as one list of messages, or a template that keeps the first messages",
    )


def marked(
    messages: Messages, tools: tuple[Tool, ...], rendering: Rendering
) -> tuple[str, tuple[CharSpan, ...]]:
    """A conversation, and the places in it that are trained on.

    Where a template that stands in writes another text than the model's own (of tools, often), the own one is
    taken, and the turns are found in it without marks.
    Raises: BadRow when the template refuses it, or a message that is chosen cannot be found.
    """
    wants_marks = rendering.assistant_only and rendering.has_marks
    if rendering.own_template is not None:
        own = replace(rendering, chat_template=rendering.own_template, own_template=None)
        own_text = conversation(messages, tools, own)[0]
        try:
            stands_in = conversation(messages, tools, rendering)[0] == own_text
        except BadRow:
            stands_in = False
        if not stands_in:
            rendering, wants_marks = own, False
    text, marks = conversation(messages, tools, rendering, spans_wanted=wants_marks)

    def beginning(some: Messages, generation_prompt: bool) -> str:
        return conversation(some, tools, rendering, generation_prompt=generation_prompt)[0]

    spans = loss_spans(
        messages,
        text,
        marks if wants_marks else None,
        beginning,
        assistant_only=rendering.assistant_only,
        last_turn_only=rendering.last_turn_only,
    )
    return text, spans


def check_tools(messages: Messages, tools: tuple[Tool, ...], chat_template: str) -> None:
    """Raise BadRow for tools, or calls of them, that a template never speaks of: they would be lost."""
    lost = []
    if tools and "tools" not in chat_template:
        lost.append("tools")
    if "tool_calls" not in chat_template and any(message.get("tool_calls") for message in messages):
        lost.append("tool_calls")
    if lost:
        raise BadRow(
            f"the chat template does not render {' or '.join(lost)}: they would be lost",
            "set model.chat_template to a template that renders them, or leave them out of the rows",
        )


def conversation(
    messages: Messages,
    tools: tuple[Tool, ...],
    rendering: Rendering,
    *,
    generation_prompt: bool = False,
    spans_wanted: bool = False,
) -> tuple[str, tuple[CharSpan, ...]]:
    """A conversation as the chat template writes it, and the spans of its generation marks.

    Raises: BadRow when the template refuses the conversation, or has no place for its tools; DataError when
    it passes the limits of time, memory and text.
    """
    from jinja2.exceptions import TemplateError, TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    assert rendering.chat_template is not None, "rows of messages are refused without a template"
    check_tools(messages, tools, rendering.chat_template)
    read = rendering.own_template or rendering.chat_template
    for name in rendering.template_kwargs:
        if name not in read:
            raise BadRow(
                f"the chat template never reads '{name}' of chat_template_kwargs", f"remove '{name}'"
            )
    try:
        texts, marked = within_limits(
            lambda: cast(Any, render_jinja_template)(
                [[shown(message) for message in messages]],
                tools=list(tools) or None,
                chat_template=rendering.chat_template,
                return_assistant_tokens_mask=spans_wanted,
                add_generation_prompt=generation_prompt,
                **rendering.special_tokens,
                **rendering.template_kwargs,
            )
        )
    except MemtrainError:
        raise
    except TemplateSyntaxError as error:
        raise DataError(
            f"the chat template is not a valid Jinja template: {words_of(error)} (line {error.lineno})",
            "model.chat_template",
            "fix it, or set model.chat_template to another: a file, or a shipped one such as chatml",
        ) from None
    except Exception as error:  # a template is a program: it fails in every way that one can
        refuses = "refuses" if isinstance(error, TemplateError) else "fails on"
        raise BadRow(
            f"the chat template {refuses} the conversation: {words_of(error)}",
            "fix the order or the fields of its messages, or set model.chat_template to another template",
        ) from None
    check_length(texts[0])
    return texts[0], tuple(map(tuple, marked[0])) if spans_wanted else ()
