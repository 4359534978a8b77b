"""Strings that are turns of a chat, renamed questions and answers, and prompts of rows with answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from memtrain.errors import DataError
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.data.store.prepare import kept_rows, prepare
from memtrain.trainers.data.store.token_store import TokenStore
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def told(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def recipe_of(folder: Path, method: str = "sft", **data: Any) -> Recipe:
    said: dict[str, Any] = {"method": method, "model": {"path": "builtin:tiny"}}
    if method == "grpo":
        said["rewards"] = {"functions": "exact_answer"}
    return Recipe.model_validate(said | {"data": data | {"cache_dir": str(folder / "cache")}})


def store(folder: Path, method: str = "sft", **data: Any) -> TokenStore:
    recipe = recipe_of(folder, method, **data)
    return kept_rows(recipe.data, recipe.data.train, method, load_tokenizer("builtin:tiny"), seed=0).store


STRINGS_AND_TURNS = {
    "sft": (
        {"prompt": "1 + 1?", "completion": "It is 2."},
        {"prompt": [user("1 + 1?")], "completion": [told("It is 2.")]},
    ),
    "dpo": (
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
        {"prompt": [user("1 + 1?")], "chosen": [told("2")], "rejected": [told("3")]},
    ),
    "kto": (
        {"prompt": "1 + 1?", "completion": "2", "label": True},
        {"prompt": [user("1 + 1?")], "completion": [told("2")], "label": True},
    ),
    "grpo": ({"prompt": "1 + 1?", "answer": "2"}, {"prompt": [user("1 + 1?")], "answer": "2"}),
}


@pytest.mark.parametrize("method", STRINGS_AND_TURNS)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_strings_that_are_turns_are_the_tokens_of_their_messages(tmp_path, method, system):
    strings, turns = STRINGS_AND_TURNS[method]
    said: dict[str, Any] = {} if system is None else {"system_prompt": system}
    rows = jsonl(tmp_path / "s.jsonl", strings)
    one = store(tmp_path, method, train=rows, strings_are="turns", **said)
    of_source = store(tmp_path, method, train={"source": rows, "strings_are": "turns"}, **said)
    other = store(tmp_path, method, train=jsonl(tmp_path / "m.jsonl", turns), **said)
    for made in (one, of_source):
        assert made.row(0).tolist() == other.row(0).tolist()
        assert made.loss_mask(0).tolist() == other.loss_mask(0).tolist()
        assert made.part_lengths.tolist() == other.part_lengths.tolist()
    assert store(tmp_path, method, train=rows).row(0).tolist() != one.row(0).tolist()
    assert one.columns(0) == other.columns(0)


def test_renamed_questions_and_instructions_are_the_tokens_of_their_own_names(tmp_path):
    plain = jsonl(tmp_path / "a.jsonl", {"question": "1 + 1?", "answer": "2", "system": "Be brief."})
    named = jsonl(tmp_path / "b.jsonl", {"inp": "1 + 1?", "out": "2", "rule": "Be brief."})
    columns = {"question": "inp", "answer": "out", "system": "rule"}
    one, other = store(tmp_path, train=plain), store(tmp_path, train=named, columns=columns)
    assert one.row(0).tolist() == other.row(0).tolist()
    row = {"instruction": "Add.", "input": "1 + 1", "output": "2", "history": [["a", "b"]]}
    plain = jsonl(tmp_path / "c.jsonl", row)
    named = jsonl(tmp_path / "d.jsonl", dict(zip("wxyz", row.values(), strict=True)))
    columns = dict(zip(row, "wxyz", strict=True))
    one, other = store(tmp_path, train=plain), store(tmp_path, train=named, columns=columns)
    assert one.row(0).tolist() == other.row(0).tolist()


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1 + 1?", "answer": "It is 2.", "system": "Be brief."},
        {"instruction": "1 +", "input": "1?", "output": "It is 2.", "level": 3},
    ],
)
def test_the_prompts_that_are_answered_are_those_of_fine_tuning(tmp_path, row):
    rows = jsonl(tmp_path / "rows.jsonl", row)
    tuned, asked = store(tmp_path, train=rows), store(tmp_path, "grpo", train=rows)
    assert asked.meta.format == "prompt"
    assert asked.row(0).tolist() == tuned.part(0, "prompt").tolist()
    assert asked.columns(0) == row  # The answer is a column for the rewards, under its own name.
    assert asked.meta.unrendered == {}
    held = asked.asked(0)
    assert held is not None
    assert held["prompt"][-1]["role"] == "user"


def test_rows_of_questions_and_of_prompts_are_asked_together(tmp_path):
    one = jsonl(tmp_path / "a.jsonl", {"question": "1 + 1?", "answer": "2"})
    two = jsonl(tmp_path / "b.jsonl", {"prompt": [user("1 + 1?")], "answer": "2"})
    made = store(tmp_path, "grpo", train=[one, two])
    assert made.row(0).tolist() == made.row(1).tolist()


def test_a_string_without_a_turn_is_a_bad_row(tmp_path):
    pair = jsonl(tmp_path / "p.jsonl", {"chosen": "the sky is blue", "rejected": "the sky is black"})
    with pytest.raises(DataError, match="the row has no column 'prompt': with data.strings_are: turns"):
        store(tmp_path, "dpo", train=pair, strings_are="turns")
    empty = jsonl(tmp_path / "e.jsonl", {"prompt": " ", "completion": "a"})
    with pytest.raises(DataError, match="column 'prompt' is empty: the user's turn says nothing"):
        store(tmp_path, train=empty, strings_are="turns")


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"text": "a"}, "rows of format text are texts without turns"),
        ({"input_ids": [1, 2]}, "rows of format ids are texts without turns"),
        ({"question": "a", "answer": "b"}, "rows of format question_answer are turns already"),
        ({"messages": [user("a"), told("b")]}, "rows of format messages are turns already"),
    ],
)
@pytest.mark.parametrize("are", ["turns", "text"])
def test_a_word_on_strings_where_there_are_none_is_refused(tmp_path, row, what, are):
    rows = jsonl(tmp_path / "rows.jsonl", row)
    with pytest.raises(DataError, match=f"data.strings_are has no effect: {what}"):
        store(tmp_path, train=rows, strings_are=are)
    strings = jsonl(tmp_path / "s.jsonl", {"prompt": "a", "completion": "b"})
    store(tmp_path, train=[rows, strings], strings_are=are)
    with pytest.raises(DataError, match=f"of source '.*rows.jsonl' has no effect: {what}"):
        store(tmp_path, train=[{"source": rows, "strings_are": are}, strings])


def test_turns_need_a_chat_template(tmp_path):
    tokenizer = load_tokenizer("builtin:tiny")
    tokenizer.chat_template = None
    recipe = recipe_of(
        tmp_path, train=jsonl(tmp_path / "s.jsonl", {"prompt": "a", "completion": "b"}), strings_are="turns"
    )
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        kept_rows(recipe.data, recipe.data.train, "sft", tokenizer, seed=0)


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
@pytest.mark.parametrize("is_plain", [True, False])
def test_the_token_over_the_end_of_a_prompt_is_told_with_its_rows(tmp_path, method, is_plain):
    answers = {
        "sft": {"completion": "no"},
        "dpo": {"chosen": "yes", "rejected": "no"},
        "kto": {"completion": "no", "label": False},
    }
    other = {} if is_plain else {"tools": []}  # A column of tools has rows read one by one.
    rows = [{"prompt": prompt, **answers[method], **other} for prompt in ("Hi\n", "Hi", "Ha\n", "Hi")]
    data = prepare(recipe_of(tmp_path, method, train=jsonl(tmp_path / "rows.jsonl", *rows)))
    made = TokenStore.open(data.train.folder)
    tokenizer = load_tokenizer("builtin:tiny")
    over = [
        at
        for at in range(made.num_rows)
        if tokenizer.decode(made.part(at, "prompt").tolist()) != rows[at]["prompt"]
    ]
    assert over == [1, 3]
    (words,) = (one for one in data.words() if one.startswith("Where prompt and answer meet"))
    assert "(in 2 of 4 rows, 50.0%; the first" in words
    assert "rows.jsonl:2: 'in')" in words
    apart = prepare(recipe_of(tmp_path, method, train=jsonl(tmp_path / "n.jsonl", rows[0])))
    assert not any("meet" in one or "reaches over" in one for one in apart.words())
    assert any(
        "No token reaches over the end of a prompt" in one for one in apart.words(shows_boundaries=True)
    )
