"""Words of an environment as tokens: by the chat template in conversations, as they are behind plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from memtrain.errors import DataError
from memtrain.memory.plan.plan import TurnEnd
from memtrain.recipes.formats.fields import BadRow
from memtrain.trainers.data.tokenize.chat import specials_of, template_of
from memtrain.trainers.data.tokenize.render import Rendering, conversation

PLACE = "rewards.environment"
ASKED = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
"""A conversation whose rendering is cut off: only what the template writes behind it is used."""


@dataclass(frozen=True, slots=True)
class PlainWords:
    """Words behind plain text, as they are."""

    tokenizer: PreTrainedTokenizerFast

    def ids(self, words: str | Sequence[str], *, closes_turn: bool) -> list[int]:
        """Tokens of the words."""
        text = words if isinstance(words, str) else "".join(words)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, ids: Sequence[int]) -> str:
        """Text of a turn of the model, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class TemplateWords(PlainWords):
    """Words as messages of their own role, with the beginning of the model's next turn behind them."""

    rendering: Rendering
    turn_end: TurnEnd
    role: str

    def ids(self, words: str | Sequence[str], *, closes_turn: bool) -> list[int]:
        """Tokens of the messages. The token that ends the model's turn is the model's own, or comes first."""
        closing = [self.turn_end.token_id] if closes_turn else []
        return closing + self.tokenizer.encode(self.between(words), add_special_tokens=False)

    def between(self, words: str | Sequence[str]) -> str:
        """Text from the end of the model's turn to the beginning of its next.

        Raises: DataError where the template refuses the role, or writes earlier turns otherwise when others
        follow.
        """
        try:
            before = conversation(ASKED, (), self.rendering, generation_prompt=False)[0]
            texts = (words,) if isinstance(words, str) else words
            messages = tuple({"role": self.role, "content": text} for text in texts)
            after = conversation((*ASKED, *messages), (), self.rendering, generation_prompt=True)[0]
        except BadRow as error:
            raise DataError(
                f"the chat template cannot write the words of an environment with role {self.role}: {error}",
                PLACE,
                "set `role` of the class to a role that the template knows, such as user",
            ) from None
        end = before.rfind(self.turn_end.token) + len(self.turn_end.token)
        if before[:end] != after[:end]:
            raise DataError(
                "the chat template changes the model's turn when a message follows, so that a conversation "
                "cannot be continued token for token",
                PLACE,
                "set model.chat_template to one that leaves earlier turns as they are (chatml)",
            )
        return after[end:]


def words_of_environment(
    tokenizer: PreTrainedTokenizerFast,
    turn_end: TurnEnd | None,
    role: str,
    template_kwargs: Mapping[str, Any],
    *,
    is_chat: bool,
) -> PlainWords:
    """Words of an environment for prompts of a run.

    Raises: DataError where conversations cannot be continued by the chat template.
    """
    if not is_chat:
        return PlainWords(tokenizer)
    if turn_end is None:
        raise DataError(
            "the chat template has no token that ends the model's turns, so that no turn can follow",
            PLACE,
            "set model.chat_template: chatml",
        )
    rendering = Rendering(
        chat_template=template_of(tokenizer),
        special_tokens=specials_of(tokenizer),
        end_token=None,
        completion_only=False,
        assistant_only=False,
        template_kwargs=dict(template_kwargs),
    )
    made = TemplateWords(tokenizer, rendering, turn_end, role)
    made.between("a")
    return made
