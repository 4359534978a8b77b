"""The input of a reward model: a completion in its own chat template, tokenized as in its training.

A reward was learned at the last token of rows that were rendered in one way: beginning-of-sequence token,
turns, end of turn or end of text. A completion is rendered in the same way, from the messages of its row and
not from the policy's tokens, so that the score is read at the place that was learned. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memtrain.errors import Fault, RecipeError
from memtrain.recipes.formats.fields import BadRow, Messages
from memtrain.recipes.sections.base import Section
from memtrain.recipes.sections.model import Model
from memtrain.recipes.sections.rewards import RewardModel
from memtrain.trainers.data.store.token_store import Stored
from memtrain.trainers.data.tokenize.chat import specials_of, template_of
from memtrain.trainers.data.tokenize.encode import Encoder
from memtrain.trainers.data.tokenize.render import Piece, Rendering, conversation, ended, prompt_of
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of
from memtrain.trainers.online.rewards.answer import Answer, RowPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

READING_FILE = "reward_reading.json"
"""Beside the weights of a trained reward model: how the rows of its training were written."""

Ids = tuple[int, ...]


class Reading(Section):
    """Form of the rows in a reward model's training. The default: nothing is known of it."""

    rows: Literal["conversations", "strings", "both", "unknown"] = "unknown"
    end_token: bool = True
    """Strings ended with the end-of-sequence token."""
    chat_template_kwargs: dict[str, Any] = {}


def reading_of(meta: Stored) -> Reading:
    """Form of the rows of a store."""
    readings: list[dict[str, Any]] = meta.made_of["readings"]
    chats = [one for one in readings if one["is_chat"]]
    kinds = {bool(one["is_chat"]) for one in readings}
    return Reading(
        rows="both" if len(kinds) > 1 else "conversations" if chats else "strings",
        end_token=meta.made_of["rendering"]["end_token"] is not None,
        chat_template_kwargs=dict(chats[0]["template_kwargs"]) if chats else {},
    )


def write_reading(reading: Reading, folder: Path) -> None:
    """Put it beside a model."""
    (folder / READING_FILE).write_text(reading.model_dump_json(indent=1) + "\n")


def read_reading(folder: Path) -> Reading:
    """The file beside a model; empty without such a file, as on the hub."""
    path = folder / READING_FILE
    return Reading.model_validate_json(path.read_text()) if path.is_file() else Reading()


@dataclass(frozen=True, slots=True)
class RewardReader:
    """Turns completions into the tokens of a reward model."""

    tokenizer: PreTrainedTokenizerFast
    reading: Reading = field(default_factory=Reading)

    def check(self, asked: RowPrompt, label: str, where: str) -> None:
        """Raise RecipeError where prompts like this one cannot be written as in the model's training."""
        is_chat = not isinstance(asked.prompt, str)
        fault = fix = ""
        if (is_chat or self.reading.rows == "conversations") and self._rendering.chat_template is None:
            fault = "the rows are conversations, but its tokenizer has no chat template"
            fix = "set chat_template of this model, or use a model whose tokenizer has a template"
        elif is_chat and self.reading.rows == "strings":
            fault = "the rows are conversations, but the reward model was trained on strings"
            fix = "give the prompts as strings, or train the reward model on rows of messages"
        else:
            try:
                self.pieces([Answer("", "a", (), {}, asked=asked)])
            except BadRow as wrong:
                fault, fix = wrong.what, wrong.fix
        if fault:
            raise RecipeError([Fault(f"reward model '{label}': {fault}", where, fix)])

    def ids(self, answers: Sequence[Answer]) -> list[tuple[Ids, Ids]]:
        """(prompt, completion) of each answer as the model's tokens; the score belongs to the last one."""
        encoder = Encoder(self.tokenizer.backend_tokenizer.to_str())
        encoded = encoder.encode(self.pieces(answers))
        return [(tuple(one.ids[: one.cut].tolist()), tuple(one.ids[one.cut :].tolist())) for one in encoded]

    def pieces(self, answers: Sequence[Answer]) -> list[Piece]:
        """Each answer with its prompt as a text. Raises: BadRow where the template refuses one."""
        rendering = self._rendering
        return [self._piece(answer, rendering) for answer in answers]

    def _piece(self, answer: Answer, rendering: Rendering) -> Piece:
        asked = answer.asked
        assert asked is not None, "Every row of prompts is kept as it was read."
        prompt = asked.prompt
        if isinstance(prompt, str):
            if self.reading.rows != "conversations":
                text = prompt + ended(answer.completion, rendering)
                return Piece(text, len(prompt), ((len(prompt), len(text)),), adds_specials=True)
            prompt = ({"role": "user", "content": prompt},)
        tools = asked.tools if "tools" in (rendering.chat_template or "") else ()
        prompt, answer_text = _with_answer(prompt, answer.completion)
        text, _ = conversation((*prompt, answer_text), tools, rendering)
        try:
            cut = len(prompt_of(text, prompt, tools, rendering))
        except BadRow:
            # Then no two answers have a beginning in common.
            cut = 0
        return Piece(text, cut, ((cut, len(text)),), adds_specials=False)

    @property
    def _rendering(self) -> Rendering:
        """Rendering of rows, as for pairs: see data/store/prepare.py."""
        end = self.tokenizer.eos_token if self.reading.end_token else None
        return Rendering(
            chat_template=template_of(self.tokenizer),
            special_tokens=specials_of(self.tokenizer),
            end_token=None if end is None else str(end),
            completion_only=True,
            assistant_only=False,
            template_kwargs=self.reading.chat_template_kwargs,
        )


def _with_answer(prompt: Messages, completion: str) -> tuple[Messages, dict[str, Any]]:
    """(prompt, assistant's message): where the prompt ends in one, the completion goes on with it."""
    if prompt[-1]["role"] != "assistant":
        return prompt, {"role": "assistant", "content": completion}
    begun = prompt[-1]
    return prompt[:-1], begun | {"content": str(begun["content"]) + completion}


def prompt_of_row(kept: str | dict[str, Any]) -> RowPrompt:
    """Prompt of a row, as a store keeps it."""
    held: dict[str, Any] = json.loads(kept) if isinstance(kept, str) else kept
    prompt = held["prompt"]
    return RowPrompt(prompt if isinstance(prompt, str) else tuple(prompt), tuple(held["tools"]))


def model_of(recipe: RewardModel) -> Model:
    """The model that a reward names."""
    return Model(path=recipe.path, revision=recipe.revision, chat_template=recipe.chat_template)


def reader_of(recipe: RewardModel) -> RewardReader:
    """The tokenizer of a reward model, with facts of its training.

    Raises: DataError when there is no such tokenizer.
    """
    return RewardReader(tokenizer_of(model_of(recipe)), read_reading(Path(recipe.path).expanduser()))
