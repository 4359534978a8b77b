"""The trained parts of a rendered conversation: single messages found in the text, chosen by the recipe.

A template with generation marks says itself what the assistant says. Any other is asked for beginnings of the
conversation: where each is the beginning of the whole text, messages lie between their ends. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix

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
        return tuple(_words(i, messages, text, render) for i in chosen)
    except BadRow:
        between = by_edges(messages, text, render)
        if between is None:
            raise
        return tuple(between[spoken.index(i)] for i in chosen)


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


def _words(index: int, messages: Messages, text: str, render: Render) -> CharSpan:
    """Span that the assistant writes in a turn: from its generation prompt to the token that ends the turn.

    Blanks that the template writes after that token are not the assistant's.
    """
    start = _end(index, messages, text, render, is_asked=True)
    end = _end(index + 1, messages, text, render)
    content = str(messages[index]["content"]).strip()
    after = text[start:end].rpartition(content)[2] if content else text[start:end]
    return start, end - (len(after) - len(after.rstrip()) if after.strip() else 0)


def _end(count: int, messages: Messages, text: str, render: Render, *, is_asked: bool = False) -> int:
    """End of the first `count` messages in the text; `is_asked`: with a generation prompt.

    Raises: BadRow when they are written otherwise than in the whole conversation.
    """
    if count == len(messages):
        return len(text)
    for generation_prompt in (True, False) if is_asked else (False,):
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
