"""The trained parts of a rendered conversation: single messages found in the text, chosen by the recipe.

A template with generation marks says itself what the assistant says. Any other is asked for beginnings of the
conversation: where each is the beginning of the whole text, messages lie between their ends. Where it is not
(a system prompt that moves to the last question), they lie where other words change the text. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from memtrain.recipes.formats.fields import NO_LOSS, BadRow, Message, Messages

CharSpan = tuple[int, int]
Render = Callable[[Messages, bool], str]
"""A conversation as the template writes it, with a generation prompt where that is asked."""


def loss_spans(
    messages: Messages,
    text: str,
    marks: Sequence[CharSpan] | None,
    render: Render,
    *,
    assistant_only: bool,
    last_turn_only: bool,
) -> tuple[CharSpan, ...]:
    """Characters of `text` that are trained on: the assistant's turns, its last one, or all but the messages
    that the row switches off.

    `marks`: what the template marks; None where it marks nothing.
    Raises: BadRow when a message that must be found cannot be.
    """
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    off = [i for i, message in enumerate(messages) if message.get(NO_LOSS)]
    if not assistant_only:
        return _without([_region(i, messages, text, render) for i in off], len(text))
    chosen = [i for i in (spoken[-1:] if last_turn_only else spoken) if i not in off]
    if marks is not None and chosen == spoken:
        return tuple(marks)
    if marks is not None and len(marks) == len(spoken):
        return tuple(marks[spoken.index(i)] for i in chosen)
    try:
        return tuple(_words(i, messages, text, render, prompts=(True,)) for i in chosen)
    except BadRow:
        between = by_edges(messages, text, render)
    if between is not None:
        return tuple(between[spoken.index(i)] for i in chosen)
    found = [by_other_words(i, messages, text, render) for i in chosen]
    sure = tuple(span for span in found if span is not None)
    return sure if len(sure) == len(found) else tuple(_words(i, messages, text, render) for i in chosen)


def by_edges(messages: Messages, text: str, render: Render) -> list[CharSpan] | None:
    """The assistant's turns by what the template writes before and after each; None where that is not sure.

    For templates that write earlier turns otherwise once others follow. Sure is a text with one beginning of
    a turn for each message of the assistant, and in each turn its content, and an end of turn after it.
    """
    edges = _edges(render)
    spoken = [message for message in messages if message["role"] == "assistant"]
    if edges is None or text.count(edges[0]) != len(spoken):
        return None
    begin, end = edges
    found: list[CharSpan] = []
    at = 0
    for message in spoken:
        start = text.index(begin, at) + len(begin)
        at = text.find(begin, start)
        turn = text[start : at if at >= 0 else len(text)]
        # What stands before the end of thoughts may be left out of earlier turns.
        words = str(message["content"]).rpartition("</think>")[2].strip()
        stop = turn.find(end)
        if stop < 0 or words not in turn[:stop]:
            return None
        found.append((start, start + stop + len(end)))
    return found


def _edges(render: Render) -> tuple[str, str] | None:
    """What a template writes before an assistant's turn and after it; None where it is nothing."""
    asked, words = {"role": "user", "content": "Hi."}, "memtrain's own words"
    told = {"role": "assistant", "content": words}
    try:
        head, prompted = render((asked,), False), render((asked,), True)
        last, earlier = render((asked, told), False), render((asked, told, asked), False)
    except BadRow:
        return None
    before, _, after = earlier.partition(words)
    end = last.rpartition(words)[2].rstrip()
    if not (before.startswith(head) and prompted.startswith(head) and after.startswith(end)):
        return None
    ways = before[len(head) :], prompted[len(head) :]
    begin = commonprefix(ways)
    if begin in ways and not begin.strip() and not any(way.strip() for way in ways):
        # Nothing is written before the assistant's words but the end of the user's turn: [/INST].
        begin = head.rpartition(asked["content"])[2].strip()
    return (begin, end) if (begin in ways or begin in head) and begin.strip() and end else None


OTHERS = ("Alpha 0x1f", "Omega-7Q")
"""Words in place of a message's own: alike in no letter at their edges."""
LEAST_PROMPT = 4
"""Letters of a generation prompt by which the beginning of a turn is known."""


def by_other_words(index: int, messages: Messages, text: str, render: Render) -> CharSpan | None:
    """Turn of the assistant, by what changes in the text once it says something else; None where that is
    not sure.

    For templates that write what came before otherwise once more follows (a system prompt or tools in the
    last question, thoughts that are dropped). The turn begins where the message before it ends and the
    template has written what it writes when an answer is asked for there, and it ends with what the template
    writes after it when nothing follows, or before another message.
    """
    if index == 0:
        return None
    before, own = _place(index - 1, messages, render), _place(index, messages, render)
    asked, told = messages[:index], messages[: index + 1]
    if before is None or own is None or before.text != text or own.text != text:
        return None
    prompted, last = _place(index - 1, asked, render, is_asked=True), _place(index, told, render)
    if prompted is None or last is None:
        return None
    # Letters that the generation prompt and the turn begin with, whatever the words of the turn.
    prompt = prompted.text[prompted.end :]
    shared = commonprefix([prompt, *(one[before.end :] for one in (text, *own.others))])
    if shared != prompt and not shared.strip():
        return None
    start, after = before.end + len(shared), text[own.end :]
    end = last.text[last.end :].rstrip()
    if not after.startswith(end):
        end = _end_before_another(told, render)
    words = str(messages[index]["content"]).rpartition("</think>")[2].strip()
    is_whole = own.is_call or words in text[start : own.end]
    if not end or not after.startswith(end) or start > own.start or not is_whole:
        return None
    return start, own.end + len(end)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a text changes with the words of a message."""

    text: str
    start: int
    end: int
    others: tuple[str, ...]
    """The text with other words."""
    is_call: bool
    """Whether the name of a tool was changed: the template writes no other words of the message."""


def _place(index: int, messages: Messages, render: Render, *, is_asked: bool = False) -> Place | None:
    """Place of a message's words, or of its first call; None where the text does not depend on them."""
    for is_call in (False, True):
        try:
            text = render(messages, is_asked)
            others = tuple(
                render((*messages[:index], changed, *messages[index + 1 :]), is_asked)
                for words in OTHERS
                if (changed := _changed(messages[index], words, is_call)) is not None
            )
        except BadRow:
            continue
        if len(others) < len(OTHERS) or len({text, *others}) < len(OTHERS) + 1:
            continue
        start = len(commonprefix([text, *others]))
        end = len(text) - len(commonprefix([one[::-1] for one in (text, *others)]))
        if start <= end:
            return Place(text, start, end, others, is_call)
    return None


def _changed(message: Message, words: str, is_call: bool) -> Message | None:
    """The message with other words, or with another name of its first call; None where it has none."""
    if not is_call:
        return {**message, "content": words}
    given: Any = message.get("tool_calls")
    calls: Sequence[Any] = given if isinstance(given, list | tuple) else ()
    first: Any = calls[0] if calls else None
    function = first.get("function") if isinstance(first, Mapping) else None
    if not isinstance(function, Mapping):
        return None
    renamed = {**first, "function": {**function, "name": re.sub(r"\W", "_", words)}}
    return {**message, "tool_calls": [renamed, *calls[1:]]}


def _end_before_another(told: Messages, render: Render) -> str:
    """What a template writes after the last message when a question follows; empty where that is not sure.

    It ends where another message begins: as a generation prompt does.
    """
    question = {"role": "user", "content": OTHERS[0]}
    followed = _place(len(told) - 1, (*told, question), render)
    if followed is None or followed.text.count(OTHERS[0], followed.end) != 1:
        return ""
    between = followed.text[followed.end :].partition(OTHERS[0])[0]
    try:
        plain, prompted = render((*told, question), False), render((*told, question), True)
    except BadRow:
        return ""
    prompt = prompted[len(plain) :] if prompted.startswith(plain) else ""
    begins = (prompt[:size] for size in range(len(prompt), LEAST_PROMPT - 1, -1))
    begin = next((one for one in begins if one in between), "")
    return between.partition(begin)[0].rstrip() if begin and between.count(begin) == 1 else ""


def shown(message: Message) -> Message:
    """The message as templates see it."""
    return {name: value for name, value in message.items() if name != NO_LOSS}


def _without(regions: Sequence[CharSpan], length: int) -> tuple[CharSpan, ...]:
    """All characters outside the regions, which are in order."""
    edges = [0, *(edge for region in regions for edge in region), length]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple((start, end) for start, end in pairs if end > start)


def _region(index: int, messages: Messages, text: str, render: Render) -> CharSpan:
    """A message with the template's text around it."""
    return _end(index, messages, text, render), _end(index + 1, messages, text, render)


def _words(
    index: int,
    messages: Messages,
    text: str,
    render: Render,
    prompts: Sequence[bool] = (True, False),
) -> CharSpan:
    """Span that the assistant writes in a turn: from its generation prompt to the token that ends the turn.

    Blanks that the template writes after that token are not the assistant's. `prompts`: with (True) and
    without a generation prompt, tried in this order.
    """
    start = _end(index, messages, text, render, prompts)
    end = _end(index + 1, messages, text, render)
    content = str(messages[index]["content"]).strip()
    after = text[start:end].rpartition(content)[2] if content else text[start:end]
    return start, end - (len(after) - len(after.rstrip()) if after.strip() else 0)


def _end(
    count: int, messages: Messages, text: str, render: Render, prompts: Sequence[bool] = (False,)
) -> int:
    """End of the first `count` messages in the text; `prompts`: with a generation prompt, or without.

    Raises: BadRow when they are written otherwise than in the whole conversation.
    """
    if count == len(messages):
        return len(text)
    for generation_prompt in prompts:
        try:
            head = render(messages[:count], generation_prompt)
        except BadRow:
            if count:
                raise
            head = ""
        if text.startswith(head):
            return len(head)
    raise BadRow(
        f"the chat template renders the first {count} message{'' if count == 1 else 's'} differently when "
        "more follow: the tokens of each message cannot be identified",
        "put {% generation %} marks around the assistant's words in a copy of the template and set "
        "model.chat_template to it, or train on all turns (data.assistant_only_loss: false, and no message "
        "with weight: 0 or train: false)",
    )


def turn_end(render: Render, end_tokens: Sequence[str]) -> str | None:
    """The first of `end_tokens` (all special tokens) that the template writes after an assistant's turn.

    None where it writes none, or refuses a plain conversation.
    """
    words = "memtrain's own words"
    talk = ({"role": "user", "content": "Hi."}, {"role": "assistant", "content": words})
    try:
        after = render(talk, False).rpartition(words)[2]
    except BadRow:
        return None
    places = [(after.find(token), -len(token), token) for token in end_tokens if token in after]
    return min(places)[2] if places else None
