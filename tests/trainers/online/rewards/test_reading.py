"""A reward model reads completions as it read the rows of its training: template, tokens, end, place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from memtrain.errors import RecipeError
from memtrain.recipes.sections.model import Model
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of
from memtrain.trainers.online.rewards.answer import Answer, RowPrompt
from memtrain.trainers.online.rewards.reading import (
    Reading,
    RewardReader,
    prompt_of_row,
    read_reading,
    write_reading,
)

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
"""Another template than the policy's; its rows end in a line break after the end of the turn."""
ASKED = RowPrompt(({"role": "user", "content": "1+1?"},))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    made = tokenizer_of(Model(path="builtin:tiny"))
    made.chat_template = TURNS
    return made


def answer(asked: RowPrompt, completion: str) -> Answer:
    """As the policy saw it: other tokens, which must not matter."""
    return Answer("<policy>", completion, (7, 8), {}, (9,), asked=asked)


def read(reader: RewardReader, asked: RowPrompt, completion: str) -> tuple[str, str]:
    ((prompt, said),) = reader.ids([answer(asked, completion)])
    return reader.tokenizer.decode(prompt), reader.tokenizer.decode(said)


def test_a_conversation_is_written_by_the_models_own_template(tokenizer: PreTrainedTokenizerFast):
    """To the line break after the end of the turn, which is the token that was scored in training."""
    prompt, said = read(RewardReader(tokenizer), ASKED, "2")
    assert prompt == "<|im_start|>user: 1+1?<|im_end|>\n<|im_start|>assistant: "
    assert said == "2<|im_end|>\n"


def test_an_answer_that_was_begun_in_the_prompt_goes_on(tokenizer: PreTrainedTokenizerFast):
    begun = RowPrompt((*ASKED.prompt, {"role": "assistant", "content": "It is "}))  # type: ignore[misc]
    prompt, said = read(RewardReader(tokenizer), begun, "2")
    assert prompt + said == "<|im_start|>user: 1+1?<|im_end|>\n<|im_start|>assistant: It is 2<|im_end|>\n"


@pytest.mark.parametrize(("ends", "expected"), [(True, " 2<eos>"), (False, " 2")])
def test_a_string_ends_as_the_rows_of_its_training_did(
    tokenizer: PreTrainedTokenizerFast, ends: bool, expected: str
):
    reader = RewardReader(tokenizer, Reading(rows="strings", end_token=ends))
    assert read(reader, RowPrompt("1+1 is"), " 2") == ("1+1 is", expected)


def test_a_string_is_a_users_turn_for_a_model_that_trained_on_conversations(
    tokenizer: PreTrainedTokenizerFast,
):
    reader = RewardReader(tokenizer, Reading(rows="conversations"))
    assert read(reader, RowPrompt("1+1?"), "2") == read(RewardReader(tokenizer), ASKED, "2")


def test_two_answers_share_the_tokens_of_their_prompt(tokenizer: PreTrainedTokenizerFast):
    first, second = RewardReader(tokenizer).ids([answer(ASKED, "2"), answer(ASKED, "It is 3.")])
    assert first[0] == second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize(
    ("template", "reading", "asked", "what"),
    [
        (None, Reading(), ASKED, "no chat template"),
        (None, Reading(rows="conversations"), RowPrompt("1+1?"), "no chat template"),
        (TURNS, Reading(rows="strings"), ASKED, "the reward model was trained on strings"),
        ("{{ raise_exception('no system') }}", Reading(), ASKED, "no system"),
    ],
)
def test_prompts_that_cannot_be_read_as_in_training_are_refused_with_a_way_out(
    tokenizer: PreTrainedTokenizerFast, template: str | None, reading: Reading, asked: RowPrompt, what: str
):
    tokenizer.chat_template = template
    with pytest.raises(RecipeError, match=what) as refused:
        RewardReader(tokenizer, reading).check(asked, "rm", "rewards.functions.0.model")
    assert refused.value.faults[0].fix


def test_how_rows_were_written_stands_beside_the_weights(tmp_path: Path):
    known: dict[str, Any] = {"rows": "conversations", "end_token": False}
    write_reading(Reading(**known), tmp_path)
    assert read_reading(tmp_path) == Reading(**known)
    assert read_reading(tmp_path / "none") == Reading()


def test_a_prompt_is_kept_as_it_was_read():
    kept = {"prompt": [{"role": "user", "content": "1+1?"}], "tools": []}
    assert prompt_of_row(json.dumps(kept)) == prompt_of_row(kept) == ASKED
