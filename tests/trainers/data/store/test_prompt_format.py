"""Prompts that a text writes (`data.prompt_format`), of instructions and of questions."""

import json
from pathlib import Path
from typing import Any

import pytest

from memtrain.errors import DataError, RecipeError
from memtrain.recipes.reading.load import load_text
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.data.store.prepare import kept_rows
from memtrain.trainers.data.store.token_store import TokenStore
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer

FORMAT = {
    "text": "Do: {instruction}\n=>",
    "with_input": "Do: {instruction} with {input}\n=>",
    "system": "[{system}] ",
}


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def store(folder: Path, row: dict[str, Any], method: str = "sft", **data: Any) -> TokenStore:
    rows = jsonl(folder / "rows.jsonl", row)
    said: dict[str, Any] = {"method": method, "model": {"path": "builtin:tiny"}}
    if method == "grpo":
        said["rewards"] = {"functions": "exact_answer"}
    made = said | {"data": {"train": rows, "cache_dir": str(folder / "cache")} | data}
    recipe = Recipe.model_validate(made)
    return kept_rows(recipe.data, recipe.data.train, method, load_tokenizer("builtin:tiny"), seed=0).store


@pytest.mark.parametrize(
    ("row", "columns", "prompt"),
    [
        ({"instruction": "add", "output": "3"}, {}, "Do: add\n=>"),
        ({"instruction": "add", "input": "", "output": "3"}, {}, "Do: add\n=>"),
        ({"instruction": "add", "input": "1 {input}", "output": "3"}, {}, "Do: add with 1 {input}\n=>"),
        ({"instruction": "add", "output": "3", "system": "S"}, {}, "[S] Do: add\n=>"),
        ({"instruction": "{system}", "output": "3"}, {}, "Do: {system}\n=>"),
        ({"ask": "add", "output": "3"}, {"instruction": "ask"}, "Do: add\n=>"),
        ({"question": "add", "answer": "3"}, {}, "Do: add\n=>"),
    ],
)
def test_prompts_are_the_text_of_their_format(tmp_path, row, columns, prompt):
    made = store(tmp_path, row, columns=columns, prompt_format=FORMAT)
    same = store(tmp_path, {"prompt": prompt, "completion": "3"}, strings_are="text")
    assert made.row(0).tolist() == same.row(0).tolist()
    assert made.loss_tokens_per_row.tolist() == same.loss_tokens_per_row.tolist()


def test_prompts_without_answers_and_a_source_of_its_own(tmp_path):
    row = {"question": "1+1?", "answer": "2"}
    made = store(tmp_path, row, "grpo", prompt_format={"text": "Q: {question}\nA:"})
    same = store(tmp_path, {"prompt": "Q: 1+1?\nA:", "answer": "2"}, "grpo", strings_are="text")
    assert made.row(0).tolist() == same.row(0).tolist()
    rows = jsonl(tmp_path / "own.jsonl", row)
    one = {"source": rows, "prompt_format": {"text": "Q: {question}\nA:"}}
    assert store(tmp_path, row, "grpo", train=one).row(0).tolist() == made.row(0).tolist()


@pytest.mark.parametrize(
    ("row", "data", "words"),
    [
        ({"prompt": "a", "completion": "b"}, {}, "has no effect"),
        ({"text": "a b c"}, {}, "has no effect"),
        ({"instruction": "", "output": "b"}, {}, "nothing is asked"),
        ({"instruction": "a", "output": "b", "history": [["x", "y"]]}, {}, "earlier turns"),
        ({"instruction": "a", "output": "b"}, {"system_prompt": "Be brief."}, "has no effect"),
    ],
)
def test_a_format_that_writes_nothing_is_refused(tmp_path, row, data, words):
    with pytest.raises(DataError, match=words):
        store(tmp_path, row, prompt_format=FORMAT, **data)


def test_a_format_without_the_rows_text_is_refused():
    recipe = "method: sft\nmodel: {path: builtin:tiny}\ndata: {train: a, prompt_format: {text: 'Hi'}}\n"
    with pytest.raises(RecipeError, match="shows nothing of the row"):
        load_text(recipe, "recipe.yaml")
